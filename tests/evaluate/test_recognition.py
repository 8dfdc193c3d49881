"""Recognisable images beside a control, against slow loops and with nothing to recognise."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from exhume import data as datasets
from exhume.errors import InputError
from exhume.evaluate import metrics, ncc_distances, recognised
from exhume.evaluate.recognition import stretch
from problems import gaussian
from runs import images

REAL = Path(__file__).parents[3] / "shared" / "data"


def test_counts_stand_beside_those_of_held_out_images() -> None:
    known = datasets.load("digits", 40, centre="pixels")
    others = datasets.held_out(known, 60)
    found = recognised(known.inputs + 0.02 * gaussian(40, 64), known, others)
    assert found.ssim == found.cosine80 == found.cosine90 == found.samples == 40
    assert found.control.samples == 40  # as many, of those that are more
    assert found.control.cosine90 < 5 and found.control.control is None
    assert found.control.ssim > 30  # of digits, the most are alike
    assert found.p_value < 1e-3 and found.control.p_value is None
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["ssim"] == 40 and record["control"]["cosine80"] == found.control.cosine80
    assert len(record["ssims"]) == 40 and record["control"]["control"] is None
    alone = recognised(-known.inputs, known, None)
    assert alone.control is None and alone.p_value is None and alone.cosine90 == 0


@pytest.mark.parametrize("normalise", [False, True])
def test_the_mean_image_that_candidates_of_nothing_become_is_no_advantage(normalise: bool) -> None:
    own, control = 0.0, 0.0
    for seed in range(5):
        known = datasets.load("photos", 10, seed, normalise, centre="pixels")
        found = recognised(1e-9 * known.inputs, known, datasets.held_out(known, seed=seed))
        own, control = own + float(found.ssims.mean()), control + float(found.control.ssims.mean())
        # as if the held-out image had been trained on in the place of the training image
        pixels, other = known.images(), found.control.originals[3]
        pixels[3] = other
        instead = metrics.ssim(other[None], stretch(pixels.mean(0)[None]))
        assert found.control.ssims[3] >= instead - 1e-6
    assert own < control + 0.15  # sums of five means, which are 0.6 apart with the same mean


def test_candidates_that_know_the_mean_image_have_no_advantage() -> None:
    known = datasets.load("digits", 40, centre="pixels")
    others = datasets.held_out(known, 200)
    found = recognised(others.inputs[100:], known, others)
    assert found.p_value > 0.05


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


@pytest.mark.parametrize("shape", [(7, 6), (3, 8, 10), (1, 6, 6)])
def test_recognition_is_that_of_a_loop(shape: tuple[int, ...]) -> None:
    known, candidates = images(6, *shape, centre=True), gaussian(9, math.prod(shape), seed=1)
    others = images(6, *shape, seed=1)
    result = recognised(candidates, known, others)
    slow = torch.tensor([[slow_ncc(x, y, shape) for y in candidates] for x in known.inputs])
    found = ncc_distances(known.inputs, candidates, shape)
    torch.testing.assert_close(found, slow.double(), atol=1e-6, rtol=1e-6)
    mean = known.transform.mean
    pictures = candidates[slow.argmin(1)] + mean
    low, high = pictures.amin(1, keepdim=True), pictures.amax(1, keepdim=True)
    pair = [x.reshape(-1, *shape) for x in (known.inputs + mean, (pictures - low) / (high - low))]
    torch.testing.assert_close([result.originals, result.pictures], pair)
    torch.testing.assert_close(result.ssims, metrics.ssim(*pair))
    cosines = functional.cosine_similarity(known.inputs[:, None], candidates[None], dim=2)
    torch.testing.assert_close(result.cosines, cosines.amax(1).clamp(min=0))
    torch.testing.assert_close(result.control.originals, others.images())


def test_a_constant_channel_is_like_nothing_and_contrast_does_not_count() -> None:
    flat, candidates = torch.full((1, 108), 0.3, dtype=torch.float64), gaussian(4, 108, seed=1)
    truth = gaussian(2, 108)
    assert ncc_distances(truth, flat, (3, 6, 6)).tolist() == [[1.0], [1.0]]
    before, after = (ncc_distances(truth, c, (3, 6, 6)) for c in (candidates, 7 * candidates - 3))
    torch.testing.assert_close(before, after)
    stretched = stretch(torch.cat([flat, candidates]))
    torch.testing.assert_close(stretched[1:], stretch(7 * candidates - 3))
    assert stretched.amin(1).eq(0).all() and stretched.amax(1).tolist() == [0, 1, 1, 1, 1]


def test_pooled_runs_and_no_candidates() -> None:
    known = images(12, 7, 6, centre=True)
    runs = [gaussian(5, 42, seed=seed) for seed in (1, 2)]
    one, two, pooled = (recognised(run, known, None) for run in (*runs, torch.cat(runs)))
    torch.testing.assert_close(pooled.cosines, torch.maximum(one.cosines, two.cosines))
    known = images(4, 3, 8, 8, centre=True)
    none = recognised(torch.zeros(0, known.dim), known, images(4, 3, 8, 8, seed=1))
    assert none.ssims.isnan().all() and none.pictures.isnan().all()
    assert none.ssim == none.cosine80 == none.control.ssim == 0 and none.p_value == 1
    assert none.to_dict()["ssims"] == [None] * 4


@pytest.mark.parametrize(
    ("samples", "known", "held_out", "words"),
    [
        (torch.zeros(1, 9), datasets.sphere(9, 3), None, "only images"),
        (torch.zeros(1, 18), images(3, 2, 9), None, "only images"),
        (torch.zeros(1, 48), images(3, 3, 4, 4), None, "only images"),
        (torch.zeros(1, 41), images(3, 7, 6), None, "expected"),
        (torch.full((1, 42), math.nan), images(3, 7, 6), None, "NaN"),
        (torch.zeros(1, 42), images(3, 7, 6), images(3, 6, 7), r"\(6, 7\), the training"),
        (torch.zeros(1, 42), images(3, 7, 6), images(9, 7, 6), "3 of 9 held-out images are train"),
    ],
)
def test_refusals(samples, known, held_out, words: str) -> None:
    with pytest.raises(InputError, match=words):
        recognised(samples, known, held_out)


@pytest.mark.skipif(not (REAL / "mnist.npz").is_file(), reason=f"no real images in {REAL}")
def test_on_mnist_an_ssim_of_two_fifths_is_no_evidence() -> None:
    known = datasets.load("mnist", 100, centre="pixels", root=REAL)
    others = datasets.held_out(known, samples=400, root=REAL)
    found = recognised(others.inputs[100:], known, others)
    assert min(found.ssim, found.control.ssim) > 90 and found.p_value > 0.01
