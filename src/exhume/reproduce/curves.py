"""Results as rows and curves, and where a curve rises.

None stands for what a cell could not measure, as where an attack diverged. It is left out of means
and medians; a share of 0 stays in them.

Inside: `rows`, `chosen`, `values`, `present`, `whole`, `means`, `fallen`, `onset`, `near`,
`Threshold`, `percent`.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exhume.experiments.law import start
from exhume.sweep import Record

Row = Mapping[str, Any]
"""The fields of a cell and the values it returned."""

Curve = dict[float, float]
"""A mean over seeds, by what it was measured at, in rising order."""

BELOW, ABOVE = 0.1, 0.9
"""Share of samples recovered that counts as none, and as all, over several seeds."""

NEAR = (0.7, 3.0)
"""Ratios of equations to unknowns that count as about one."""


def rows(records: Sequence[Record], kind: type) -> list[Row]:
    """Fields and values of the cells of that kind that ended without an error."""
    return [
        asdict(record.cell) | record.values  # type: ignore[call-overload]
        for record in records
        if isinstance(record.cell, kind) and record.values is not None
    ]


def chosen(rows: Iterable[Row], **fields: Any) -> list[Row]:
    """The rows with those values.

    Example:
        >>> chosen([{"a": 1, "b": 2}, {"a": 1, "b": 3}], a=1, b=3)
        [{'a': 1, 'b': 3}]
    """
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def values(rows: Iterable[Row], name: str) -> list[Any]:
    """The different values of a field, in the order in which they come."""
    return list(dict.fromkeys(row[name] for row in rows))


def present(rows: Iterable[Row], name: str) -> list[Any]:
    """A field of all rows that have it.

    Example:
        >>> present([{"error": None}, {"error": 0.0}], "error")
        [0.0]
    """
    return [row[name] for row in rows if row[name] is not None]


def whole(rows: Iterable[Row], *names: str) -> list[Row]:
    """The rows that have all these fields.

    Example:
        >>> whole([{"rank": 1, "unknowns": None}, {"rank": 1, "unknowns": 2}], "rank", "unknowns")
        [{'rank': 1, 'unknowns': 2}]
    """
    return [row for row in rows if all(row[name] is not None for name in names)]


def means(rows: Iterable[Row], value: str, by: str = "ratio") -> Curve:
    """The mean of a value for each of another; rows without it (None) are left out.

    Example:
        >>> means([{"ratio": 2, "error": 0.5}, {"ratio": 1, "error": 1.0}], "error")
        {1: 1.0, 2: 0.5}
    """
    groups: dict[float, list[float]] = {}
    for row in whole(rows, value, by):
        groups.setdefault(row[by], []).append(row[value])
    return {x: statistics.fmean(groups[x]) for x in sorted(groups)}


def fallen(curve: Curve, level: float) -> Curve:
    """The share of a level by which a curve is below it; none where there is no level.

    Example:
        >>> fallen({1.0: 0.8, 2.0: 0.2}, 0.8)
        {1.0: 0.0, 2.0: 0.75}
    """
    return {x: 1 - y / level if level else 0.0 for x, y in curve.items()}


def onset(curve: Curve) -> float | None:
    """From where on a curve of shares is at least one half; None if it does not end there."""
    return start(list(curve), list(curve.values()))


def near(place: float | None) -> bool:
    """Whether a place is at about one equation for each unknown.

    Example:
        >>> near(1.3), near(3.5), near(None)
        (True, False, False)
    """
    return place is not None and NEAR[0] <= place <= NEAR[1]


@dataclass(frozen=True)
class Threshold:
    """Recovery against equations for each unknown.

    Attributes:
        below: the most that is recovered where unknowns outnumber equations clearly (up to 0.7).
        start: the ratio from which on half is recovered; None if that is not reached.
        above: what is recovered at the largest ratio.
    """

    below: float
    start: float | None
    above: float

    @classmethod
    def of(cls, curve: Curve) -> "Threshold | None":
        """Of the mean share recovered by ratio; None where one side was not measured.

        The upper side lies beyond what counts as about one, so that a start can lie there too.
        """
        low = [y for x, y in curve.items() if x <= NEAR[0]]
        if not low or max(curve) <= NEAR[1]:
            return None
        return cls(max(low), onset(curve), curve[max(curve)])

    @property
    def checks(self) -> tuple[bool, ...]:
        """Whether recovery happens at all; nothing below; a start at about one; all above."""
        reached = self.start is not None
        return (reached, self.below <= BELOW, near(self.start), self.above >= ABOVE)

    def sentence(self, unit: str = "dn") -> str:
        """In words.

        Example:
            >>> Threshold(0.0, 1.5, 1.0).sentence()
            'none below 0.7 dn, half from 1.5 dn, 100 % at the top'
        """
        below = "none" if self.below == 0 else percent(self.below)
        start = "half nowhere" if self.start is None else f"half from {self.start:.2g} {unit}"
        return f"{below} below {NEAR[0]:g} {unit}, {start}, {percent(self.above)} at the top"


def percent(share: float) -> str:
    """A share in words.

    Example:
        >>> percent(0.953)
        '95 %'
    """
    return f"{100 * share:.0f} %"
