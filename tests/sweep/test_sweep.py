"""Sweeps on this machine: grids, addresses, files, failures, interruptions."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError
from rich.console import Console

import exhume
from exhume import sweep
from exhume.errors import InputError
from exhume.sweep import Grid, Record, engines, store, worker
from exhume.sweep.store import Store, address_of, outcome, remove_failure, write_once
from exhume.sweep.worker import Task, work
from sweep_cells import (
    FAILURES,
    RAISED,
    Checked,
    Fails,
    Killer,
    Raises,
    Slow,
    Square,
    note,
    noted,
    start_driver,
    wait_for,
)


def alive(process: str) -> bool:
    """Whether a process runs, by its id; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


def wait_until_gone(processes: list[str]) -> None:
    end = time.monotonic() + 20
    while any(map(alive, processes)):
        assert time.monotonic() < end, "a worker outlived its driver"
        time.sleep(0.05)


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
    assert {path.stem for path in files} == {address_of(cell) for cell in grid}
    assert {path.suffix for path in files} == {".json"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == (folder / "cells").stat().st_mode & 0o777 == 0o700


def test_a_failure_is_kept_unless_it_is_to_be_retried(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cells = [Square(x, log=str(log)) for x in (1.0, 2.0, 3.0)]
    store = Store.opened(tmp_path / "sweep")
    store.write(address_of(cells[0]), outcome(cells[0], None, "OSError: a bad day", 1.0, None))
    store.write(address_of(cells[1]), outcome(cells[1], {"y": -1}, None, 1.0, None))
    kept = sweep.run(cells[:2], folder=store.folder)
    assert [record.error for record in kept] == ["OSError: a bad day", None]
    assert not log.exists()
    again = sweep.run(cells, folder=store.folder, workers=1, retry=True)
    assert [row["y"] for row in sweep.table(again)] == [1.0, -1, 9.0]
    assert sorted(noted(log, "end")) == ["1.0", "3.0"]
    assert sweep.run(cells, folder=store.folder) == again


def test_a_cell_that_always_kills_its_worker_is_given_up(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    note(log, "start nobody")  # the killer waits for no neighbour
    records = sweep.run([Killer(log, times=9), Square(5.0, log=log)], workers=2)
    assert "the worker died" in str(records[0].error)
    assert records[1].error is None
    assert noted(log, "start").count("killer") == 3
    assert noted(log, "end") == ["5.0"]


def test_a_killed_driver_resumes_to_the_same_table(tmp_path: Path) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "log"
    with start_driver(folder, log, "loky") as driver:
        wait_for(log, "end", 4)
        driver.kill()
    finished = len(list((folder / "cells").glob("*.json")))
    assert 2 <= finished < 10
    records = sweep.run(Grid(Slow, {"x": range(10), "log": str(log)}), folder=folder, workers=2)
    assert sweep.table(records) == [{"x": x, "log": str(log), "y": x + 0.5} for x in range(10)]
    assert sorted(noted(log, "end")) == [str(x) for x in range(10)]
    assert not list((folder / "cells").glob("*.lock"))
    wait_until_gone(noted(log, "process"))


def test_an_interrupt_keeps_what_is_finished_and_ends_the_workers(tmp_path: Path) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "log"
    with start_driver(folder, log, "loky") as driver:
        wait_for(log, "end", 4)
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        assert driver.wait(30) == 77
    kept = [json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")]
    assert 2 <= len(kept) < 10
    assert [finished["error"] for finished in kept] == [None] * len(kept)
    wait_until_gone(noted(log, "process"))


def test_whatever_a_cell_raises_is_its_outcome() -> None:
    found = [worker.attempt(Fails(x), 0, "cpu") for x in range(5)]
    assert [finished["error"] for finished in found] == [None, *FAILURES]
    assert found[0]["values"] == {"y": 0, "z": None, "by": {"1": [2]}}
    assert [finished["values"] for finished in found[1:]] == [None] * 4


@pytest.mark.parametrize("recorded", [*RAISED, "nothing"])
def test_an_error_that_is_hard_to_write_down_is_written_down(recorded: str, tmp_path: Path) -> None:
    [task] = tasks_of([Raises(recorded)], Store.opened(tmp_path)).values()
    _, finished = work(task)
    assert finished["error"] == (recorded if recorded in RAISED else None)
    if recorded == "nothing":
        assert finished["values"] == {"file": ["caf\\udce9"], "\\ud800": {"\\udce9": "ü"}}
    assert task.store.read(task.address) == finished
    record = Record(task.cell, finished["values"], finished["error"], 0.1)
    sweep.write_csv(tmp_path / "table.csv", [record])


def test_an_error_in_show_ends_the_sweep_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def threads(*options: Any) -> Iterator[engines.Engine]:
        yield engines.Engine(2, {"backend": "threading"})

    def show(record: Record) -> None:
        raise RuntimeError("the console is gone")

    monkeypatch.setitem(engines.ENGINES, "loky", threads)
    log = tmp_path / "log"
    grid = Grid(Slow, {"x": range(6), "log": str(log)})
    with pytest.raises(RuntimeError, match="the console is gone"):
        sweep.run(grid, folder=tmp_path / "sweep", show=show)
    assert len(noted(log, "start")) < 6
    assert len(sweep.run(grid, folder=tmp_path / "sweep")) == 6
    assert sorted(noted(log, "end")) == [str(x) for x in range(6)]


# Who is to blame, with engines that only pretend.


@dataclass(frozen=True)
class Fragile(engines.Engine):
    """Like loky: when a cell of `bad` runs, all that run with it die."""

    bad: tuple[str, ...] = ()

    def stream(self, tasks: Any, limit: int) -> Any:
        tasks = iter(tasks)
        while group := [task for _, task in zip(range(limit), tasks, strict=False)]:
            for task in group:
                (task.store.folder / "cells" / f"{task.address}.lock").touch()
            if any(task.address in self.bad for task in group):
                raise TerminatedWorkerError
            yield from map(work, group)


def tasks_of(cells: list[Any], store: Store) -> dict[str, Task]:
    return {
        address_of(cell): Task(cell, address_of(cell), number, "cpu", store)
        for number, cell in enumerate(cells)
    }


def test_only_cells_that_die_alone_are_blamed(tmp_path: Path) -> None:
    store = Store.opened(tmp_path)
    tasks = tasks_of([Square(float(x)) for x in range(12)], store)
    bad = tuple(tasks)[3:5]
    found = dict(sweep._finish(tasks, Fragile(4, {}, bad=bad), store))
    assert {place for place, finished in found.items() if finished["error"]} == set(bad)
    assert set(found) == set(tasks)


def test_workers_that_die_before_any_cell_are_not_started_for_ever(tmp_path: Path) -> None:
    store, started = Store.opened(tmp_path), []

    class Dead(engines.Engine):
        def stream(self, tasks: Any, limit: int) -> Any:
            started.append(next(iter(tasks)))
            raise TerminatedWorkerError
            yield

    with pytest.raises(InputError, match="workers die before they run a cell"):
        list(sweep._finish(tasks_of([Square(1.0), Square(2.0)], store), Dead(2, {}), store))
    assert len(started) == 3


def test_a_cluster_gives_a_cell_back_and_it_is_tried_again(tmp_path: Path) -> None:
    calls: list[str] = []

    def call(task: Task) -> engines.Result:
        calls.append(task.address)
        died = task.cell.x == 1 or (task.cell.x == 2 and calls.count(task.address) < 3)
        return (task.address, None) if died else work(task)

    store = Store.opened(tmp_path)
    tasks = tasks_of([Square(float(x)) for x in range(4)], store)
    one, two = list(tasks)[1:3]
    engine = engines.Engine(2, {"backend": "threading"}, call)
    found = dict(sweep._finish(tasks, engine, store))
    assert [place for place, finished in found.items() if finished["error"]] == [one]
    assert calls.count(one) == calls.count(two) == 3


def test_workers_that_cannot_run_cells_are_an_input_error(tmp_path: Path) -> None:
    def call(task: Task) -> engines.Result:
        raise ModuleNotFoundError("No module named 'exhume'")

    store = Store.opened(tmp_path)
    engine = engines.Engine(2, {"backend": "threading"}, call)
    with pytest.raises(InputError, match="No module named 'exhume'"):
        list(sweep._finish(tasks_of([Square(1.0)], store), engine, store))


# Files.


def test_the_first_writer_wins(tmp_path: Path) -> None:
    written: list[bool] = []
    path = tmp_path / "file"
    threads = [
        threading.Thread(target=lambda x=x: written.append(write_once(path, bytes([x]) * 9999)))
        for x in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(written) == [False] * 7 + [True]
    assert len(set(path.read_bytes())) == 1 and path.stat().st_size == 9999
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_worker_waits_for_the_first_and_takes_its_result(tmp_path: Path) -> None:
    log = tmp_path / "log"
    [task] = tasks_of([Slow(1, str(log))], Store.opened(tmp_path)).values()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(work(task))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert noted(log, "start") == ["1"]
    assert found == [found[0]] * 3


def test_a_worker_that_does_not_see_the_folder_returns_what_it_found(tmp_path: Path) -> None:
    store = Store.opened(tmp_path)
    [task] = tasks_of([Square(3.0)], replace(store, token="of another disk")).values()
    address, finished = work(task)
    assert finished["values"]["y"] == 9.0
    assert not list((tmp_path / "cells").iterdir())
    assert store.write(address, finished) == finished == store.read(address)
    assert store.write(address, {**finished, "seconds": -1.0}) == finished


def test_only_a_failure_is_removed(tmp_path: Path) -> None:
    good, bad = (Square(x) for x in (1.0, 2.0))
    kept = Store.opened(tmp_path)
    kept.write(address_of(bad), outcome(bad, None, "OSError: a bad day", 1.0, None))
    written = kept.write(address_of(good), outcome(good, {"y": 1}, None, 1.0, None))
    for cell in (good, bad, Square(3.0)):
        remove_failure(tmp_path, address_of(cell))
    assert kept.read(address_of(bad)) is None and kept.read(address_of(good)) == written


def test_a_retry_keeps_what_another_driver_has_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, kept = Square(1.0), Store.opened(tmp_path)
    kept.write(address_of(cell), outcome(cell, None, "OSError: a bad day", 1.0, None))

    @contextmanager
    def late(*options: Any) -> Iterator[engines.Engine]:
        """By the time that this engine is open, another driver has finished the cell."""
        remove_failure(tmp_path, address_of(cell))
        kept.write(address_of(cell), outcome(cell, {"y": -1}, None, 1.0, None))
        yield engines.Engine(1, {"backend": "threading"})

    monkeypatch.setitem(engines.ENGINES, "loky", late)
    [record] = sweep.run([cell], folder=tmp_path, retry=True)
    assert record.values == {"y": -1}


def test_a_worker_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [task] = tasks_of([Square(3.0)], Store.opened(tmp_path)).values()
    monkeypatch.setattr(store, "version", lambda: "0.1.0+000000000000")
    with pytest.raises(InputError, match="version"):
        work(task)


def test_the_version_tells_sources_apart(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    one, two = tmp_path / "one.py", tmp_path / "inner" / "two.py"
    found = []
    for first, second in (("a", "b"), ("a", "c"), ("ab", ""), ("", "ab")):
        one.write_text(first)
        two.write_text(second)
        found.append(store.digest_of_sources(tmp_path))
    two.rename(tmp_path / "two.py")
    found.append(store.digest_of_sources(tmp_path))
    assert len(set(found)) == 5
    (tmp_path / "notes.txt").write_text("no source")
    assert store.digest_of_sources(tmp_path) == found[-1]
    number, _, digest = store.identity(Square(1.0))["version"].partition("+")
    assert exhume.__version__.startswith(number) and re.fullmatch("[0-9a-f]{12}", digest)
    assert digest == store.digest_of_sources(Path(exhume.__file__).parent)


def test_cells_of_other_sources_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, kept = Square(1.0), Store.opened(tmp_path)
    kept.write(address_of(cell), outcome(cell, {"y": 1}, None, 1.0, None))
    assert sweep._earlier(tmp_path, [address_of(cell)], False)
    monkeypatch.setattr(store, "version", lambda: "0.1.0+000000000000")
    assert not sweep._earlier(tmp_path, [address_of(cell)], False)


def test_the_address_is_the_content() -> None:
    cell = Square(1.5)
    assert address_of(cell) == address_of(Square(x=1.5, power=2, log=""))
    others = [Square(1.5, 3), Square(1.5000000000000002), Slow(1, ""), Checked(1, "")]
    assert len({address_of(other) for other in [cell, *others]}) == 5


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"kind": "sw',
        b"[1]",
        b"{}",
        json.dumps(outcome(Square(2.0), {"y": 4}, None, 0.0, None)).encode(),
        json.dumps(outcome(Square(1.0), None, None, 0.0, None)).encode(),
        json.dumps({**outcome(Square(1.0), {}, None, 0.0, None), "seconds": "long"}).encode(),
        json.dumps(outcome(Square(float("nan")), {}, None, 0.0, None)).encode(),
        json.dumps(outcome(Square(1.0, log="\udce9"), {}, None, 0.0, None)).encode(),
    ],
)
def test_a_damaged_file_is_named_before_any_work(tmp_path: Path, content: bytes) -> None:
    Store.opened(tmp_path)
    path = tmp_path / "cells" / f"{address_of(Square(1.0))}.json"
    path.write_bytes(content)
    shown: list[Record] = []
    with pytest.raises(InputError, match=f"{path}.*damaged.*remove it"):
        sweep.run([Square(0.0), Square(1.0)], folder=tmp_path, show=shown.append)
    assert not shown and path.read_bytes() == content
    assert len(list((tmp_path / "cells").iterdir())) == 1


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(InputError, match=r"sweep\.json"):
        sweep.run([Square(1.0)], folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file"):
        sweep.run([Square(1.0)], folder=tmp_path / "file")


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
        (GOOD, {"engine": "slurm"}, "'slurm'.*loky, dask, ray"),
        (GOOD, {"workers": 0}, "workers 0"),
        (GOOD, {"workers": 1.5}, "workers 1.5: expected a whole number"),
        (GOOD, {"workers": True}, "workers True"),
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


def test_cells_check_themselves_before_the_first_runs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(InputError, match="x -1: must not be negative"):
        sweep.run(Grid(Checked, {"x": [1, 2, -1], "log": str(log)}), folder=tmp_path / "sweep")
    assert not log.exists()


# The rest.


def test_the_length_of_a_grid_is_the_number_of_its_cells() -> None:
    grid = Grid(Square, {"x": (1.0, 2.0), "power": range(3), "log": "value"})
    cells = list(grid)
    assert len(grid) == len(cells) == 6
    assert cells[:3] == [Square(1.0, power, "value") for power in range(3)]


def test_cells_take_turns_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    chosen = [worker._chosen("cuda", number) for number in range(4)]
    assert chosen == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert worker._chosen("cuda:1", 2) == "cuda:1"
    assert worker._chosen("cpu", 2) == "cpu"
    for device, most in (("cuda", 3), ("cuda:1", 1)):
        with engines.loky(None, None, device) as engine:
            assert engine.workers == most


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


def test_a_cell_says_where_and_when_it_was_made() -> None:
    finished = worker.attempt(Square(1.0), 0, "cpu")
    record = Record(Square(1.0), finished["values"], None, 0.1, finished["made"])
    assert record.made["torch"] == torch.__version__
    assert sweep.made([record, record], "hardware").endswith(" cores")
    other = replace(record, made={"hardware": "abacus, 1 cores"})
    assert sweep.made([record, other], "hardware").startswith("abacus, 1 cores, ")
    assert sweep.made([other], "date") == ""


def test_the_package_hands_out_the_sweep_when_it_is_asked_for() -> None:
    asked = "import sys, exhume; assert 'joblib' not in sys.modules; exhume.sweep.run"
    subprocess.run([sys.executable, "-c", asked], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        exhume.nothing  # noqa: B018


@dataclass(frozen=True)
class Ended:
    module: str

    def run(self, device: str) -> dict[str, Any]:
        exec("raise SystemExit(1)", {"__name__": self.module})
        return {}


def test_a_worker_that_ray_ends_records_nothing(tmp_path: Path) -> None:
    store = Store.opened(tmp_path)
    own, other = Ended("cells"), Ended("ray._private.worker")
    with pytest.raises(SystemExit):
        work(Task(other, address_of(other), 0, "cpu", store))
    assert store.read(address_of(other)) is None
    assert work(Task(own, address_of(own), 0, "cpu", store))[1]["error"] == "SystemExit: 1"
