"""Controls: chance and look-alikes."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from exhume.evaluate import chance
from exhume.evaluate.scoring import AGGREGATES
from problems import gaussian, on_sphere, refusals
from runs import images


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
    json.dumps(asdict(level), allow_nan=False)
    assert chance(data, candidates=2, seed=7, trials=2) == level
    assert chance(data, candidates=2, seed=8, trials=2) != level
    assert chance(data.inputs, candidates=2).sphere["ssim"] is None


test_refusals = refusals(
    (lambda: chance(on_sphere(3, 9), candidates=0), "candidates: expected"),
    (lambda: chance(on_sphere(3, 9), candidates=1, trials=0), "trials: expected"),
)
