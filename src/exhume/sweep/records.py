"""What comes out of a sweep: records of finished cells, as a table, a file, a bar that grows."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from exhume.files import write_private
from exhume.sweep.cells import Cell

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Record:
    """A record says what a finished cell gave, or why it failed.

    Attributes:
        cell: the cell.
        values: what its `run` returned, with None for NaN and infinities; None after an error.
        error: type and message of what it raised, if it did.
        seconds: how long it ran.
        made: `hardware`, `torch` and `date`, as they were where it ran.
    """

    cell: Cell
    values: dict[str, Any] | None
    error: str | None
    seconds: float
    made: Mapping[str, str] = field(default_factory=dict)


def table(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return a row for each record: the cell's fields, with its values or its `failure`."""
    rows = []
    for record in records:
        cell = cast(Any, record.cell)
        row = {field.name: getattr(cell, field.name) for field in fields(cell)}
        row |= record.values or {}
        rows.append(row if record.error is None else row | {"failure": record.error})
    return rows


def made(records: Iterable[Record], word: str) -> str:
    """Return what `Record.made` has under a word, all values where there are several."""
    return ", ".join(sorted({record.made[word] for record in records if word in record.made}))


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Write the table as a private CSV file; lists and dicts as JSON, None as nothing."""
    rows = table(records)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {
                name: json.dumps(value) if isinstance(value, list | tuple | dict) else value
                for name, value in row.items()
            }
        )
    write_private(path, text.getvalue().encode())


@contextmanager
def progress(console: "Console", total: int) -> Iterator[Callable[[Record], None]]:
    """Show a bar with cells done, cells failed and the time left, if there is a terminal.

    Yields:
        What to give `run` as `show`.
    """
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
