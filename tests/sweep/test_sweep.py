"""Sweeps without processes: grids, addresses, files, failures, refusals."""

import io
import json
import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from joblib.externals.loky.process_executor import TerminatedWorkerError
from rich.console import Console

import exhume
from exhume import sweep
from exhume.errors import InputError
from exhume.sweep import Grid, Record, driver, engines, store
from exhume.sweep.engines import Executor, Task, attempt, work
from exhume.sweep.store import address_of
from sweep_cells import FAILURES, KEPT, Fails, Square, in_threads, noted

Patch = pytest.MonkeyPatch


def keep(folder: Path, *records: Record) -> None:
    with store.held(folder):
        for record in records:
            store.write(folder, address_of(record.cell), record)


@pytest.mark.parametrize("recorded", [*FAILURES, "nothing"])
def test_whatever_a_cell_does_is_recorded(recorded: str, tmp_path: Path) -> None:
    cell = Fails(recorded)
    record = attempt(cell, 0, "cpu")
    expected = (None, recorded) if recorded in FAILURES else (KEPT, None)
    assert (record.values, record.error) == expected
    keep(tmp_path, record)
    assert store.read(tmp_path, address_of(cell), cell) == record
    sweep.write_csv(tmp_path / "table.csv", [record])


def test_that_ray_ends_a_worker_is_no_error_of_the_cell() -> None:
    def ended_in(module: str) -> Any:
        return SimpleNamespace(run=lambda _: exec("raise SystemExit(1)", {"__name__": module}))

    with pytest.raises(SystemExit):
        attempt(ended_in("ray._private.worker"), 0, "cpu")
    assert attempt(ended_in("cells"), 0, "cpu").error == "SystemExit: 1"


