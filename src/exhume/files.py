"""Files: written at once and privately, read without executing anything, errors with names."""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from exhume.errors import InputError

LOCK = ".lock"  # the file in a folder that is being written to, which says by whom
LONGEST = 1 << 26  # bytes of JSON or YAML: the scores of a hundred thousand samples are half of it
DEEPEST = 32  # levels of lists in lists; what we write has eight, and Python fails at a thousand


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in an error of writing, be it a full disk or a folder of somebody else's."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"{path}: cannot be written ({reason}); make room, or choose another place."
        ) from error


def write_private(path: Path, content: bytes) -> Path:
    """Write a file at once, readable by its owner only, and return its path.

    Whatever happens meanwhile, the name stands for the old content or for the new, whole and on
    the disk: a full disk or a kill loses nothing that was there, and a power cut neither.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):  # an interruption may come right after the renaming
                os.unlink(temporary)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        with suppress(OSError):  # some file systems have no such thing as a folder on the disk
            os.fsync(folder)
        os.close(folder)
    return path


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the only one that writes to a folder while this lasts; refuse where another is, by name.

    The lock ends with its process, however that ends. Where the file system has none, the process
    that the file names counts, as long as it lives or is another machine's, of which nothing is
    known here: once that is gone, the file must be removed by hand.
    """
    file = folder / LOCK
    while True:
        with writing(file):
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            said, way = os.read(handle, 1000).decode(errors="replace"), None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                way = "or choose another folder."
            except OSError:
                way = f"or remove {file} if it is gone." if _lives(said) else None
            if way is not None:
                holder = said or "another process"
                raise InputError(f"{folder}: {holder} is at work here; wait until it ends, {way}")
            if _is_at(handle, file):  # else it was removed by the one that held it
                holder = f"process {os.getpid()} on {socket.gethostname()}"
                since = datetime.now(UTC).isoformat(" ", "seconds")
                os.truncate(handle, 0)
                os.pwrite(handle, f"{holder} since {since}".encode(), 0)
                try:
                    yield
                finally:
                    if _is_at(handle, file):  # else somebody has removed it
                        os.unlink(file)
                return
        finally:
            os.close(handle)


def _is_at(handle: int, file: Path) -> bool:
    """Return whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def _lives(said: str) -> bool:
    """Return whether the process that a lock names may be alive: it is, or is out of sight."""
    here = re.match(rf"process (\d+) on {re.escape(socket.gethostname())} ", said)
    if here is None:
        return bool(said)
    try:
        os.kill(int(here[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def regular(path: Path) -> Path:
    """Return the path of a file; refuse pipes and devices, which could be read for ever."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file.") from None
    except (OSError, ValueError) as error:  # such as a name that no file can have
        raise InputError(f"{path}: cannot be read ({error}).") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise InputError(f"{path}: is {kind}; expected a file.")
    return path


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, kind: str = "text") -> str:
    """Return the text of a file that is not too long to be read as a whole."""
    if (size := regular(path).stat().st_size) > LONGEST:
        raise InputError(f"{path}: has {size:,} bytes; expected {LONGEST:,} at most.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as {kind} ({error}).") from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, private."""
    write_private(path, serialise(dense(tensors), dict(metadata) if metadata else None))


def dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU: the format refuses those that share memory."""
    whole = torch.contiguous_format
    return {name: x.detach().cpu().clone(memory_format=whole) for name, x in tensors.items()}


def read_tensors(path: Path, expected: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, which must hold those of the expected names."""
    regular(path)
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
    text = read_text(path, "JSON")
    try:
        return _shallow(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}).") from error


class _Plain(yaml.SafeLoader):
    """YAML without aliases: a few lines with them can stand for more than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose what comes next."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds an alias; write out what that stands for")
        return super().compose_node(parent, index)


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds; an error names the file."""
    text = read_text(path, "YAML")
    try:
        return _shallow(yaml.load(text, _Plain))
    except Exception as error:  # a damaged file can break the reader anywhere
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: cannot be read as YAML ({reason}).") from error


def _shallow(value: Any, depth: int = 0) -> Any:
    """Return what a file held, unless it is nested so deeply that nothing could go through it."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    inner = value.values() if isinstance(value, dict) else value
    for item in inner if isinstance(value, dict | list | tuple | set) else ():
        _shallow(item, depth + 1)
    return value


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


def private_folder(path: Path) -> Path:
    """Make a folder (mode 0700), be sure that it can be written to, and return it."""
    with writing(path):
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
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))  # mode 0700
    try:
        yield temporary
        with writing(path):
            os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
