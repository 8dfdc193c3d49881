"""Executors for the cells of a sweep: processes on this machine, or a Dask or Ray cluster.

Workers only return records; retries and files are the driver's business.
"""

import json
import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import joblib
import torch
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import BrokenProcessPool, TerminatedWorkerError

from exhume.device import hardware
from exhume.errors import InputError
from exhume.files import finite
from exhume.sweep.grid import Record
from exhume.sweep.store import address_of

# Seconds to wait for a cluster to answer, and three times as long for its workers: one that runs
# answers within a fraction of a second, and without a limit its clients would wait for minutes
PATIENCE = 3.0
DASK, RAY = 8786, 6379  # the ports of schedulers that do not say otherwise
# How often a cell is handed out if its worker dies each time. A worker may die by accident once,
# and on this machine by another cell's fault twice; three times in a row is its own.
TRIES = 3
# Libraries that get one thread in each process: sums in another order are rounded otherwise
THREADS = ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR")
# What UTF-8 cannot write, as in names of files that are no text: its escape is written instead
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Task:
    """A task is a cell on its way to a worker."""

    cell: Any
    address: str
    number: int  # its place in the grid, which chooses among several GPUs
    device: str  # cpu, cuda (any), or one device


@dataclass(frozen=True)
class Executor:
    """An executor runs tasks on workers that are ready."""

    workers: int  # the most cells at a time
    submit: Callable[[Task], Future[Record | None]]  # gives what `work` returns, or raises
    deaths: tuple[type[Exception], ...] = ()  # what a future raises when the worker died
    tries: int = TRIES  # how often a cell is handed out if its worker dies each time


def work(task: Task) -> Record | None:
    """Run the cell of a task; return None if this machine has other code for it than the driver.

    A class of the driver's own script comes with its code, and only the driver knows its address.
    """
    if type(task.cell).__module__ != "__main__" and address_of(task.cell) != task.address:
        return None
    return attempt(task.cell, task.number, task.device)


def attempt(cell: Any, number: int, device: str) -> Record:
    """Run a cell on one core, or on a GPU's share of them; what it raises is recorded too."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    torch.set_num_threads(1 if device == "cpu" else max(1, joblib.cpu_count() // max(1, gpus)))
    start = time.perf_counter()
    values, error = None, None
    try:
        values = cell.run(f"cuda:{number % gpus}" if device == "cuda" and gpus else device)
        if not isinstance(values, dict):
            raise TypeError(f"run() must return a dict, and returned {type(values).__name__}")
        text = json.dumps(finite(values), allow_nan=False, ensure_ascii=False)
        values = json.loads(SURROGATE.sub(lambda found: rf"\\u{ord(found[0]):x}", text))
    except BaseException as raised:  # Ctrl-C is for the driver: workers do not hear it
        if _ended_by_ray(raised):
            raise
        values, error = None, _described(raised)
    finally:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # the next cell may be another process's
    return Record(cell, values, error, time.perf_counter() - start, made_on(hardware(device)))


def made_on(hardware: str) -> dict[str, str]:
    """Return what `Record.made` says of a cell that ran now, on the hardware named."""
    date = datetime.now(UTC).date().isoformat()
    return {"hardware": hardware, "torch": torch.__version__, "date": date}


def _ended_by_ray(raised: BaseException) -> bool:
    """Tell whether Ray's handler of signals raised it, as it does when the driver was killed."""
    frames = traceback.walk_tb(raised.__traceback__)
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return not isinstance(raised, Exception) and any(m.partition(".")[0] == "ray" for m in modules)


def _described(raised: BaseException) -> str:
    """Return type and message of an error, even if it cannot say its message."""
    name = type(raised).__name__
    for words in (str, repr):
        with suppress(BaseException):  # the cell's own code again, as the error is
            message = words(raised)
            said = f"{name}: {message}" if message else name
            return said.encode(errors="backslashreplace").decode()
    return name


@contextmanager
def loky(address: str | None, workers: int | None, device: str, cells: int) -> Iterator[Executor]:
    """Open processes on this machine, one core each; with `cuda` one for each GPU."""
    if address is not None:
        raise InputError(f"address {address!r}: loky takes no address; choose dask or ray.")
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

    def submit(self, task: Task) -> Any:
        for _ in range(TRIES):
            try:
                if self._processes is None:
                    self._start()
                return self._processes.submit(work, task)
            except BrokenProcessPool:
                self.close()
        raise InputError("workers die before they run a cell (out of memory?); try fewer workers.")

    def _start(self) -> None:
        """Start all processes, and see that they live: a death from here on is due to a cell."""
        one = {f"{library}_NUM_THREADS": "1" for library in THREADS}
        self._processes = ProcessPoolExecutor(
            self._size, initializer=_follow, initargs=(os.getpid(),), env=one
        )
        for future in [self._processes.submit(os.getpid) for _ in range(self._size)]:
            future.result()

    def close(self) -> None:
        if self._processes is not None:
            self._processes.shutdown(wait=True, kill_workers=True)
            self._processes = None


