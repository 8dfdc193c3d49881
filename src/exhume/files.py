"""Files: written at once and privately, read without executing anything, errors with names."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from exhume.errors import InputError


def write_private(path: Path, content: bytes, durable: bool = False) -> Path:
    """Write a file at once, readable by its owner only, and return its path.

    Args:
        path: the file.
        content: its bytes.
        durable: wait until the disk has them: else the name may outlive a power cut, and not they.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):  # an interruption may come right after the renaming
                os.unlink(temporary)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}).") from error
    return path


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, private."""
    dense = {  # copies: the format refuses tensors that share memory
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    write_private(path, serialise(dense, dict(metadata) if metadata else None))


def read_tensors(path: Path, expected: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, which must hold those of the expected names."""
    if not path.is_file():
        raise InputError(f"{path}: no such file.")
    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: cannot be read as a safetensors file ({error}); it may be truncated, copy "
            "or write it again."
        ) from error
    for name in expected:
        if name not in tensors:
            there = ", ".join(tensors) or "nothing"
            raise InputError(f"{path}: holds no tensor {name!r}; it holds {there}.")
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def write_json(path: Path, value: Any) -> None:
    """Write JSON, private; NaN and infinities become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_private(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; an error names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}).") from error


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; an error names the file."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: cannot be read as YAML ({reason}).") from error


def finite(value: Any) -> Any:
    """Return the same value with numbers that JSON lacks replaced by None.

    Example:
        >>> finite({"a": [1.0, float("nan")]})
        {'a': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error}); choose another --out.") from error


def private_folder(path: Path) -> Path:
    """Make a folder (mode 0700), be sure that it can be written to, and return it."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        tempfile.TemporaryFile(dir=path).close()
    return path


def check_new(path: Path) -> None:
    """Refuse a folder that holds something."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: is there already and not empty; remove it or choose another.")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a private folder that is renamed to `path` once complete, and removed on an error."""
    check_new(path)
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))  # mode 0700
    try:
        yield temporary
        with _writing(path):
            os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
