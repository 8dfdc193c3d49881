"""Where finished cells are kept: one file a cell, named by its content, written once.

    folder/sweep.json            tells workers that they see this very folder
    folder/cells/ADDRESS.json    a finished cell: what it was, what it gave or why it failed
    folder/cells/ADDRESS.lock    a cell that is being run, or was when its worker died

The address is a hash of the cell's class, its fields and the sources of exhume: the same cell is
the same file, whatever grid, engine or machine it comes from, and code that changed runs it again.
A damaged file is refused rather than replaced: files appear at once and complete, so something else
went wrong there.
"""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from exhume.device import hardware
from exhume.errors import InputError
from exhume.files import private_folder, read_json
from exhume.version import VERSION

Outcome = dict[str, Any]
"""A finished cell as its file has it: kind, fields, version, values, error, seconds, made."""


def digest_of_sources(folder: Path) -> str:
    """The first 12 hexadecimal digits of the sha256 of a folder's Python files, names and bytes."""
    total = hashlib.sha256()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for name in sorted(files):
        total.update(hashlib.sha256(name.encode()).digest())
        total.update(hashlib.sha256(files[name].read_bytes()).digest())
    return total.hexdigest()[:12]


@cache
def version() -> str:
    """The version of exhume with a digest of its sources, such as 0.1.0+1f2e3d4c5b6a.

    The number alone stays the same while the code changes.
    """
    import exhume

    number = VERSION.partition("+")[0]
    return f"{number}+{digest_of_sources(Path(exhume.__file__).parent)}"


def identity(cell: Any) -> dict[str, Any]:
    """What a cell is: its class, its fields, the version of exhume that runs it."""
    kind = type(cell)
    values = {field.name: getattr(cell, field.name) for field in fields(cell)}
    return {
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "fields": values,
        "version": version(),
    }


def canonical(value: Any) -> str:
    """The one JSON text of a value: keys in order, no spaces, floats by their repr.

    Example:
        >>> canonical({"b": (1, 2.50), "a": None})
        '{"a":null,"b":[1,2.5]}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest(identified: dict[str, Any]) -> str:
    """The address of an identity: sha256 of its canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical(identified).encode()).hexdigest()


def address_of(cell: Any) -> str:
    """The address of a cell.

    Raises:
        InputError: it is no dataclass, no other process could import its class, or a field is not
            plain JSON.
    """
    if not is_dataclass(cell) or isinstance(cell, type):
        raise InputError(f"{cell!r}: a cell of a sweep is an instance of a frozen dataclass.")
    if "<locals>" in type(cell).__qualname__:
        raise InputError(
            f"{type(cell).__qualname__}: the class of a cell must be importable, and this one is "
            "local to a function: define it at the top of a module."
        )
    try:
        return digest(identity(cell))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{cell!r}: the fields of a cell must be plain JSON values, finite numbers, texts, "
            f"lists ({error})."
        ) from error


def outcome(
    cell: Any, values: Any, error: str | None, seconds: float, device: str | None
) -> Outcome:
    """A finished cell as its file has it.

    Args:
        cell: the cell.
        values: what it gave, plain JSON.
        error: what it raised.
        seconds: how long it ran.
        device: where; None if nobody can tell.
    """
    return {
        **identity(cell),
        "values": values,
        "error": error,
        "seconds": seconds,
        "made": {
            "hardware": "unknown" if device is None else hardware(device),
            "torch": torch.__version__,
            "date": datetime.now(UTC).date().isoformat(),
        },
    }


