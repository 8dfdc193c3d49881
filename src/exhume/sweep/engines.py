"""Executors for the cells of a sweep: processes on this machine, or a Dask or Ray cluster.

Each engine is opened as a context, and gives an `Executor`: tasks go in one by one, and each gives
a future. Retries and files are the driver's business.
"""

import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import joblib
import torch
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import BrokenProcessPool, TerminatedWorkerError

from exhume.errors import InputError
from exhume.sweep.records import Record
from exhume.sweep.worker import Task, work

PATIENCE = 3.0
"""Seconds to wait for a cluster to answer, and three times as long for its workers. A cluster that
runs answers within a fraction of a second; without a limit its clients would wait for minutes."""

TRIES = 3
"""How often a cell is handed out if its worker dies each time. A worker may die by accident once,
and on this machine by another cell's fault twice; three times in a row is its own."""

THREADS = ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR")
"""Libraries that get one thread in each process: sums in another order are rounded otherwise."""


@dataclass(frozen=True)
class Executor:
    """An executor runs tasks on workers that are ready.

    Attributes:
        workers: the most cells at a time.
        submit: hands out a task; its future gives what `work` returns, or raises.
        deaths: what a future raises when the worker died.
        tries: how often a cell is handed out if its worker dies each time.
    """

    workers: int
    submit: Callable[[Task], Future[Record | None]]
    deaths: tuple[type[Exception], ...] = ()
    tries: int = TRIES


Opener = Callable[[str | None, int | None, str, int], AbstractContextManager[Executor]]
"""Opens an engine, given the address of a cluster, the most cells at a time, the device, and the
number of cells, beyond which no worker is of use."""


@contextmanager
def loky(address: str | None, workers: int | None, device: str, cells: int) -> Iterator[Executor]:
    """Open processes on this machine, one core each; with `cuda` one for each GPU."""
    if address is not None:
        raise InputError(
            f"address {address!r}: the engine loky runs on this machine and takes no address; "
            "choose the engine dask or ray."
        )
    most = joblib.cpu_count()
    if device.startswith("cuda"):
        most = torch.cuda.device_count() if device == "cuda" else 1
    pool = _Pool(min(workers or most, cells))
    with warnings.catch_warnings():
        # It is not worth a word when loky replaces a process that has grown.
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
        try:
            yield Executor(workers or most, pool.submit, (TerminatedWorkerError,))
        finally:
            pool.close()


class _Pool:
    """Processes that are started when a task comes, and again after the death of one ended all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: Any = None

    def submit(self, task: Task) -> Future[Record | None]:
        for _ in range(TRIES):
            try:
                if self._processes is None:
                    self._start()
                future: Future[Record | None] = self._processes.submit(work, task)
                return future
            except BrokenProcessPool:
                self.close()
        raise InputError(
            "workers die before they run a cell (out of memory?); try fewer workers. Finished "
            "cells are kept."
        )

    def _start(self) -> None:
        """Start all processes, and see that they live: a death from here on is due to a cell."""
        self._processes = ProcessPoolExecutor(
            self._size,
            initializer=_follow,
            initargs=(os.getpid(),),
            env={f"{library}_NUM_THREADS": "1" for library in THREADS},
        )
        for future in [self._processes.submit(os.getpid) for _ in range(self._size)]:
            future.result()

    def close(self) -> None:
        if self._processes is not None:
            self._processes.shutdown(wait=True, kill_workers=True)
            self._processes = None


def _follow(driver: int) -> None:
    """End this process when its driver was killed; not by Ctrl-C, which is for the driver.

    The pool itself would keep it, idle and with all its memory, for minutes. Ctrl-C in a terminal
    reaches this process too, and would look like an error of the cell.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def dask(address: str | None, workers: int | None, device: str, cells: int) -> Iterator[Executor]:
    """Open a Dask cluster that is running, by the address of its scheduler; all its threads.

    With `cuda` one cell a worker at a time, on a GPU that it sees.
    """
    _need("distributed", "dask")
    if address is None:
        raise InputError(
            "address: the engine dask needs the address of a scheduler, such as "
            "tcp://127.0.0.1:8786; `dask scheduler` prints it."
        )
    _probe(address, 8786)
    _check_certificates(address)
    from distributed import Client, KilledWorker

    try:
        client = Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(f"address {address!r}: is no Dask scheduler ({error}).") from error
    try:
        try:
            client.wait_for_workers(1, timeout=3 * PATIENCE)
        except TimeoutError as error:
            raise InputError(
                f"address {address!r}: the scheduler has no workers; start some, "
                f"`dask worker {address}`."
            ) from error
        threads = client.ncores()
        most = len(threads) if device.startswith("cuda") else sum(threads.values())
        # Not pure: Dask would hand out an earlier result for the same cell.
        futures = client.get_executor(pure=False)

        def submit(task: Task) -> Future[Record | None]:
            # As a function without arguments, into which Dask does not look.
            future: Future[Record | None] = futures.submit(partial(work, task))
            return future

        # Dask has tried several workers before it gives a cell up, together with cells that only
        # waited on the same ones: those are cleared by a second try.
        yield Executor(workers or most, submit, (KilledWorker,), tries=2)
    finally:
        client.close()