def test_cells_take_turns_on_the_gpus(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(engines, "hardware", str)

    def chosen(device: str, number: int) -> Any:
        return (attempt(Square(1.0), number, device).values or {})["device"]

    assert [chosen("cuda", number)[-1] for number in range(4)] == ["0", "1", "2", "0"]
    assert (chosen("cuda:1", 2), chosen("cpu", 2)) == ("cuda:1", "cpu")
    for device, most in (("cuda", 3), ("cuda:1", 1)):
        with engines.loky(None, None, device, 9) as executor:
            assert executor.workers == most


def test_a_cell_runs_on_one_core_and_says_where_and_when_it_was_made() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    record = attempt(Square(1.0), 0, "cpu")
    torch.set_num_threads(before)
    assert record.values is not None and record.values["threads"] == 1
    assert record.made["torch"] == torch.__version__
    assert sweep.made([record, record], "hardware").endswith(" cores")
    other = replace(record, made={"hardware": "abacus, 1 cores"})
    assert sweep.made([record, other], "hardware").startswith("abacus, 1 cores, ")
    assert sweep.made([other], "date") == ""


def tasks_of(count: int) -> list[Task]:
    cells = [Square(float(x)) for x in range(count)]
    return [Task(cell, address_of(cell), number, "cpu") for number, cell in enumerate(cells)]


def test_only_cells_that_die_alone_are_blamed() -> None:
    """As in a loky pool, all that run beside a bad cell die with it."""
    tasks = tasks_of(12)
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
        found = dict(driver._finish(tasks, executor, None))
    assert {place for place, record in found.items() if record.error} == bad
    assert set(found) == {task.address for task in tasks}


def test_a_cluster_gives_a_cell_back_and_it_is_tried_again(tmp_path: Path) -> None:
    calls: list[float] = []

    def call(task: Task) -> Record | None:
        calls.append(task.cell.x)
        if task.cell.x == 1 or (task.cell.x == 2 and calls.count(2.0) < 3):
            raise EOFError
        return work(task)

    tasks = tasks_of(4)
    with store.held(tmp_path), in_threads(call, deaths=(EOFError,)) as executor:
        found = dict(driver._finish(tasks, executor, tmp_path))
    assert [record.cell for record in found.values() if record.error] == [Square(1.0)]
    assert calls.count(1.0) == calls.count(2.0) == 3
    for task in tasks:
        assert store.read(tmp_path, task.address, task.cell) == found[task.address]


def test_workers_that_cannot_run_cells_are_an_input_error(monkeypatch: Patch) -> None:
    [task], none = tasks_of(1), Mock(side_effect=ModuleNotFoundError("No module named 'exhume'"))
    with in_threads(none) as executor, pytest.raises(InputError, match="No module named 'exhume'"):
        list(driver._finish([task], executor, None))
    other = replace(task, address=address_of(Square(2.0)))  # as other code would have it
    with in_threads() as executor, pytest.raises(InputError, match="another version"):
        list(driver._finish([other], executor, None))
    dead = Mock()
    dead.return_value.submit.side_effect = TerminatedWorkerError
    monkeypatch.setattr(engines, "ProcessPoolExecutor", dead)
    with pytest.raises(InputError, match="workers die before they run a cell"):
        sweep.run([Square(1.0), Square(2.0)], workers=2)
    assert [start.args for start in dead.call_args_list] == [(2,)] * 3


def test_an_error_in_show_loses_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    show = Mock(side_effect=RuntimeError("the console is gone"))
    monkeypatch.setitem(engines.ENGINES, "loky", lambda *options: in_threads())
    log = tmp_path / "log"
    grid = Grid(Square, {"x": [float(x) for x in range(6)], "log": str(log)})
    with pytest.raises(RuntimeError, match="the console is gone"):
        sweep.run(grid, folder=tmp_path / "sweep", show=show)
    assert len(noted(log, "end")) < 6
    finished = {path.stem for path in (tmp_path / "sweep" / "cells").iterdir()}
    assert finished and len(sweep.run(grid, folder=tmp_path / "sweep")) == 6
    ends = noted(log, "end")
    assert all(ends.count(str(cell.x)) == 1 for cell in grid if address_of(cell) in finished)


def test_a_failure_is_kept_unless_it_is_to_be_retried(tmp_path: Path, monkeypatch: Patch) -> None:
    log, folder = tmp_path / "log", tmp_path / "sweep"
    cells = [Square(x, log=str(log)) for x in (1.0, 2.0, 3.0)]
    keep(folder, Record(cells[0], None, "OSError: no", 1.0), Record(cells[1], {"y": -1}, None, 1.0))
    kept = sweep.run(cells[:2], folder=folder)
    assert [record.error for record in kept] == ["OSError: no", None]
    assert not log.exists()

    def late(*options: Any) -> AbstractContextManager[Executor]:
        """By the time that this engine is open, another driver has finished the third cell."""
        keep(folder, Record(cells[2], {"y": -2}, None, 1.0))
        return in_threads()

    monkeypatch.setitem(engines.ENGINES, "loky", late)
    again = sweep.run(cells, folder=folder, retry=True)
    assert [row["y"] for row in sweep.table(again)] == [1.0, -1, -2]
    assert noted(log, "end") == ["1.0"]
    assert sweep.run(cells, folder=folder) == again


def test_the_address_is_the_content() -> None:
    assert address_of(Square(1.5)) == address_of(Square(x=1.5, power=2, log=""))
    cells = [Square(1.5), Square(1.5, 3), Square(1.5000000000000002), Fails("")]
    assert len({address_of(cell) for cell in cells}) == 4
    assert exhume.__version__.startswith(store.identity(cells[0])["version"].partition("+")[0])


def test_code_that_a_cell_imports_is_in_its_address(tmp_path: Path) -> None:
    module, copied = "exhume.methods", tmp_path / "exhume"
    shutil.copytree(store.ROOT, copied, ignore=shutil.ignore_patterns("*.pyc"))
    before = store.closure(module, copied)
    for name, old, new, counts in (
        ("methods/iurada2025.py", "", "# A comment.\n", False),
        ("report/__init__.py", "", '"""Other."""\n', False),
        ("solvers/levenberg_marquardt.py", '"""', '"""So: ', False),
        ("sweep/driver.py", "", "X = 1\n", False),  # which a method cannot import
        ("__init__.py", "", "X = 1\n", False),
        ("methods/iurada2025.py", "", "X = 1\n", True),
        ("solvers/levenberg_marquardt.py", "", "X = 1\n", True),
    ):
        text = (copied / name).read_text()
        (copied / name).write_text(text.replace(old, new, 1))
        assert (store.closure(module, copied) != before) == counts, name
        (copied / name).write_text(text)


def test_imports_are_followed_wherever_they_stand(tmp_path: Path) -> None:
    late = "def late():\n    from exhume.inner import module, name\n    import torch"
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from exhume import unused"
    texts = {
        "__init__": "from exhume import unused",
        "start": f"import exhume.plain\n{typing}\n{late}",
        "plain": "from . import sibling",
        "sibling": "import exhume.start",
        "inner/__init__": "from .other import *",
        **dict.fromkeys(("inner/module", "inner/other", "unused"), ""),
    }
    (tmp_path / "inner").mkdir()
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    names = ("inner", "inner.module", "inner.other", "plain", "sibling", "start")
    assert list(store.closure("exhume.start", tmp_path)) == [f"exhume.{name}" for name in names]
    # Nobody can tell what a notebook imports, and a cell's own module counts, too.
    assert len(store.closure("of a notebook", tmp_path)) == len(texts)
    assert "sweep_cells" in store.closure("sweep_cells")


CHANGES = {"values": None, "error": "also", "seconds": "long", "version": "0.1.0+000000000000"}
FIELDS = ({"x": 2.0}, {"x": float("nan")}, {"log": "\udce9"})
DAMAGED = [
    *(b"", b'{"kind": "sw', b"[1]", b"{}"),
    *({word: bad} for word, bad in CHANGES.items()),
    *({"fields": {"x": 1.0, "power": 2, "log": ""} | field} for field in FIELDS),
]


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_file_is_named_before_any_work(tmp_path: Path, change: Any) -> None:
    cell, shown = Square(1.0), list[Record]()
    path = tmp_path / "cells" / f"{address_of(cell)}.json"
    keep(tmp_path, Record(cell, {}, None, 0.0))
    whole = json.loads(path.read_text())
    content = change if isinstance(change, bytes) else json.dumps(whole | change).encode()
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path}.*damaged.*remove it"):
        sweep.run([Square(0.0), cell], folder=tmp_path, show=shown.append)
    assert not shown and path.read_bytes() == content
    assert len(list((tmp_path / "cells").iterdir())) == 1


