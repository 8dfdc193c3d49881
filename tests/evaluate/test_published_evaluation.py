"""The papers' evaluation: against slow loops, against scikit-image, and what must not change it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage import metrics as skimage_metrics
from torch import Tensor
from torch.nn import functional

from exhume import data as datasets
from exhume.data import Data, Transform
from exhume.errors import InputError
from exhume.evaluate import (
    Contrast,
    PublishedScore,
    chance_level,
    compared,
    ncc_distances,
    other_data,
    published_score,
)
from exhume.evaluate.published import (
    averaged,
    mutual_best,
    peak_signal_to_noise,
    stretch,
    structural_similarity,
)
from exhume.evaluate.runs import score_run
from exhume.files import write_json, write_tensors
from exhume.report import published_figures

REAL = Path(__file__).parents[3] / "shared" / "data"
SHAPES = [(7, 6), (3, 8, 10), (1, 6, 6)]


def rows(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, math.prod(shape), generator=generator, dtype=torch.float64)


def pictures(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *shape, generator=generator, dtype=torch.float64)


def images(count: int, shape: tuple[int, ...], seed: int = 0) -> Data:
    """Random pictures, less their mean image."""
    pixels = pictures(count, shape, seed).flatten(1)
    mean = pixels.mean(0)
    targets = torch.ones(count, 1, dtype=torch.float64)
    return Data(pixels - mean, targets, shape, transform=Transform(mean.mean().item(), mean=mean))


def slow_ncc(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> float:
    """One pair, channel by channel, as half the mean square of the published difference."""
    total = 0.0
    channels = shape[0] if len(shape) == 3 else 1
    for one, two in zip(
        x.reshape(channels, *shape[-2:]), y.reshape(channels, *shape[-2:]), strict=True
    ):
        pair = []
        for plane in (one, two):
            if len(shape) == 3:
                plane = functional.interpolate(plane[None, None], scale_factor=0.5, mode="bicubic")
            plane = plane.flatten()
            pair.append((plane - plane.mean()) / plane.std(correction=0))
        total += float((pair[0] - pair[1]).square().mean()) / 2
    return total / channels


# Distances


@pytest.mark.parametrize("shape", SHAPES)
def test_cross_correlation_is_that_of_a_loop(shape: tuple[int, ...]) -> None:
    truth, candidates = rows(4, shape), rows(5, shape, seed=1)
    slow = torch.tensor([[slow_ncc(x, y, shape) for y in candidates] for x in truth])
    fast = ncc_distances(truth, candidates, shape)
    torch.testing.assert_close(fast, slow.double(), atol=1e-6, rtol=1e-6)


def test_halving_is_for_colour_only() -> None:
    checkered = torch.ones(6, 6, dtype=torch.float64)
    checkered[::2, ::2] = checkered[1::2, 1::2] = -1
    pair = torch.stack([checkered.flatten(), rows(1, (6, 6))[0]])
    grey, colour = ncc_distances(pair, pair, (6, 6)), ncc_distances(pair, pair, (1, 6, 6))
    assert grey.diagonal().tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert colour[0, 1] != pytest.approx(grey[0, 1].item(), abs=1e-3)


@settings(deadline=None)
@given(
    seed=st.integers(0, 500),
    shape=st.sampled_from(SHAPES),
    gain=st.floats(0.01, 100),
    shift=st.floats(-10, 10),
)
def test_brightness_and_contrast_do_not_count(
    seed: int, shape: tuple[int, ...], gain: float, shift: float
) -> None:
    truth, candidates = rows(4, shape, seed), rows(6, shape, seed + 1)
    changed = candidates.clone()
    changed[2] = gain * changed[2] + shift
    before, after = (ncc_distances(truth, c, shape) for c in (candidates, changed))
    torch.testing.assert_close(before, after, atol=1e-9, rtol=0)
    assert before.argmin(1).equal(after.argmin(1))


@settings(deadline=None)
@given(seed=st.integers(0, 500), shape=st.sampled_from(SHAPES), options=st.booleans())
def test_order_does_not_count(seed: int, shape: tuple[int, ...], options: bool) -> None:
    known, candidates = images(5, shape, seed), rows(8, shape, seed + 1)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    first = published_score(candidates, known, mutual=options, average=options)
    second = published_score(candidates[order], known, mutual=options, average=options)
    for name in ("ssim", "psnr", "l2", "ncc"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), equal_nan=True)
    found = first.neighbours >= 0
    assert order[second.neighbours[found]].equal(first.neighbours[found])
    assert found.equal(second.neighbours >= 0)


@settings(deadline=None)
@given(seed=st.integers(0, 500), shape=st.sampled_from(SHAPES))
def test_order_of_the_truth_moves_its_values(seed: int, shape: tuple[int, ...]) -> None:
    known, candidates = images(5, shape, seed), rows(8, shape, seed + 1)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    moved = replace(known, inputs=known.inputs[order])
    first, second = published_score(candidates, known), published_score(candidates, moved)
    torch.testing.assert_close(first.ssim[order], second.ssim)
    torch.testing.assert_close(first.l2[order], second.l2)
    assert first.neighbours[order].equal(second.neighbours)


def test_a_constant_channel_is_like_nothing() -> None:
    shape = (3, 6, 6)
    truth, flat = rows(2, shape), torch.full((1, 108), 0.3, dtype=torch.float64)
    assert ncc_distances(truth, flat, shape).tolist() == [[1.0], [1.0]]


# Images


@pytest.mark.parametrize("shape", [(7, 6), (28, 28), (3, 8, 10), (3, 3)])
def test_similarity_is_that_of_scikit_image(shape: tuple[int, ...]) -> None:
    one = pictures(4, shape)
    two = (one + 0.3 * pictures(4, shape, seed=1)).clamp(0, 1)
    expected = [
        skimage_metrics.structural_similarity(
            a.numpy(), b.numpy(), win_size=3, data_range=1, channel_axis=0 if a.ndim == 3 else None
        )
        for a, b in zip(one, two, strict=True)
    ]
    assert structural_similarity(one, two).tolist() == pytest.approx(expected, abs=1e-12)
    ratios = [
        skimage_metrics.peak_signal_noise_ratio(a.numpy(), b.numpy(), data_range=1)
        for a, b in zip(one, two, strict=True)
    ]
    assert peak_signal_to_noise(one, two).tolist() == pytest.approx(ratios, abs=1e-9)


def slow_gaussian_similarity(one: Tensor, two: Tensor) -> float:
    """Pixel by pixel; numpy reflects without repeating the border."""
    x, y = (np.pad(a.numpy(), 1, mode="reflect") for a in (one, two))
    near = np.exp(-(np.array([-1.0, 0.0, 1.0]) ** 2) / 4.5)
    weights = np.outer(near, near) / near.sum() ** 2
    values = []
    for i in range(one.shape[0]):
        for j in range(one.shape[1]):
            a, b = x[i : i + 3, j : j + 3], y[i : i + 3, j : j + 3]
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            variances = (weights * ((a - mean_a) ** 2 + (b - mean_b) ** 2)).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            values.append(
                (2 * mean_a * mean_b + 1e-4)
                * (2 * covariance + 9e-4)
                / ((mean_a**2 + mean_b**2 + 1e-4) * (variances + 9e-4))
            )
    return float(np.mean(values))


def test_gaussian_window_is_that_of_a_loop() -> None:
    one, two = pictures(2, (3, 6, 5)), pictures(2, (3, 6, 5), seed=1)
    expected = [
        np.mean([slow_gaussian_similarity(a, b) for a, b in zip(*pair, strict=True)])
        for pair in zip(one, two, strict=True)
    ]
    found = structural_similarity(one, two, "gaussian")
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert not torch.allclose(found, structural_similarity(one, two), atol=1e-3)


@settings(deadline=None)
@given(seed=st.integers(0, 500), gain=st.floats(0.01, 100), shift=st.floats(-10, 10))
def test_a_stretch_forgets_one_gain_and_shift(seed: int, gain: float, shift: float) -> None:
    picture = pictures(3, (3, 4, 4), seed)
    stretched = stretch(picture)
    torch.testing.assert_close(stretched, stretch(gain * picture + shift), atol=1e-9, rtol=0)
    assert stretched.flatten(1).amin(1).tolist() == [0.0] * 3
    assert stretched.flatten(1).amax(1).tolist() == [1.0] * 3


# Score


@pytest.mark.parametrize("shape", [(7, 6), (3, 8, 8)])
@pytest.mark.parametrize("window", ["uniform", "gaussian"])
def test_score_is_that_of_a_loop(shape: tuple[int, ...], window: Any) -> None:
    known, candidates = images(6, shape), rows(9, shape, seed=1)
    result = published_score(candidates, known, window=window)
    mean = known.transform.mean
    assert mean is not None
    for i, x in enumerate(known.inputs):
        costs = [slow_ncc(x, y, shape) for y in candidates]
        best = int(np.argmin(costs))
        assert result.neighbours[i] == best
        assert result.ncc[i].item() == pytest.approx(costs[best])
        picture = candidates[best] + mean
        picture = ((picture - picture.min()) / (picture.max() - picture.min())).reshape(shape)
        original = (x + mean).reshape(shape)
        expected = structural_similarity(original[None], picture[None], window)
        assert result.ssim[i].item() == pytest.approx(expected.item())
        error = (original - picture).square().mean().item()
        assert result.psnr[i].item() == pytest.approx(-10 * math.log10(error))
        lengths = [(x - y).norm().item() for y in candidates]
        assert result.l2_neighbours[i] == int(np.argmin(lengths))
        assert result.l2[i].item() == pytest.approx(min(lengths))
    torch.testing.assert_close(result.dssim, (1 - result.ssim) / 2)
    assert (result.samples, result.candidates, result.window) == (6, 9, window)


def test_the_training_images_themselves() -> None:
    known = images(12, (7, 6))
    result = published_score(known.inputs.flip(0), known)
    assert result.neighbours.tolist() == list(range(11, -1, -1))
    assert result.l2.max() < 1e-12
    assert result.good == result.good_dssim == 12
    assert result.top10_ssim > 0.95  # not 1: the stretch changes what did not fill [0, 1]


def test_pooled_runs_are_at_least_as_good_as_each() -> None:
    known, runs = images(6, (7, 6)), [rows(5, (7, 6), seed) for seed in (1, 2)]
    single = [published_score(run, known) for run in runs]
    pooled = published_score(torch.cat(runs), known)
    assert pooled.l2.equal(torch.minimum(single[0].l2, single[1].l2))
    torch.testing.assert_close(pooled.ncc, torch.minimum(single[0].ncc, single[1].ncc))


@pytest.mark.parametrize("count", [3, 10, 15])
def test_the_ten_best_or_as_many_as_there_are(count: int) -> None:
    known = images(count, (7, 6))
    result = published_score(rows(20, (7, 6), seed=1), known)
    most = min(10, count)
    best = {
        "top10_ssim": sorted(result.ssim.tolist())[-most:],
        "top10_psnr": sorted(result.psnr.tolist())[-most:],
        "top10_dssim": sorted(result.dssim.tolist())[:most],
        "top10_l2": sorted(result.l2.tolist())[:most],
    }
    for name, values in best.items():
        assert getattr(result, name) == pytest.approx(sum(values) / most)
        assert result.to_dict()[name] == getattr(result, name)
    assert result.good == sum(value > 0.4 for value in result.ssim.tolist())
    assert result.good_dssim == sum(value < 0.15 for value in result.dssim.tolist())


def test_no_candidates() -> None:
    known = images(4, (3, 8, 8))
    result = published_score(torch.zeros(0, known.dim), known)
    assert result.neighbours.tolist() == result.l2_neighbours.tolist() == [-1] * 4
    assert result.ssim.isnan().all()
    assert (result.good, result.good_dssim) == (0, 0)
    assert result.to_dict()["top10_ssim"] is None


def test_mutual_gives_each_candidate_to_one_image() -> None:
    known = images(6, (7, 6))
    near_first = known.inputs[:1] + 0.01 * rows(3, (7, 6), seed=1)
    every, mutual = (published_score(near_first, known, mutual=choice) for choice in (False, True))
    assert (every.neighbours >= 0).all()
    assert mutual.neighbours.tolist()[1:] == mutual.l2_neighbours.tolist()[1:] == [-1] * 5
    assert mutual.neighbours[0] == every.neighbours[0]
    assert mutual.ssim[1:].isnan().all()
    assert mutual.top10_ssim == pytest.approx(every.ssim[0].item())


def test_mutual_keeps_the_least_of_each_column() -> None:
    costs = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    kept = mutual_best(costs)
    assert kept.isfinite().sum(0).tolist() == [1] * 7
    assert kept.amin(0).equal(costs.amin(0))


def test_average_takes_those_nearly_as_near() -> None:
    costs = torch.tensor([[2.0, 2.19, 2.21, math.inf], [0.0, 0.0, 1.0, 1.0]])
    candidates = torch.tensor([[0.0, 0.0], [1.0, 2.0], [5.0, 5.0], [9.0, 9.0]])
    assert averaged(costs, candidates).tolist() == [[0.5, 1.0], [0.5, 1.0]]
    known = images(6, (7, 6))
    noisy = known.inputs.repeat(30, 1) + 0.15 * rows(180, (7, 6), seed=1)
    costs = ncc_distances(known.inputs, noisy, (7, 6))
    several = (costs < 1.1 * costs.amin(1, keepdim=True)).sum(1) > 1
    assert several.any()
    one, mean = (published_score(noisy, known, average=choice) for choice in (False, True))
    assert mean.neighbours.equal(one.neighbours)
    assert mean.l2.equal(one.l2)
    assert (mean.psnr > one.psnr).equal(several)


@pytest.mark.parametrize(
    ("shape", "candidates", "options", "message"),
    [
        ((9,), torch.zeros(1, 9), {}, "for images"),
        ((2, 9), torch.zeros(1, 18), {}, "for images"),
        ((3, 4, 4), torch.zeros(1, 48), {}, "for images"),
        ((7, 6), torch.zeros(1, 41), {}, "expected"),
        ((7, 6), torch.full((1, 42), math.nan), {}, "NaN"),
        ((7, 6), torch.zeros(1, 42), {"window": "round"}, "window='round'"),
    ],
)
def test_bad_scores(
    shape: tuple[int, ...], candidates: Tensor, options: dict[str, Any], message: str
) -> None:
    known = Data(rows(3, shape), torch.ones(3, 1, dtype=torch.float64), shape)
    with pytest.raises(InputError, match=message):
        published_score(candidates, known, **options)


# Comparisons


def scored(ssim: list[float], l2: list[float]) -> PublishedScore:
    none = torch.zeros(len(ssim), dtype=torch.float64)
    values, lengths = (torch.tensor(v, dtype=torch.float64) for v in (ssim, l2))
    return PublishedScore(1, "uniform", none.long(), none, values, none, none.long(), lengths)


def test_compared_image_by_image() -> None:
    first = scored([0.25, 0.5, 0.5, math.nan], [1.0, 2.0, 3.0, 4.0])
    second = scored([0.5, 0.25, 1.0, 1.0], [1.0, 1.0, 1.0, 5.0])
    by_ssim, by_l2 = compared(first, second), compared(first, second, by="l2")
    assert by_ssim.gains.tolist()[:3] == [0.25, -0.25, 0.5]
    assert (by_ssim.improved, by_ssim.worsened) == (2, 1)
    assert by_ssim.mean_gain == pytest.approx(0.5 / 3)
    assert by_l2.gains.tolist() == [0.0, 1.0, 2.0, -1.0]
    assert (by_l2.improved, by_l2.worsened, by_l2.mean_gain) == (2, 1, 0.5)
    with pytest.raises(InputError, match="4 and of 1"):
        compared(first, scored([1.0], [1.0]))


# Controls


def test_chance_is_the_score_of_held_out_images() -> None:
    known = datasets.load("digits", 30, centre="pixels")
    others = datasets.held_out(known, samples=60)
    chance = chance_level(known, others, window="gaussian")
    same = published_score(others.inputs, known, window="gaussian")
    assert chance.ssim.equal(same.ssim)
    assert (chance.samples, chance.candidates, chance.window) == (30, 60, "gaussian")
    assert chance.top10_ssim < published_score(known.inputs, known, window="gaussian").top10_ssim


def test_other_data_tells_recovery_from_chance() -> None:
    known = datasets.load("digits", 40, centre="pixels")
    others = datasets.held_out(known)
    found = other_data(known.inputs + 0.02 * rows(40, (64,)), known, others)
    assert found.recovered == (1.0, 0.0)
    assert found.ssims is not None
    assert found.cosines.p_value < 1e-9
    assert found.ssims.p_value < 1e-9
    assert found.cosines.advantage > 0.99
    nothing = other_data(datasets.held_out(known, 200, seed=1).inputs[100:], known, others)
    assert nothing.recovered[0] == 0.0
    assert nothing.cosines.p_value > 1e-3
    record = found.to_dict()
    assert record["samples"] == [40, 40]
    assert record["good"] == list(found.ssims.shares(0.4))
    assert set(record["cosine"]) == {"mean", "advantage", "p_value"}


def test_other_data_is_the_published_score_where_no_mean_image_was_subtracted() -> None:
    known = datasets.load("digits", 20)
    others, candidates = datasets.held_out(known), rows(30, (64,))
    control = other_data(candidates, known, others)
    assert control.ssims is not None
    assert control.ssims.own.equal(published_score(candidates, known).ssim)
    assert control.ssims.other.equal(published_score(candidates, others).ssim)


@pytest.mark.parametrize("normalise", [False, True])
def test_the_mean_image_of_the_samples_is_no_advantage(normalise: bool) -> None:
    """Candidates of nothing become the mean image, which was taken from the samples."""
    values, naive = [], []
    for seed in range(20):
        known = datasets.load("photos", 10, seed, normalise, centre="pixels")
        others, blank = datasets.held_out(known, seed=seed), 1e-5 * rows(10, (3072,), seed)
        ssims = other_data(blank, known, others).ssims
        assert ssims is not None
        values.append(ssims.p_value)
        own, other = (published_score(blank, side).ssim for side in (known, others))
        naive.append(Contrast(own, other).p_value)
    assert sum(value < 0.05 for value in values) <= 4
    assert sum(value < 0.05 for value in naive) >= 10


def test_both_sides_of_a_control_are_treated_alike() -> None:
    known = datasets.load("digits", 20, centre="pixels")
    others, candidates = datasets.held_out(known), rows(30, (64,))
    one, two = other_data(candidates, known, others), other_data(candidates, others, known)
    assert one.ssims is not None
    assert two.ssims is not None
    torch.testing.assert_close(one.ssims.own, two.ssims.other)
    torch.testing.assert_close(one.cosines.own, two.cosines.other)


def test_other_data_forgives_signs_and_takes_vectors() -> None:
    known, others = datasets.sphere(50, 20, seed=0), datasets.sphere(50, 20, seed=1)
    control = other_data(-3 * known.inputs, known, others)
    torch.testing.assert_close(control.cosines.own, torch.ones(20, dtype=torch.float64))
    slow = functional.cosine_similarity(others.inputs[:, None], known.inputs[None], dim=2)
    torch.testing.assert_close(control.cosines.other, slow.abs().amax(1))
    assert control.ssims is None
    assert control.recovered == (0.0, 0.0)
    assert other_data(-known.inputs, known, others).recovered == (1.0, 0.0)


def test_the_p_value_is_uniform_where_nothing_was_recovered() -> None:
    """Own and held-out samples from one distribution, candidates from it too."""
    values = []
    for seed in range(60):
        own, other, free = (datasets.sphere(10, 15, seed=3 * seed + part) for part in range(3))
        values.append(other_data(free.inputs, own, other).cosines.p_value)
    assert 0.35 < float(np.mean(values)) < 0.65
    assert 1 <= sum(value < 0.1 for value in values) <= 15


@settings(deadline=None)
@given(
    own=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    other=st.lists(st.integers(0, 5), min_size=1, max_size=8),
)
def test_advantage_is_that_of_a_loop(own: list[int], other: list[int]) -> None:
    contrast = Contrast(torch.tensor(own).double(), torch.tensor(other).double())
    wins = [float(a > b) + 0.5 * (a == b) for a in own for b in other]
    assert contrast.advantage == pytest.approx(sum(wins) / len(wins))
    assert 0 <= contrast.p_value <= 1


def test_bad_controls() -> None:
    known = datasets.load("digits", 10)
    with pytest.raises(InputError, match="no candidates"):
        other_data(torch.zeros(0, 64), known, known)
    with pytest.raises(InputError, match=r"\(64,\)"):
        other_data(known.inputs, known, datasets.sphere(64, 3))


@pytest.mark.skipif(not (REAL / "mnist.npz").is_file(), reason=f"no real images in {REAL}")
def test_on_mnist_an_ssim_of_two_fifths_is_no_evidence() -> None:
    known = datasets.load("mnist", 100, centre="pixels", root=REAL)
    others = datasets.held_out(known, samples=300, root=REAL)
    assert chance_level(known, others).good > 90


# Whole runs


def make_run(tmp_path: Path, known: Data, samples: Tensor) -> Path:
    """A run of a model of one's own, as far as a score looks, and its truth."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: null\n")
    write_json(run / "result.json", {"seed": 0, "residual": 1e-9})
    write_tensors(run / "candidates.safetensors", {"samples": samples})
    datasets.save(known, tmp_path / "truth.safetensors")
    return run


