"""Controls and the papers' evaluation: chance, look-alikes, other data, and slow loops."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from exhume import data as datasets
from exhume.errors import InputError
from exhume.evaluate import Contrast, chance, chance_level, metrics, ncc_distances, other_data
from exhume.evaluate.published import published_score, stretch
from exhume.evaluate.scoring import AGGREGATES
from problems import gaussian, on_sphere
from runs import images

REAL = Path(__file__).parents[3] / "shared" / "data"


def test_chance_on_the_sphere_is_the_known_value() -> None:
    level = chance(on_sphere(5, 4000), candidates=5, trials=3)
    for values in (level.sphere, level.neighbour):
        assert values["error"] == pytest.approx(math.sqrt(2), rel=0.03)
        assert values["published_error"] == pytest.approx(math.sqrt(2 - 4 / math.pi), rel=0.03)
        assert values["error"] < math.sqrt(2) and values["cosine"] < 0.05
        assert [values[name] for name in ("recovered", "exact", "recall", "precision")] == [0] * 4
    few, many = (chance(on_sphere(5, 20), candidates=k).sphere["error"] for k in (5, 200))
    assert many < few < math.sqrt(2)


def test_chance_does_not_redraw_data_from_the_same_seed() -> None:
    drawn = torch.from_numpy(np.random.default_rng(3).standard_normal((4, 50)))
    for truth in (drawn, gaussian(4, 50, seed=3), on_sphere(4, 50, seed=3)):
        assert chance(truth, candidates=4, seed=3).sphere["recovered"] == 0


def test_the_neighbour_is_the_nearest_other_sample() -> None:
    truth = torch.tensor([[10.0, 0.0], [10.0, 0.5], [0.0, 10.0], [10.0, -0.5]])
    level = chance(truth, candidates=4)
    pairs = (truth[:, None] - truth[None]).norm(dim=2) / truth.norm(dim=1)[:, None]
    expected = float((pairs + torch.eye(4) * 9).amin(1).mean())
    assert level.neighbour["error"] == pytest.approx(expected)
    assert [level.neighbour[name] for name in ("recovered", "recall", "precision")] == [0.75] * 3
    assert chance(on_sphere(1, 9), candidates=1).neighbour is None


def test_chance_has_the_aggregates_of_a_score() -> None:
    data = images(3, 8, 8, rescale=True)
    level = chance(data, candidates=2, seed=7, trials=2)
    assert tuple(level.sphere) == tuple(level.neighbour) == AGGREGATES
    assert level.sphere["ssim"] is not None and level.neighbour["psnr"] is not None
    json.dumps(level.to_dict(), allow_nan=False)
    assert chance(data, candidates=2, seed=7, trials=2) == level
    assert chance(data, candidates=2, seed=8, trials=2) != level
    assert chance(data.inputs, candidates=2).sphere["ssim"] is None


def test_other_data_tells_recovery_from_chance() -> None:
    known = datasets.load("digits", 40, centre="pixels")
    others = datasets.held_out(known)
    found = other_data(known.inputs + 0.02 * gaussian(40, 64), known, others)
    assert found.recovered == (1.0, 0.0)
    assert max(found.ssims.p_value, found.cosines.p_value) < 1e-9 < 0.99 < found.cosines.advantage
    nothing = other_data(datasets.held_out(known, 200, seed=1).inputs[100:], known, others)
    assert nothing.recovered[0] == 0.0 and nothing.cosines.p_value > 1e-3
    record = found.to_dict()
    assert record["samples"] == [40, 40] and record["recovered"] == [1.0, 0.0]
    assert record["good"] == list(found.ssims.shares(0.4))
    assert set(record["cosine"]) == {"mean", "advantage", "p_value"}
    both = (known, others), (others, known)  # which are treated alike
    one, two = (other_data(gaussian(30, 64), *sides) for sides in both)
    torch.testing.assert_close(one.ssims.own, two.ssims.other)
    torch.testing.assert_close(one.cosines.own, two.cosines.other)


@pytest.mark.parametrize("normalise", [False, True])
def test_the_mean_image_that_candidates_of_nothing_become_is_no_advantage(normalise: bool) -> None:
    values, naive = [], []
    for seed in range(10):
        known = datasets.load("photos", 10, seed, normalise, centre="pixels")
        others, blank = datasets.held_out(known, seed=seed), 1e-5 * gaussian(10, 3072, seed=seed)
        values.append(other_data(blank, known, others).ssims.p_value)
        naive.append(Contrast(*(published_score(blank, x).ssim for x in (known, others))).p_value)
    assert sum(value < 0.05 for value in values) <= 2
    assert sum(value < 0.05 for value in naive) >= 5


def test_other_data_forgives_signs_and_takes_vectors() -> None:
    known, others = datasets.sphere(50, 20, seed=0), datasets.sphere(50, 20, seed=1)
    control = other_data(-3 * known.inputs, known, others)
    torch.testing.assert_close(control.cosines.own, torch.ones(20, dtype=torch.float64))
    slow = functional.cosine_similarity(others.inputs[:, None], known.inputs[None], dim=2)
    torch.testing.assert_close(control.cosines.other, slow.abs().amax(1))
    assert control.ssims is None and control.recovered == (0.0, 0.0)
    assert other_data(-known.inputs, known, others).recovered == (1.0, 0.0)


def test_the_p_value_is_uniform_where_nothing_was_recovered() -> None:
    values = []
    for seed in range(60):
        own, other, free = (datasets.sphere(10, 15, seed=3 * seed + part) for part in range(3))
        values.append(other_data(free.inputs, own, other).cosines.p_value)
    assert 0.35 < float(np.mean(values)) < 0.65
    assert 1 <= sum(value < 0.1 for value in values) <= 15


def test_ties_count_half_in_the_advantage() -> None:
    own, other = torch.tensor([0.0, 1, 1, 3]), torch.tensor([1.0, 1, 2])
    wins = (own[:, None] > other).double() + 0.5 * (own[:, None] == other)
    assert Contrast(own, other).advantage == pytest.approx(float(wins.mean()))


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
def test_score_is_that_of_a_loop(shape: tuple[int, ...]) -> None:
    known, candidates = images(6, *shape, centre=True), gaussian(9, math.prod(shape), seed=1)
    result = published_score(candidates, known)
    slow = torch.tensor([[slow_ncc(x, y, shape) for y in candidates] for x in known.inputs])
    found = ncc_distances(known.inputs, candidates, shape)
    torch.testing.assert_close(found, slow.double(), atol=1e-6, rtol=1e-6)
    assert result.neighbours.tolist() == slow.argmin(1).tolist()
    mean = known.transform.mean
    pictures = candidates[result.neighbours] + mean
    low, high = pictures.amin(1, keepdim=True), pictures.amax(1, keepdim=True)
    pair = [x.reshape(-1, *shape) for x in (known.inputs + mean, (pictures - low) / (high - low))]
    torch.testing.assert_close(result.ssim, metrics.ssim(*pair, 3))
    errors = (pair[0] - pair[1]).square().flatten(1).mean(1)
    torch.testing.assert_close(result.psnr, -10 * errors.log10())
    lengths, nearest = (known.inputs[:, None] - candidates).norm(dim=2).min(1)
    assert result.l2_neighbours.equal(nearest)
    torch.testing.assert_close(result.l2, lengths)
    assert (result.samples, result.candidates, result.to_dict()["window"]) == (6, 9, "uniform")


def test_a_constant_channel_is_like_nothing_and_contrast_does_not_count() -> None:
    flat, candidates = torch.full((1, 108), 0.3, dtype=torch.float64), gaussian(4, 108, seed=1)
    truth = gaussian(2, 108)
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
    runs = [gaussian(5, 42, seed=seed) for seed in (1, 2)]
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
    result = published_score(gaussian(20, 42, seed=1), images(count, 7, 6, centre=True))
    most, ssims = min(10, count), sorted(result.ssim.tolist())
    dssims, psnrs = [(1 - value) / 2 for value in reversed(ssims)], sorted(result.psnr.tolist())
    bests = {"ssim": ssims[-most:], "dssim": dssims[:most], "psnr": psnrs[-most:]}
    for name, best in {**bests, "l2": sorted(result.l2.tolist())[:most]}.items():
        mean = getattr(result, f"top10_{name}")
        assert result.to_dict()[f"top10_{name}"] == mean == pytest.approx(sum(best) / most)
    assert result.good == sum(value > 0.4 for value in ssims)
    assert result.good_dssim == sum(value < 0.15 for value in dssims)


KNOWN = datasets.sphere(9, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: chance(KNOWN, candidates=0), "candidates: expected"),
        (lambda: chance(KNOWN, candidates=1, trials=0), "trials: expected"),
        (lambda: other_data(KNOWN.inputs[:0], KNOWN, KNOWN), "no candidates"),
        (lambda: other_data(KNOWN.inputs, KNOWN, datasets.sphere(8, 3)), r"\(8,\)"),
        (lambda: published_score(torch.zeros(1, 9), KNOWN), "for images"),
        (lambda: published_score(torch.zeros(1, 18), images(3, 2, 9)), "for images"),
        (lambda: published_score(torch.zeros(1, 48), images(3, 3, 4, 4)), "for images"),
        (lambda: published_score(torch.zeros(1, 41), images(3, 7, 6)), "expected"),
        (lambda: published_score(torch.full((1, 42), math.nan), images(3, 7, 6)), "NaN"),
    ],
)
def test_refusals(call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.skipif(not (REAL / "mnist.npz").is_file(), reason=f"no real images in {REAL}")
def test_on_mnist_an_ssim_of_two_fifths_is_no_evidence() -> None:
    known = datasets.load("mnist", 100, centre="pixels", root=REAL)
    others = datasets.held_out(known, samples=300, root=REAL)
    assert chance_level(known, others).good > 90
