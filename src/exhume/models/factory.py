"""Models by name: the user's own function or class, imported and called. This runs its code."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from exhume.errors import InputError, quoted


def load_factory(spec: str, arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """Return the model that a factory makes: a function, a class, or a model that is there already.

    It is "package.module:factory", where the current folder counts as installed, or
    "path/to/file.py:factory", where the file's folder does. Only what is named is imported.
    """
    try:
        where, colon, name = spec.rpartition(":")
        if not (colon and where.strip() and name.isidentifier()):
            raise InputError("expected package.module:factory or path/to/file.py:factory.")
        is_file = where.endswith(".py") or "/" in where or "\\" in where
        with nothing_left_behind():
            sys.path.insert(0, str(Path(where).resolve().parent if is_file else Path.cwd()))
            importlib.invalidate_caches()
            module = _imported(where, is_file)
            if hasattr(module, name):
                return _made(getattr(module, name), dict(arguments or {}))
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        offered = [key for key, value in public.items() if callable(value)]
        own = [key for key in offered if getattr(public[key], "__module__", "") == module.__name__]
        names = ", ".join((own or offered)[:12]) or "no function or class"
        raise InputError(f"no {name!r} there; it offers {names}.")
    except InputError as error:
        raise InputError(f"factory {spec!r}: {error}") from error


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Put sys.path and torch's global random numbers back as they were."""
    before = list(sys.path)
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count()) if used else []):
            yield
    finally:
        sys.path[:] = before


def _imported(where: str, is_file: bool) -> ModuleType:
    """Run a module of the user's; what goes wrong inside is quoted."""
    if is_file and not Path(where).is_file():
        raise InputError(f"{where}: no such file.")
    try:
        return _from_file(Path(where)) if is_file else importlib.import_module(where)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        lost = error.name if isinstance(error, ModuleNotFoundError) else None
        if not is_file and lost and f"{where}.".startswith(f"{lost}."):
            advice = "neither installed nor in this folder; name a file as ./model.py:factory"
            raise InputError(f"no module {lost!r}, {advice}.") from error
        raise InputError(f"{where} cannot be imported; {quoted(error)}.") from error


def _from_file(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"exhume_factory_{path.stem}", path.resolve())
    if found is None or found.loader is None:
        raise InputError(f"{path}: is no Python file; expected a name in .py.")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # as an import would: dataclasses look themselves up
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[found.name]
        raise
    return module


def _made(factory: Any, arguments: dict[str, Any]) -> nn.Module:
    if isinstance(factory, nn.Module):
        if arguments:
            raise InputError("is a model already, and takes no arguments.")
        return factory
    known = inspect.isfunction(factory) or inspect.isclass(factory)
    if not known and not hasattr(factory, "__wrapped__"):
        raise InputError(f"is a {type(factory).__name__}; expected a function or class.")
    signature = None
    with suppress(TypeError, ValueError):  # some built-in callables do not tell
        signature = inspect.signature(factory)
    try:
        if signature is not None:
            signature.bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments) or "nothing"
        raise InputError(f"{error}; it takes {signature}, and was given {given}.") from error
    try:
        model = factory(**arguments)
    except (Exception, SystemExit) as error:
        raise InputError(f"fails with arguments {arguments}; {quoted(error)}.") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"returned a {type(model).__name__}; expected a torch.nn.Module.")
    return model
