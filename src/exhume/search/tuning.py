"""Tuning: hyperparameters by random search, with nothing to judge by but the problem itself.

Settings are drawn at random and tried for few steps; the third with the least residual is tried
again for three times as many, and so on (successive halving). A small residual alone may be
chance. What two starts of the same settings both find hardly is, so each of the last settings is
given a second start.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from exhume.search.moves import merged

FACTOR = 3
"""Three times fewer settings go on, for three times more steps: every rung costs about the same."""

FINALISTS = 2
"""So many settings are the last, and are given a second start: one could not be compared."""

ALIKE = 0.9
"""Candidates of two starts with a cosine above this are the same: random ones never come close."""

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The interval in which a hyperparameter is looked for, perhaps by orders of magnitude.

    Example:
        >>> Range(1, 3).at(0.5), round(Range(1e-4, 1, logarithmic=True).at(0.5), 6)
        (2.0, 0.01)
    """

    low: float
    high: float
    logarithmic: bool = False

    def at(self, draw: float) -> float:
        """Return the number at `draw` in [0, 1]."""
        if self.logarithmic:
            return math.exp(math.log(self.low) + draw * math.log(self.high / self.low))
        return self.low + draw * (self.high - self.low)


def rungs(trials: int) -> list[int]:
    """Return how many settings are tried in each rung.

    Example:
        >>> rungs(18), rungs(4), rungs(1)
        ([18, 6, 2], [4, 2], [1])
    """
    sizes = [trials]
    while sizes[-1] > FINALISTS:
        sizes.append(math.ceil(sizes[-1] / FACTOR))
    return sizes


class Trial(NamedTuple):
    """What is tried: a setting in a rung, by its first start (0) or its second (1)."""

    rung: int
    setting: int
    start: int


@dataclass(frozen=True)
class Table:
    """What is known of all settings."""

    # of each setting in each rung, (rungs, settings); NaN before it was tried, infinite if it was
    # no good
    residuals: tuple[tuple[float, ...], ...]
    # share of the candidates that a second start found again, for each setting; NaN before that
    replicated: tuple[float, ...]

    @classmethod
    def empty(cls, settings: int) -> "Table":
        """Return the table before anything was tried."""
        untried = (math.nan,) * settings
        return cls((untried,) * len(rungs(settings)), untried)

    def entered(self, trial: Trial, value: float) -> "Table":
        """Return the table with a residual of a first start, or the share that a second found."""
        if trial.start:
            return replace(self, replicated=_entered(self.replicated, trial.setting, value))
        row = _entered(self.residuals[trial.rung], trial.setting, value)
        return replace(self, residuals=_entered(self.residuals, trial.rung, row))

    def next_trial(self) -> Trial | None:
        """Return what is to be tried next, or None when all is done.

        Example:
            >>> nan, inf = float("nan"), float("inf")
            >>> tuple(Table(((0.5, inf, 0.2), (nan,) * 3), (nan,) * 3).next_trial())
            (1, 2, 0)
            >>> tuple(Table(((0.5, inf, 0.2), (nan, nan, 0.1)), (nan,) * 3).next_trial())
            (1, 2, 1)
        """
        alive = list(range(len(self.replicated)))
        for rung, size in enumerate(rungs(len(self.replicated))):
            if rung > 0:
                before = self.residuals[rung - 1]
                good = [setting for setting in alive if math.isfinite(before[setting])]
                alive = sorted(good, key=lambda setting: before[setting])[:size]
            for setting in alive:
                residual = self.residuals[rung][setting]
                if math.isnan(residual):
                    return Trial(rung, setting, 0)
                last = size <= FINALISTS and math.isfinite(residual)
                if last and math.isnan(self.replicated[setting]):
                    return Trial(rung, setting, 1)
        return None


def _entered(row: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*row[:index], value, *row[index + 1 :])


def found_again(first: Tensor, second: Tensor) -> float:
    """Return the share of the candidates of one start, (m, d), that the other found as well.

    Candidates that agree among themselves are one; the others count where they are each other's
    nearest, with a cosine above `ALIKE`. So candidates that all became the same prove next to
    nothing.

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
    """Return by what settings are ranked, the least first: residual / (share found + 1/m).

    Twice as many candidates found again outweigh twice the residual. Without a second start, or
    if that finds nothing, the residual decides.
    """
    return residual / (replicated + 1 / candidates)
