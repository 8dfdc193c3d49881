"""What a claim is: a sentence, the cells that put it to the test, the rule that judges it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.figure import Figure

from exhume.sweep import Cell, Record

BUNDLED = ("sphere", "digits", "faces", "photos")  # sets that need no folder
FIRST = 20  # the first seed of runs that are judged; sizes and rules were set on smaller ones
FAILED = 0.05  # share of the cells that may fail; where more do, nothing is decided

Scale = Literal["small", "full"]  # minutes on two cores; for a GPU
Verdict = Literal["holds", "holds in part", "does not hold", "not decided"]


@dataclass(frozen=True)
class Finding:
    """What the results say of a claim."""

    figure: str  # the measured result, in one line
    verdict: Verdict
    note: str = ""  # what a reader should know beside it


Cells = Callable[[Scale], list[Cell]]
Rule = Callable[[Sequence[Record]], Finding]
Draw = Callable[[Sequence[Record]], Figure | None]


@dataclass(frozen=True)
class Claim:
    """One result of a source, to be reproduced; its rule sees results, and can come out any way."""

    name: str
    source: str  # the paper, and where in it
    sentence: str  # what the source claims, in our words
    minutes: tuple[float, float]  # about, at small scale on two cores and at full scale on a GPU
    cells: Cells
    draw: Draw  # None if there is nothing to draw
    rule: Rule

    def judge(self, records: Sequence[Record]) -> Finding:
        """Return the finding by the rule, unless too many cells failed."""
        errors = [record.error for record in records if record.error is not None]
        if len(errors) > FAILED * len(records):
            first = " ".join(errors[0].split()).rstrip(".")
            return undecided(f"{len(errors)} of {len(records)} failed, the first with {first}")
        return self.rule(records)

    def data(self, scale: Scale) -> list[str]:
        """Return the sets that have to be in the folder EXHUME_DATA."""
        named = dict.fromkeys(getattr(cell, "data", "sphere") for cell in self.cells(scale))
        return [name for name in named if name not in BUNDLED]


def claim(
    source: str, sentence: str, minutes: tuple[float, float], cells: Cells, draw: Draw
) -> Callable[[Rule], Claim]:
    """Make a claim of the rule below, which names it."""

    def named(rule: Rule) -> Claim:
        name = rule.__name__.replace("_", "-")
        return Claim(name, source, sentence, minutes, cells, draw, rule)

    return named


def seeds(count: int) -> range:
    """Return so many seeds on which no size or rule was set."""
    return range(FIRST, FIRST + count)


def judged(core: bool, *rest: bool) -> Verdict:
    """Return the verdict on a claim whose core must hold, and of which more may fail."""
    if not core:
        return "does not hold"
    return "holds" if all(rest) else "holds in part"


def undecided(what: str) -> Finding:
    """Return the finding where results are missing."""
    return Finding("no result", "not decided", f"Too few cells ended: {what}.")
