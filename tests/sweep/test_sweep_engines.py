"""One grid on loky, on a real Dask cluster and on a real Ray: the same table, and no cell lost.

The clusters are processes of their own, as a user's are. A worker of each is ended with kill -9 in
the middle of the sweep.
"""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exhume import sweep
from exhume.errors import InputError
from exhume.sweep import engines
from sweep_cells import FAILURES, Fails, Killer, Neighbour, Square, noted, start_driver, wait_for

HERE = str(Path(__file__).parents[1])
TABLES: dict[str, list[dict[str, Any]]] = {}
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


@pytest.fixture(scope="module")
def dask_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A scheduler and two workers, which import the cells of the tests."""
    pytest.importorskip("distributed", reason="the extra dask is not installed")
    folder = tmp_path_factory.mktemp("dask")
    file, environment = folder / "scheduler.json", {**os.environ, "PYTHONPATH": HERE}
    options = ["--scheduler-file", str(file), "--no-dashboard", "--host", "127.0.0.1"]
    own = {
        "dask_scheduler": ["--port", "0"],
        "dask_worker": ["--nworkers", "2", "--nthreads", "1", "--local-directory", str(folder)],
    }
    with open(folder / "log", "w") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{name}", *options, *more],
                env=environment,
                stdout=log,
                stderr=log,
            )
            for name, more in own.items()
        ]
    try:
        end = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.05)
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
    command, pipe = [sys.executable, "-c", RAY, folder], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": HERE}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as cluster:
        assert cluster.stdout is not None
        yield cluster.stdout.readline().strip()
        cluster.communicate("")
    shutil.rmtree(folder, ignore_errors=True)


def run_and_check(engine: str, address: str | None, folder: Path) -> None:
    """The grid with a death in it: every cell ends once, and the table is that of the others."""
    log = str(folder / "log")
    cells = [
        Neighbour(log),
        Killer(log, times=1),
        *(Square(float(x), power, log) for x in range(3) for power in (2, 3)),
        *(Fails(x) for x in range(5)),
    ]
    seen: list[sweep.Record] = []
    records = sweep.run(cells, engine, folder / "sweep", address, show=seen.append, workers=2)
    table = [{**row, "log": ""} for row in sweep.table(records)]
    assert [record.error for record in records] == [None] * 9 + FAILURES
    assert len(seen) == len(cells) == len(list((folder / "sweep" / "cells").iterdir()))
    assert noted(log, "start").count("killer") == 2
    expected = ["neighbour", "killer", *(str(float(x)) for x in range(3) for _ in "23")]
    assert sorted(noted(log, "end")) == sorted(expected)
    TABLES[engine] = table
    assert all(other == table for other in TABLES.values())
    # Every engine finds what any engine has finished.
    assert sweep.run(cells, "loky", folder / "sweep") == records


def test_loky(tmp_path: Path) -> None:
    run_and_check("loky", None, tmp_path)


def test_dask(tmp_path: Path, dask_address: str) -> None:
    run_and_check("dask", dask_address, tmp_path)


def test_ray(tmp_path: Path, ray_address: str) -> None:
    run_and_check("ray", ray_address, tmp_path)
    import ray

    assert not ray.is_initialized()


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_an_interrupt_keeps_what_is_finished(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "log"
    with start_driver(folder, log, engine, request.getfixturevalue(f"{engine}_address")) as driver:
        wait_for(log, "end", 3)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(30) == 77
    assert 1 <= len(list((folder / "cells").glob("*.json"))) < 10


# What is refused, before any work.


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_an_address_where_nothing_listens(engine: str, nowhere: str, tmp_path: Path) -> None:
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    for address in (nowhere, f"tcp://{nowhere}", "no.such.host.invalid:99"):
        with pytest.raises(InputError, match="nothing listens"):
            sweep.run([Square(1.0)], engine, tmp_path / "sweep", address)
    for address in ("", "127.0.0.1:99999", "a b:c", "tcp://:80"):
        with pytest.raises(InputError, match="address"):
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


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_a_listener_that_is_no_cluster(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"dask": "distributed"}.get(engine, engine))
    monkeypatch.setattr(engines, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InputError, match="no cluster answers there"):
            sweep.run([Square(1.0)], engine, address=address)


def test_an_encrypted_dask_address_needs_certificates(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    import dask

    with socket.create_server(("127.0.0.1", 0)) as other:
        for scheme in ("tls", "wss"):
            address = f"{scheme}://127.0.0.1:{other.getsockname()[1]}"
            with pytest.raises(InputError, match=r"certificates.*distributed\.comm\.tls"):
                sweep.run([Square(1.0)], "dask", address=address)
        missing = dict.fromkeys(("ca-file", "client.cert"), str(tmp_path / "none.pem"))
        wrong = {f"distributed.comm.tls.{word}": path for word, path in missing.items()}
        with dask.config.set(wrong), pytest.raises(InputError, match=r"certificates.*\(.*Error"):
            sweep.run([Square(1.0)], "dask", address=address)


def test_dask_needs_an_address() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(InputError, match="needs the address of a scheduler"):
        sweep.run([Square(1.0)], "dask")


@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_an_engine_that_is_not_installed(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda module: None)
    with pytest.raises(InputError, match=rf"pip install 'exhume\[{engine}\]'"):
        sweep.run([Square(1.0)], engine, address="127.0.0.1:1")
