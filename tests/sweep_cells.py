"""Cells for the tests of sweeps, in a module that workers can import."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exhume.errors import InputError


def note(log: str, line: str) -> None:
    """Append a line to a file."""
    with open(log, "a") as file:
        file.write(line + "\n")


def noted(log: str | Path, word: str) -> list[str]:
    """The second words of the lines that begin with a word."""
    path = Path(log)
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.split()[:1] == [word]]


def wait_for(log: str | Path, word: str, count: int, seconds: float = 60.0) -> None:
    """Wait until so many lines begin with a word."""
    end = time.monotonic() + seconds
    while len(noted(log, word)) < count:
        assert time.monotonic() < end, f"no {count} lines with {word} in {log}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Square:
    """Quick, and repeatable to the last bit on one core only."""

    x: float
    power: int = 2
    log: str = ""

    def run(self, device: str) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(int(self.x))
        noise = torch.randn(100_000, generator=generator)
        if self.log:
            note(self.log, f"end {self.x}")
        return {
            "y": self.x**self.power,
            "noise": float(noise.sum()),
            "device": device,
            "threads": torch.get_num_threads(),
        }


@dataclass(frozen=True)
class Fails:
    """Every way not to give results."""

    x: int

    def run(self, device: str) -> dict[str, Any]:
        if self.x == 1:
            raise ValueError("one is too many")
        if self.x == 2:
            raise SystemExit(3)
        if self.x == 3:
            return {"y": torch.zeros(1)}
        if self.x == 4:
            return [4]  # type: ignore[return-value]
        return {"y": self.x, "z": float("nan"), "by": {1: (2,)}}


FAILURES = [
    "ValueError: one is too many",
    "SystemExit: 3",
    "TypeError: Object of type Tensor is not JSON serializable",
    "TypeError: run() must return a dict, and returned list",
]
"""What cells Fails(1) to Fails(4) are recorded with."""


class Unspeakable(Exception):
    """An error that cannot say its message."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Unspeakably(Unspeakable):
    """Nor what it is."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt


RAISED: dict[str, BaseException] = {
    "Unspeakable: Unspeakable(7)": Unspeakable(7),
    "Unspeakably": Unspeakably(7),
    "OSError: caf\\udce9": OSError("caf\udce9"),
    "KeyboardInterrupt: by hand": KeyboardInterrupt("by hand"),
    "GeneratorExit": GeneratorExit(),
}
"""What cells raise that is hard to write down, by how it is recorded."""


@dataclass(frozen=True)
class Raises:
    """Raises one of these, or returns a text that UTF-8 cannot write."""

    recorded: str

    def run(self, device: str) -> dict[str, Any]:
        if self.recorded in RAISED:
            raise RAISED[self.recorded]
        return {"file": ["caf\udce9"], "\ud800": {"\udce9": "ü"}}


@dataclass(frozen=True)
class Neighbour:
    """Is in the middle of its work when another cell's worker dies."""

    log: str

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, "start neighbour")
        time.sleep(0.7)
        note(self.log, "end neighbour")
        return {"y": 1}


@dataclass(frozen=True)
class Killer:
    """Ends its worker with kill -9, the first `times` times."""

    log: str
    times: int

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, "start killer")
        wait_for(self.log, "start", 2)  # the neighbour's, or an earlier one
        if noted(self.log, "start").count("killer") <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        note(self.log, "end killer")
        return {"y": 2}


@dataclass(frozen=True)
class Slow:
    """Long enough to be interrupted."""

    x: int
    log: str

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, f"start {self.x}")
        note(self.log, f"process {os.getpid()}")
        time.sleep(0.3)
        note(self.log, f"end {self.x}")
        return {"y": self.x + 0.5}


@dataclass(frozen=True)
class Checked:
    """Refuses a negative number before any work."""

    x: int
    log: str

    def check(self) -> None:
        if self.x < 0:
            raise InputError(f"x {self.x}: must not be negative.")

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, f"end {self.x}")
        return {}


DRIVER = """
import sys
from pathlib import Path
from exhume import sweep
from sweep_cells import Slow
folder, log, engine, address = sys.argv[1:]
grid = sweep.Grid(Slow, {"x": range(10), "log": log})
try:
    sweep.run(grid, engine, Path(folder), address or None, workers=2)
except KeyboardInterrupt:
    sys.exit(77)
"""


def start_driver(
    folder: Path, log: Path, engine: str, address: str = ""
) -> "subprocess.Popen[bytes]":
    """A sweep of ten slow cells in a process of its own; it exits with 77 if interrupted."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-W", "error", "-c", DRIVER, str(folder), str(log), engine, address]
    return subprocess.Popen(command, env=environment, start_new_session=True)