def write_once(path: Path, content: bytes) -> bool:
    """Write a private file, at once, unless it is there.

    Returns:
        Whether it was written; False if another was first.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(
                    file.fileno()
                )  # else the name may outlive a power cut, and not the content
            os.link(temporary, path)  # unlike a rename, this never replaces a file
        finally:
            os.unlink(temporary)
    except FileExistsError:
        return False
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}).") from error
    return True


@dataclass(frozen=True)
class Store:
    """A folder of finished cells, as drivers and workers see it.

    Attributes:
        folder: its absolute path.
        token: what its sweep.json says, if workers see this folder and not another of that name.
    """

    folder: Path
    token: str

    @classmethod
    def opened(cls, folder: Path) -> "Store":
        """The store in a folder, made (mode 0700) if it is not there."""
        folder = folder.absolute()
        private_folder(folder)
        private_folder(folder / "cells")
        mark = folder / "sweep.json"
        if not mark.exists():
            write_once(mark, canonical({"token": uuid4().hex}).encode())
        found = read_json(mark)
        if not isinstance(found, dict) or not isinstance(found.get("token"), str):
            raise InputError(f"{mark}: is not of a sweep; remove it or choose another folder.")
        return cls(folder, found["token"])

    def visible(self) -> bool:
        """Whether this process sees the folder that the driver opened."""
        try:
            return bool(read_json(self.folder / "sweep.json") == {"token": self.token})
        except InputError:
            return False

    def read(self, address: str) -> Outcome | None:
        """The finished cell of an address, if it is there."""
        return read_outcome(self.folder, address)

    def write(self, address: str, finished: Outcome) -> Outcome:
        """Keep a finished cell, unless it is there already.

        Returns:
            What the file holds now: what was given, or what another wrote first.
        """
        found = self.read(address)
        if found is None:
            text = json.dumps(finished, indent=1, ensure_ascii=False, allow_nan=False)
            write_once(_path(self.folder, address), text.encode())
            found = self.read(address)
        return finished if found is None else found

    @contextmanager
    def hold(self, address: str) -> Iterator[None]:
        """Be the only one to run a cell; others wait.

        A worker that outlives its driver, or that its cluster has given up too early, still holds
        its cell: a second one waits and finds it finished. The lock of a dead worker is free.
        """
        with os.fdopen(os.open(self._lock(address), os.O_CREAT | os.O_RDWR, 0o600)) as file:
            with suppress(OSError):  # a file system without locks: the second writer loses anyway
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
            self.release(address)

    def release(self, address: str) -> None:
        """Take away the mark of a cell that was being run."""
        self._lock(address).unlink(missing_ok=True)

    def started(self, address: str) -> bool:
        """Whether a cell is being run, or was when its worker died."""
        return self._lock(address).exists()

    def _lock(self, address: str) -> Path:
        return self.folder / "cells" / f"{address}.lock"


def _path(folder: Path, address: str) -> Path:
    return folder / "cells" / f"{address}.json"


def read_outcome(folder: Path, address: str) -> Outcome | None:
    """The finished cell of an address in a folder, if it is there.

    Raises:
        InputError: the file is damaged.
    """
    path = _path(folder, address)
    if not path.exists():
        return None
    try:
        found = read_json(path)
        _check(found, address)
    except ValueError as error:  # also what no address can be made of, such as NaN in a field
        raise InputError(
            f"{path}: is damaged ({error}); remove it, and the cell is run again."
        ) from error
    return dict(found)


def remove_failure(folder: Path, address: str) -> None:
    """Forget a cell that failed; a result, which another driver may have written since, stays."""
    found = read_outcome(folder, address)
    if found is not None and found["error"] is not None:
        _path(folder, address).unlink(missing_ok=True)


def _check(found: Any, address: str) -> None:
    """Refuse what is not the finished cell of an address."""
    words = {"kind", "fields", "version", "values", "error", "seconds", "made"}
    if not isinstance(found, dict) or set(found) != words:
        raise InputError(f"a finished cell has {', '.join(sorted(words))}")
    if digest({word: found[word] for word in ("kind", "fields", "version")}) != address:
        raise InputError("it holds another cell than its name says")
    values, error, seconds = found["values"], found["error"], found["seconds"]
    good = isinstance(values, dict) if error is None else values is None and isinstance(error, str)
    if not good or not isinstance(seconds, float | int):
        raise InputError("it has neither values nor an error")
