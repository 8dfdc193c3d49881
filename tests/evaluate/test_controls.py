"""Controls: chance, look-alikes, and data that the model never saw."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from exhume import data as datasets
from exhume.errors import InputError
from exhume.evaluate import Contrast, chance, other_data, published_score
from exhume.evaluate.scoring import AGGREGATES
from pictures import images
from problems import gaussian, on_sphere


def test_chance_on_the_sphere_is_the_known_value() -> None:
    level = chance(on_sphere(5, 4000), candidates=5, trials=3)
    assert level.neighbour is not None
    for values in (level.sphere, level.neighbour):
        assert values["error"] == pytest.approx(math.sqrt(2), rel=0.03)
        assert values["published_error"] == pytest.approx(math.sqrt(2 - 4 / math.pi), rel=0.03)
        assert values["error"] < math.sqrt(2) and values["cosine"] < 0.05
        assert [values[name] for name in ("recovered", "exact", "recall", "precision")] == [0] * 4
    few, many = (chance(on_sphere(5, 20), candidates=k).sphere["error"] for k in (5, 200))
    assert few is not None and many is not None and many < few < math.sqrt(2)


@pytest.mark.parametrize("seed", [0, 3])
def test_chance_does_not_redraw_data_from_the_same_seed(seed: int) -> None:
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 50)))
    for truth in (drawn, gaussian(4, 50, seed=seed), on_sphere(4, 50, seed=seed)):
        assert chance(truth, candidates=4, seed=seed).sphere["recovered"] == 0


def test_the_neighbour_is_the_nearest_other_sample() -> None:
    truth = torch.tensor([[10.0, 0.0], [10.0, 0.5], [0.0, 10.0], [10.0, -0.5]])
    level = chance(truth, candidates=4)
    pairs = (truth[:, None] - truth[None]).norm(dim=2) / truth.norm(dim=1)[:, None]
    assert level.neighbour is not None
    expected = float((pairs + torch.eye(4) * 9).amin(1).mean())
    assert level.neighbour["error"] == pytest.approx(expected)
    assert [level.neighbour[name] for name in ("recovered", "recall", "precision")] == [0.75] * 3
    assert chance(on_sphere(1, 9), candidates=1).neighbour is None


def test_chance_has_the_aggregates_of_a_score() -> None:
    data = images(3, 8, 8, rescale=True)
    level = chance(data, candidates=2, seed=7, trials=2)
    assert level.neighbour is not None
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
    assert found.ssims is not None and found.ssims.p_value < 1e-9
    assert found.cosines.p_value < 1e-9 and found.cosines.advantage > 0.99
    nothing = other_data(datasets.held_out(known, 200, seed=1).inputs[100:], known, others)
    assert nothing.recovered[0] == 0.0 and nothing.cosines.p_value > 1e-3
    record = found.to_dict()
    assert record["samples"] == [40, 40] and record["recovered"] == [1.0, 0.0]
    assert record["good"] == list(found.ssims.shares(0.4))
    assert set(record["cosine"]) == {"mean", "advantage", "p_value"}


def test_both_sides_of_a_control_are_treated_alike() -> None:
    candidates, plain = gaussian(30, 64), datasets.load("digits", 20)
    others = datasets.held_out(plain)
    control = other_data(candidates, plain, others)
    assert control.ssims is not None  # without a mean image it is the published score
    assert control.ssims.own.equal(published_score(candidates, plain).ssim)
    assert control.ssims.other.equal(published_score(candidates, others).ssim)
    known = datasets.load("digits", 20, centre="pixels")
    others = datasets.held_out(known)
    one, two = other_data(candidates, known, others), other_data(candidates, others, known)
    assert one.ssims is not None and two.ssims is not None
    torch.testing.assert_close(one.ssims.own, two.ssims.other)
    torch.testing.assert_close(one.cosines.own, two.cosines.other)


@pytest.mark.parametrize("normalise", [False, True])
def test_the_mean_image_of_the_samples_is_no_advantage(normalise: bool) -> None:
    """Candidates of nothing become the mean image, which was taken from the samples."""
    values, naive = [], []
    for seed in range(10):
        known = datasets.load("photos", 10, seed, normalise, centre="pixels")
        others, blank = datasets.held_out(known, seed=seed), 1e-5 * gaussian(10, 3072, seed=seed)
        ssims = other_data(blank, known, others).ssims
        assert ssims is not None
        values.append(ssims.p_value)
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


KNOWN = datasets.sphere(9, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: chance(KNOWN, candidates=0), "candidates: expected"),
        (lambda: chance(KNOWN, candidates=1, trials=0), "trials: expected"),
        (lambda: other_data(KNOWN.inputs[:0], KNOWN, KNOWN), "no candidates"),
        (lambda: other_data(KNOWN.inputs, KNOWN, datasets.sphere(8, 3)), r"\(8,\)"),
    ],
)
def test_refusals(call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()
