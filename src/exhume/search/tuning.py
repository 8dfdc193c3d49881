"""Tuning: hyperparameters by random search, with nothing to judge by but the problem itself.

Settings are drawn at random and tried for few steps; the third with the least residual is tried
again for three times as many, and so on (successive halving). A small residual alone may be
chance. What two starts of the same settings both find hardly is, so each of the last settings is
given a second start.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.search.merge import merged

FACTOR = 3
"""How many times fewer settings go on, for how many times more steps."""

FINALISTS = 2
"""So many settings, or fewer, are the last: these are given a second start."""

ALIKE = 0.9
"""Cosine above which candidates of two starts are the same."""


@dataclass(frozen=True)
class Range:
    """Where a hyperparameter is looked for.

    Attributes:
        low: the least.
        high: the most.
        logarithmic: whether all orders of magnitude are as likely.

    Example:
        >>> Range(1, 3).at(0.5), round(Range(1e-4, 1, logarithmic=True).at(0.5), 6)
        (2.0, 0.01)
    """

    low: float
    high: float
    logarithmic: bool = False

    def at(self, draw: float) -> float:
        """The number at `draw` in [0, 1]."""
        if self.logarithmic:
            return math.exp(math.log(self.low) + draw * math.log(self.high / self.low))
        return self.low + draw * (self.high - self.low)


def rungs(trials: int) -> list[int]:
    """How many settings are tried in each rung.

    Example:
        >>> rungs(18), rungs(4), rungs(1)
        ([18, 6, 2], [4, 2], [1])
    """
    sizes = [trials]
    while sizes[-1] > FINALISTS:
        sizes.append(math.ceil(sizes[-1] / FACTOR))
    return sizes


def next_trial(
    scores: Sequence[Sequence[float]], replicated: Sequence[float]
) -> tuple[int, int, int] | None:
    """What is to be tried next, from what is known.

    Args:
        scores: residual of each setting in each rung, (rungs, trials); NaN before it was tried,
            infinite if it was no good.
        replicated: share of the candidates that a second start found again, (trials,); NaN before
            that.

    Returns:
        Rung, setting, and 0 for its first start or 1 for its second; None when all is done.

    Example:
        >>> nan, inf = float("nan"), float("inf")
        >>> next_trial([[0.5, inf, 0.2], [nan] * 3], [nan] * 3)
        (1, 2, 0)
        >>> next_trial([[0.5, inf, 0.2], [nan, nan, 0.1]], [nan] * 3)
        (1, 2, 1)
    """
    alive = list(range(len(replicated)))
    for rung, size in enumerate(rungs(len(replicated))):
        if rung > 0:
            before = scores[rung - 1]
            good = [trial for trial in alive if math.isfinite(before[trial])]
            alive = sorted(good, key=lambda trial: before[trial])[:size]
        for trial in alive:
            score = scores[rung][trial]
            if math.isnan(score):
                return rung, trial, 0
            last = size <= FINALISTS
            if last and math.isfinite(score) and math.isnan(replicated[trial]):
                return rung, trial, 1
    return None


def found_again(first: Tensor, second: Tensor) -> float:
    """Share of the candidates of one start, (m, d), that the other, (m, d), found as well.

    Candidates that agree among themselves are one; of the others those count that are each
    other's nearest, with a cosine above `ALIKE`. So candidates that all became the same prove
    next to nothing.

    Example:
        >>> X = torch.eye(4)
        >>> found_again(X, X[[1, 2, 3, 3]]), found_again(torch.ones(4, 2), torch.ones(4, 2))
        (0.75, 0.25)
    """
    alone = torch.ones_like(first[:, :1])
    one, other = (
        torch.nn.functional.normalize(merged(x, alone, ALIKE), dim=1) for x in (first, second)
    )
    cosines = one @ other.T
    best, nearest = cosines.max(1)
    mutual = cosines.argmax(0)[nearest] == torch.arange(len(one), device=one.device)
    return int((mutual & (best > ALIKE)).sum()) / len(first)


def merit(residual: float, replicated: float, candidates: int) -> float:
    """By what settings are ranked, the least first: residual / (share found again + 1/m).

    Twice as many candidates found again outweigh twice the residual. Without a second start, or
    if that finds nothing, the residual decides.

    Example:
        >>> merit(0.02, 0.5, 20) < merit(0.01, 0.0, 20)
        True
    """
    return residual / (replicated + 1 / candidates)
