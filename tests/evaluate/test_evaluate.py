"""Evaluation: matching, scores, chance levels, spans; dense or brute-force oracles beside each."""

import itertools
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume import data as datasets
from exhume import evaluate
from exhume.auditing import evidence
from exhume.data import Data, Transform
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import (
    assign,
    chance,
    distances,
    feature_space,
    floors,
    outside,
    principal_angles,
    score,
    span_residual,
    verdict,
)
from exhume.evaluate.runs import SCORE, score_run
from exhume.evaluate.scoring import AGGREGATES
from exhume.files import write_json, write_tensors
from exhume.models.formulation import POINTS
from exhume.victims import Victim, random_features, two_layer

seeds = st.integers(0, 2**31 - 1)
fast = settings(max_examples=30, deadline=None)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sphere(count: int, dim: int, seed: int = 0) -> Tensor:
    """Rows of norm √d."""
    points = gaussian(count, dim, seed=seed)
    return math.sqrt(dim) * points / points.norm(dim=1, keepdim=True)


def images(count: int, *shape: int, seed: int = 0, rescale: bool = False) -> Data:
    """Random images through a transform, on the sphere of radius √d if rescaled."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(count, math.prod(shape), generator=generator, dtype=torch.float64)
    transform = Transform(0.5, 0.25)
    norms = transform.apply(pixels).norm(dim=1) if rescale else None
    inputs = transform.apply(pixels, norms)
    targets = torch.ones(count, 1, dtype=torch.float64)
    return Data(inputs, targets, shape, "random", Transform(0.5, 0.25, norms))


# Distances and assignment


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 4), (3, 7), (7, 3), (4, 0)])
def test_distances_against_the_dense_oracle(n: int, k: int) -> None:
    x, y = gaussian(n, 5), gaussian(k, 5, seed=1)
    minus, plus = (x[:, None] - y[None]).norm(dim=2), (x[:, None] + y[None]).norm(dim=2)
    published = (x.abs()[:, None] - y.abs()[None]).norm(dim=2)
    torch.testing.assert_close(distances(x, y, "signed"), minus)
    torch.testing.assert_close(distances(x, y), torch.minimum(minus, plus))
    torch.testing.assert_close(distances(x, y, "published"), published)


def test_distances_take_single_precision_up_to_double() -> None:
    x, y = gaussian(3, 5).float(), gaussian(2, 5, seed=1).float()
    expected = (x.double()[:, None] - y.double()[None]).norm(dim=2)
    torch.testing.assert_close(distances(x, y, "signed"), expected, rtol=1e-12, atol=0)


@fast
@given(n=st.integers(1, 5), k=st.integers(0, 5), seed=seeds)
def test_assignment_against_brute_force(n: int, k: int, seed: int) -> None:
    costs = gaussian(n, k, seed=seed).abs()
    matched = assign(costs)
    found = matched >= 0
    assert int(found.sum()) == min(n, k)
    assert len(set(matched[found].tolist())) == min(n, k)
    table = costs if n <= k else costs.T
    best = min(
        sum(float(table[i, j]) for i, j in enumerate(columns))
        for columns in itertools.permutations(range(table.shape[1]), table.shape[0])
    )
    assert math.isclose(float(costs[found, matched[found]].sum()), best, abs_tol=1e-12)


# Scores


@fast
@given(n=st.integers(1, 6), k=st.integers(0, 8), dim=st.integers(1, 9), seed=seeds)
def test_order_and_sign_of_candidates_do_not_matter(n: int, k: int, dim: int, seed: int) -> None:
    truth, found = gaussian(n, dim, seed=seed), gaussian(k, dim, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(k, generator=generator)
    signs = torch.randint(0, 2, (k, 1), generator=generator) * 2 - 1
    plain, moved = score(found, truth), score((found * signs)[order], truth)
    for name in ("recovered", "exact", "error", "recall", "precision", "published_error"):
        assert math.isclose(getattr(plain, name), getattr(moved, name), abs_tol=1e-12), name
    back = order[moved.matched.clamp(min=0)] if k else moved.matched
    assert torch.equal(torch.where(moved.matched < 0, -1, back), plain.matched)
    assert plain.recovered <= plain.recall
    assert plain.exact <= plain.recovered


@fast
@given(n=st.integers(1, 6), extra=st.integers(-3, 4), seed=seeds)
def test_a_permuted_negated_scaled_truth_is_recovered(n: int, extra: int, seed: int) -> None:
    truth = sphere(n, 200, seed=seed)
    k = max(0, n + extra)
    candidates = torch.cat([truth, sphere(max(0, extra), 200, seed=seed + 1)])[:k]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    result = score(-1.05 * candidates[order], truth)
    kept = min(n, k)
    assert order[result.matched[:kept]].tolist() == list(range(kept))
    assert result.matched[kept:].tolist() == [-1] * (n - kept)
    torch.testing.assert_close(result.errors[:kept], torch.full((kept,), 0.05).double())
    torch.testing.assert_close(result.signed_errors[:kept], torch.full((kept,), 2.05).double())
    torch.testing.assert_close(result.cosines[:kept], torch.ones(kept).double())
    assert result.recovered == result.recall == kept / n
    assert result.exact == 0
    assert result.precision == (kept / k if k else 0)
    assert result.flips == kept


def test_small_errors_are_not_lost_to_cancellation() -> None:
    truth = sphere(4, 300)
    result = score(truth * (1 + 1e-12), truth)
    np.testing.assert_allclose(result.errors, 1e-12, rtol=1e-3)
    assert score(truth, truth).error == 0


def test_thresholds_are_strict() -> None:
    truth = torch.tensor([[10.0], [1000.0]], dtype=torch.float64)
    at = score(torch.tensor([[9.0], [990.0]]), truth)
    assert at.errors.tolist() == [0.1, 0.01]
    assert (at.recovered, at.exact, at.recall) == (0.5, 0, 0.5)
    below = score(torch.tensor([[9.001], [990.1]]), truth)
    assert (below.recovered, below.exact, below.recall, below.precision) == (1, 0.5, 1, 1)
    assert (evaluate.RECOVERED, evaluate.EXACT) == (0.1, 0.01)


def test_the_error_is_relative_to_each_samples_own_norm() -> None:
    truth = torch.tensor([[2.0, 0.0], [0.0, 200.0]])
    result = score(truth + torch.tensor([[0.0, 1.0], [1.0, 0.0]]), truth)
    assert result.errors.tolist() == [0.5, 0.005]
    assert result.published_errors.tolist() == pytest.approx([1 / math.sqrt(2)] * 2)


def test_samples_without_a_candidate_score_as_the_zero_vector() -> None:
    truth = 3 * torch.eye(3, dtype=torch.float64)
    result = score(truth[:1], truth)
    assert result.matched.tolist() == [0, -1, -1]
    assert result.errors.tolist() == result.signed_errors.tolist() == [0, 1, 1]
    assert result.cosines.tolist() == [1, 0, 0]
    assert result.published_errors.tolist() == pytest.approx([0, math.sqrt(3), math.sqrt(3)])
    zeros = score(torch.zeros(3, 3), truth)
    assert zeros.error == zeros.signed_error == 1
    assert zeros.cosine == 0
    none = score(torch.zeros(0, 3), truth)
    assert (none.error, none.recovered, none.recall, none.precision) == (1, 0, 0, 0)
    json.dumps(none.to_dict(), allow_nan=False)


def test_duplicates_raise_recall_and_precision_no_further_than_they_should() -> None:
    truth = sphere(4, 100)
    twice = score(torch.cat([truth[:2], truth[:2]]), truth)
    assert twice.recovered == twice.recall == 0.5
    assert twice.precision == 1
    twins = truth.clone()
    twins[1] = truth[0] * 1.05
    merged = score(torch.cat([twins[:1], sphere(3, 100, seed=1)]), twins)
    assert merged.recall == 0.5  # one candidate is near both twins,
    assert merged.recovered == 0.25  # but can be given to one of them only
    assert merged.precision == 0.25


def test_a_mixture_of_two_samples_recovers_neither() -> None:
    truth = sphere(2, 100)
    result = score(truth.mean(0, keepdim=True), truth)
    assert result.recovered == result.recall == result.precision == 0
    assert 0.5 < float(result.errors.min()) < 1


def test_the_published_error_forgives_the_sign_of_every_pixel() -> None:
    truth = sphere(5, 100)
    signs = torch.where(gaussian(5, 100, seed=3) < 0, -1.0, 1.0)
    result = score((truth * signs).flip(0), truth)
    assert result.published_error < 1e-12
    assert result.error > 1
    assert result.recovered == 0


def test_flips_show_in_the_signed_error_only() -> None:
    truth = sphere(3, 50)
    result = score(truth * torch.tensor([[1.0], [-1.0], [1.0]]), truth)
    assert result.flipped.tolist() == [False, True, False]
    assert result.flips == 1
    assert result.error == 0
    torch.testing.assert_close(result.signed_errors, torch.tensor([0.0, 2.0, 0.0]).double())
    torch.testing.assert_close(result.cosines, torch.ones(3).double())


@pytest.mark.parametrize(
    ("samples", "truth", "words"),
    [
        (torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), torch.ones(2, 2), "candidate 1 holds NaN"),
        (torch.tensor([[1.0, math.inf]]), torch.ones(2, 2), "candidate 0 holds a value too large"),
        (torch.tensor([[1.0, 1e200]]).double(), torch.ones(2, 2), "candidate 0 holds"),
        (torch.ones(2, 2), torch.tensor([[1.0, math.nan]]), "true sample 0 holds NaN"),
        (torch.ones(2, 3), torch.ones(2, 2), r"shape \(2, 3\), expected \(any number, 2\)"),
        (torch.ones(2, 1, 2), torch.ones(2, 2), "candidates have shape"),
        (torch.ones(2), torch.ones(2, 2), "candidates have shape"),
        (torch.ones(2, 2), torch.ones(0, 2), "no true samples"),
        (torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "true sample 1 is zero"),
    ],
)
def test_bad_input_is_named(samples: Tensor, truth: Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        score(samples, truth)


def test_inputs_are_left_alone() -> None:
    truth, found = sphere(3, 10), sphere(4, 10, seed=1).requires_grad_()
    before = truth.clone(), found.detach().clone()
    assert not score(found, truth).errors.requires_grad
    assert torch.equal(truth, before[0])
    assert torch.equal(found.detach(), before[1])


# Images


@pytest.mark.parametrize(
    ("shape", "window"), [((8, 8), 7), ((25, 25), 7), ((3, 9, 8), 7), ((1, 6, 5), 5), ((3, 3), 3)]
)
def test_image_metrics_of_matched_pairs(shape: tuple[int, ...], window: int) -> None:
    from skimage.metrics import structural_similarity

    data = images(3, *shape)
    noisy = data.inputs + 0.2 * gaussian(*data.inputs.shape, seed=5)
    result = score(-noisy[[2, 0, 1]], data)
    assert result.matched.tolist() == [1, 2, 0]
    assert result.ssim_window == window
    assert result.psnrs is not None
    assert result.ssims is not None
    a, b = (data.images(rows)[1].clamp(0, 1).numpy() for rows in (data.inputs, noisy))
    assert math.isclose(float(result.psnrs[1]), -10 * math.log10(((a - b) ** 2).mean()))
    if len(shape) == 2:
        expected = structural_similarity(a, b, data_range=1, win_size=window)
    else:
        channels = zip(a, b, strict=True)
        expected = np.mean(
            [structural_similarity(*c, data_range=1, win_size=window) for c in channels]
        )
    assert math.isclose(float(result.ssims[1]), expected, rel_tol=1e-9)
    assert result.ssim == pytest.approx(float(result.ssims.mean()))


def test_images_are_undone_with_the_norm_of_the_true_sample() -> None:
    data = images(3, 8, 8, rescale=True)
    assert data.transform.norms is not None
    order = torch.tensor([2, 0, 1])
    result = score(-data.inputs[order] * (1 + 1e-9), data)
    assert result.psnr is not None
    assert result.psnr > 150
    missing = score(data.inputs[1:2] * (1 + 1e-9), data)
    assert missing.psnrs is not None
    assert missing.psnrs.isnan().tolist() == [True, False, True]
    assert missing.psnr is not None
    assert missing.psnr > 150
    assert missing.ssim == pytest.approx(1)


def test_equal_images_are_safe_in_json_and_warn_nothing() -> None:
    data = images(2, 3, 8, 8)
    result = score(data.inputs, data)
    assert result.psnr == math.inf
    assert result.ssim == pytest.approx(1)
    as_dict = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert as_dict["psnr"] is None
    assert [row["psnr"] for row in as_dict["rows"]] == [None, None]
    nothing = score(data.inputs[:0], data)
    assert json.loads(json.dumps(nothing.to_dict(), allow_nan=False))["ssim"] is None


def test_no_image_metrics_without_images() -> None:
    data = images(2, 64)
    for truth in (data, data.inputs):
        result = score(data.inputs, truth)
        assert (result.psnr, result.ssim, result.psnrs, result.ssims) == (None,) * 4
    tiny = score(images(2, 2, 9).inputs, images(2, 2, 9))
    assert tiny.psnr == math.inf
    assert (tiny.ssims, tiny.ssim_window) == (None, None)


def test_the_dictionary_holds_every_sample() -> None:
    truth = 10 * torch.eye(3, dtype=torch.float64)
    result = score(torch.tensor([[0.0, -9.5, 0.0], [10.0, 0.0, 0.0]]), truth)
    as_dict = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (as_dict["samples"], as_dict["candidates"], as_dict["flips"]) == (3, 2, 1)
    assert as_dict["thresholds"] == {"recovered": 0.1, "exact": 0.01}
    assert as_dict["recovered"] == pytest.approx(2 / 3)
    assert set(AGGREGATES) <= set(as_dict)
    assert [row["candidate"] for row in as_dict["rows"]] == [1, 0, None]
    assert [row["flipped"] for row in as_dict["rows"]] == [False, True, False]
    assert [row["error"] for row in as_dict["rows"]] == [0, pytest.approx(0.05), 1]


# Chance


def test_chance_on_the_sphere_is_the_known_value() -> None:
    truth = sphere(5, 4000)
    level = chance(truth, candidates=5, trials=3)
    assert level.neighbour is not None
    known = math.sqrt(2 - 4 / math.pi)
    for values in (level.sphere, level.neighbour):
        assert values["error"] == pytest.approx(math.sqrt(2), rel=0.03)
        assert values["published_error"] == pytest.approx(known, rel=0.03)
        assert values["error"] < math.sqrt(2)
        assert values["cosine"] < 0.05
        assert [values[name] for name in ("recovered", "exact", "recall", "precision")] == [0] * 4


@pytest.mark.parametrize("seed", [0, 3])
def test_chance_does_not_redraw_data_from_the_same_seed(seed: int) -> None:
    drawn = np.random.default_rng(seed).standard_normal((4, 50))
    for truth in (torch.from_numpy(drawn), gaussian(4, 50, seed=seed), sphere(4, 50, seed=seed)):
        assert chance(truth, candidates=4, seed=seed).sphere["recovered"] == 0


def test_more_candidates_are_closer_by_chance() -> None:
    truth = sphere(5, 20)
    few, many = (chance(truth, candidates=k).sphere["error"] for k in (5, 200))
    assert few is not None
    assert many is not None
    assert many < few < math.sqrt(2)


def test_the_neighbour_is_the_nearest_other_sample() -> None:
    truth = torch.tensor([[10.0, 0.0], [10.0, 0.5], [0.0, 10.0], [10.0, -0.5]])
    level = chance(truth, candidates=4)
    pairs = (truth[:, None] - truth[None]).norm(dim=2) / truth.norm(dim=1)[:, None]
    expected = (pairs + torch.eye(4) * 9).amin(1)
    assert level.neighbour is not None
    assert level.neighbour["error"] == pytest.approx(float(expected.mean()))
    assert level.neighbour["recovered"] == level.neighbour["recall"] == 0.75
    assert level.neighbour["precision"] == 0.75


def test_chance_has_the_aggregates_of_a_score() -> None:
    data = images(3, 8, 8, rescale=True)
    level = chance(data, candidates=2, seed=7, trials=2)
    assert level.neighbour is not None
    assert tuple(level.sphere) == tuple(level.neighbour) == AGGREGATES
    assert level.sphere["ssim"] is not None
    assert level.neighbour["psnr"] is not None
    json.dumps(level.to_dict(), allow_nan=False)
    assert chance(data, candidates=2, seed=7, trials=2) == level
    assert chance(data, candidates=2, seed=8, trials=2) != level
    assert chance(data.inputs, candidates=2).sphere["ssim"] is None


def test_chance_of_a_single_sample_has_no_neighbour() -> None:
    level = chance(sphere(1, 9), candidates=1)
    assert level.neighbour is None
    json.dumps(level.to_dict(), allow_nan=False)
    with pytest.raises(InputError, match="candidates=0"):
        chance(sphere(1, 9), candidates=0)


# Feature space


@dataclass
class Dense:
    """Features σ(Vx) with σ = ReLU, r rows an input, whole in memory."""

    weights: Tensor  # (r, p, d)
    device = torch.device("cpu")
    dtype = torch.float64

    @property
    def width(self) -> int:
        return self.weights.shape[1]

    def phi(self, inputs: Tensor) -> Tensor:
        return torch.einsum("rpd,nd->nrp", self.weights, inputs).relu().flatten(0, 1)

    def linearize(self, inputs: Tensor) -> SimpleNamespace:
        phi = self.phi(inputs)
        return SimpleNamespace(gram=lambda: phi @ phi.T)


def dense_span_residual(features: Dense, candidates: Tensor, truth: Tensor) -> float:
    basis = torch.linalg.svd(features.phi(candidates), full_matrices=False)
    rows = basis.Vh[basis.S / basis.S[0] > 1e-7]
    phi = features.phi(truth)
    return float((phi - phi @ rows.T @ rows).norm(dim=1).mean() / math.sqrt(features.width))


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(4, 4), (3, 6), (5, 2), (3, 30)])
def test_span_residual_against_the_svd(n: int, k: int, r: int) -> None:
    features = Dense(gaussian(r, 40, 6))
    truth, candidates = sphere(n, 6), sphere(k, 6, seed=1)
    candidates[-1] = 2 * candidates[0]  # linearly dependent features
    value = span_residual(features, candidates, truth)
    expected = dense_span_residual(features, candidates, truth)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_span_residual_of_the_truth_is_zero_and_of_nothing_is_the_size() -> None:
    features = Dense(gaussian(1, 40, 6))
    truth = sphere(4, 6)
    more = torch.cat([sphere(2, 6, seed=2), 3 * truth.flip(0)]).float().double()
    assert span_residual(features, 3 * truth.flip(0), truth) < 1e-7
    assert span_residual(features, more, truth) < 1e-6
    size = float(features.phi(truth).norm(dim=1).mean() / math.sqrt(40))
    assert span_residual(features, truth[:0], truth) == pytest.approx(size)
    assert span_residual(features, torch.zeros(2, 6), truth) == pytest.approx(size)
    with pytest.raises(InputError, match="NaN"):
        span_residual(features, truth * math.nan, truth)


def test_residual_at_truth_is_the_objective_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(problem: str, inputs: Tensor) -> SimpleNamespace:
        assert problem == "problem"
        return SimpleNamespace(value=float(inputs.sum()))

    monkeypatch.setattr(feature_space.objective, "fitted", fake)
    assert evaluate.residual_at_truth("problem", torch.ones(2, 3)) == 6
    assert evaluate.residual_at_truth("problem", images(2, 3)) == float(images(2, 3).inputs.sum())


# Floors


@cache
def victim(**options: Any) -> Victim:
    """A tiny two-layer net on the sphere, trained to 1e-6."""
    return two_layer(datasets.sphere(16, 4), width=128, until=1e-6, **options)


def dense_floor(victim: Victim, parameters: str, point: str) -> float:
    """The residual at the truth, from weights, plain autograd and a dense least-squares fit."""
    assert victim.model is not None
    weights = {
        "initial": [victim.initial],
        "final": [victim.trained],
        "midpoint": [{k: (victim.initial[k] + w) / 2 for k, w in victim.trained.items()}],
        "both": [victim.initial, victim.trained],
    }[point]
    names = {"last": ["3.weight"], "all": list(victim.trained)}[parameters]
    columns = []
    for at in weights:
        for x in victim.truth.inputs.double():
            w1, w2 = (at[name].clone().requires_grad_() for name in ("1.weight", "3.weight"))
            output = w2 @ (w1 @ x).relu()
            slopes = dict(zip(victim.trained, torch.autograd.grad(output, (w1, w2)), strict=True))
            columns.append(torch.cat([slopes[name].flatten() for name in names]))
    change = [(victim.trained[name] - victim.initial[name]).flatten() for name in names]
    target, basis = torch.cat(change), torch.stack(columns, 1)
    rest = target - basis @ torch.linalg.lstsq(basis, target[:, None]).solution[:, 0]
    return float(rest.square().sum() / target.square().sum())


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_floors_against_the_dense_oracle(parameters: str) -> None:
    made = victim()
    found = floors(lambda point: made.posed(parameters, point), made.truth)
    assert tuple(found) == POINTS
    for point, value in found.items():
        assert value == pytest.approx(dense_floor(made, parameters, point), rel=1e-4), point
    assert found["both"] < found["midpoint"] < min(found["initial"], found["final"])


def test_a_point_that_cannot_be_formed_has_no_floor() -> None:
    made = victim()

    def partial(point: str) -> Problem:
        if point in ("initial", "midpoint"):
            raise InputError("initial weights are missing: 1.weight")
        return made.posed("last", point)

    assert set(floors(partial, made.truth.inputs)) == {"final", "both"}


@pytest.mark.parametrize(
    ("residual", "floor", "recovered", "ratio", "words"),
    [
        (1e-12, 1e-13, 8, 4.0, "All 8 samples recovered"),
        (None, 0.3, 8, 4.0, "All 8 samples recovered"),
        (1e-3, 1e-8, 0, 4.0, "None of 8 samples recovered. The attack failed although"),
        (1e-3, 1e-8, 5, 4.0, "5 of 8 samples recovered. The attack failed although"),
        (None, 1e-8, 0, 4.0, "ended at a residual of inf"),
        (1e-7, 1e-30, 0, 4.0, "The attack failed although"),
        (1e-3, 1e-2, 0, 4.0, "no such trace at this width or laziness"),
        (1e-3, math.nan, 0, 4.0, "no such trace at this width or laziness"),
        (1e-3, 9e-3, 0, 4.0, "fits below the floor with wrong candidates"),
        (1e-3, 1e-8, 0, 0.8, "0.80 equations for each unknown are too few"),
        (1e-2, 2e-2, 7, 4.0, "7 of 8 samples recovered. The attack fits below the floor"),
        (1e-3, 9e-3, 0, 0.8, "0.80 equations for each unknown are too few"),
        (1e-12, 1e-30, 2, 4.0, "fits as well as the samples do with wrong candidates"),
        (5e-4, 1e-4, 7, 4.0, "7 of 8 samples recovered. The attack fits nearly as well"),
        (5e-4, 1e-4, 7, 4.0, "the trace of what was missed is too small"),
    ],
)
def test_a_verdict_tells_the_attack_from_the_model(
    residual: float | None, floor: float, recovered: int, ratio: float, words: str
) -> None:
    assert words in verdict(residual, floor, recovered, 8, ratio)


def test_a_verdict_names_the_point_where_the_trace_is_clearer() -> None:
    by_point = {"initial": 0.3, "final": 0.4, "midpoint": 5e-3, "both": 1e-5}
    assert "'both' they leave 1.0e-05" in verdict(1e-3, 0.3, 0, 8, 4.0, by_point)
    assert "at the point" not in verdict(1e-3, 0.3, 0, 8, 4.0, {"initial": 0.3})
    assert "at the point" not in verdict(1e-3, 5e-3, 0, 8, 0.5, by_point)


@pytest.mark.parametrize(
    ("residual", "floor", "recovered", "ratio", "words"),
    [
        (1e-3, 0.07, 8, 4.0, "All 8 samples recovered"),
        (1e-7, 0.07, 0, 4.0, "explain the weights better than the samples do"),
        (0.1, 0.07, 3, 4.0, "3 of 8 samples recovered. Candidates that are not samples explain"),
        (0.1, 0.07, 3, 4.0, "about as well as the samples do"),
        (0.5, 0.01, 0, 4.0, "The attack failed although the trace is there"),
        (1e-3, 0.6, 0, 4.0, "The premise margin does not hold for this model"),
        (1e-3, math.nan, 0, 4.0, "The premise margin does not hold for this model"),
        (1e-3, 0.07, 0, 0.8, "0.80 equations for each unknown are too few"),
    ],
)
def test_a_verdict_on_trained_weights_alone(
    residual: float, floor: float, recovered: int, ratio: float, words: str
) -> None:
    said = verdict(residual, floor, recovered, 8, ratio, {"final": 1e-9}, Premise.MARGIN)
    assert words in said and "laziness" not in said and "at the point" not in said


def test_the_thresholds_of_a_verdict_are_where_they_are_said_to_be() -> None:
    floor = 0.1 * evidence.NO_TRACE
    for factor, words in ((0.99, "fits"), (1.01, "failed although")):
        assert words in verdict(factor * evidence.ABOVE * floor, floor, 0, 8, 4.0)
    for factor, words in ((0.99, "failed although"), (1.01, "no such trace")):
        assert words in verdict(1.0, factor * evidence.NO_TRACE, 0, 8, 4.0)


# The samples' span


def rotated(angles: Tensor, extra: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Bases of two subspaces at given angles (radians), the first with further directions."""
    k = len(angles)
    q = torch.linalg.qr(gaussian(dim, 2 * k + extra, seed=seed)).Q
    second = q[:, :k] * angles.cos() + q[:, k : 2 * k] * angles.sin()
    return torch.cat([q[:, :k], q[:, 2 * k :]], 1), second


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("swap", [False, True])
def test_principal_angles_are_those_the_spaces_were_made_with(extra: int, swap: bool) -> None:
    angles = torch.tensor([1.5, 0.9, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    basis, other = rotated(angles, extra, 30, seed=extra)
    if swap:
        basis, other = other, basis
    mixed = gaussian(2 * other.shape[1], other.shape[1], seed=5) @ other.T  # samples in that span
    found = principal_angles(basis, mixed)
    torch.testing.assert_close(found, angles.rad2deg(), rtol=1e-5, atol=0)


def test_principal_angles_against_the_dense_oracle() -> None:
    basis, truth = torch.linalg.qr(gaussian(12, 5)).Q, gaussian(3, 12, seed=1)
    span = torch.linalg.qr(truth.T).Q
    sines = torch.linalg.svdvals((torch.eye(12).double() - basis @ basis.T) @ span)
    torch.testing.assert_close(principal_angles(basis, truth), sines.asin().rad2deg())
    projected = truth @ basis @ basis.T
    expected = (truth - projected).norm(dim=1) / truth.norm(dim=1)
    torch.testing.assert_close(outside(basis, truth), expected)


def test_samples_that_repeat_each_other_add_no_direction() -> None:
    basis = torch.eye(6, 2, dtype=torch.float64)
    truth = gaussian(2, 2, seed=2) @ basis.T
    again = torch.cat([truth, truth.sum(0, keepdim=True) + 1e-12 * gaussian(1, 6)])
    assert len(principal_angles(basis, again)) == 2
    assert float(principal_angles(basis, again).max()) < 1e-9
    assert float(outside(basis, again).max()) < 1e-11


# Whole runs


def make_run(path: Path, model: Path, samples: Tensor, **entries: Any) -> Path:
    """A run directory as an audit leaves it, as far as a score looks."""
    path.mkdir()
    settings = {k: entries[k] for k in ("parameters", "point", "rank") if k in entries}
    (path / "config.yaml").write_text(yaml.safe_dump({"model": str(model), **settings}))
    write_json(path / "result.json", {"seed": 0, "residual": 1e-9} | entries)
    write_tensors(path / "candidates.safetensors", {"samples": samples.double()})
    return path


def test_a_score_of_a_network_holds_floors_span_and_verdict(tmp_path: Path) -> None:
    made = victim()
    made.save(tmp_path / "model")
    run = make_run(tmp_path / "run", tmp_path / "model", made.truth.inputs)
    record = score_run(run)
    assert record == json.loads((run / SCORE).read_text())
    assert set(record["floors"]) == set(POINTS)
    assert record["floors"]["midpoint"] == record["residual_at_truth"]
    assert record["verdict"].startswith("All 4 samples recovered")
    assert record["subspace"]["rank"] == 4 and record["subspace"]["kept"] == 1
    assert record["subspace"]["largest_angle"] < 1e-4 and record["subspace"]["outside"] < 1e-6

    whole = make_run(tmp_path / "all", tmp_path / "model", sphere(4, 16), parameters="all", rank=3)
    record = score_run(whole)
    assert record["residual_at_truth"] == pytest.approx(
        dense_floor(made, "all", "midpoint"), rel=1e-4
    )
    assert record["subspace"]["rank"] == 3 and record["subspace"]["outside"] > 0.1
    assert record["subspace"]["largest_angle"] < 1e-4  # all three directions are in the span
    assert "None of 4 samples recovered. The attack fits below" in record["verdict"]


@pytest.mark.parametrize(("rank", "words"), [(None, "1.00 equations"), (4, "there are 4.00")])
def test_unknowns_are_counted_in_the_subspace_of_the_run(
    tmp_path: Path, rank: int | None, words: str
) -> None:
    made = two_layer(datasets.sphere(16, 4), width=64, until=1e-4)
    made.save(tmp_path / "model")
    run = make_run(tmp_path / "run", tmp_path / "model", sphere(4, 16), rank=rank)
    assert words in score_run(run)["verdict"]


def test_where_the_optimiser_hides_the_span_the_score_says_so(tmp_path: Path) -> None:
    made = victim(optimizer="adam")
    made.save(tmp_path / "model")
    record = score_run(make_run(tmp_path / "run", tmp_path / "model", made.truth.inputs))
    assert "Adam" in record["subspace"] and set(record["floors"]) == set(POINTS)


def test_a_model_of_ones_own_needs_its_truth_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tmp_path, sphere(4, 16))
    (run / "config.yaml").write_text("model: null\n")
    with pytest.raises(InputError, match="--truth"):
        score_run(run)
    (run / "config.yaml").write_text("model: package.module:factory\ntrained: a.pt\n")
    with pytest.raises(InputError, match="--truth"):
        score_run(run)


def test_a_score_of_random_features_has_one_floor(tmp_path: Path) -> None:
    made = random_features(datasets.sphere(16, 4), 128)
    made.save(tmp_path / "model")
    run = make_run(tmp_path / "run", tmp_path / "model", sphere(4, 16), residual=1e-3)
    record = score_run(run)
    assert record["residual_at_truth"] < 1e-12 and record["floors"] == {}
    assert "subspace" not in record and "although the trace is there" in record["verdict"]
