"""Where finished cells are kept, and the code that their results rest on.

    folder/sweep.json            says what the folder is; a running driver holds a lock beside it
    folder/cells/ADDRESS.json    a finished cell: what it was, what it gave or why it failed

The address is a hash of the cell's class, its fields and the code that it can import.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from exhume import files
from exhume.errors import InputError
from exhume.files import private_folder, read_json, write_private
from exhume.sweep.grid import Record
from exhume.version import VERSION

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[1]
IDENTITY = ("kind", "fields", "version")
FOUND = ("values", "error", "seconds", "made")


def identity(cell: Any) -> dict[str, Any]:
    """Return what a cell is: its class, its fields, the version of the code it rests on."""
    kind = type(cell)
    return {
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "fields": {field.name: getattr(cell, field.name) for field in fields(cell)},
        "version": version_of(kind.__module__),
    }


def address_of(cell: Any) -> str:
    """Return the address of a cell, the SHA-256 of its identity as canonical JSON."""
    if not is_dataclass(cell) or isinstance(cell, type):
        raise InputError(f"{cell!r}: a cell of a sweep is an instance of a frozen dataclass.")
    name = type(cell).__qualname__
    if "<locals>" in name:
        raise InputError(f"{name}: a cell must be importable: define it at the top of a module.")
    try:
        return _digest(identity(cell))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{cell!r}: fields of a cell must be plain JSON ({error}).") from error


def _digest(identified: dict[str, Any]) -> str:
    """Return the hash of the one JSON text of a value: keys in order, floats by their repr.

    Example:
        >>> _digest({"a": 1, "b": 2.5}) == _digest({"b": 2.50, "a": 1})
        True
    """
    plain: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
    text = json.dumps(identified, sort_keys=True, separators=(",", ":"), **plain)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a folder for finished cells (mode 0700) and be the only driver that writes there."""
    private_folder(folder)
    with files.held(folder):
        private_folder(folder / "cells")
        mark = folder / "sweep.json"
        if not mark.exists():
            write_private(mark, b'{"kind": "exhume sweep"}\n')
        if not isinstance(read_json(mark), dict):
            raise InputError(f"{mark}: is not of a sweep; remove it or choose another folder.")
        yield


def write(folder: Path, address: str, record: Record) -> None:
    """Keep a finished cell, also over a power cut."""
    content = identity(record.cell) | {word: getattr(record, word) for word in FOUND}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_private(_path(folder, address), text.encode())


def read(folder: Path, address: str, cell: Any) -> Record | None:
    """Return the finished cell of an address, if it is there; refuse a damaged file."""
    path = _path(folder, address)
    if not path.exists():
        return None
    try:
        found = read_json(path)
        if not isinstance(found, dict) or set(found) != {*IDENTITY, *FOUND}:
            raise InputError(f"a finished cell has {', '.join((*IDENTITY, *FOUND))}")
        if _digest({word: found[word] for word in IDENTITY}) != address:
            raise InputError("it holds another cell than its name says")
        values, failure, seconds, made = (found[word] for word in FOUND)
        failed = values is None and isinstance(failure, str)
        good = failed or (isinstance(values, dict) and failure is None)
        if not good or not isinstance(seconds, float | int):
            raise InputError("it has neither values nor an error")
    except ValueError as error:  # also what no address can be made of, such as NaN in a field
        raise InputError(f"{path}: is damaged ({error}); remove it to run it again.") from error
    return Record(cell, values, failure, float(seconds), made)


def _path(folder: Path, address: str) -> Path:
    return folder / "cells" / f"{address}.json"


@cache
def version_of(module: str) -> str:
    """Return the version with a digest of the code that cells rest on: 0.1.0+1f2e3d4c5b6a."""
    digests = "".join(f"{name} {digest}\n" for name, digest in closure(module).items())
    digest = hashlib.sha256(digests.encode()).hexdigest()
    return f"{VERSION.partition('+')[0]}+{digest[:12]}"


def closure(module: str, root: Path = ROOT) -> dict[str, str]:
    """Return digests of a module and of all modules of exhume that it can import, by name.

    Imports are read from the sources, those inside functions too. A package that only lies on the
    way to a module does not count: importing `exhume.a.b` uses no name of `exhume/a/__init__.py`.
    For a module without a file, as in a notebook, every module of exhume counts.
    """
    waiting = [module]
    if _file(module, root) is None:
        parts = (path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py"))
        waiting = [".".join((PACKAGE, *part)).removesuffix(".__init__") for part in parts]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        file = _file(name, root)
        if name in found or file is None:
            continue
        found[name], imports = _parsed(file.read_text(encoding="utf-8"))
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for base, member in imports:
            base = resolve_name(base, package)
            if base.partition(".")[0] == PACKAGE:
                inner = f"{base}.{member}"
                waiting.append(inner if member and _file(inner, root) else base)
    return dict(sorted(found.items()))


def _file(module: str, root: Path) -> Path | None:
    """Return the file of a module: of exhume by its name, of others if they are imported."""
    package, *parts = module.split(".")
    if package != PACKAGE:
        file = getattr(sys.modules.get(module), "__file__", None)
        return Path(file) if file is not None and Path(file).is_file() else None
    place = root.joinpath(*parts)
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


@cache
def _parsed(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a digest of a module's code, and its imports as pairs of module and name."""
    tree, imports = ast.parse(text), list[tuple[str, str]]()
    waiting: list[Any] = [tree]
    for node in waiting:
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING")):  # which never runs
                continue
            case ast.Import():
                imports += [(alias.name, "") for alias in node.names]
            case ast.ImportFrom():
                base = "." * node.level + (node.module or "")
                imports += [(base, alias.name) for alias in node.names]
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                node.body = [part for part in node.body if not _bare(part)]
        waiting += ast.iter_child_nodes(node)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), tuple(imports)


def _bare(node: ast.stmt) -> bool:
    """Tell whether a statement is a string alone: prose changes no digest."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
