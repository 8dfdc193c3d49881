"""Cells for the tests of sweeps, in a module that workers can import."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exhume.errors import InputError
from exhume.sweep.engines import Executor, work


def note(log: str | Path, line: str) -> None:
    with open(log, "a") as file:
        file.write(line + "\n")


def noted(log: str | Path, word: str) -> list[str]:
    """The second words of the lines that begin with a word."""
    path = Path(log)
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.split()[:1] == [word]]


def wait_until(true: Callable[[], bool], seconds: float = 300.0) -> bool:
    """Tell whether it came true in time, which is far more than it takes, for a busy machine."""
    end = time.monotonic() + seconds
    while not (now := true()) and time.monotonic() < end:
        time.sleep(0.01)
    return now


@contextmanager
def in_threads(call: Any = work, workers: int = 2, **options: Any) -> Iterator[Executor]:
    with ThreadPoolExecutor(workers) as pool:
        yield Executor(workers, lambda task: pool.submit(call, task), **options)


@dataclass(frozen=True)
class Square:
    x: float
    power: int = 2
    log: str = ""

    def check(self) -> None:
        if isinstance(self.x, float) and self.x < 0:
            raise InputError(f"x {self.x}: must not be negative.")

    def run(self, device: str) -> dict[str, Any]:
        noise = torch.randn(100_000, generator=torch.Generator().manual_seed(int(self.x)))
        if self.log:
            note(self.log, f"end {self.x}")
        found = {"y": self.x**self.power, "noise": float(noise.sum())}
        return found | {"device": device, "threads": torch.get_num_threads()}


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Unspeakably(Unspeakable):
    def __repr__(self) -> str:
        raise KeyboardInterrupt


# Every way not to give results, by how it is recorded: what `run` raises, or returns
FAILURES: dict[str, Any] = {
    "ValueError: one is too many": ValueError("one is too many"),
    "SystemExit: 3": SystemExit(3),
    "TypeError: Object of type Tensor is not JSON serializable": {"y": torch.zeros(1)},
    "TypeError: run() must return a dict, and returned list": [4],
    "Unspeakable: Unspeakable(7)": Unspeakable(7),
    "Unspeakably": Unspeakably(7),
    "OSError: caf\\udce9": OSError("caf\udce9"),
    "KeyboardInterrupt: by hand": KeyboardInterrupt("by hand"),
    "GeneratorExit": GeneratorExit(),
}
# Results that JSON and UTF-8 can only nearly hold, and how they are kept
AWKWARD = {"y": 0, "z": float("nan"), "by": {1: (2,)}, "\ud800": ["caf\udce9", {"\udce9": "ü"}]}
KEPT = {"y": 0, "z": None, "by": {"1": [2]}, "\\ud800": ["caf\\udce9", {"\\udce9": "ü"}]}


@dataclass(frozen=True)
class Fails:
    recorded: str

    def run(self, device: str) -> dict[str, Any]:
        outcome = FAILURES.get(self.recorded, AWKWARD)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Neighbour:
    log: str

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, "start neighbour")
        # Until the killer is run again; Dask may let it queue behind this very cell.
        wait_until(lambda: len(noted(self.log, "killer")) >= 2, seconds=4.0)
        note(self.log, "end neighbour")
        return {"y": 1}


@dataclass(frozen=True)
class Killer:
    """Ends its worker with kill -9, the first time, beside the cell that is started."""

    log: str

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, "killer starts")
        wait_until(lambda: bool(noted(self.log, "start")))
        if len(noted(self.log, "killer")) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        note(self.log, "end killer")
        return {"y": 2}


@dataclass(frozen=True)
class Gated:
    """Ends at once below x = 3, and from there on when the log says `go`."""

    x: int
    log: str

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, f"process {os.getpid()}\nstart {self.x}")
        if self.x >= 3:
            wait_until(lambda: bool(noted(self.log, "go")), seconds=600.0)
        return {"y": self.x + 0.5}
