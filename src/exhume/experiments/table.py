"""Results as a table and as curves, and where a curve rises.

None stands for what a cell could not measure, as where an attack diverged. It is left out of means
and medians; a share of 0 stays in them.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exhume.sweep import Record, table

Row = Mapping[str, Any]  # the fields of a cell and the values it returned
Curve = dict[float, float]  # a mean over seeds, by what it was measured at, in rising order

HALF = 0.5  # mean share of the samples recovered from which recovery counts as started
BELOW, ABOVE = 0.1, 0.9  # share recovered that counts as none, and as all, over several seeds

# Ratios of equations to unknowns that count as about one: counting puts the threshold at one, and a
# search needs a little more than that.
NEAR = (0.7, 3.0)


class Table(list[Row]):
    """Rows, with the few questions that rules and figures ask of them."""

    @classmethod
    def of(cls, records: Iterable[Record], kind: type) -> "Table":
        """Return fields and values of the cells of that kind that ended without an error."""
        return cls(table(r for r in records if isinstance(r.cell, kind) and r.values is not None))

    def where(self, **fields: Any) -> "Table":
        """Return the rows with those values."""
        return Table(row for row in self if all(row[k] == value for k, value in fields.items()))

    def whole(self, *names: str) -> "Table":
        """Return the rows that have all these values."""
        return Table(row for row in self if all(row[name] is not None for name in names))

    def values(self, name: str) -> list[Any]:
        """Return the different values of a field, in the order in which they come."""
        return list(dict.fromkeys(row[name] for row in self))

    def present(self, name: str) -> list[Any]:
        """Return a value of all rows that have it."""
        return [row[name] for row in self.whole(name)]

    def curve(
        self, value: str, by: str = "ratio", of: Callable[[list[float]], float] = statistics.fmean
    ) -> Curve:
        """Return the mean (or another figure) of a value for each of another."""
        groups: dict[float, list[float]] = {}
        for row in self.whole(value, by):
            groups.setdefault(row[by], []).append(row[value])
        return {x: of(groups[x]) for x in sorted(groups)}


def start(places: Sequence[float], shares: Sequence[float], between: bool = True) -> float | None:
    """Return the first of rising places from which on every share is at least one half, or None.

    With `between`, it is interpolated to where the share is one half, on a logarithmic axis.

    Example:
        >>> start([1.0, 2.0, 4.0, 16.0], [1.0, 0.0, 0.0, 1.0])
        8.0
        >>> start([1.0, 2.0], [1.0, 0.0])
    """
    below = [index for index, share in enumerate(shares) if share < HALF]
    first = below[-1] + 1 if below else 0
    if first == len(places):
        return None
    if first == 0 or not between:
        return places[first]
    (left, right), (low, high) = places[first - 1 : first + 1], shares[first - 1 : first + 1]
    return float(left * (right / left) ** ((HALF - low) / (high - low)))


def rise(curve: Curve) -> float | None:
    """Return from where on a curve of shares is at least one half; None if it ends below."""
    return start(list(curve), list(curve.values()))


def fall(curve: Curve, level: float) -> Curve:
    """Return the share of a level by which a curve is below it; none where there is no level."""
    return {x: 1 - y / level if level else 0.0 for x, y in curve.items()}


def near(place: float | None) -> bool:
    """Say whether a place is at about one equation for each unknown."""
    return place is not None and NEAR[0] <= place <= NEAR[1]


@dataclass(frozen=True)
class Threshold:
    """Recovery against equations for each unknown."""

    below: float  # the most that is recovered where unknowns clearly outnumber equations
    start: float | None  # the ratio from which on half is recovered
    above: float  # what is recovered at the largest ratio

    @classmethod
    def of(cls, curve: Curve) -> "Threshold | None":
        """Read it off the mean share recovered by ratio; None where one side was not measured."""
        low = [y for x, y in curve.items() if x <= NEAR[0]]
        if not low or max(curve) <= NEAR[1]:  # a start may lie beyond what counts as about one
            return None
        return cls(max(low), rise(curve), curve[max(curve)])

    @property
    def checks(self) -> tuple[bool, ...]:
        """Whether recovery happens at all; nothing below; a start at about one; all above."""
        reached = self.start is not None
        return (reached, self.below <= BELOW, near(self.start), self.above >= ABOVE)

    @property
    def sentence(self) -> str:
        """Say it in words.

        Example:
            >>> Threshold(0.0, 1.5, 1.0).sentence
            'none below 0.7 dn, half from 1.5 dn, 100 % at the top'
        """
        below = "none" if self.below == 0 else percent(self.below)
        half = place(self.start, " dn", "from ")
        return f"{below} below {NEAR[0]:g} dn, half {half}, {percent(self.above)} at the top"


def place(at: float | None, unit: str = "", word: str = "") -> str:
    """Say where a curve rises."""
    return "nowhere" if at is None else f"{word}{at:.2g}{unit}"


def percent(share: float) -> str:
    """Say a share in words."""
    return f"{100 * share:.0f} %"
