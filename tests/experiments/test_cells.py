"""Cells: what they measure against direct calls, what they refuse, and the data they stand on."""

import base64
import io
import json
import math
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from exhume import data
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.experiments import UNDETERMINED, Attack, Failure, LabelFit
from exhume.experiments.cells import attack, splitting
from exhume.experiments.cells.fitting import Flips
from exhume.experiments.cells.identifiability import Rank, Stationary, TensorTerms
from exhume.experiments.cells.margin import CASES, WeightsAlone
from exhume.experiments.cells.splitting import Splitting
from exhume.features.weights import Seeded
from exhume.methods import reconstruct
from exhume.methods.tansley2026 import Tansley2026
from exhume.sweep.store import closure
from exhume.victims import random_features
from problems import refusals

SMALL = Attack(dim=8, samples=3, ratio=4.0, products=2000)
IMAGES: Any = {"data": "digits", "dim": None, "size": 4, "classes": "parity"}
MODELS = st.sampled_from(["random_features", "resnet"])
DIGITS = Attack(**IMAGES, samples=3, ratio=5.0)


def test_an_attack_is_a_direct_call_and_repeats() -> None:
    values = SMALL.run("cpu")
    known = data.sphere(8, 3)
    victim = random_features(known, 96)
    found = reconstruct(victim.problem, 3, product_limit=2000)
    result = score(found.samples, known)
    assert values["error"] == result.error and values["exact"] == result.exact
    assert (values["residual"], values["steps"]) == (found.residual, found.steps)
    assert values["width"] == values["parameters"] == 96
    assert values["actual_ratio"] == 4.0 and values["inputs"] == 8
    assert values["outcome"] == "converged" and values["recovered"] == 1.0
    assert values["error"] < 1e-4 < values["chance"]
    assert values["fit"] < 1e-12 and values["floor"] < 1e-10
    assert values == SMALL.run("cpu") == json.loads(json.dumps(values))


def test_the_attack_is_given_the_problem_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(wraps=reconstruct)
    monkeypatch.setattr(attack, "reconstruct", spy)
    values = replace(SMALL, told=4).run("cpu")
    replace(SMALL, told=0, products=20).run("cpu")
    (problem, *given), (_, unknown, *_) = ((*x.args, *x.kwargs.values()) for x in spy.mock_calls)
    assert given == [4, 0, "exhume", None, None, 2000] and unknown is None
    torch.testing.assert_close(problem.target, random_features(SMALL.known(), 96).problem.target)
    assert values["candidates"] == 4 and values["precision"] < 1 == values["recovered"]


def test_no_more_features_than_candidates_are_not_attacked() -> None:
    values = replace(SMALL, ratio=3 / 24).run("cpu")  # p = n
    assert values["width"] == 3 and values["outcome"] == UNDETERMINED
    assert values["error"] is values["recovered"] is values["fit"] is None
    one_more = replace(SMALL, ratio=4 / 24)
    attacked = one_more.run("cpu")
    assert list(values) == list(attacked) and attacked["outcome"] != UNDETERMINED
    assert replace(one_more, told=4).run("cpu")["outcome"] == UNDETERMINED


def test_a_budget_is_kept_and_divergence_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = replace(SMALL, method="iurada2025", products=7).run("cpu")
    assert values["products_used"] == 7 and values["outcome"] == "budget"

    def diverged(*arguments: Any, **options: Any) -> Any:
        found = reconstruct(*arguments, **options)
        return replace(found, samples=found.samples * math.inf, residual=math.nan)

    monkeypatch.setattr(attack, "reconstruct", diverged)
    values = replace(SMALL, products=10).run("cpu")
    assert values["error"] == 1.0 and values["recovered"] == 0.0 and values["residual"] is None


def test_a_subspace_that_is_told_or_shown_needs_fewer_features() -> None:
    cell = replace(SMALL, dim=24, rank=3, ratio=0.6)
    inside = replace(cell, method="tansley2026").run("cpu")
    full = replace(cell, products=300).run("cpu")
    assert (inside["subspace"], full["subspace"]) == ("told", None)
    assert inside["confined"] == 3 and inside["recovered"] == 1.0
    assert full["confined"] is None and full["recovered"] < 0.5
    network = {"architecture": "two_layer", "method": "tansley2026"}
    shown = Attack(dim=20, samples=3, rank=2, ratio=3, **network).run("cpu")
    assert (shown["confined"], shown["recovered"], shown["subspace"]) == (2, 1.0, "estimated")
    assert shown["label_error"] < 1e-6 and shown["floor"] > 1e-9


