"""Sweeps: a grid of independent cells, run by joblib on this machine or on a cluster.

A cell is a frozen dataclass of plain values with a method `run`. Finished cells are kept in a
folder, one file each, named by their content: a sweep that was stopped goes on where it was, and
a larger grid runs only what is new. What a cell gives depends on its fields alone, so engines,
numbers of workers and interruptions change nothing in the table. The device is not in the name,
though results on a GPU differ by rounding: a folder is for one kind of device.
"""

import csv
import io
import itertools
import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from joblib.externals.loky.process_executor import TerminatedWorkerError

from exhume.device import usable_device
from exhume.errors import InputError
from exhume.files import write_private
from exhume.sweep.engines import ENGINES, Engine
from exhume.sweep.store import Outcome, Store, address_of, outcome, read_outcome, remove_failure
from exhume.sweep.worker import Task

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["MOST", "Cell", "Grid", "Record", "made", "progress", "run", "table", "write_csv"]

MOST = 100_000
"""The most cells of a sweep."""


class Cell(Protocol):
    """A frozen dataclass whose fields are plain JSON values; what `run` gives depends on no more.

    A cell may have a method `check`, which refuses fields that make no sense with an InputError;
    it is called for all cells before the first one runs. Workers must be able to import its class.
    """

    def run(self, device: str) -> dict[str, Any]:
        """The results by name, plain JSON values."""
        ...


@dataclass(frozen=True)
class Grid:
    """All combinations of the values of some fields.

    Attributes:
        cell: the dataclass.
        axes: by field, one value, or a list, tuple or range of values.

    Example:
        >>> @dataclass(frozen=True)
        ... class Point:
        ...     x: int
        ...     y: str = "a"
        >>> grid = Grid(Point, {"x": range(2), "y": ["a", "b"]})
        >>> len(grid), [(point.x, point.y) for point in grid]
        (4, [(0, 'a'), (0, 'b'), (1, 'a'), (1, 'b')])
    """

    cell: Callable[..., Cell]
    axes: Mapping[str, Any]

    def __len__(self) -> int:
        """The number of cells, which are not made for that."""
        return math.prod(len(values) for values in self._values().values())

    def __iter__(self) -> Iterator[Cell]:
        """The cells, the last axis fastest."""
        values = self._values()
        for chosen in itertools.product(*values.values()):
            yield self.cell(**dict(zip(values, chosen, strict=True)))

    def _values(self) -> dict[str, Sequence[Any]]:
        return {
            name: values if isinstance(values, list | tuple | range) else (values,)
            for name, values in self.axes.items()
        }


@dataclass(frozen=True)
class Record:
    """A finished cell.

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


def run(
    grid: Grid | Sequence[Cell],
    engine: str = "loky",
    folder: Path | None = None,
    address: str | None = None,
    workers: int | None = None,
    device: str = "cpu",
    retry: bool = False,
    show: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Run every cell of a grid that is not finished yet.

    A cell that raises is recorded with its error and stops no other. A cell whose worker dies is
    run again, and recorded as failed when that happened too often.

    Args:
        grid: a Grid, or the cells themselves; all different.
        engine: loky (processes on this machine), dask or ray (a cluster that is running).
        folder: where finished cells are kept, and found by the next run; nowhere if None.
        address: of the cluster; for ray, the one on this machine if None.
        workers: the most cells at a time; all cores of the machine or the cluster if None.
        device: cpu, cuda (cells take turns on all GPUs), or one device.
        retry: run cells again that failed in an earlier run.
        show: is called for each finished cell, first those that were there already.

    Returns:
        A record a cell, in the order of the grid.

    Raises:
        InputError: something cannot be used. Nothing has run then, unless it is the workers that
            turn out not to be able to run cells.
    """
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r}: is unknown; choose {', '.join(ENGINES)}.")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise InputError(f"workers {workers!r}: expected a whole number of at least 1.")
    cells = _addressed(_cells(grid))
    found: dict[str, Record] = {}

    def keep(address: str, finished: Outcome) -> None:
        values, error, made = (finished[word] for word in ("values", "error", "made"))
        record = Record(cells[address], values, error, float(finished["seconds"]), made)
        found[address] = record
        if show is not None:
            show(record)

    earlier = _earlier(folder, cells, retry)
    for place, finished in earlier.items():
        keep(place, finished)
    if len(earlier) < len(cells):
        on = usable_device(device) if engine == "loky" or device == "auto" else device
        with ExitStack() as stack:
            opened = stack.enter_context(ENGINES[engine](address, workers, on))
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep-")))
            store = Store.opened(folder)
            tasks = {
                place: Task(cell, place, number, on, store)
                for number, (place, cell) in enumerate(cells.items())
                if place not in earlier
            }
            if retry:
                for place in tasks:
                    remove_failure(folder, place)
            for place, finished in stack.enter_context(closing(_finish(tasks, opened, store))):
                keep(place, finished)
    return [found[place] for place in cells]


