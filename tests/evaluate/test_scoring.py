"""Matching and scores: dense or brute-force oracles, and what must not change them."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume import evaluate
from exhume.errors import InputError
from exhume.evaluate import assign, distances, metrics, score
from exhume.evaluate.scoring import AGGREGATES
from problems import gaussian, on_sphere
from runs import images, pictures

seeds = st.integers(0, 2**31 - 1)
fast = settings(max_examples=30, deadline=None)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 7), (7, 3), (4, 0)])
def test_distances_against_the_dense_oracle(n: int, k: int) -> None:
    x, y = gaussian(n, 5).float(), gaussian(k, 5, seed=1).float()
    a, b = x.double()[:, None], y.double()[None]  # single precision is taken up to double
    minus, plus = (a - b).norm(dim=2), (a + b).norm(dim=2)
    torch.testing.assert_close(distances(x, y, "signed"), minus)
    torch.testing.assert_close(distances(x, y), torch.minimum(minus, plus))
    torch.testing.assert_close(distances(x, y, "published"), (a.abs() - b.abs()).norm(dim=2))


@fast
@given(n=st.integers(1, 5), k=st.integers(0, 5), seed=seeds)
def test_assignment_against_brute_force(n: int, k: int, seed: int) -> None:
    costs = gaussian(n, k, seed=seed).abs()
    matched = assign(costs)
    found = matched >= 0
    assert int(found.sum()) == len(set(matched[found].tolist())) == min(n, k)
    table = costs if n <= k else costs.T
    choices = itertools.permutations(range(table.shape[1]), table.shape[0])
    best = min(float(table[range(table.shape[0]), list(columns)].sum()) for columns in choices)
    assert math.isclose(float(costs[found, matched[found]].sum()), best, abs_tol=1e-12)


@fast
@given(n=st.integers(1, 6), extra=st.integers(-3, 4), seed=seeds)
def test_a_permuted_negated_scaled_truth_is_recovered(n: int, extra: int, seed: int) -> None:
    truth = on_sphere(n, 200, seed=seed)
    k = max(0, n + extra)
    candidates = torch.cat([truth, on_sphere(max(0, extra), 200, seed=seed + 1)])[:k]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    result = score(-1.05 * candidates[order], truth)
    kept = min(n, k)
    assert order[result.matched[:kept]].tolist() == list(range(kept))
    assert result.matched[kept:].tolist() == [-1] * (n - kept)
    for name, expected in {"errors": 0.05, "signed_errors": 2.05, "cosines": 1}.items():
        assert getattr(result, name)[:kept].tolist() == pytest.approx([expected] * kept)
    assert result.recovered == result.recall == kept / n
    assert (result.exact, result.flips) == (0, kept)
    assert result.precision == (kept / k if k else 0)


def test_thresholds_are_strict_and_errors_relative_to_each_norm() -> None:
    truth = torch.tensor([[10.0], [1000.0]], dtype=torch.float64)
    at = score(torch.tensor([[9.0], [990.0]]), truth)
    assert at.errors.tolist() == [0.1, 0.01]
    assert (at.recovered, at.exact, at.recall) == (0.5, 0, 0.5)
    below = score(torch.tensor([[9.001], [990.1]]), truth)
    assert (below.recovered, below.exact, below.recall, below.precision) == (1, 0.5, 1, 1)
    assert (evaluate.RECOVERED, evaluate.EXACT) == (0.1, 0.01)
    assert below.published_errors.tolist() == pytest.approx([0.999, 9.9], rel=1e-4)
    truth = on_sphere(4, 300)  # small errors are not lost to cancellation
    np.testing.assert_allclose(score(truth * (1 + 1e-12), truth).errors, 1e-12, rtol=1e-3)
    assert score(truth, truth).error == 0


def test_samples_without_a_candidate_score_as_the_zero_vector() -> None:
    truth = 3 * torch.eye(3, dtype=torch.float64)
    result = score(truth[:1], truth)
    assert result.matched.tolist() == [0, -1, -1]
    assert result.errors.tolist() == result.signed_errors.tolist() == [0, 1, 1]
    assert result.cosines.tolist() == [1, 0, 0]
    assert result.published_errors.tolist() == pytest.approx([0, math.sqrt(3), math.sqrt(3)])
    zeros, none = score(torch.zeros(3, 3), truth), score(torch.zeros(0, 3), truth)
    assert (zeros.error, zeros.signed_error, zeros.cosine) == (1, 1, 0)
    assert (none.error, none.recovered, none.recall, none.precision) == (1, 0, 0, 0)
    json.dumps(none.to_dict(), allow_nan=False)


def test_duplicates_mixtures_and_signs_of_pixels_recover_no_more_than_they_should() -> None:
    truth = on_sphere(4, 100)
    twice = score(torch.cat([truth[:2], truth[:2]]), truth)
    assert (twice.recovered, twice.recall, twice.precision) == (0.5, 0.5, 1)
    twins = truth.clone()
    twins[1] = truth[0] * 1.05
    merged = score(torch.cat([twins[:1], on_sphere(3, 100, seed=1)]), twins)
    assert merged.recall == 0.5  # one candidate is near both twins,
    assert merged.recovered == merged.precision == 0.25  # but can be given to one of them only
    mixed = score(truth[:2].mean(0, keepdim=True), truth[:2])
    assert mixed.recovered == mixed.recall == mixed.precision == 0
    assert 0.5 < float(mixed.errors.min()) < 1
    signed = score((truth * gaussian(4, 100, seed=3).sign()).flip(0), truth)
    assert signed.published_error < 1e-12 and signed.error > 1 and signed.recovered == 0


@pytest.mark.parametrize(
    ("samples", "truth", "words"),
    [
        (torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), torch.ones(2, 2), "candidate 1 holds NaN"),
        (torch.tensor([[1.0, math.inf]]), torch.ones(2, 2), "candidate 0 holds a value too large"),
        (torch.tensor([[1.0, 1e200]]).double(), torch.ones(2, 2), "candidate 0 holds"),
        (torch.ones(2, 2), torch.tensor([[1.0, math.nan]]), "true sample 0 holds NaN"),
        (torch.ones(2, 3), torch.ones(2, 2), r"shape \(2, 3\), expected \(any number, 2\)"),
        (torch.ones(2, 1, 2), torch.ones(2, 2), "candidates have shape"),
        (torch.ones(2, 2), torch.ones(0, 2), "no true samples"),
        (torch.ones(2, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "true sample 1 is zero"),
    ],
)
def test_bad_input_is_named(samples: Tensor, truth: Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        score(samples, truth)


def test_the_dictionary_holds_every_sample() -> None:
    truth = 10 * torch.eye(3, dtype=torch.float64)
    found = torch.tensor([[0.0, -9.5, 0.0], [10.0, 0.0, 0.0]]).requires_grad_()
    record = json.loads(json.dumps(score(found, truth).to_dict(), allow_nan=False))
    assert (record["samples"], record["candidates"], record["flips"]) == (3, 2, 1)
    assert record["thresholds"] == {"recovered": 0.1, "exact": 0.01, "nearer": 1 / 3}
    assert [row["grade"] for row in record["rows"]] == ["exact", "recovered", "not found"]
    assert record["recovered"] == pytest.approx(2 / 3) and set(AGGREGATES) <= set(record)
    rows = [[row[x] for x in ("candidate", "flipped", "signed_error")] for row in record["rows"]]
    assert rows == [[1, False, 0], [0, True, pytest.approx(1.95)], [None, False, 1]]


def test_what_is_legible_is_recognisable_whatever_the_threshold() -> None:
    truth = 10 * torch.nn.functional.normalize(1 + 0.4 * gaussian(6, 50), dim=1)  # all alike
    near = torch.cdist(truth, truth).fill_diagonal_(torch.inf).amin(1) / 10
    off = torch.nn.functional.normalize(gaussian(6, 50, seed=1), dim=1)
    for share, grade in ((0.3, "recognisable"), (0.36, "not found")):
        result = score(truth + 10 * (share * near)[:, None] * off, truth)
        assert (result.errors > 0.1).all() and (result.errors < 0.25).all()
        assert {result.grade(i) for i in range(6)} == {grade} and result.recovered == 0
        assert result.recognisable == (grade == "recognisable")
    assert score(truth[1:2] * 0.6, truth[1:2]).recognisable == 1  # with no other sample, half
    assert score(truth[1:2] * 0.4, truth[1:2]).recognisable == 0


@pytest.mark.parametrize("shape", [(7, 6), (28, 28), (3, 8, 10), (3, 3)])
def test_similarity_is_that_of_scipy_and_scikit_image(shape: tuple[int, ...]) -> None:
    from scipy.ndimage import gaussian_filter
    from skimage.metrics import peak_signal_noise_ratio

    def mean(image: np.ndarray) -> np.ndarray:
        return gaussian_filter(image, 1.5, mode="mirror", radius=1, axes=(-2, -1))

    one = pictures(4, *shape)
    two = one + 0.6 * (pictures(4, *shape, seed=1) - 0.5)  # some of it outside of [0, 1]
    pairs = [(a.numpy(), b.clamp(0, 1).numpy()) for a, b in zip(one, two, strict=True)]
    for (x, y), found in zip(pairs, metrics.ssim(one, two).tolist(), strict=True):
        (a, b), (va, vb) = (mean(x), mean(y)), (mean(x * x), mean(y * y))
        similar = (2 * a * b + 1e-4) * (2 * (mean(x * y) - a * b) + 9e-4)
        similar /= (a**2 + b**2 + 1e-4) * (va - a**2 + vb - b**2 + 9e-4)
        assert found == pytest.approx(similar.mean(), abs=1e-12)
    ratios = [peak_signal_noise_ratio(*pair, data_range=1) for pair in pairs]
    assert metrics.psnr(one, two).tolist() == pytest.approx(ratios, abs=1e-9)


@pytest.mark.parametrize("shape", [(7, 6), (3, 8, 10), (3, 3), (2, 9)])
def test_image_metrics_of_matched_pairs(shape: tuple[int, ...]) -> None:
    data = images(3, *shape)
    noisy = data.inputs + 0.2 * gaussian(*data.inputs.shape, seed=5)
    result = score(-noisy[[2, 0, 1]], data)
    assert result.matched.tolist() == [1, 2, 0]
    pair = data.images(), data.images(noisy)
    assert result.psnr == float(result.psnrs.median())
    torch.testing.assert_close(result.psnrs, metrics.psnr(*pair))
    if min(shape) < 3:
        assert result.ssims is None and result.ssim is None
    else:
        assert result.ssim == pytest.approx(float(result.ssims.mean()))
        torch.testing.assert_close(result.ssims, metrics.ssim(*pair))


def test_images_have_the_norm_of_the_true_sample_and_are_safe_in_json() -> None:
    data = images(3, 8, 8, rescale=True)
    assert score(-data.inputs[[2, 0, 1]] * (1 + 1e-9), data).psnr > 150
    missing = score(data.inputs[1:2] * (1 + 1e-9), data)
    assert missing.psnrs.isnan().tolist() == [True, False, True]
    assert missing.psnr > 150 and missing.ssim == pytest.approx(1)
    data = images(2, 3, 8, 8)
    equal, nothing = score(data.inputs, data), score(data.inputs[:0], data)
    assert equal.psnr == math.inf and equal.ssim == pytest.approx(1)
    record = json.loads(json.dumps(equal.to_dict(), allow_nan=False))
    assert [record["psnr"], *(row["psnr"] for row in record["rows"])] == [None] * 3
    assert json.loads(json.dumps(nothing.to_dict(), allow_nan=False))["ssim"] is None
    for truth in (images(2, 192), data.inputs):  # vectors have no image metrics
        plain = score(data.inputs, truth)
        assert (plain.psnr, plain.ssim, plain.psnrs, plain.ssims) == (None,) * 4
