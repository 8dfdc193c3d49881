"""Tuning: hyperparameters by successive halving, with nothing to judge by but the problem itself.

A small residual alone may be chance. What two starts of the same settings both find hardly is, so
each of the last settings is given a second start.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from exhume.search.moves import merged

FACTOR = 3  # times fewer settings go on, for more steps: every rung costs about the same
FINALISTS = 2  # settings that are given a second start: one could not be compared
ALIKE = 0.9  # cosine above which candidates of two starts are the same: random ones never are

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

    # (rungs, settings): NaN before a setting was tried, infinite if it was no good
    residuals: tuple[tuple[float, ...], ...]
    replicated: tuple[float, ...]  # share that a second start found again; NaN before that

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
        """Return what is to be tried next, or None when all is done."""
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
    """Return the share of one start's candidates (m, d), copies as one, that the other found."""
    alone = torch.ones_like(first[:, :1])
    one, other = (
        torch.nn.functional.normalize(merged(x, alone, ALIKE), dim=1) for x in (first, second)
    )
    cosines = one @ other.T
    best, nearest = cosines.max(1)
    mutual = cosines.argmax(0)[nearest] == torch.arange(len(one), device=one.device)
    return int((mutual & (best > ALIKE)).sum()) / len(first)


def merit(residual: float, replicated: float, candidates: int) -> float:
    """Return by what settings are ranked, the least first: residual / (share found + 1/m)."""
    return residual / (replicated + 1 / candidates)
