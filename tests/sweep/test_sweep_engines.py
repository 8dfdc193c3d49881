"""One grid on loky, on a real Dask cluster and on a real Ray: the same table, and no cell lost."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exhume import sweep
from exhume.errors import InputError
from exhume.sweep import engines
from exhume.sweep.store import address_of
from sweep_cells import FAILURES, Fails, Gated, Killer, Neighbour, Square, note, noted

HERE = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
TABLES: dict[str, bytes] = {}
"""What each engine gave, for the others to be compared with."""

# A token that only these tests know. Ray reads this when it is imported, in whichever test that is.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

RAY = """
import ray, sys
found = ray.init(
    num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=sys.argv[1]
)
print(found.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""

DRIVER = """
import signal, sys
from pathlib import Path
from typing import Any
from exhume import sweep
from sweep_cells import Gated
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
folder, log, engine, address = sys.argv[1:]
grid = sweep.Grid(Gated, {"x": range(5), "log": log})
try:
    sweep.run(grid, engine, Path(folder), address or None, workers=1)
except KeyboardInterrupt:
    sys.exit(77)
"""


def start(*command: str, **options: Any) -> "subprocess.Popen[str]":
    """A process that can import the cells."""
    environment = {**os.environ, "PYTHONPATH": HERE}
    return subprocess.Popen([sys.executable, *command], env=environment, text=True, **options)


def wait_until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 300  # far more than it takes, for a busy machine
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def alive(process: str) -> bool:
    """Whether a process runs, by its id; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="module")
def dask_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler and two workers, which import the cells of the tests."""
    pytest.importorskip("distributed", reason="the extra dask is not installed")
    folder = tmp_path_factory.mktemp("dask")
    file = folder / "scheduler.json"
    options = ["--scheduler-file", str(file), "--no-dashboard", "--host", "127.0.0.1"]
    own = {
        "dask_scheduler": ["--port", "0"],
        "dask_worker": ["--nworkers", "2", "--nthreads", "1", "--local-directory", str(folder)],
    }
    with open(folder / "log", "w") as log:
        processes = [
            start("-m", f"distributed.cli.{name}", *options, *more, stdout=log, stderr=log)
            for name, more in own.items()
        ]
    try:
        wait_until(file.exists, "no scheduler")
        yield json.loads(file.read_text())["address"]
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A cluster of two CPUs with little memory."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets allow no long path
    pipe = subprocess.PIPE
    with start("-c", RAY, folder, stdin=pipe, stdout=pipe) as cluster:
        assert cluster.stdout is not None
        yield cluster.stdout.readline().strip()
        cluster.communicate("")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["loky", "dask", "ray"])
def cluster(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    """An engine, and the address of its cluster."""
    engine = str(request.param)
    return engine, None if engine == "loky" else request.getfixturevalue(f"{engine}_address")


def test_a_killed_worker_changes_nothing_in_the_table(
    cluster: tuple[str, str | None], tmp_path: Path
) -> None:
    (engine, address), folder, log = cluster, tmp_path / "sweep", str(tmp_path / "log")
    squares = [Square(float(x), power, log) for x in range(3) for power in (2, 3)]
    cells = [Neighbour(log), Killer(log), *squares, Fails("nothing"), *map(Fails, FAILURES)]
    seen: list[sweep.Record] = []
    records = sweep.run(cells, engine, folder, address, show=seen.append, workers=2)
    assert [record.cell for record in records] == cells
    assert [record.error for record in records] == [None] * 9 + list(FAILURES)
    assert [row["y"] for row in sweep.table(records[2:8])] == [0, 0, 1, 1, 4, 8]
    assert {row["threads"] for row in sweep.table(records[2:8])} == {1}
    assert sorted(map(repr, seen)) == sorted(map(repr, records))
    assert noted(log, "killer") == ["starts", "starts"]
    expected = ["neighbour", "killer", *(str(cell.x) for cell in squares)]
    assert sorted(noted(log, "end")) == sorted(expected)
    sweep.write_csv(tmp_path / "table.csv", records)
    TABLES[engine] = (tmp_path / "table.csv").read_bytes().replace(log.encode(), b"")
    assert len(set(TABLES.values())) == 1

    files = list((folder / "cells").iterdir())
    assert {path.name for path in files} == {f"{address_of(cell)}.json" for cell in cells}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == (folder / "cells").stat().st_mode & 0o777 == 0o700
    # Every engine finds what any engine has finished.
    assert sweep.run(cells[::-1], "loky", folder) == records[::-1]
    assert engine != "ray" or not sys.modules["ray"].is_initialized()


@pytest.mark.parametrize(
    ("cluster", "signals"),
    [("loky", (signal.SIGKILL, signal.SIGINT)), ("ray", (signal.SIGINT,))],
    indirect=["cluster"],
)
def test_ended_drivers_lose_nothing_and_the_next_resumes(
    cluster: tuple[str, str | None], signals: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    (engine, address), folder, log = cluster, tmp_path / "sweep", tmp_path / "log"
    arguments = str(folder), str(log), engine, address or ""
    for count, ended in enumerate(signals, 4):
        with start("-W", "error", "-c", DRIVER, *arguments, start_new_session=True) as driver:
            wait_until(lambda count=count: len(noted(log, "start")) == count, "cells do not start")
            with pytest.raises(InputError, match="another sweep is running in this folder"):
                sweep.run([Square(1.0)], folder=folder)
            if engine == "loky" and ended == signal.SIGINT:
                os.killpg(driver.pid, ended)  # as a terminal does: to the workers, too
            else:
                driver.send_signal(ended)
            assert driver.wait(300) == (77 if ended == signal.SIGINT else -signal.SIGKILL)
        if engine == "loky":
            workers = set(noted(log, "process"))
            wait_until(lambda workers=workers: not any(map(alive, workers)), "a worker lives on")
        assert len(list((folder / "cells").iterdir())) == 3
    note(log, "go on")
    cells = [Gated(x, str(log)) for x in range(5)]
    records = sweep.run(cells, engine, folder, address, workers=1)
    assert sweep.table(records) == [{"x": x, "log": str(log), "y": x + 0.5} for x in range(5)]
    assert noted(log, "start") == ["0", "1", "2", *"3" * len(signals), "3", "4"]


# What is refused, before any work.


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_an_address_where_no_cluster_is(
    engine: str, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    monkeypatch.setattr(engines, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused = {
            nowhere: "nothing listens",
            f"tcp://{nowhere}": "nothing listens",
            "no.such.host.invalid:99": "nothing listens",
            "": "address",
            "127.0.0.1:99999": "address",
            "a b:c": "address",
            "tcp://:80": "address",
            f"127.0.0.1:{other.getsockname()[1]}": "no cluster answers there",
        }
        for address, words in refused.items():
            with pytest.raises(InputError, match=words):
                sweep.run([Square(1.0)], engine, tmp_path / "sweep", address)
    assert not (tmp_path / "sweep").exists()


def test_a_ray_cluster_that_is_gone(
    nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_an_engine_that_is_not_installed(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda module: None)
    with pytest.raises(InputError, match=rf"pip install 'exhume\[{engine}\]'"):
        sweep.run([Square(1.0)], engine, address="127.0.0.1:1")
