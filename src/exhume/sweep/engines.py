"""What runs the cells of a sweep: loky on this machine, or a Dask or Ray cluster.

joblib hands out the cells: to its pool of processes on this machine, and for a cluster to threads
that submit one cell each and wait for it there. joblib's own backends for the two clusters are
not used. Under the one for Dask a cell that keeps killing its worker is waited for without end;
the one for Ray gives nothing before the last cell is finished, deals cells out in turn instead of
to whoever is free, and goes on dealing to workers that are dead.
"""

import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import joblib
import torch
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from exhume.errors import InputError
from exhume.sweep.store import Outcome
from exhume.sweep.worker import Task, work

Result = tuple[str, Outcome | None]
"""The address of a cell and the finished cell; None if its worker died."""

PATIENCE = 3.0
"""Seconds to wait for a cluster to answer, and three times as long for its workers."""


@dataclass(frozen=True)
class Engine:
    """Workers that are ready.

    Attributes:
        workers: the most cells at a time.
        backend: what joblib.parallel_config is told.
        call: runs one task there, and waits for it.
        tries: how often a cell is handed out if its worker dies each time.
    """

    workers: int
    backend: dict[str, Any]
    call: Callable[[Task], Result] = work
    tries: int = 3

    def stream(self, tasks: Iterable[Task], limit: int) -> Generator[Result]:
        """Run tasks, and yield results as they arrive.

        Args:
            tasks: the tasks.
            limit: the most at a time.

        Raises:
            TerminatedWorkerError: on this machine a worker died, and the others were ended.
            InputError: the workers cannot run cells at all.
        """
        # With one job joblib would run cells in this process, and a crash would take it along.
        with joblib.parallel_config(n_jobs=max(2, limit), **self.backend), _quiet():
            pool = joblib.Parallel(
                batch_size=1, pre_dispatch=limit, return_as="generator_unordered"
            )
            try:
                with closing(pool(joblib.delayed(self.call)(task) for task in tasks)) as results:
                    yield from results
            except (InputError, TerminatedWorkerError):
                raise
            except Exception as error:
                raise InputError(
                    f"the workers cannot run cells ({_last_line(error)}). Is the cluster still "
                    "there, and can its workers import exhume and the class of the cells? Finished "
                    "cells are kept."
                ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without joblib's advice when a sweep is interrupted, or a worker replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
        warnings.filterwarnings("ignore", r"\d+ tasks (have been|which were still)", UserWarning)
        yield


@contextmanager
def loky(address: str | None, workers: int | None, device: str) -> Iterator[Engine]:
    """Processes on this machine, one core each; with `cuda` one for each GPU."""
    if address is not None:
        raise InputError(
            f"address {address!r}: the engine loky runs on this machine and takes no address; "
            "choose the engine dask or ray."
        )
    most = joblib.cpu_count()
    if device.startswith("cuda"):
        most = torch.cuda.device_count() if device == "cuda" else 1
    try:
        backend = {"backend": "loky", "inner_max_num_threads": 1}
        yield Engine(workers or most, backend, partial(_local, os.getpid()))
    finally:
        get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


_BUSY = threading.Lock()


def _local(driver: int, task: Task) -> Result:
    """Run a task in a process that the driver started, which the driver alone is to end."""
    _follow(driver)
    with _BUSY:
        return work(task)


@cache
def _follow(driver: int) -> None:
    """End this process when its driver was killed, after the cell at hand; not by Ctrl-C.

    The pool itself would keep it, idle and with all its memory, for minutes. Ctrl-C in a terminal
    reaches this process too, and would look like an error of the cell.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1.0)
        with _BUSY:
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def dask(address: str | None, workers: int | None, device: str) -> Iterator[Engine]:
    """A Dask cluster that is running, by the address of its scheduler; all its threads.

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

    def call(task: Task) -> Result:
        # A key of its own: Dask would hand out an earlier result for the same key.
        key = f"cell-{task.address[:12]}-{uuid4().hex}"
        future = client.submit(_Prepared(task), key=key)
        try:
            result: Result = future.result()
        except KilledWorker:
            return task.address, None
        return result

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
        # Dask has tried several workers before it gives a cell up, together with cells that only
        # waited on the same ones: those are cleared by a second try.
        yield Engine(workers or most, {"backend": "threading"}, call, tries=2)
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
        context, reason = None, f" ({_last_line(error)})"
    if context is None:
        raise InputError(
            f"address {address!r}: is encrypted, and Dask's configuration names no certificates "
            f"that can be used{reason}; set distributed.comm.tls there, or give a tcp:// address."
        )


@dataclass(frozen=True)
class _Prepared:
    """A task as a function without arguments, into which Dask does not look."""

    task: Task

    def __call__(self) -> Result:
        return work(self.task)


@contextmanager
def ray(address: str | None, workers: int | None, device: str) -> Iterator[Engine]:
    """A Ray cluster that is running, by default the one on this machine; all its CPUs.

    With `cuda` each cell gets a GPU of its own, and there are as many cells at a time.
    """
    _need("ray", "ray")
    import ray as cluster

    started = not cluster.is_initialized()
    if started:
        address = _ray_address(address)
        if address != "auto":
            _probe(address, 6379)
        try:
            cluster.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"address {address!r}: no Ray cluster can be used there "
                f"({_last_line(error.__cause__ or error)}). Start one with `ray start --head`, or "
                "give the address of one."
            ) from error
    gpu = device.startswith("cuda")
    remote = cluster.remote(num_cpus=1, num_gpus=int(gpu), max_retries=0)(work)
    running: dict[str, Any] = {}

    def call(task: Task) -> Result:
        running[task.address] = None
        try:
            running[task.address] = reference = remote.remote(task)
            result: Result = cluster.get(reference)
        except cluster.exceptions.RayTaskError as error:
            raise error.cause from None
        except _deaths(cluster):
            return task.address, None
        finally:
            del running[task.address]
        return result

    try:
        kind = "GPU" if gpu else "CPU"
        most = int(cluster.cluster_resources().get(kind, 0))
        if most == 0:
            raise InputError(f"the Ray cluster has no {kind}; add a node with one to it.")
        yield Engine(workers or most, {"backend": "threading"}, call)
    finally:
        # After an interruption threads still wait; to shut down below them would be a crash.
        end = time.monotonic() + PATIENCE
        while running and time.monotonic() < end:
            for reference in filter(None, list(running.values())):
                cluster.cancel(reference, force=True)
            time.sleep(0.05)
        if started:
            cluster.shutdown()


def _deaths(cluster: Any) -> tuple[type[Exception], ...]:
    """What Ray raises when a worker is gone, with its node or alone."""
    errors = cluster.exceptions
    return errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError


def _ray_address(address: str | None) -> str:
    """Where the cluster is: as given, as Ray's environment says, as `ray start` left word."""
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


def _last_line(error: BaseException) -> str:
    """What an error says in the end: those of clusters quote whole tracebacks."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]


Opener = Callable[[str | None, int | None, str], AbstractContextManager[Engine]]
ENGINES: dict[str, Opener] = {"loky": loky, "dask": dask, "ray": ray}
