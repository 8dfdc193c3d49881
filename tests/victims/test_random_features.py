"""Random-features victims against dense oracles, and the folders they are kept in."""

import importlib
import json
import os
import stat
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from exhume import data
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import residual_at_truth
from exhume.features.weights import GENERATORS, Mapped, Seeded, Stored
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH, read_model
from exhume.victims import Victim, random_features, victim
from problems import ACTIVATIONS, dense_phi, gaussian, refusals

source = importlib.import_module("exhume.victims.random_features")  # the name is a function too

ONE = data.sphere(12, 5)
SEVERAL = Data(ONE.inputs, gaussian(5, 3, seed=7), (12,), "several")
SIGNS = replace(SEVERAL, targets=SEVERAL.targets.sign())
LOGISTIC = {"loss": "logistic", "ridge": 0.01}


def solved(made: Victim) -> tuple[Tensor, Tensor]:
    """Φ at the training samples, (n, p), and θ (p, m), in float64."""
    return dense_phi(made.problem.features, made.truth.inputs), made.problem.target.double()


def penalty_of(phi: Tensor, ridge: float) -> float:
    """λ: the ridge is relative to the mean squared norm of the features."""
    return ridge * phi.square().sum(1).mean().item()


def far(given: Tensor, expected: Tensor) -> float:
    return ((given - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("known", [ONE, SEVERAL], ids=["one", "three"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_theta_interpolates_or_is_that_of_ridge(name: str, known: Data, monkeypatch: Any) -> None:
    made = random_features(known, 80, name)
    phi, theta = solved(made)
    assert theta.shape == (80, known.outputs)
    assert far(theta, torch.linalg.pinv(phi) @ known.targets) < 1e-6
    assert far(phi @ theta, known.targets) < 1e-5 and made.training["fit"] < 1e-18
    for ridge in (1e-3, 0.1, 10.0):
        made = random_features(known, 80, name, ridge=ridge)
        theta = made.problem.target.double()
        primal = phi.T @ phi + penalty_of(phi, ridge) * torch.eye(80, dtype=torch.float64)
        assert far(theta, torch.linalg.solve(primal, phi.T @ known.targets)) < 1e-6
        expected = (phi @ theta - known.targets).square().mean().item()
        assert made.training["fit"] == pytest.approx(expected, rel=1e-4, abs=1e-9)
    monkeypatch.setattr(source, "ROWS", 7)
    assert far(random_features(known, 80, name, ridge=10.0).problem.target, theta) < 1e-6


def slope_of_logistic(theta: Tensor, phi: Tensor, labels: Tensor, penalty: float) -> float:
    """The norm of ∂/∂θ of Σ log(1 + exp(−y f)) + ½ λ |θ|²."""
    at = theta.clone().requires_grad_()
    loss = torch.nn.functional.softplus(-labels * (phi @ at)).sum()
    return torch.autograd.grad(loss + penalty / 2 * at.square().sum(), at)[0].norm().item()


def test_newton_ends_where_the_regularised_loss_is_flat() -> None:
    crowded = data.sphere(2, 10, seed=19)  # where it must not run away
    signs, turns = ONE.targets[:, 0].sign(), torch.tensor([1.0, -1.0]).double().repeat(5)
    for known, width, labels, ridge in (
        *((ONE, 80, signs, ridge) for ridge in (1e-8, 1e-2, 100.0)),
        (crowded, 500, turns, 1e-5),
    ):
        phi, _ = solved(random_features(known, width))
        how = (phi, labels, penalty_of(phi, ridge))
        theta = phi.T @ source.logistic(phi @ phi.T, *how[1:])
        slope = slope_of_logistic(theta, *how)
        assert slope < 1e-6 * slope_of_logistic(0 * theta, *how)
        assert known is crowded or slope < 1e-11 * (how[2] * theta).norm()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_logistic_victim_is_at_the_minimum(name: str) -> None:
    made = random_features(SEVERAL, 80, name, **LOGISTIC)
    (phi, theta), labels = solved(made), SIGNS.targets
    how = (phi, labels, penalty_of(phi, 0.01))
    assert slope_of_logistic(theta, *how) < 1e-5 * slope_of_logistic(0 * theta, *how)
    assert ((phi @ theta).sign() == labels).all()
    fit = torch.log1p(torch.exp(-labels * (phi @ theta))).mean().item()
    assert made.training["fit"] == pytest.approx(fit, rel=1e-4)
    signs = random_features(SIGNS, 80, name, **LOGISTIC)  # nothing else counts
    assert torch.equal(made.problem.target, signs.problem.target)


def test_v_may_be_seeded_stored_or_mapped_and_is_found_again(tmp_path: Path) -> None:
    seeded, path = Seeded(300, 12, seed=3), tmp_path / "v.npy"
    v = seeded.rows(0, 300)
    np.save(path, v.numpy())
    kinds = (None, seeded, Stored(v), Stored(v.double()), Mapped(path))
    made = [random_features(ONE, 300, seed=3, ridge=0.1, weights=kind) for kind in kinds]
    target = made[0].problem.target
    assert all(torch.equal(one.problem.target, target) for one in made)
    assert far(random_features(ONE, 300, seed=4, ridge=0.1).problem.target, target) > 0.1
    # V in half precision does not round the last layer
    posed = source.random_features_problem(Stored(v.half()), "relu", target, (12,))
    assert torch.equal(posed.to("cpu").target, target)
    for name, weights in (("a", Mapped(path)), ("b", Mapped(path)), ("c", Stored(v))):
        random_features(ONE, 300, weights=weights).save(tmp_path / name, store=name == "b")
    assert residual_at_truth(read_model(tmp_path / "a"), ONE) < 1e-12
    path.unlink()
    for name in ("b", "c"):
        assert torch.equal(load_file(tmp_path / name / INITIAL)["first"], v)
        assert residual_at_truth(read_model(tmp_path / name), ONE) < 1e-12


HOLED = Seeded(80, 12, 0).rows(0, 80).index_fill(0, torch.tensor([3]), torch.nan)
test_what_cannot_be_trained_is_refused = refusals(
    ({"width": 4}, "width 4 .* 5"),
    ({"ridge": -1.0}, "ridge: .*-1.0"),
    ({"ridge": float("nan")}, "ridge: .*nan"),
    ({"loss": "hinge"}, "loss: .*squared, logistic.*hinge"),
    ({"loss": "logistic"}, "ridge"),
    ({"activation": "swish"}, "swish.*relu"),
    ({"activation": "polynomial:1"}, "polynomial"),
    ({"weights": Seeded(80, 11, 0)}, r"\(80, 12\).*\(80, 11\)"),
    ({"weights": Stored(HOLED)}, r"first layer|NaN"),
    call=partial(random_features, ONE, width=80),
)


@pytest.mark.parametrize("generator", GENERATORS)
def test_the_card_names_the_generator_and_one_without_a_name_is_old(
    generator: str, tmp_path: Path
) -> None:
    made = random_features(ONE, 300, weights=Seeded(300, 12, 7, generator=generator))
    made.save(tmp_path)
    card = json.loads((tmp_path / CARD).read_text())
    assert card["first"] == {"source": "seed", "seed": 7, "generator": generator}
    v = made.problem.features.weights.rows(0, 300)
    assert torch.equal(read_model(tmp_path).features.weights.rows(0, 300), v)
    del card["first"]["generator"]
    (tmp_path / CARD).write_text(json.dumps(card))
    read = read_model(tmp_path)
    assert torch.equal(read.features.weights.rows(0, 300), v) == (generator == "tiles")
    assert (residual_at_truth(read, ONE) < 1e-12) == (generator == "tiles")
    card["first"]["generator"] = "dice"
    (tmp_path / CARD).write_text(json.dumps(card))
    with pytest.raises(InputError, match=r"first\.generator: .* philox, tiles, got 'dice'"):
        read_model(tmp_path)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("name", ["relu", "polynomial:0.1234567890123,1,-0.3333333333333"])
def test_a_saved_model_is_equal_and_holds_no_truth(name: str, store: bool, tmp_path: Path) -> None:
    known, folder = data.load("digits", 10, seed=123), tmp_path / "new" / "model"
    made, z, numbers = random_features(known, 300, name, seed=5), gaussian(100), list[float]()
    made.save(folder, store)
    problem, truth = read_model(folder), data.read(folder / TRUTH)
    assert torch.equal(problem.target, made.problem.target) and problem.shape == (8, 8)
    assert problem.display is not None and asdict(problem.display) == known.transform.card()
    before, after = made.problem.features, problem.features
    assert torch.equal(after.activation.value(z), before.activation.value(z))
    assert torch.equal(after.weights.rows(0, 300), before.weights.rows(0, 300))
    assert isinstance(after.weights, Stored if store else Seeded)
    assert torch.equal(truth.inputs, known.inputs) and residual_at_truth(problem, truth) < 1e-12
    others = {CARD, TRAINED, INITIAL} if store else {CARD, TRAINED}
    assert {path.name for path in folder.iterdir()} == {TRUTH, *others}
    assert {key: w.shape for key, w in load_file(folder / TRAINED).items()} == {"last": (300, 10)}
    card = json.loads((folder / CARD).read_text())
    words = "schema kind activation width dim outputs shape first display training"
    assert card.keys() == set(words.split())
    assert card["display"].keys() == {"shift", "scale"}
    assert card["training"].keys() == {"data", "loss", "ridge", "seed", "fit"}
    noted: Any = lambda text: numbers.append(float(text))  # noqa: E731
    json.loads((folder / CARD).read_text(), parse_int=noted, parse_float=noted)
    assert 123 not in numbers, "the seed of the samples would give all of them away"
    told = torch.tensor(numbers, dtype=torch.float64)
    assert ((told[:, None] - known.transform.norms).abs() > 1e-6).all()
    raw = b"".join((folder / other).read_bytes() for other in others)
    for secret in (known.inputs, known.inputs.float(), known.images(), known.images().float()):
        for row in secret.flatten(1):
            assert row[20:28].contiguous().numpy().tobytes() not in raw


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_is_whole_and_private(exists: bool, tmp_path: Path, monkeypatch: Any) -> None:
    folder, made, notes = tmp_path / "model", random_features(ONE, 80), tmp_path / "notes"
    if exists:
        folder.mkdir(mode=0o777)
    for error in (OSError("disk full"), KeyboardInterrupt()):
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(victim, "save", Mock(side_effect=error))  # the truth comes last
            made.save(folder)
        assert list(tmp_path.rglob("*")) == ([folder] if exists else [])
    before = os.umask(0)
    try:
        made.save(folder, store=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    notes.write_text("mine")
    for used, words in ((tmp_path, "not empty"), (notes, "notes"), (notes / "model", "notes")):
        with pytest.raises(InputError, match=words):
            made.save(used)
    assert notes.read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
