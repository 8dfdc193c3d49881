"""The papers' evaluation: against slow loops, and what must not change it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from exhume import data as datasets
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import chance_level, metrics, ncc_distances, published_score
from exhume.evaluate.published import stretch
from pictures import images
from problems import gaussian

REAL = Path(__file__).parents[3] / "shared" / "data"
SHAPES = [(7, 6), (3, 8, 10), (1, 6, 6)]


def rows(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return gaussian(count, math.prod(shape), seed=seed)


def slow_ncc(x: Tensor, y: Tensor, shape: tuple[int, ...]) -> float:
    """One pair, channel by channel, as half the mean square of the published difference."""
    total, channels = 0.0, shape[0] if len(shape) == 3 else 1
    planes = (rows.reshape(channels, *shape[-2:]) for rows in (x, y))
    for pair in zip(*planes, strict=True):
        standard = []
        for plane in pair:
            if len(shape) == 3:
                plane = functional.interpolate(plane[None, None], scale_factor=0.5, mode="bicubic")
            plane = plane.flatten()
            standard.append((plane - plane.mean()) / plane.std(correction=0))
        total += float((standard[0] - standard[1]).square().mean()) / 2
    return total / channels


@pytest.mark.parametrize("shape", SHAPES)
def test_score_is_that_of_a_loop(shape: tuple[int, ...]) -> None:
    known, candidates = images(6, *shape, centre=True), rows(9, shape, seed=1)
    result = published_score(candidates, known)
    slow = torch.tensor([[slow_ncc(x, y, shape) for y in candidates] for x in known.inputs])
    found = ncc_distances(known.inputs, candidates, shape)
    torch.testing.assert_close(found, slow.double(), atol=1e-6, rtol=1e-6)
    assert result.neighbours.tolist() == slow.argmin(1).tolist()
    mean = known.transform.mean
    assert mean is not None
    for i, x in enumerate(known.inputs):
        picture = candidates[result.neighbours[i]] + mean
        picture = ((picture - picture.min()) / (picture.max() - picture.min())).reshape(shape)
        original = (x + mean).reshape(shape)
        expected = metrics.ssim(original[None], picture[None], 3)
        assert result.ssim[i].item() == pytest.approx(expected.item())
        error = (original - picture).square().mean().item()
        assert result.psnr[i].item() == pytest.approx(-10 * math.log10(error))
        lengths = [(x - y).norm().item() for y in candidates]
        assert result.l2_neighbours[i] == int(np.argmin(lengths))
        assert result.l2[i].item() == pytest.approx(min(lengths))
    assert (result.samples, result.candidates, result.to_dict()["window"]) == (6, 9, "uniform")


def test_a_constant_channel_is_like_nothing_and_contrast_does_not_count() -> None:
    flat, candidates = torch.full((1, 108), 0.3, dtype=torch.float64), rows(4, (3, 6, 6), seed=1)
    truth = rows(2, (3, 6, 6))
    assert ncc_distances(truth, flat, (3, 6, 6)).tolist() == [[1.0], [1.0]]
    before, after = (ncc_distances(truth, c, (3, 6, 6)) for c in (candidates, 7 * candidates - 3))
    torch.testing.assert_close(before, after)
    stretched = stretch(torch.cat([flat, candidates]))
    torch.testing.assert_close(stretched[1:], stretch(7 * candidates - 3))
    assert stretched.amin(1).eq(0).all() and stretched.amax(1).tolist() == [0, 1, 1, 1, 1]


def test_the_training_images_themselves_pooled_runs_and_none() -> None:
    known = images(12, 7, 6, centre=True)
    result = published_score(known.inputs.flip(0), known)
    assert result.neighbours.tolist() == list(range(11, -1, -1))
    assert result.l2.max() < 1e-12 and result.good == result.good_dssim == 12
    assert result.top10_ssim > 0.95  # not 1: the stretch changes what did not fill [0, 1]
    runs = [rows(5, (7, 6), seed) for seed in (1, 2)]
    one, two, pooled = (published_score(run, known) for run in (*runs, torch.cat(runs)))
    assert pooled.l2.equal(torch.minimum(one.l2, two.l2))
    assert chance_level(known, images(3, 7, 6)).candidates == 3
    known = images(4, 3, 8, 8, centre=True)
    none = published_score(torch.zeros(0, known.dim), known)
    assert none.neighbours.tolist() == none.l2_neighbours.tolist() == [-1] * 4
    assert none.ssim.isnan().all() and none.l2.isnan().all()
    assert (none.good, none.good_dssim, none.to_dict()["top10_ssim"]) == (0, 0, None)


@pytest.mark.parametrize("count", [3, 15])
def test_the_ten_best_or_as_many_as_there_are(count: int) -> None:
    result = published_score(rows(20, (7, 6), seed=1), images(count, 7, 6, centre=True))
    most, ssims = min(10, count), sorted(result.ssim.tolist())
    dssims = [(1 - value) / 2 for value in reversed(ssims)]
    for name, best in (
        ("top10_ssim", ssims[-most:]),
        ("top10_dssim", dssims[:most]),
        ("top10_psnr", sorted(result.psnr.tolist())[-most:]),
        ("top10_l2", sorted(result.l2.tolist())[:most]),
    ):
        assert result.to_dict()[name] == getattr(result, name) == pytest.approx(sum(best) / most)
    assert result.good == sum(value > 0.4 for value in ssims)
    assert result.good_dssim == sum(value < 0.15 for value in dssims)


@pytest.mark.parametrize(
    ("shape", "candidates", "words"),
    [
        ((9,), torch.zeros(1, 9), "for images"),
        ((2, 9), torch.zeros(1, 18), "for images"),
        ((3, 4, 4), torch.zeros(1, 48), "for images"),
        ((7, 6), torch.zeros(1, 41), "expected"),
        ((7, 6), torch.full((1, 42), math.nan), "NaN"),
    ],
)
def test_refusals(shape: tuple[int, ...], candidates: Tensor, words: str) -> None:
    known = Data(rows(3, shape), torch.ones(3, 1, dtype=torch.float64), shape)
    with pytest.raises(InputError, match=words):
        published_score(candidates, known)


@pytest.mark.skipif(not (REAL / "mnist.npz").is_file(), reason=f"no real images in {REAL}")
def test_on_mnist_an_ssim_of_two_fifths_is_no_evidence() -> None:
    known = datasets.load("mnist", 100, centre="pixels", root=REAL)
    others = datasets.held_out(known, samples=300, root=REAL)
    assert chance_level(known, others).good > 90
