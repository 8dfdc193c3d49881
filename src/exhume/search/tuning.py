"""Tuning: hyperparameters by successive halving, with nothing to judge by but the problem itself.

A small residual alone may be chance. What two starts of the same settings both find hardly is, so
each of the last settings is given a second start.
"""

import math
from dataclasses import dataclass
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

    # (rungs, settings), of first starts: NaN before one was tried, infinite if it was no good
    residuals: tuple[tuple[float, ...], ...]

    @classmethod
    def empty(cls, settings: int) -> "Table":
        """Return the table before anything was tried."""
        return cls(((math.nan,) * settings,) * len(rungs(settings)))

    def entered(self, trial: Trial, residual: float) -> "Table":
        """Return the table with the residual of a first start."""
        row = _entered(self.residuals[trial.rung], trial.setting, residual)
        return Table(_entered(self.residuals, trial.rung, row))

    def next_trials(self) -> list[Trial]:
        """Return what is to be tried next, side by side: all of a rung; nothing when all is done.

        The last settings have both their starts, one after the other.
        """
        alive = list(range(len(self.residuals[0])))
        for rung, size in enumerate(rungs(len(alive))):
            if rung > 0:
                before = self.residuals[rung - 1]
                good = [setting for setting in alive if math.isfinite(before[setting])]
                alive = sorted(good, key=lambda setting: before[setting])[:size]
            starts = range(2 if size <= FINALISTS else 1)
            untried = [setting for setting in alive if math.isnan(self.residuals[rung][setting])]
            if untried:
                return [Trial(rung, setting, start) for setting in untried for start in starts]
        return []


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