def test_a_score_of_images_holds_the_published_figures(tmp_path: Path) -> None:
    known = datasets.load("digits", 20, centre="pixels")
    found = known.inputs + 0.01 * rows(20, (64,))
    record = score_run(make_run(tmp_path, known, found), tmp_path / "truth.safetensors")
    figures = record["published"]
    expected = published_score(found, known).to_dict()
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    others = datasets.held_out(known, 20)
    assert figures["chance"] == pytest.approx(chance_level(known, others).to_dict())
    assert figures["control"]["recovered"] == [1.0, 0.0]
    said = published_figures(figures)
    assert f"{figures['good']} of 20 images over 0.4" in said
    assert "20 held-out images in the place of the candidates would have" in said


def test_figures_without_a_source_say_that_nothing_is_at_hand(tmp_path: Path) -> None:
    known = images(4, (7, 6))
    record = score_run(make_run(tmp_path, known, known.inputs), tmp_path / "truth.safetensors")
    assert record["published"]["chance"] is None
    assert "No held-out images are at hand" in published_figures(record["published"])


def test_vectors_have_no_published_figures(tmp_path: Path) -> None:
    known = datasets.sphere(16, 4)
    record = score_run(make_run(tmp_path, known, known.inputs), tmp_path / "truth.safetensors")
    assert "published" not in record
