"""One grid on loky, on a real Dask cluster and on a real Ray: the same table, and no cell lost."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import sweep_cells
from exhume import sweep
from exhume.errors import InputError
from exhume.sweep import engines
from exhume.sweep.store import address_of
from sweep_cells import FAILURES, Fails, Gated, Killer, Neighbour, Square, in_threads, note, noted

Patch = pytest.MonkeyPatch

HERE = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
TABLES: dict[str, bytes] = {}  # what each engine gave, for the others to be compared with

# A token that only these tests know. Ray reads this when it is imported, in whichever test that is.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (15, its default, starves on a busy machine)

RAY = """
import ray, sys
found = ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=sys.argv[1]
)
print(found.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""

DRIVER = """
import sys, exhume
from pathlib import Path
assert "joblib" not in sys.modules  # the sweep comes when it is asked for
from sweep_cells import Gated
folder, log = sys.argv[1:]
exhume.sweep.run([Gated(x, log) for x in range(5)], folder=Path(folder), workers=1)
"""


def start(*command: str, **options: Any) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": HERE}
    return subprocess.Popen([sys.executable, *command], env=environment, text=True, **options)


def alive(process: str) -> bool:
    """Whether a process runs, by its id; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


def all_gone(log: Path) -> None:
    """Wait until no process is left that has run a gated cell."""
    workers = noted(log, "process")
    assert sweep_cells.wait_until(lambda: not any(map(alive, workers))), "a worker lives on"


def finished(folder: Path) -> set[str]:
    return {path.stem for path in (folder / "cells").glob("*.json")}


@pytest.fixture
def ctrl_c() -> Iterator[Callable[..., object]]:
    """Presses it once something is true; some processes in the same terminal hear it, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has none

    def press(true: Callable[[], bool], others: Callable[[], list[str]]) -> None:
        assert sweep_cells.wait_until(true), "cells do not start"
        for process in [*others(), os.getpid()]:
            os.kill(int(process), signal.SIGINT)

    with ThreadPoolExecutor(1) as fingers:
        yield partial(fingers.submit, press)
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def dask_address() -> Iterator[str]:
    """A scheduler, and two workers in processes of their own."""
    distributed = pytest.importorskip("distributed", reason="the extra dask is not installed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    place = {"prefix": "ray-", "dir": "/tmp"}  # its sockets allow no long path
    with (
        tempfile.TemporaryDirectory(**place, ignore_cleanup_errors=True) as folder,
        start("-c", RAY, folder, **pipes) as cluster,
    ):
        yield cluster.stdout.readline().strip()
        cluster.communicate("")


@pytest.mark.parametrize("engine", ["loky", "dask", "ray"])
def test_a_killed_worker_and_ctrl_c_change_nothing_in_the_table(
    engine: str, ctrl_c: Any, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: Patch
) -> None:
    address = None if engine == "loky" else request.getfixturevalue(f"{engine}_address")
    folder, log = tmp_path / "sweep", tmp_path / "log"
    squares = [Square(float(x), power, str(log)) for x in range(3) for power in (2, 3)]
    both = [Neighbour(str(log)), Killer(str(log))]
    done = [*both, *squares, Fails("nothing"), *map(Fails, FAILURES)]
    cells, seen = [*done, Gated(3, str(log))], list[sweep.Record]()
    workers = partial(noted, log, "process")
    terminal = workers if engine == "loky" else list
    ctrl_c(lambda: bool(workers()) and len(seen) == len(done), terminal)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(cells, engine, folder, address, show=seen.append, workers=2)
    if engine != "dask":  # whose workers are the cluster's own
        all_gone(log)
    assert engine != "ray" or not sys.modules["ray"].is_initialized()
    assert finished(folder) == {address_of(cell) for cell in done}
    assert noted(log, "killer") == ["starts", "starts"]
    expected = ["neighbour", "killer", *(str(cell.x) for cell in squares)]
    assert sorted(noted(log, "end")) == sorted(expected)

    # Every engine finds what any engine has finished.
    note(log, "go on")
    monkeypatch.setitem(engines.ENGINES, "loky", lambda *options: in_threads())
    records = sweep.run(cells, folder=folder)
    assert [record.cell for record in records] == cells
    assert [record.error for record in records] == [None] * 9 + [*FAILURES, None]
    assert [row["y"] for row in sweep.table(records[2:8])] == [0, 0, 1, 1, 4, 8]
    assert {row["threads"] for row in sweep.table(records[2:8])} == {1}
    assert sorted(map(repr, seen)) == sorted(map(repr, records[:-1]))
    assert noted(log, "start").count("3") == 2
    sweep.write_csv(tmp_path / "table.csv", records)
    TABLES[engine] = (tmp_path / "table.csv").read_bytes().replace(str(log).encode(), b"")
    assert len(set(TABLES.values())) == 1
    files = list((folder / "cells").iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == (folder / "cells").stat().st_mode & 0o777 == 0o700


def test_a_killed_driver_loses_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "log"
    with start("-W", "error", "-c", DRIVER, str(folder), str(log)) as driver:
        assert sweep_cells.wait_until(lambda: len(noted(log, "start")) == 4), "cells do not start"
        try:
            with pytest.raises(InputError, match="is at work here"):
                sweep.run([Square(1.0)], folder=folder)
        finally:  # or it waits for ever
            driver.kill()
    all_gone(log)
    assert len(finished(folder)) == 3
    note(log, "go on")
    monkeypatch.setitem(engines.ENGINES, "loky", lambda *options: in_threads(workers=1))
    records = sweep.run([Gated(x, str(log)) for x in range(5)], folder=folder)
    assert sweep.table(records) == [{"x": x, "log": str(log), "y": x + 0.5} for x in range(5)]
    assert noted(log, "start") == ["0", "1", "2", "3", "3", "4"]


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@contextmanager
def one_byte() -> Iterator[str]:
    """The address of a server that says one byte to everybody, and then nothing."""
    heard: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):  # closed, at the end
            while True:
                heard.append(server.accept()[0])
                heard[-1].sendall(b"\x08")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in heard:
        connection.close()


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_an_engine_that_is_not_installed_or_not_there(
    engine: str, nowhere: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as without, pytest.raises(InputError, match=f"{engine}\\]'"):
        without.setattr(engines, "find_spec", lambda module: None)
        sweep.run([Square(1.0)], engine, address="127.0.0.1:1")
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    monkeypatch.setattr(engines, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other, one_byte() as curt:
        refused = {
            curt: "no cluster answers there",  # once the clients waited for minutes
            **dict.fromkeys((nowhere, f"tcp://{nowhere}", "none.invalid:99"), "nothing listens"),
            **dict.fromkeys(("", "127.0.0.1:99999", "a b:c", "tcp://:80"), "address"),
            f"127.0.0.1:{other.getsockname()[1]}": "no cluster answers there",
        }
        for address, words in refused.items():
            with pytest.raises(InputError, match=words):
                sweep.run([Square(1.0)], engine, tmp_path / "sweep", address)
    assert not (tmp_path / "sweep").exists()


def test_a_ray_cluster_that_is_gone(nowhere: str, tmp_path: Path, monkeypatch: Patch) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(nowhere)
    with pytest.raises(InputError, match=f"{nowhere}.*nothing listens"):
        sweep.run([Square(1.0)], "ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InputError, match=r"127\.0\.0\.1:1'.*nothing listens"):
        sweep.run([Square(1.0)], "ray")


def test_a_dask_address_must_be_given_and_if_encrypted_have_certificates(tmp_path: Path) -> None:
    dask = pytest.importorskip("distributed") and pytest.importorskip("dask")
    with pytest.raises(InputError, match="needs the address of a scheduler"):
        sweep.run([Square(1.0)], "dask")
    missing = dict.fromkeys(("ca-file", "client.cert"), str(tmp_path / "none.pem"))
    wrong = {f"distributed.comm.tls.{word}": path for word, path in missing.items()}
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        for scheme, settings, words in (
            ("tls", {}, r"certificates.*distributed\.comm\.tls"),
            ("wss", {}, r"certificates.*distributed\.comm\.tls"),
            ("wss", wrong, r"certificates.*\(.*Error"),
        ):
            with dask.config.set(settings), pytest.raises(InputError, match=words):
                sweep.run([Square(1.0)], "dask", address=f"{scheme}://{place}")