def _follow(driver: int) -> None:
    """End this process when its driver was killed: the pool would keep it idle for minutes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the driver alone

    def watch() -> None:
        while os.getppid() == driver:
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def dask(address: str | None, workers: int | None, device: str, cells: int) -> Iterator[Executor]:
    """Open a Dask cluster that is running, all its threads; with `cuda` one cell a worker."""
    _need("distributed", "dask")
    if address is None:
        raise InputError("address: dask needs the address of a scheduler, such as host:8786.")
    _probe(address, DASK)
    if address.startswith(("tls://", "wss://")):
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
            start = f"start some, `dask worker {address}`."
            raise InputError(f"address {address!r}: has no workers; {start}") from error
        threads = client.ncores()
        most = len(threads) if device.startswith("cuda") else sum(threads.values())
        # Not pure: Dask would hand out an earlier result for the same cell.
        futures = client.get_executor(pure=False)

        def submit(task: Task) -> Any:
            return futures.submit(partial(work, task))  # no arguments, which Dask would look into

        # Dask has tried several workers before it gives a cell up, together with cells that only
        # waited on the same ones: those are cleared by a second try.
        yield Executor(workers or most, submit, (KilledWorker,), tries=2)
    finally:
        client.close()


def _check_certificates(address: str) -> None:
    """Refuse an encrypted address without certificates, which the client fails on half-made."""
    from distributed.security import Security

    try:
        context, reason = Security().get_connection_args("client").get("ssl_context"), ""
    except (OSError, ValueError, TypeError) as error:
        context, reason = None, f" ({last_line(error)})"
    if context is None:
        place = "in Dask's configuration, distributed.comm.tls, or give a tcp:// address."
        raise InputError(f"address {address!r}: needs certificates{reason}; name them {place}")


@contextmanager
def ray(address: str | None, workers: int | None, device: str, cells: int) -> Iterator[Executor]:
    """Open a Ray cluster that is running, all its CPUs; with `cuda` a GPU for each cell."""
    _need("ray", "ray")
    import ray as cluster

    started = not cluster.is_initialized()
    if started:
        _join_ray(address)
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


def _join_ray(address: str | None) -> None:
    """Join the cluster at an address, or where the environment or `ray start` say that it is."""
    import ray as cluster

    if address in (None, "auto"):
        left = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
        told = left.read_text().strip() if left.is_file() else ""
        address = os.environ.get("RAY_ADDRESS") or told or "auto"
    if address != "auto":
        _probe(address, RAY)
    try:
        cluster.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        why = f"({last_line(error.__cause__ or error)}); start one, `ray start --head`."
        raise InputError(f"address {address!r}: no Ray cluster can be used there {why}") from error


def _need(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise InputError(f"engine {extra!r}: pip install 'exhume[{extra}]', also on the cluster.")


def _probe(address: str, port: int) -> None:
    """Refuse an address host[:port] where no cluster listens: clients would wait for minutes."""
    found = re.fullmatch(r"(?:(\w+)://)?(\[[^\]]+\]|[^:/\[\]\s]+)(?::(\d+))?/?", address)
    if found is None or int(found[3] or port) > 65535:
        raise InputError(f"address {address!r}: must be host:port.")
    place = found[2].strip("[]"), int(found[3] or port)
    try:
        with socket.create_connection(place, timeout=PATIENCE) as connection:
            # Schedulers of Dask and Ray speak first, except under encryption.
            greeting = found[1] not in (None, "tcp", "ray") or _greets(connection, port)
    except TimeoutError:
        greeting = False
    except OSError as error:
        raise InputError(f"address {address!r}: nothing listens there ({error}).") from error
    if not greeting:
        raise InputError(f"address {address!r}: no cluster answers there; correct the address.")


def _greets(connection: socket.socket, port: int) -> bool:
    """Tell whether the first words are a cluster's: a message of Dask's, or settings of HTTP/2."""
    deadline = time.monotonic() + PATIENCE

    def heard(count: int) -> bytes:
        words = b""
        while len(words) < count:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if not (more := connection.recv(count - len(words))):
                break
            words += more
        return words

    if port == RAY:
        return heard(9)[3:4] == b"\x04"  # length (3 bytes), type, flags, stream (4)
    size = int.from_bytes(heard(8), "little")
    return 0 < size < 1 << 16 and len(heard(size)) == size  # a greeting has some hundred bytes


def last_line(error: BaseException) -> str:
    """Return what an error says in the end: those of clusters quote whole tracebacks."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1]


Engine = Callable[[str | None, int | None, str, int], AbstractContextManager[Executor]]
# Each opens an engine, given the address of a cluster, the most cells at a time, the device, and
# the number of cells, beyond which no worker is of use
ENGINES: dict[str, Engine] = {"loky": loky, "dask": dask, "ray": ray}
