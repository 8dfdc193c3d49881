"""Cells, grids of them, and the records that come out: as a table, a file, a bar that grows."""

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from exhume.files import write_private

if TYPE_CHECKING:
    from rich.console import Console

MOST = 100_000
"""The most cells of a sweep: each is a file, and a folder with more of them is slow to read."""


class Cell(Protocol):
    """A cell is a frozen dataclass of plain JSON values; what `run` gives depends on no more.

    A cell may have a method `check`, which refuses fields that make no sense with an InputError;
    it is called for all cells before the first one runs. Workers must be able to import its class.
    """

    def run(self, device: str) -> dict[str, Any]:
        """Return the results by name, plain JSON values."""
        ...


@dataclass(frozen=True)
class Grid:
    """A grid holds a cell for each combination of the values of some fields.

    Example:
        >>> @dataclass(frozen=True)
        ... class Place:
        ...     x: int
        ...     y: str = "a"
        >>> grid = Grid(Place, {"x": range(2), "y": ["a", "b"]})
        >>> len(grid), [(place.x, place.y) for place in grid]
        (4, [(0, 'a'), (0, 'b'), (1, 'a'), (1, 'b')])
    """

    cell: Callable[..., Cell]  # the dataclass
    axes: Mapping[str, Any]  # by field, one value, or a list, tuple or range of values

    def __len__(self) -> int:
        """Count the cells without making them."""
        return math.prod(len(values) for values in self.values().values())

    def __iter__(self) -> Iterator[Cell]:
        """Make the cells, the last axis fastest."""
        values = self.values()
        for chosen in itertools.product(*values.values()):
            yield self.cell(**dict(zip(values, chosen, strict=True)))

    def values(self) -> dict[str, Sequence[Any]]:
        """Return the values of each axis, also where there is only one."""
        return {
            name: values if isinstance(values, list | tuple | range) else (values,)
            for name, values in self.axes.items()
        }


@dataclass(frozen=True)
class Record:
    """A record says what a finished cell gave, or why it failed."""

    cell: Cell
    values: dict[str, Any] | None  # what `run` returned, None for NaN; None after an error
    error: str | None  # type and message of what it raised, if it did
    seconds: float  # how long it ran
    made: Mapping[str, str] = field(default_factory=dict)  # `hardware`, `torch`, `date` there


def table(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return a row for each record: the cell's fields, with its values or its `failure`."""
    rows = []
    for record in records:
        cell = cast(Any, record.cell)
        row = {field.name: getattr(cell, field.name) for field in fields(cell)}
        rows.append(row | (record.values or {}))
        if record.error is not None:
            rows[-1]["failure"] = record.error
    return rows


def made(records: Iterable[Record], word: str) -> str:
    """Return what `Record.made` has under a word, all values where there are several."""
    return ", ".join(sorted({record.made[word] for record in records if word in record.made}))


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Write the table as a private CSV file; lists and dicts as JSON, None as nothing."""

    def plain(value: Any) -> Any:
        return json.dumps(value) if isinstance(value, list | tuple | dict) else value

    rows = [{name: plain(value) for name, value in row.items()} for row in table(records)]
    text = io.StringIO(newline="")
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_private(path, text.getvalue().encode())


@contextmanager
def progress(console: "Console", total: int) -> Iterator[Callable[[Record], None]]:
    """Show cells done, cells failed and the time left; yield what `run` takes as `show`."""
    from rich import progress as parts

    columns = (
        parts.TextColumn("cells"),
        parts.BarColumn(),
        parts.MofNCompleteColumn(),
        parts.TextColumn("{task.description}"),
        parts.TimeRemainingColumn(),
    )
    quiet = not console.is_terminal
    with parts.Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task, failed = bar.add_task("", total=total), 0

        def show(record: Record) -> None:
            nonlocal failed
            failed += record.error is not None
            bar.update(task, advance=1, description=f"{failed} failed" if failed else "")

        yield show
