"""A module as a pure function of its weights and of flat inputs."""

import fnmatch
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from exhume.device import tensor_cores
from exhume.errors import InputError
from exhume.features.exact import exact_operations, load_forward_mode

Weights = Mapping[str, Tensor]
"""Parameters and buffers by name, as in a state dict."""


@dataclass(frozen=True, eq=False)
class Network:
    """A prepared module (see `exhume.models.prepare`), called with weights of the caller's.

    Attributes:
        module: in eval mode; its own weights are not used.
        shape: of one input.
        outputs: c, the number of outputs.
        head: name of the last linear layer.
        basis: U (d, r), where inputs are given by their coordinates z, x = Uz; or None.
    """

    module: nn.Module
    shape: tuple[int, ...]
    outputs: int
    head: str
    basis: Tensor | None = None

    @property
    def dim(self) -> int:
        """Return the number of entries, or of coordinates, of one input."""
        return torch.Size(self.shape).numel() if self.basis is None else self.basis.shape[1]

    def __call__(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return f(x; θ), (n, d) → (n, c)."""
        return self._run(weights, inputs).reshape(len(inputs), self.outputs)

    def hidden(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return what the head is given, (n, d) → (n, h)."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen.append(arguments[0])

        handle = self.module.get_submodule(self.head).register_forward_pre_hook(keep)
        try:
            self._run(weights, inputs)
        finally:
            handle.remove()
        return seen[-1].reshape(len(inputs), -1)

    def _run(self, weights: Weights, inputs: Tensor) -> Tensor:
        if self.basis is not None:
            inputs = inputs @ self.basis.T.to(inputs)
        shaped = inputs.reshape(len(inputs), *self.shape)
        with exact_operations():
            outputs: Tensor = functional_call(self.module, dict(weights), (shaped,))
        return outputs

    @property
    def head_weight(self) -> str:
        """Return the name of the head's weight (c, h)."""
        return f"{self.head}.weight" if self.head else "weight"

    def first_dense(self, weights: Weights) -> str | None:
        """Return the name of the first layer's weight (h, d), if it is dense and sees the input.

        It is None where the input goes into something else first (a convolution, patches, a norm),
        or where the layer is used again further on.
        """
        generator = torch.Generator().manual_seed(0)
        like = next(w for w in weights.values() if w.is_floating_point())
        weights = moved(weights, like.device, like.dtype)
        d = torch.Size(self.shape).numel()
        inputs = torch.randn(2, d, generator=generator).to(like)
        order: list[tuple[str, bool]] = []
        handles = []
        for name, module in self.module.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue

            def note(module: nn.Module, arguments: tuple[Any, ...], name: str = name) -> None:
                x = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
                whole = (
                    isinstance(module, nn.Linear)
                    and x is not None
                    and x.shape == inputs.shape
                    and torch.equal(x, inputs)
                )
                order.append((name, whole))

            handles.append(module.register_forward_pre_hook(note))
        try:
            with torch.no_grad():
                self(weights, inputs)
        finally:
            for handle in handles:
                handle.remove()
        if not order or not order[0][1] or sum(name == order[0][0] for name, _ in order) > 1:
            return None
        return f"{order[0][0]}.weight" if order[0][0] else "weight"


def known_network(module: nn.Module, shape: tuple[int, ...], outputs: int) -> Network:
    """Return a network whose head is its last linear layer and whose derivatives are right.

    Those of `exhume.models.architectures` are such; a module of anyone else's goes through
    `exhume.models.prepare.prepare`.
    """
    head = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][-1]
    return Network(module, shape, outputs, head)


def named_block(weights: Weights, trainable: tuple[str, ...], pattern: str) -> tuple[str, ...]:
    """Return the names of the parameters that a user means.

    Args:
        weights: all of them, in the order of the model.
        trainable: names of those that are parameters, not buffers.
        pattern: `all`, `first` or `last` (the first or last layer with weights, its bias too), or
            names and patterns with commas between them.

    Example:
        >>> weights = {"a.weight": torch.zeros(2), "a.bias": torch.zeros(1), "b": torch.zeros(1)}
        >>> named_block(weights, tuple(weights), "first"), named_block(weights, ("b",), "*")
        (('a.weight', 'a.bias'), ('b',))
    """
    if pattern == "all":
        return trainable
    if pattern in ("first", "last"):
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in trainable))
        layer = layers[0] if pattern == "first" else layers[-1]
        return tuple(name for name in trainable if name.rpartition(".")[0] == layer)
    words = [word.strip() for word in pattern.split(",") if word.strip()]
    found = tuple(n for n in trainable if any(fnmatch.fnmatchcase(n, w) for w in words))
    for word in words:
        if not any(fnmatch.fnmatchcase(name, word) for name in trainable):
            raise InputError(
                f"parameters: {word!r} names none of the model's: {', '.join(trainable)}. "
                "Write all, first, last, or names and patterns with commas between them."
            )
    if not found:
        raise InputError(
            "parameters: names none; write all, first, last, or names with commas between them."
        )
    return found


def midpoint(initial: Weights, trained: Weights) -> dict[str, Tensor]:
    """Return (θ₀ + θ)/2 for floating-point weights, and the trained ones for the others."""
    return {
        name: (initial[name] + w) / 2 if w.is_floating_point() else w for name, w in trained.items()
    }


def moved(weights: Weights, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the same weights elsewhere; integers stay integers."""
    return {
        name: w.to(device, dtype) if w.is_floating_point() else w.to(device)
        for name, w in weights.items()
    }


@contextmanager
def derivatives(rounded: bool) -> Iterator[None]:
    """Take derivatives with TF32 on a GPU where they may be rounded, else without."""
    load_forward_mode()
    with tensor_cores(rounded):
        yield