def test_a_folder_of_something_else_or_of_another_driver_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("[]")
    (tmp_path / "file").write_text("")
    for folder, words in ((tmp_path, r"sweep\.json"), (tmp_path / "file", "file")):
        with pytest.raises(InputError, match=words):
            sweep.run([Square(1.0)], folder=folder)
    own = tmp_path / "own"
    with store.held(own), pytest.raises(InputError, match=r"process .* is at work here"):
        keep(own)
    keep(own)  # as nobody holds it any more


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    class Local(Square):
        pass

    good, folder = Grid(Square, {"x": 1.0}), tmp_path / "sweep"
    for grid, options, words in (
        ([], {}, "empty"),
        (Grid(Square, {"x": []}), {}, "axis 'x' is empty"),
        (Grid(Square, {"x": range(10**9)}), {}, "1,000,000,000 cells"),
        (Grid(Square, {"x": range(10**6), "power": range(10**6), "log": range(10**8)}), {}, "most"),
        (Grid(Square, {"x": 1.0, "exponent": 2}), {}, "no field 'exponent'.*x, power, log"),
        (Grid(Square, {"power": 2}), {}, "cannot be made"),
        (Grid(print, {}), {}, "dataclass"),
        ([Square(1.0), good], {}, "method run"),
        (["text"], {}, "method run"),
        (Grid(Square, {"x": float("nan")}), {}, "plain JSON"),
        (Grid(Square, {"x": torch.zeros(1)}), {}, "plain JSON"),
        (Grid(Square, {"x": 1.0, "log": "caf\udce9"}), {}, "plain JSON"),
        ([Local(1.0)], {}, "Local: .* must be importable.*at the top of a module"),
        (Grid(Square, {"x": [1.0, 2.0, 1.0]}), {}, "twice.*x=1.0"),
        (Grid(Square, {"x": [1.0, 2.0, -1.0]}), {}, "x -1.0: must not be negative"),
        (good, {"engine": "slurm"}, "loky, dask, ray.*'slurm'"),
        (good, {"workers": 1.5}, "workers: expected a whole number"),
        (good, {"device": "abacus"}, "device 'abacus'"),
        (good, {"address": "localhost:1"}, "takes no address"),
    ):
        with pytest.raises(InputError, match=words):
            sweep.run(grid, folder=folder, **options)
        assert not folder.exists()


def test_the_table_as_csv(tmp_path: Path) -> None:
    records = [
        Record(Fails("a"), {"y": 0.1, "pair": [1, 2]}, None, 5.0),
        Record(Fails("b"), None, 'ValueError: "no", never', 5.0),
        Record(Fails("c"), {"y": None, "z": True}, None, 5.0),
    ]
    sweep.write_csv(tmp_path / "table.csv", records)
    head, body = "recorded,y,pair,failure,z\n", 'a,0.1,"[1, 2]",,\nb,,,"ValueError: ""no"", never",'
    assert (tmp_path / "table.csv").read_text() == head + body + "\nc,,,,True\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_counts_cells_and_failures(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with sweep.progress(console, 3) as show:
        for error in (None, "ValueError: no"):
            show(Record(Square(0.0), None if error else {}, error, 0.1))
    text = console.file.getvalue()
    assert "2/3" in text and "1 failed" in text if terminal else not text.strip()
