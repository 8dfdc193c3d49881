"""What an audit was given, by SHA-256: whoever reads its result can tell of which files it is."""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from exhume.files import digest_of
from exhume.models.pretrained import CONFIG, is_pretrained
from exhume.models.state import state_files


@dataclass(frozen=True)
class Input:
    """An input has a role, the name of its file (None for what was in memory) and a SHA-256."""

    role: str
    file: str | None
    sha256: str

    @classmethod
    def of(cls, role: str, file: Path) -> "Input":
        """Return the entry of a file."""
        return cls(role, file.name, digest_of(file))


def inputs(given: Mapping[str, object]) -> tuple[Input, ...]:
    """Return the entries of what was given by role, without what is None.

    A role has a file, a folder of weights, a state dict, a tensor, or a factory by its name.
    """
    return tuple(
        entry for role, part in given.items() if part is not None for entry in _entries(role, part)
    )


def _entries(role: str, part: object) -> Iterator[Input]:
    if isinstance(part, Tensor):
        part = {role: part}
    if isinstance(part, Mapping):
        yield Input(role, None, of_tensors(part))
    elif isinstance(part, Path):
        yield from (Input.of(role, file) for file in state_files(part))
    elif isinstance(part, str):  # a folder with a configuration, or a factory that was imported
        where = part.rpartition(":")[0]
        file = getattr(sys.modules.get(where), "__file__", None) or where
        file = Path(part, CONFIG) if is_pretrained(part) else Path(file)
        if file.is_file():
            yield Input.of(role, file)


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: of their names, kinds, shapes and bytes, by name.

    Example:
        >>> one = {"a": torch.zeros(2), "b": torch.ones(1)}
        >>> of_tensors(one) == of_tensors(dict(reversed(one.items())))
        True
        >>> of_tensors(one) == of_tensors(one | {"a": torch.zeros(2, 1)})
        False
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
