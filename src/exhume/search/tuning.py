"""Tuning: hyperparameters by successive halving, with nothing to judge by but the problem itself.

Settings begin side by side; after each rung the best go on from where they are, until one is left.
"""

import math
from dataclasses import dataclass

FACTOR = 3  # times fewer settings go on, for more steps: every rung costs about the same
FINALISTS = 2  # settings at most in the last rung, of which one becomes the run


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
