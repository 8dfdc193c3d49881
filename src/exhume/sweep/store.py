"""Where finished cells are kept: one file a cell, named by its content, written by the driver.

    folder/sweep.json            says what the folder is; a running driver holds a lock on it
    folder/cells/ADDRESS.json    a finished cell: what it was, what it gave or why it failed

The address is a hash of the cell's class, its fields and the code it rests on: the same cell is the
same file, whatever grid, engine or machine it comes from, and code that changed runs it again.
A damaged file is refused rather than replaced: files appear at once and complete, so something else
went wrong there.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from exhume.errors import InputError
from exhume.files import private_folder, read_json, write_private
from exhume.sweep.records import Record
from exhume.sweep.sources import version_of


def identity(cell: Any) -> dict[str, Any]:
    """Return what a cell is: its class, its fields, the version of the code it rests on."""
    kind = type(cell)
    return {
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "fields": {field.name: getattr(cell, field.name) for field in fields(cell)},
        "version": version_of(kind.__module__),
    }


def canonical(value: Any) -> str:
    """Return the one JSON text of a value: keys in order, no spaces, floats by their repr.

    Example:
        >>> canonical({"b": (1, 2.50), "a": None})
        '{"a":null,"b":[1,2.5]}'
    """
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def address_of(cell: Any) -> str:
    """Return the address of a cell, the SHA-256 of its identity as canonical JSON.

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
        return _digest(identity(cell))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{cell!r}: the fields of a cell must be plain JSON values, finite numbers, texts, "
            f"lists ({error})."
        ) from error


def _digest(identified: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(identified).encode()).hexdigest()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a folder for finished cells (mode 0700) and be the only driver that writes there."""
    private_folder(folder)
    private_folder(folder / "cells")
    mark = folder / "sweep.json"
    # Network file systems lock only what is open for writing.
    with open(os.open(mark, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{folder}: another sweep is running in this folder; wait for it, or choose "
                "another folder."
            ) from error
        except OSError:
            pass  # A file system without locks: of two equal results the later one stays.
        if mark.stat().st_size == 0:
            file.write('{"kind": "exhume sweep"}\n')
            file.flush()
        if not isinstance(read_json(mark), dict):
            raise InputError(f"{mark}: is not of a sweep; remove it or choose another folder.")
        yield


def write(folder: Path, address: str, record: Record) -> None:
    """Keep a finished cell, also over a power cut."""
    values = {word: getattr(record, word) for word in ("values", "error", "seconds", "made")}
    text = json.dumps({**identity(record.cell), **values}, indent=1, ensure_ascii=False)
    write_private(_path(folder, address), text.encode(), durable=True)


def read(folder: Path, address: str, cell: Any) -> Record | None:
    """Return the finished cell of an address, if it is there.

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
    return Record(cell, found["values"], found["error"], float(found["seconds"]), found["made"])


def _path(folder: Path, address: str) -> Path:
    return folder / "cells" / f"{address}.json"


def _check(found: Any, address: str) -> None:
    """Refuse what is not the finished cell of an address."""
    words = {"kind", "fields", "version", "values", "error", "seconds", "made"}
    if not isinstance(found, dict) or set(found) != words:
        raise InputError(f"a finished cell has {', '.join(sorted(words))}")
    if _digest({word: found[word] for word in ("kind", "fields", "version")}) != address:
        raise InputError("it holds another cell than its name says")
    values, error, seconds = found["values"], found["error"], found["seconds"]
    good = isinstance(values, dict) if error is None else values is None and isinstance(error, str)
    if not good or not isinstance(seconds, float | int):
        raise InputError("it has neither values nor an error")
