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


def note(log: str | Path, line: str) -> None:
    """Append a line to a file."""
    with open(log, "a") as file:
        file.write(line + "\n")


def noted(log: str | Path, word: str) -> list[str]:
    """The second words of the lines that begin with a word."""
    path = Path(log)
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1] for line in lines if line.split()[:1] == [word]]


def wait_for(log: str | Path, word: str, count: int, seconds: float = 600.0) -> bool:
    """Wait until so many lines begin with a word; tell whether they came."""
    end = time.monotonic() + seconds
    while len(noted(log, word)) < count and time.monotonic() < end:
        time.sleep(0.01)
    return len(noted(log, word)) >= count


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
    """Is in the middle of its work when the worker of a `Killer` dies."""

    log: str

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, "start neighbour")
        # Until the killer is run again; Dask may let it queue behind this very cell.
        wait_for(self.log, "killer", 2, seconds=5.0)
        note(self.log, "end neighbour")
        return {"y": 1}


@dataclass(frozen=True)
class Killer:
    """Ends its worker with kill -9, the first `times` times, beside the cell that is started."""

    log: str
    times: int

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, "killer starts")
        wait_for(self.log, "start", 1)
        if len(noted(self.log, "killer")) <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        note(self.log, "end killer")
        return {"y": 2}


@dataclass(frozen=True)
class Gated:
    """Ends at once below x = 4, and from there on when the log says `go`."""

    x: int
    log: str

    def run(self, device: str) -> dict[str, Any]:
        note(self.log, f"start {self.x}")
        note(self.log, f"process {os.getpid()}")
        if self.x >= 4:
            wait_for(self.log, "go", 1)
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
from sweep_cells import Gated
folder, log, engine, address = sys.argv[1:]
grid = sweep.Grid(Gated, {"x": range(8), "log": log})
try:
    sweep.run(grid, engine, Path(folder), address or None, workers=2)
except KeyboardInterrupt:
    sys.exit(77)
"""


def start_driver(
    folder: Path, log: Path, engine: str, address: str | None
) -> "subprocess.Popen[bytes]":
    """A sweep of eight gated cells in a process of its own; it exits with 77 if interrupted."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-c", DRIVER]
    return subprocess.Popen(
        [*command, str(folder), str(log), engine, address or ""],
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
