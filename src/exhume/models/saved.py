"""Weights as they were stored: of which precision, from where, and fitted to a module."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from exhume.errors import InputError
from exhume.models.state import fit_state, read_state

ZERO_HEAD = "zero-head"
"""In the place of initial weights: the last layer began at zero, and nothing else was trained."""

StateOrFile = Mapping[str, Tensor] | Path | str
"""A state dict, or the file that holds one."""


@dataclass(frozen=True, eq=False)
class Saved:
    """Weights and how they were stored.

    Attributes:
        tensors: parameters and buffers by name.
        dtypes: precisions of the floating-point numbers in the file.
        source: the file, or words for it.
    """

    tensors: dict[str, Tensor]
    dtypes: frozenset[torch.dtype]
    source: str

    @classmethod
    def read(cls, state: StateOrFile | None, word: str) -> "Saved":
        """Read a state dict, or its file; `word` says which one it is in errors."""
        if isinstance(state, Path | str):
            source, tensors = str(state), read_state(Path(state))
        elif isinstance(state, Mapping) and all(isinstance(x, Tensor) for x in state.values()):
            source, tensors = word, {name: tensor.cpu() for name, tensor in state.items()}
        else:
            raise InputError(
                f"{word}: expected a state dict, as model.state_dict() gives it, or the path of a "
                f"file with one, got a {type(state).__name__}."
            )
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        return cls(tensors, frozenset(dtypes), source)

    @property
    def coarsest(self) -> torch.dtype:
        """The precision with the fewest digits."""
        return max(self.dtypes, key=eps)

    def fitted(self, module: nn.Module, partial: bool = False) -> "Saved":
        """Return what fits a module: tied weights under one name, and its own unsaved buffers.

        Args:
            module: whose names count.
            partial: some of the weights may be missing.
        """
        tensors = fit_state(self.tensors, module, self.source, partial)
        saved = module.state_dict()
        tensors |= {name: b.detach() for name, b in module.named_buffers() if name not in saved}
        own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        return replace(self, tensors={name: tensors[name] for name in own if name in tensors})

    def with_zero(self, head: str) -> "Saved":
        """Return the same weights with a last layer of zeros."""
        zeros = {
            name: torch.zeros_like(self.tensors[name])
            for name in of_head(head)
            if name in self.tensors
        }
        return replace(self, tensors=self.tensors | zeros, source=ZERO_HEAD)


def of_head(head: str) -> tuple[str, str]:
    """Return the names of the weight and the bias of a layer; the module itself is ""."""
    prefix = f"{head}." if head else ""
    return f"{prefix}weight", f"{prefix}bias"


def eps(dtype: torch.dtype) -> float:
    """Return the relative distance between neighbouring numbers of a precision."""
    return torch.finfo(dtype).eps