def test_other_losses_and_outputs() -> None:
    values = replace(SMALL, loss="logistic", products=100).run("cpu")
    assert values["label_error"] == pytest.approx(values["fit"] / math.log(2))
    digits = replace(DIGITS, classes=None, ratio=2.0, products=100).run("cpu")
    assert digits["outputs"] == 10 and digits["parameters"] == 10 * digits["width"]
    assert digits["actual_ratio"] == pytest.approx(2.0, rel=0.06)


def test_pictures_are_kept_on_demand() -> None:
    values = replace(DIGITS, keep=2).run("cpu")
    picture = Image.open(io.BytesIO(base64.b64decode(values["picture"])))
    assert picture.size == (8, 8)  # two originals above two reconstructions
    pixels = np.asarray(picture, float) / 255
    assert np.abs(pixels[:4] - np.hstack(DIGITS.known().images()[:2])).max() < 0.003
    assert values["recovered"] == 1.0 and np.abs(pixels[4:] - pixels[:4]).max() < 0.01
    assert "picture" not in replace(DIGITS, products=10).run("cpu")


@settings(deadline=None, max_examples=20)
@given(ratio=st.floats(0.05, 40), samples=st.integers(1, 9), model=MODELS)
def test_the_width_comes_nearest_to_the_ratio(ratio: float, samples: int, model: str) -> None:
    cell = replace(DIGITS, size=None, samples=samples, ratio=ratio, architecture=model)
    step, wanted = 49 if model == "resnet" else 1, ratio * 64 * samples
    width = cell.width(cell.known())
    near = {other: abs(step * other - wanted) for other in (width + 1, max(1, width - 1), width)}
    assert width >= 1 and near[width] == min(near.values())


test_bad_fields_are_named = refusals(
    ({"data": "spheres"}, "data: expected one of sphere, digits"),
    ({"architecture": "mlp"}, "architecture: expected one of random_features"),
    ({"method": "magic"}, "method: expected one of exhume, iurada2025"),
    ({"loss": "hinge"}, "loss: expected one of squared, logistic"),
    ({"loss": "cross_entropy"}, "loss of random_features: expected one of squared"),
    ({"block": "first"}, "block: expected one of last, all"),
    ({"block": "all"}, "block of random_features: expected one of last"),
    ({"activation": "rely"}, "activation .*relu"), ({"dtype": "float16"}, "dtype: .*float32"),
    *[({"ratio": x}, "ratio: .* above 0") for x in (0, math.nan, None)],
    ({"ratio": 1e9}, "ratio: expected at most 10,000"), ({"until": 0.0}, "until: .* above 0"),
    *[({word: 0}, f"{word}: .* at least 1") for word in ("samples", "products")],
    *[({word: -1}, f"{word}: .* at least 0") for word in ("told", "keep")],
    ({"dim": None}, "dim: .* needs a dimension"), ({"keep": 3}, "keep: .* no pictures"),
    ({"rank": 9}, "rank: expected at most the dimension, 8"),
    ({"size": 4}, "size: .* for images"), ({"classes": "all"}, "classes: .* for images"),
    ({"lazy": 2.0}, "lazy: .*random_features"), ({"data": "digits"}, "dim: got 8"),
    ({"architecture": "resnet"}, "resnet takes images"),
    ({**IMAGES, "architecture": "resnet", "activation": "gelu"}, "activation: resnet has"),
    ({"dim": 10**8, "samples": 2}, "dim · samples: expected at most 100,000,000"),
    ({"dim": 10**5, "rank": 10**5}, "dim · rank"),
    ({"dim": 10**5, "samples": 999, "ratio": 2.0}, "ratio · dim · samples"),
    call=lambda **changes: replace(SMALL, **changes).check(),
)  # fmt: skip


