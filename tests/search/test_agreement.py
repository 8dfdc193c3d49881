"""Runs that are pooled: what comes back in several of them is kept."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from exhume.search.agreement import NEARBY, SAME, agreed
from problems import gaussian

RUNS, EACH, DIM = 6, 8, 40


def planted(runs: int, found: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Runs that have the same directions with errors, so many, and others of their own; and these.

    Those of each run stand in an order of its own.
    """
    truth = normalize(gaussian(found, DIM, seed=seed))
    near = truth + 0.06 * gaussian(runs, found, DIM, seed=seed + 1)
    other = normalize(gaussian(runs, EACH - found, DIM, seed=seed + 2), dim=2)
    both = 3 * torch.cat([near, other], 1)
    orders = (torch.randperm(EACH, generator=torch.Generator().manual_seed(r)) for r in range(runs))
    return torch.stack([run[order] for run, order in zip(both, orders, strict=True)]), truth


def slow(runs: Tensor) -> list[float]:
    """What each candidate is worth, one pair after the other, in the order of the pool."""
    worth = []
    for r, run in enumerate(runs):
        for x in run:
            best = [
                max(float(x @ y / x.norm() / y.norm()) for y in other)
                for s, other in enumerate(runs)
                if s != r
            ]
            worth.append(sorted(best, reverse=True)[min(NEARBY, len(best)) - 1])
    return worth


@pytest.mark.parametrize("runs", [2, RUNS])
def test_what_comes_back_is_first_and_nearer_than_in_any_run(runs: int) -> None:
    pool, truth = planted(runs, 5)
    found = agreed(pool)
    assert found.shape == (EACH, DIM)
    cosines = normalize(truth) @ normalize(found).T
    assert cosines[:, :5].argmax(1).sort().values.tolist() == [0, 1, 2, 3, 4]
    single = torch.einsum("td,rkd->trk", truth, normalize(pool, dim=2)).amax(2)
    assert (cosines.amax(1) > single.mean(1)).all()


def test_the_best_is_the_mean_of_all_that_are_like_it() -> None:
    runs, _ = planted(RUNS, 5)
    pool, worth = normalize(runs.flatten(0, 1)), slow(runs)
    best = max(range(len(worth)), key=worth.__getitem__)
    mean = normalize(pool[pool @ pool[best] >= SAME].mean(0), dim=0)
    torch.testing.assert_close(agreed(runs)[0], mean * runs.flatten(0, 1)[best].norm())


def test_where_all_are_alike_as_many_are_returned() -> None:
    runs, truth = planted(RUNS, 1)
    same = 2 * truth.expand(RUNS, EACH, DIM)
    torch.testing.assert_close(agreed(same), same[0])
    assert len(agreed(runs)) == EACH