def _cells(grid: Grid | Sequence[Cell]) -> list[Cell]:
    """The cells of a grid, after checks that need none of them."""
    if isinstance(grid, Grid):
        _check_axes(grid)
    try:
        count = len(grid)
    except OverflowError:
        count = 2**63
    if count > MOST:
        raise InputError(
            f"grid: has {count:,} cells or more, and a sweep has {MOST:,} at most; choose fewer "
            "values."
        )
    if count == 0:
        raise InputError("grid: is empty; give every axis one value at least.")
    try:
        cells = list(grid)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"grid: a cell cannot be made ({error}).") from error
    for cell in cells:
        check = getattr(cell, "check", None)
        if check is not None:
            check()
    return cells


def _check_axes(grid: Grid) -> None:
    """Refuse a cell that is no dataclass, fields that it lacks, and axes without values."""
    if not isinstance(grid.cell, type) or not is_dataclass(grid.cell):
        raise InputError(f"grid: cell must be a dataclass, and is {grid.cell!r}.")
    names = [field.name for field in fields(grid.cell) if field.init]
    for name, values in grid.axes.items():
        if name not in names:
            raise InputError(
                f"grid: {grid.cell.__name__} has no field {name!r}; it has {', '.join(names)}."
            )
        if isinstance(values, list | tuple | range) and not values:
            raise InputError(f"grid: the axis {name!r} is empty; give it one value at least.")


def _addressed(cells: list[Cell]) -> dict[str, Cell]:
    """The cells by address, in order."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if not callable(getattr(cell, "run", None)):
            raise InputError(f"{cell!r}: a cell of a sweep needs a method run(device).")
        if found.setdefault(address_of(cell), cell) is not cell:
            raise InputError(f"grid: holds this cell twice: {cell!r}.")
    return found


def _earlier(folder: Path | None, cells: Iterable[str], retry: bool) -> dict[str, Outcome]:
    """Cells that are finished already; with retry, those among them that did not fail."""
    if folder is None:
        return {}
    found = {place: read_outcome(folder, place) for place in cells}
    return {
        place: finished
        for place, finished in found.items()
        if finished is not None and not (retry and finished["error"] is not None)
    }


def _finish(tasks: dict[str, Task], engine: Engine, store: Store) -> Generator[tuple[str, Outcome]]:
    """Run tasks to the end, whichever workers die on the way.

    On this machine the death of one worker ends them all. So every cell that was being run is a
    suspect, and the last try of a suspect is made alone: it takes no other with it, and is the one
    to blame.
    """
    left, deaths, stalls = dict(tasks), Counter[str](), 0
    while left:
        before = len(left), deaths.total()
        together = [place for place in left if not 0 < deaths[place] == engine.tries - 1]
        chosen = together or list(left)[:1]
        handed: list[str] = []

        def hand_out(places: list[str] = chosen, handed: list[str] = handed) -> Iterator[Task]:
            for place in places:
                handed.append(place)
                yield tasks[place]

        try:
            limit = min(engine.workers, len(chosen))
            with closing(engine.stream(hand_out(), limit)) as results:
                for place, finished in results:
                    if finished is None:
                        deaths[place] += 1
                    else:
                        del left[place]
                        yield place, store.write(place, finished)
        except TerminatedWorkerError:
            for place in [place for place in handed if place in left]:
                kept = store.read(place)
                if kept is not None:
                    del left[place]
                    yield place, kept
                elif store.started(place):
                    deaths[place] += 1
        for place in [place for place in left if deaths[place] >= engine.tries]:
            message = "the worker died each time the cell was run (killed, or out of memory)"
            task = left.pop(place)
            yield place, store.write(place, outcome(task.cell, None, message, 0.0, None))
            store.release(place)
        stalls = stalls + 1 if before == (len(left), deaths.total()) else 0
        if stalls == engine.tries:
            raise InputError(
                "workers die before they run a cell (out of memory?); try fewer workers. Finished "
                "cells are kept."
            )


def table(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row a record: the fields of the cell and its values, or its `failure`; no times."""
    rows = []
    for record in records:
        cell = cast(Any, record.cell)
        row = {field.name: getattr(cell, field.name) for field in fields(cell)}
        row |= record.values or {}
        rows.append(row if record.error is None else row | {"failure": record.error})
    return rows


def made(records: Iterable[Record], word: str) -> str:
    """What a word of `Record.made` is, all values where there are several."""
    return ", ".join(sorted({record.made[word] for record in records if word in record.made}))


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """The table as a private CSV file; lists and dicts as JSON, None as nothing."""
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
    """A bar with cells done, cells failed and the time left; nothing where there is no terminal.

    Yields:
        What to give `run` as `show`.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("cells"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task, failed = bar.add_task("", total=total), 0

        def show(record: Record) -> None:
            nonlocal failed
            failed += record.error is not None
            bar.update(task, advance=1, description=f"{failed} failed" if failed else "")

        yield show
