"""The driver of a sweep: it hands out cells, and alone writes down what comes back."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from pathlib import Path

from exhume.checks import one_of, whole_number
from exhume.device import usable_device
from exhume.errors import InputError
from exhume.sweep import store
from exhume.sweep.cells import Cell, Grid, cells_of
from exhume.sweep.engines import ENGINES, Executor, last_line
from exhume.sweep.records import Record
from exhume.sweep.worker import Task, made_on

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
    """Run every cell of a grid that is not finished yet.

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

    Returns:
        A record a cell, in the order of the grid.

    Raises:
        InputError: something cannot be used. Nothing has run, unless it is the workers' fault.
    """
    one_of("engine", engine, ENGINES)
    if workers is not None:
        whole_number("workers", workers)
    cells = _addressed(cells_of(grid))
    found: dict[str, Record] = {}

    def take(records: Mapping[str, Record]) -> None:
        found.update(records)
        if show is not None:
            for record in records.values():
                show(record)

    kept = _kept(folder, cells, retry)
    if len(kept) == len(cells):
        take(kept)
        return [found[place] for place in cells]
    device = usable_device(device) if engine == "loky" or device == "auto" else device
    with ExitStack() as stack:
        left = len(cells) - len(kept)
        executor = stack.enter_context(ENGINES[engine](address, workers, device, left))
        if folder is not None:
            stack.enter_context(store.held(folder))
            kept = _kept(folder, cells, retry)  # another driver may have finished some since
        take(kept)
        numbered = enumerate(cells.items())
        tasks = [Task(cell, at, n, device) for n, (at, cell) in numbered if at not in kept]
        for records in _finish(tasks, executor, folder):
            take(records)
    return [found[place] for place in cells]


def _addressed(cells: list[Cell]) -> dict[str, Cell]:
    """Return the cells by address, in order."""
    found: dict[str, Cell] = {}
    for cell in cells:
        if found.setdefault(store.address_of(cell), cell) is not cell:
            raise InputError(f"grid: holds this cell twice: {cell!r}.")
    return found


def _kept(folder: Path | None, cells: Mapping[str, Cell], retry: bool) -> dict[str, Record]:
    """Return cells that are finished already; with retry, those among them that did not fail."""
    if folder is None:
        return {}
    found = {place: store.read(folder, place, cell) for place, cell in cells.items()}
    return {
        place: record
        for place, record in found.items()
        if record is not None and not (retry and record.error is not None)
    }


def _finish(
    tasks: Sequence[Task], executor: Executor, folder: Path | None
) -> Iterator[dict[str, Record]]:
    """Run tasks to the end, whichever workers die on the way, and write each result at once.

    On this machine the death of one worker ends them all. So every cell that was being run is a
    suspect, and the last try of a suspect is made alone: it takes no other with it, and is the one
    to blame.
    """
    waiting, suspects, deaths = deque(tasks), deque[Task](), Counter[str]()
    running: dict[Future[Record | None], Task] = {}
    while waiting or suspects or running:
        while waiting and len(running) < executor.workers:
            task = waiting.popleft()
            running[executor.submit(task)] = task
        if not running:
            task = suspects.popleft()
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
        yield finished


def _result(future: Future[Record | None], executor: Executor) -> Record | None:
    """Return what a worker returned, or None if it died.

    Raises:
        InputError: the workers cannot run cells at all.
    """
    try:
        record = future.result()
    except executor.deaths:
        return None
    except Exception as error:
        raise InputError(
            f"the workers cannot run cells ({last_line(error)}). Is the cluster still there, and "
            "can its workers import exhume and the class of the cells? Finished cells are kept."
        ) from error
    if record is None:
        raise InputError(
            "a worker has another version of exhume or of the cell's class than this process: "
            "install the same on all machines, and change no source while a sweep runs."
        )
    return record