def _check_certificates(address: str) -> None:
    """Refuse an encrypted address without certificates, which the client fails on half-made."""
    if not address.startswith(("tls://", "wss://")):
        return
    from distributed.security import Security

    try:
        context, reason = Security().get_connection_args("client").get("ssl_context"), ""
    except (OSError, ValueError, TypeError) as error:
        context, reason = None, f" ({last_line(error)})"
    if context is None:
        raise InputError(
            f"address {address!r}: is encrypted, and Dask's configuration names no certificates "
            f"that can be used{reason}; set distributed.comm.tls there, or give a tcp:// address."
        )


@contextmanager
def ray(address: str | None, workers: int | None, device: str, cells: int) -> Iterator[Executor]:
    """Open a Ray cluster that is running, by default the one on this machine; all its CPUs.

    With `cuda` each cell gets a GPU of its own, and there are as many cells at a time.
    """
    _need("ray", "ray")
    import ray as cluster

    started = not cluster.is_initialized()
    if started:
        _join_ray(_ray_address(address))
    kind = "GPU" if device.startswith("cuda") else "CPU"
    remote = cluster.remote(num_cpus=1, num_gpus=int(kind == "GPU"), max_retries=0)(work)
    running: dict[Future[Record | None], Any] = {}

    def submit(task: Task) -> Future[Record | None]:
        reference = remote.remote(task)
        future: Future[Record | None] = reference.future()
        running[future] = reference
        future.add_done_callback(running.pop)
        return future

    errors = cluster.exceptions
    deaths = errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError
    try:
        most = int(cluster.cluster_resources().get(kind, 0))
        if most == 0:
            raise InputError(f"the Ray cluster has no {kind}; add a node with one to it.")
        yield Executor(workers or most, submit, deaths)
    finally:
        for reference in list(running.values()):  # after an interruption
            cluster.cancel(reference, force=True)
        if started:
            cluster.shutdown()


def _join_ray(address: str) -> None:
    """Become a driver of the cluster at an address."""
    import ray as cluster

    if address != "auto":
        _probe(address, 6379)
    try:
        cluster.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"address {address!r}: no Ray cluster can be used there "
            f"({last_line(error.__cause__ or error)}). Start one with `ray start --head`, or give "
            "the address of one."
        ) from error


def _ray_address(address: str | None) -> str:
    """Return where the cluster is: as given, as the environment says, as `ray start` left word."""
    if address not in (None, "auto"):
        return address
    told = os.environ.get("RAY_ADDRESS")
    left = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if not told and left.is_file():
        told = left.read_text().strip()
    return told or "auto"


def _need(module: str, extra: str) -> None:
    """Refuse an engine that is not installed."""
    if find_spec(module) is None:
        raise InputError(
            f"engine {extra!r}: is not installed; pip install 'exhume[{extra}]', here and on the "
            "cluster."
        )


def _probe(address: str, port: int) -> None:
    """Refuse an address where no cluster listens: clients would wait there for minutes.

    Args:
        address: host:port, with or without tcp:// or the like.
        port: where there is none in the address.
    """
    found = re.fullmatch(r"(?:(\w+)://)?(\[[^\]]+\]|[^:/\[\]\s]+)(?::(\d+))?/?", address)
    if found is None or int(found[3] or port) > 65535:
        raise InputError(f"address {address!r}: must be host:port.")
    place = found[2].strip("[]"), int(found[3] or port)
    try:
        with socket.create_connection(place, timeout=PATIENCE) as connection:
            # Schedulers of Dask and Ray speak first, except under encryption.
            greeting = found[1] not in (None, "tcp", "ray") or connection.recv(1)
    except TimeoutError:
        greeting = b""
    except OSError as error:
        raise InputError(
            f"address {address!r}: nothing listens there ({error}); start the cluster, or correct "
            "the address."
        ) from error
    if not greeting:
        raise InputError(f"address {address!r}: no cluster answers there; correct the address.")


def last_line(error: BaseException) -> str:
    """Return what an error says in the end: those of clusters quote whole tracebacks."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]


ENGINES: dict[str, Opener] = {"loky": loky, "dask": dask, "ray": ray}
