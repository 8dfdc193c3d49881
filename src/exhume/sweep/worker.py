"""What a worker does with a cell."""

import json
import time
import traceback
from dataclasses import dataclass
from typing import Any

import joblib
import torch

from exhume.errors import InputError
from exhume.files import finite
from exhume.sweep.store import Outcome, Store, address_of, outcome


@dataclass(frozen=True)
class Task:
    """A cell on its way to a worker.

    Attributes:
        cell: the cell.
        address: its address.
        number: its place in the grid, which chooses among several GPUs.
        device: cpu, cuda (any), or one device.
        store: where to keep what it gives, if the worker sees that folder.
    """

    cell: Any
    address: str
    number: int
    device: str
    store: Store


def work(task: Task) -> tuple[str, Outcome]:
    """Run a cell unless it is finished, and keep what it gives.

    Returns:
        Its address and the finished cell.
    """
    if address_of(task.cell) != task.address:
        raise InputError(
            "a worker has another version of exhume or of the cell's class than this process: "
            "install the same on all machines, and change no source while a sweep runs."
        )
    if not task.store.visible():
        return task.address, attempt(task.cell, task.number, task.device)
    with task.store.hold(task.address):
        found = task.store.read(task.address)
        if found is None:
            found = attempt(task.cell, task.number, task.device)
            found = task.store.write(task.address, found)
    return task.address, found


def attempt(cell: Any, number: int, device: str) -> Outcome:
    """Run a cell on one core, or on a GPU's share of them; what it raises is its outcome too."""
    torch.set_num_threads(_cores(device))
    start = time.perf_counter()
    values, error = None, None
    try:
        values = cell.run(_chosen(device, number))
        if not isinstance(values, dict):
            raise TypeError(f"run() must return a dict, and returned {type(values).__name__}")
        values = _encodable(json.loads(json.dumps(finite(values), allow_nan=False)))
    except BaseException as raised:  # Ctrl-C is for the driver: workers do not hear it
        if _ended(raised):
            raise
        values, error = None, _described(raised)
    finally:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # the next cell may be another process's
    return outcome(cell, values, error, time.perf_counter() - start, device)


def _ended(raised: BaseException) -> bool:
    """Whether Ray raised it to end this worker, as it does when the driver was killed.

    Its handler of signals is then among the frames below the cell's.
    """
    frames = traceback.walk_tb(raised.__traceback__)
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return not isinstance(raised, Exception) and any(m.partition(".")[0] == "ray" for m in modules)


def _described(raised: BaseException) -> str:
    """Type and message of an error, even if it cannot say its message.

    Example:
        >>> _described(ValueError("no")), _described(KeyboardInterrupt())
        ('ValueError: no', 'KeyboardInterrupt')
    """
    message = ""
    for words in (str, repr):
        try:
            message = words(raised)
            break
        except BaseException:  # of the cell, as the error is
            continue
    name = type(raised).__name__
    return str(_encodable(f"{name}: {message}" if message else name))


def _encodable(value: Any) -> Any:
    r"""A JSON value as UTF-8 can write it: lone surrogates become their escapes.

    Example:
        >>> print(_encodable({"file": ["caf\udce9"]})["file"][0])
        caf\udce9
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value


def _chosen(device: str, number: int) -> str:
    """One GPU of those that this process sees, where any is meant."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    return f"cuda:{number % count}" if count else device


def _cores(device: str) -> int:
    """One; beside a GPU, which is fed from random numbers drawn on the CPU, its share of all."""
    if device == "cpu":
        return 1
    return max(1, int(joblib.cpu_count()) // max(1, torch.cuda.device_count()))
