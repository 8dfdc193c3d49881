"""Sweeps on this machine: grids, addresses, files, failures."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError
from rich.console import Console

import exhume
from exhume import sweep
from exhume.errors import InputError
from exhume.sweep import Grid, Record, driver, engines, store, worker
from exhume.sweep.engines import Executor
from exhume.sweep.store import address_of
from exhume.sweep.worker import Task, work
from sweep_cells import FAILURES, RAISED, Checked, Fails, Raises, Square, noted

# What runs, on real processes.


def test_a_grid_runs_in_order_and_again_without_running(tmp_path: Path) -> None:
    folder, log, before = tmp_path / "sweep", tmp_path / "log", torch.get_num_threads()
    seen: list[Record] = []
    grid = Grid(Square, {"x": [2.0, 1.0, 3.0], "power": (1, 3), "log": str(log)})
    records = sweep.run(grid, folder=folder, workers=2, show=seen.append)
    assert [record.cell for record in records] == list(grid)
    assert [row["y"] for row in sweep.table(records)] == [2, 8, 1, 1, 3, 27]
    assert {row["threads"] for row in sweep.table(records)} == {1}
    assert torch.get_num_threads() == before
    assert sorted(map(repr, seen)) == sorted(map(repr, records))

    seen.clear()
    again = sweep.run(list(grid)[::-1], folder=folder, show=seen.append)
    assert again == seen == records[::-1]
    assert len(noted(log, "end")) == 6

    files = list((folder / "cells").iterdir())
    assert {path.name for path in files} == {f"{address_of(cell)}.json" for cell in grid}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == (folder / "cells").stat().st_mode & 0o777 == 0o700


# What a worker does.


def test_whatever_a_cell_raises_is_recorded() -> None:
    found = [worker.attempt(Fails(x), 0, "cpu") for x in range(5)]
    assert [record.error for record in found] == [None, *FAILURES]
    assert found[0].values == {"y": 0, "z": None, "by": {"1": [2]}}
    assert [record.values for record in found[1:]] == [None] * 4


@pytest.mark.parametrize("recorded", [*RAISED, "nothing"])
def test_an_error_that_is_hard_to_write_down_is_written_down(recorded: str, tmp_path: Path) -> None:
    cell = Raises(recorded)
    record = worker.attempt(cell, 0, "cpu")
    assert record.error == (recorded if recorded in RAISED else None)
    if recorded == "nothing":
        assert record.values == {"file": ["caf\\udce9"], "\\ud800": {"\\udce9": "ü"}}
    with store.held(tmp_path):
        store.write(tmp_path, address_of(cell), record)
    assert store.read(tmp_path, address_of(cell), cell) == record
    sweep.write_csv(tmp_path / "table.csv", [record])


@dataclass(frozen=True)
class Ended:
    module: str

    def run(self, device: str) -> dict[str, Any]:
        exec("raise SystemExit(1)", {"__name__": self.module})
        return {}


def test_that_ray_ends_a_worker_is_no_error_of_the_cell() -> None:
    with pytest.raises(SystemExit):
        worker.attempt(Ended("ray._private.worker"), 0, "cpu")
    assert worker.attempt(Ended("cells"), 0, "cpu").error == "SystemExit: 1"


def test_cells_take_turns_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    chosen = [worker._chosen("cuda", number) for number in range(4)]
    assert chosen == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert worker._chosen("cuda:1", 2) == "cuda:1"
    assert worker._chosen("cpu", 2) == "cpu"
    for device, most in (("cuda", 3), ("cuda:1", 1)):
        with engines.loky(None, None, device, 9) as executor:
            assert executor.workers == most


# What the driver does, with executors that only pretend.


def tasks_of(cells: list[Any]) -> list[Task]:
    return [Task(cell, address_of(cell), number, "cpu") for number, cell in enumerate(cells)]


def finish(tasks: list[Task], executor: Executor, folder: Path | None = None) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for records in driver._finish(tasks, executor, folder):
        found |= records
    return found


@contextmanager
def in_threads(
    call: Callable[[Task], Record | None] = work, workers: int = 2, **options: Any
) -> Iterator[Executor]:
    with ThreadPoolExecutor(workers) as pool:
        yield Executor(workers, lambda task: pool.submit(call, task), **options)


def test_only_cells_that_die_alone_are_blamed() -> None:
    """As in a loky pool, all that run beside a bad cell die with it."""
    tasks = tasks_of([Square(float(x)) for x in range(12)])
    bad, broken = {tasks[3].address, tasks[4].address}, [Event()]

    def call(task: Task) -> Record | None:
        mine = broken[-1]
        if task.address in bad:
            time.sleep(0.02)  # until others run beside it
            broken.append(Event())
            mine.set()
        if mine.wait(0.05):
            raise TerminatedWorkerError
        return work(task)

    with in_threads(call, 4, deaths=(TerminatedWorkerError,)) as executor:
        found = finish(tasks, executor)
    assert {place for place, record in found.items() if record.error} == bad
    assert set(found) == {task.address for task in tasks}


def test_a_cluster_gives_a_cell_back_and_it_is_tried_again(tmp_path: Path) -> None:
    calls: list[float] = []

    def call(task: Task) -> Record | None:
        calls.append(task.cell.x)
        if task.cell.x == 1 or (task.cell.x == 2 and calls.count(2.0) < 3):
            raise EOFError
        return work(task)

    tasks = tasks_of([Square(float(x)) for x in range(4)])
    with store.held(tmp_path), in_threads(call, deaths=(EOFError,)) as executor:
        found = finish(tasks, executor, tmp_path)
    assert [record.cell for record in found.values() if record.error] == [Square(1.0)]
    assert calls.count(1.0) == calls.count(2.0) == 3
    for task in tasks:
        assert store.read(tmp_path, task.address, task.cell) == found[task.address]


def test_workers_that_cannot_run_cells_are_an_input_error() -> None:
    def call(task: Task) -> Record | None:
        raise ModuleNotFoundError("No module named 'exhume'")

    [task] = tasks_of([Square(1.0)])
    with in_threads(call) as executor, pytest.raises(InputError, match="No module named 'exhume'"):
        finish([task], executor)
    other = replace(task, address=address_of(Square(2.0)))  # as other code would have it
    with in_threads() as executor, pytest.raises(InputError, match="another version"):
        finish([other], executor)


def test_workers_that_die_before_any_cell_are_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []

    class Dead:
        def __init__(self, size: int, **options: Any) -> None:
            started.append(size)

        def submit(self, *call: Any) -> "Future[Any]":
            future: Future[Any] = Future()
            future.set_exception(TerminatedWorkerError())
            return future

        def shutdown(self, **options: bool) -> None:
            pass

    monkeypatch.setattr(engines, "ProcessPoolExecutor", Dead)
    with pytest.raises(InputError, match="workers die before they run a cell"):
        sweep.run([Square(1.0), Square(2.0)], workers=2)
    assert started == [2, 2, 2]


def test_an_error_in_show_ends_the_sweep_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(record: Record) -> None:
        raise RuntimeError("the console is gone")

    monkeypatch.setitem(engines.ENGINES, "loky", lambda *options: in_threads())
    log = tmp_path / "log"
    grid = Grid(Square, {"x": [float(x) for x in range(6)], "log": str(log)})
    with pytest.raises(RuntimeError, match="the console is gone"):
        sweep.run(grid, folder=tmp_path / "sweep", show=show)
    assert len(noted(log, "end")) < 6
    finished = {path.stem for path in (tmp_path / "sweep" / "cells").iterdir()}
    assert finished
    assert len(sweep.run(grid, folder=tmp_path / "sweep")) == 6
    ends = noted(log, "end")
    assert all(ends.count(str(cell.x)) == 1 for cell in grid if address_of(cell) in finished)


def test_a_failure_is_kept_unless_it_is_to_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, folder = tmp_path / "log", tmp_path / "sweep"
    cells = [Square(x, log=str(log)) for x in (1.0, 2.0, 3.0)]
    with store.held(folder):
        store.write(folder, address_of(cells[0]), Record(cells[0], None, "OSError: no", 1.0))
        store.write(folder, address_of(cells[1]), Record(cells[1], {"y": -1}, None, 1.0))
    kept = sweep.run(cells[:2], folder=folder)
    assert [record.error for record in kept] == ["OSError: no", None]
    assert not log.exists()

    @contextmanager
    def late(*options: Any) -> Iterator[Executor]:
        """By the time that this engine is open, another driver has finished the third cell."""
        with store.held(folder):
            store.write(folder, address_of(cells[2]), Record(cells[2], {"y": -2}, None, 1.0))
        with in_threads() as executor:
            yield executor

    monkeypatch.setitem(engines.ENGINES, "loky", late)
    again = sweep.run(cells, folder=folder, retry=True)
    assert [row["y"] for row in sweep.table(again)] == [1.0, -1, -2]
    assert noted(log, "end") == ["1.0"]
    assert sweep.run(cells, folder=folder) == again


# Files.


@pytest.mark.parametrize(
    "change",
    [
        lambda found: b"",
        lambda found: b'{"kind": "sw',
        lambda found: b"[1]",
        lambda found: b"{}",
        lambda found: {**found, "fields": {"x": 2.0, "power": 2, "log": ""}},
        lambda found: {**found, "values": None},
        lambda found: {**found, "seconds": "long"},
        lambda found: {**found, "fields": {"x": float("nan"), "power": 2, "log": ""}},
        lambda found: {**found, "fields": {"x": 1.0, "power": 2, "log": "\udce9"}},
        lambda found: {**found, "version": "0.1.0+000000000000"},
    ],
)
def test_a_damaged_file_is_named_before_any_work(tmp_path: Path, change: Any) -> None:
    cell, shown = Square(1.0), list[Record]()
    path = tmp_path / "cells" / f"{address_of(cell)}.json"
    with store.held(tmp_path):
        store.write(tmp_path, address_of(cell), Record(cell, {}, None, 0.0))
    content = change(json.loads(path.read_text()))
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path}.*damaged.*remove it"):
        sweep.run([Square(0.0), cell], folder=tmp_path, show=shown.append)
    assert not shown and path.read_bytes() == content
    assert len(list((tmp_path / "cells").iterdir())) == 1


def test_a_folder_of_something_else_or_of_another_driver_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(InputError, match=r"sweep\.json"):
        sweep.run([Square(1.0)], folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        sweep.run([Square(1.0)], folder=tmp_path / "file")
    with (
        store.held(tmp_path / "own"),
        pytest.raises(InputError, match="another sweep is running"),
        store.held(tmp_path / "own"),
    ):
        pass
    with store.held(tmp_path / "own"):  # which nobody holds any more
        pass


# What is refused, before any work.


@dataclass(frozen=True)
class NoRun:
    x: int = 0


def local_cell() -> Any:
    @dataclass(frozen=True)
    class Local(NoRun):
        def run(self, device: str) -> dict[str, Any]:
            return {}

    return Local()


GOOD = Grid(Square, {"x": 1.0})


@pytest.mark.parametrize(
    ("grid", "options", "words"),
    [
        ([], {}, "empty"),
        (Grid(Square, {"x": []}), {}, "axis 'x' is empty"),
        (Grid(Square, {"x": range(10**9)}), {}, "1,000,000,000 cells"),
        (Grid(Square, {"x": range(10**30)}), {}, "at most"),
        (Grid(Square, {"x": range(10**6), "power": range(10**6), "log": range(10**8)}), {}, "most"),
        (Grid(Square, {"x": 1.0, "exponent": 2}), {}, "no field 'exponent'.*x, power, log"),
        (Grid(Square, {"power": 2}), {}, "cannot be made"),
        (Grid(print, {}), {}, "dataclass"),
        ([Square(1.0), NoRun()], {}, "method run"),
        (["text"], {}, "method run"),
        (Grid(Square, {"x": float("nan")}), {}, "plain JSON"),
        (Grid(Square, {"x": torch.zeros(1)}), {}, "plain JSON"),
        (Grid(Square, {"x": 1.0, "log": "caf\udce9"}), {}, "plain JSON"),
        ([local_cell()], {}, "Local: .* must be importable.*at the top of a module"),
        (Grid(Square, {"x": [1.0, 2.0, 1.0]}), {}, "twice.*x=1.0"),
        (Grid(Checked, {"x": [1, 2, -1], "log": ""}), {}, "x -1: must not be negative"),
        (GOOD, {"engine": "slurm"}, "loky, dask, ray.*'slurm'"),
        (GOOD, {"workers": 0}, "workers: .*got 0"),
        (GOOD, {"workers": 1.5}, "workers: expected a whole number"),
        (GOOD, {"workers": True}, "workers: .*True"),
        (GOOD, {"device": "abacus"}, "device 'abacus'"),
        (GOOD, {"address": "localhost:1"}, "takes no address"),
    ],
)
def test_what_cannot_run_is_refused(
    tmp_path: Path, grid: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        sweep.run(grid, folder=tmp_path / "sweep", **options)
    assert not (tmp_path / "sweep").exists()


# The rest.


def test_the_length_of_a_grid_is_the_number_of_its_cells() -> None:
    grid = Grid(Square, {"x": (1.0, 2.0), "power": range(3), "log": "value"})
    cells = list(grid)
    assert len(grid) == len(cells) == 6
    assert cells[:3] == [Square(1.0, power, "value") for power in range(3)]


def test_the_table_as_csv(tmp_path: Path) -> None:
    records = [
        Record(Fails(0), {"y": 0.1, "pair": [1, 2]}, None, 5.0),
        Record(Fails(1), None, 'ValueError: "no", never', 5.0),
        Record(Fails(2), {"y": None, "z": True}, None, 5.0),
    ]
    sweep.write_csv(tmp_path / "table.csv", records)
    assert (tmp_path / "table.csv").read_text() == (
        'x,y,pair,failure,z\n0,0.1,"[1, 2]",,\n1,,,"ValueError: ""no"", never",\n2,,,,True\n'
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_counts_cells_and_failures(terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    with sweep.progress(console, 3) as show:
        show(Record(Fails(0), {}, None, 0.1))
        show(Record(Fails(1), None, "ValueError: no", 0.1))
    assert ("2/3" in text.getvalue() and "1 failed" in text.getvalue()) == terminal
    assert terminal or not text.getvalue().strip()


def test_a_cell_runs_on_one_core_and_says_where_and_when_it_was_made() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        record = worker.attempt(Square(1.0), 0, "cpu")
    finally:
        torch.set_num_threads(before)
    assert record.values is not None and record.values["threads"] == 1
    assert record.made["torch"] == torch.__version__
    assert sweep.made([record, record], "hardware").endswith(" cores")
    other = replace(record, made={"hardware": "abacus, 1 cores"})
    assert sweep.made([record, other], "hardware").startswith("abacus, 1 cores, ")
    assert sweep.made([other], "date") == ""


def test_the_package_hands_out_the_sweep_when_it_is_asked_for() -> None:
    asked = "import sys, exhume; assert 'joblib' not in sys.modules; exhume.sweep.run"
    subprocess.run([sys.executable, "-c", asked], check=True, env=dict(os.environ))
    with pytest.raises(AttributeError, match="nothing"):
        exhume.nothing  # noqa: B018
