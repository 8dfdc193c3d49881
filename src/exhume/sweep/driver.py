"""The driver of a sweep: it hands out cells, and alone writes down what comes back."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path

from exhume.checks import one_of, whole_number
from exhume.device import usable_device
from exhume.errors import InputError
from exhume.sweep import store
from exhume.sweep.engines import ENGINES, Executor, Task, last_line, made_on
from exhume.sweep.grid import MOST, Cell, Grid, Record

DIED = "the worker died each time the cell was run (killed, or out of memory)"


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
    """Run every cell of a grid that is not finished yet; return a record a cell, in order.

    A cell that raises is recorded with its error and stops no other; one whose worker dies is run
    again, and recorded as failed when that happened too often.

    Args:
        grid: a Grid, or the cells themselves; all different.
        engine: loky (processes on this machine), dask or ray (a cluster that is running).
        folder: where finished cells are kept, and found by the next run; for one at a time.
        address: of the cluster; for ray, the one on this machine if None.
        workers: the most cells at a time; all cores of the machine or the cluster if None.
        device: cpu, cuda (cells take turns on all GPUs), or one device.
        retry: run cells again that failed in an earlier run.
        show: is called for each finished cell, first those that were there already.
    """
    one_of("engine", engine, ENGINES)
    if workers is not None:
        whole_number("workers", workers)
    show = show or (lambda record: None)
    cells = _cells(grid)
    found = _kept(folder, cells, retry)
    left = len(cells) - len(found)
    with ExitStack() as stack:
        if left:
            device = usable_device(device) if engine == "loky" or device == "auto" else device
            executor = stack.enter_context(ENGINES[engine](address, workers, device, left))
            if folder is not None:
                stack.enter_context(store.held(folder))
                found = _kept(folder, cells, retry)  # another driver may have finished some since
        for record in found.values():
            show(record)
        numbered = enumerate(cells.items())
        tasks = [Task(cell, at, n, device) for n, (at, cell) in numbered if at not in found]
        for place, record in _finish(tasks, executor, folder) if left else ():
            found[place] = record
            show(record)
    return [found[place] for place in cells]


def _cells(grid: Grid | Sequence[Cell]) -> dict[str, Cell]:
    """Return the cells of a grid by address, in order; each has checked itself."""
    if isinstance(grid, Grid):
        if not isinstance(grid.cell, type) or not is_dataclass(grid.cell):
            raise InputError(f"grid: cell must be a dataclass, and is {grid.cell!r}.")
        known = ", ".join(field.name for field in fields(grid.cell) if field.init)
        for name, values in grid.values().items():
            if name not in known.split(", "):
                raise InputError(f"grid: {grid.cell.__name__} has no field {name!r}, but {known}.")
            if not values:
                raise InputError(f"grid: the axis {name!r} is empty; give it one value at least.")
    try:
        count = len(grid)
    except OverflowError:
        count = 2**63
    if not 1 <= count <= MOST:
        size = f"has {count:,} cells" if count else "is empty"
        raise InputError(f"grid: {size}; a sweep has one at least and {MOST:,} at most.")
    found: dict[str, Cell] = {}
    try:
        cells = list(grid)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"grid: a cell cannot be made ({error}).") from error
    for cell in cells:
        if not callable(getattr(cell, "run", None)):
            raise InputError(f"{cell!r}: a cell of a sweep needs a method run(device).")
        getattr(cell, "check", lambda: None)()
        if found.setdefault(store.address_of(cell), cell) is not cell:
            raise InputError(f"grid: holds this cell twice: {cell!r}.")
    return found


def _kept(folder: Path | None, cells: Mapping[str, Cell], retry: bool) -> dict[str, Record]:
    """Return cells that are finished already; with retry, those among them that did not fail."""
    if folder is None:
        return {}
    found = ((place, store.read(folder, place, cell)) for place, cell in cells.items())
    return {at: kept for at, kept in found if kept and not (retry and kept.error is not None)}


def _finish(
    tasks: Sequence[Task], executor: Executor, folder: Path | None
) -> Iterator[tuple[str, Record]]:
    """Run tasks to the end, whichever workers die on the way, and write each result at once."""
    # On this machine the death of one worker ends them all: every cell that was being run is a
    # suspect, whose last try is made alone.
    waiting, suspects, deaths = deque(tasks), deque[Task](), Counter[str]()
    running: dict[Future[Record | None], Task] = {}
    while waiting or suspects or running:
        while (waiting and len(running) < executor.workers) or not running:
            task = waiting.popleft() if waiting else suspects.popleft()
            running[executor.submit(task)] = task
        finished: dict[str, Record] = {}
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            task = running.pop(future)
            record = _result(future, executor)
            if record is None:
                deaths[task.address] += 1
                if deaths[task.address] < executor.tries:
                    last = deaths[task.address] == executor.tries - 1
                    (suspects if last else waiting).append(task)
                    continue
                record = Record(task.cell, None, DIED, 0.0, made_on("unknown"))
            if folder is not None:
                store.write(folder, task.address, record)
            finished[task.address] = record
        yield from finished.items()


def _result(future: Future[Record | None], executor: Executor) -> Record | None:
    """Return what a worker returned, or None if it died; refuse workers that can run no cell."""
    try:
        record = future.result()
    except executor.deaths:
        return None
    except Exception as error:
        raise InputError(
            f"the workers cannot run cells ({last_line(error)}): is the cluster still there, and "
            "can it import exhume and the class of the cells? Finished cells are kept."
        ) from error
    if record is None:
        raise InputError(
            "a worker has another version of exhume or of the cells: install the same everywhere, "
            "and change no source while a sweep runs."
        )
    return record
