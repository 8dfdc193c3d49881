"""What a worker does with a cell: it runs it, and returns a record. It writes nothing."""

import json
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import joblib
import torch

from exhume.device import hardware
from exhume.files import finite
from exhume.sweep.records import Record
from exhume.sweep.store import address_of


@dataclass(frozen=True)
class Task:
    """A task is a cell on its way to a worker.

    Attributes:
        cell: the cell.
        address: its address.
        number: its place in the grid, which chooses among several GPUs.
        device: cpu, cuda (any), or one device.
    """

    cell: Any
    address: str
    number: int
    device: str


def work(task: Task) -> Record | None:
    """Run the cell of a task; return None if this machine has other code for it than the driver.

    A class of the driver's own script comes with its code, and only the driver knows its address.
    """
    if type(task.cell).__module__ != "__main__" and address_of(task.cell) != task.address:
        return None
    return attempt(task.cell, task.number, task.device)


def attempt(cell: Any, number: int, device: str) -> Record:
    """Run a cell on one core, or on a GPU's share of them; what it raises is recorded too."""
    torch.set_num_threads(_cores(device))
    start = time.perf_counter()
    values, error = None, None
    try:
        values = cell.run(_chosen(device, number))
        if not isinstance(values, dict):
            raise TypeError(f"run() must return a dict, and returned {type(values).__name__}")
        values = _encodable(json.loads(json.dumps(finite(values), allow_nan=False)))
    except BaseException as raised:  # Ctrl-C is for the driver: workers do not hear it
        if _ended_by_ray(raised):
            raise
        values, error = None, _described(raised)
    finally:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # the next cell may be another process's
    return Record(cell, values, error, time.perf_counter() - start, made_on(hardware(device)))


def made_on(hardware: str) -> dict[str, str]:
    """Return what `Record.made` says of a cell that ran here and now, on the hardware named."""
    date = datetime.now(UTC).date().isoformat()
    return {"hardware": hardware, "torch": torch.__version__, "date": date}


def _ended_by_ray(raised: BaseException) -> bool:
    """Tell whether Ray raised it to end this worker, as it does when the driver was killed.

    Its handler of signals is then among the frames below the cell's.
    """
    frames = traceback.walk_tb(raised.__traceback__)
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in frames)
    return not isinstance(raised, Exception) and any(m.partition(".")[0] == "ray" for m in modules)


def _described(raised: BaseException) -> str:
    """Return type and message of an error, even if it cannot say its message.

    Example:
        >>> _described(ValueError("no")), _described(KeyboardInterrupt())
        ('ValueError: no', 'KeyboardInterrupt')
    """
    message = ""
    for words in (str, repr):
        try:
            message = words(raised)
            break
        except BaseException:  # the cell's own code again, as the error is
            continue
    name = type(raised).__name__
    return str(_encodable(f"{name}: {message}" if message else name))


def _encodable(value: Any) -> Any:
    r"""Return a JSON value as UTF-8 can write it: lone surrogates become their escapes.

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
    """Return one GPU of those that this process sees, where any is meant."""
    count = torch.cuda.device_count() if device == "cuda" else 0
    return f"cuda:{number % count}" if count else device


def _cores(device: str) -> int:
    """Return one; beside a GPU, which is fed by numbers drawn on the CPU, its share of all."""
    if device == "cpu":
        return 1
    return max(1, int(joblib.cpu_count()) // max(1, torch.cuda.device_count()))