@pytest.mark.parametrize("shape", [(7, 7), (8, 2), (8,)], ids=str)
def test_a_basis_that_an_attacker_is_told_must_be_one(shape: tuple[int, ...]) -> None:
    words = "orthonormal" if shape == (8, 2) else r"expected shape \(8, r\)"
    problem = random_features(SMALL.known(), 96).problem
    with pytest.raises(InputError, match=words):
        reconstruct(problem, 3, method=Tansley2026(basis=torch.ones(shape)))


@settings(deadline=None, max_examples=20)
@given(width=st.integers(1, 14), samples=st.integers(1, 7), seed=st.integers(0, 50))
def test_label_errors_are_those_of_least_squares(width: int, samples: int, seed: int) -> None:
    cell = LabelFit(dim=5, samples=samples, width=width, activation="gelu", seed=seed)
    known = cell.known()
    weights = Seeded(width, 5, seed).rows(0, width).double()
    features = torch.nn.functional.gelu(known.inputs @ weights.T)
    theta = torch.from_numpy(np.linalg.lstsq(features.numpy(), known.targets.numpy())[0])
    expected = (features @ theta - known.targets).square().sum() / known.targets.square().sum()
    assert cell.run("cpu")["label_error"] == pytest.approx(expected.item(), abs=1e-9)


def test_flips_are_free_with_two_candidates_more_and_relu_alone() -> None:
    relu, tanh = (Flips(name, dim=10, samples=4).run("cpu") for name in ("relu", "relu+tanh"))
    assert relu["paired"] < 1e-12 < 1e-3 < relu["alone"] and tanh["paired"] > 1e-4
    assert relu["odd"] < 1e-12 < 1e-2 < tanh["odd"]


def test_cells_of_identifiability() -> None:
    assert Rank(3, 4).run("cpu") == {"rank": 10, "unknowns": 10, "holds": True}
    assert not Rank(3, 3).run("cpu")["holds"]
    assert TensorTerms(degree=3).run("cpu")["error"] < 1e-6
    flat = TensorTerms(degree=2).run("cpu")
    assert flat["rest"] < 1e-12 and flat["error"] > 0.1
    assert Stationary(dim=8, samples=3).run("cpu")["error"] < 1e-6


def test_weights_alone_counts_training_images_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = replace(CASES["faces"], data=partial(data.load, "faces", 6, centre="pixels"))
    monkeypatch.setitem(CASES, "faces", replace(few, widths=(30, 30)))
    cell = WeightsAlone(steps=100)
    values = cell.run("cpu")
    assert cell.data == "faces" and values == cell.run("cpu")
    assert values["samples"] == values["held_out_samples"] == 6
    assert 6 >= values["ssim"] > values["held_out_ssim"] and 0.3 < values["cosine"] < 1
    assert {WeightsAlone(name).data for name in CASES} == {"faces", "digits", "mnist", "cifar10"}


@pytest.mark.parametrize("case", ["margin", "classes", "change"])
def test_splits_stand_beside_the_method_without_and_as_many_from_the_start(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splitting, "TRIALS", 1)
    monkeypatch.setattr(splitting, "PROBE", 1)
    values = Splitting(case, steps=60, samples=3, width=10).run("cpu")
    runs = values["runs"]
    assert set(runs) == set(splitting.ARMS) and runs["base"]["candidates"] == 6
    for rule in splitting.RULES:
        split, control = runs[f"split, {rule}"], runs[f"count of {rule}"]
        assert split["candidates"] == control["candidates"] >= 6
        assert 0 < split["cosine"] <= 1 and split["steps"] <= 60
    assert values["predicted"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "kind",
    [Attack, LabelFit, Failure, Flips, Rank, Stationary, TensorTerms, Splitting, WeightsAlone],
)
def test_what_draws_or_judges_is_no_part_of_an_address(kind: type) -> None:
    rests_on = closure(kind.__module__)
    assert kind.__module__ in rests_on and "exhume.features.weights" in rests_on
    rooms = ("cli", "report", "sweep", "experiments.claims", "experiments.benchmarks")
    assert not [name for name in rests_on if name.startswith(tuple(f"exhume.{r}" for r in rooms))]
