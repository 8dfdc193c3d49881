"""The derivative of a function at a point, kept as a linear map that is applied many times."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Linear:
    """L, the derivative of some outputs in some inputs, as a graph of Lᵀu and of that in u.

    Both hold what the function computed on its way, so that no product computes it again.
    """

    inputs: Tensors
    outputs: Tensors
    turned: Tensors  # u, of the outputs' shapes and of any value
    slopes: Tensors  # Lᵀu

    def push(self, tangents: Tensors) -> Tensors:
        """Return L t: since Lᵀu is linear in u, it is the derivative of ⟨Lᵀu, t⟩ in u."""
        return _product(self.slopes, self.turned, tangents)

    def pull(self, cotangents: Tensors) -> Tensors:
        """Return Lᵀ c."""
        return _product(self.outputs, self.inputs, cotangents)


def linear(function: Callable[..., Tensors], *inputs: Tensor) -> Linear:
    """Return the derivative of a function of tensors; `outputs` are its values.

    Example:
        >>> half = linear(lambda a, b: (a * b,), torch.tensor(2.0), torch.tensor(3.0))
        >>> [float(part) for part in half.pull((torch.tensor(1.0),))]
        [3.0, 2.0]
        >>> [float(part) for part in half.push((torch.tensor(1.0), torch.tensor(10.0)))]
        [23.0]
    """
    inputs = tuple(part.detach().requires_grad_() for part in inputs)
    with torch.enable_grad():
        outputs = function(*inputs)
        turned = tuple(torch.zeros_like(part, requires_grad=True) for part in outputs)
        slopes = torch.autograd.grad(outputs, inputs, turned, create_graph=True)
    return Linear(inputs, outputs, turned, slopes)


class Measured(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `bytes` grows by what tensors take that are made: the most that a graph holds."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}  # of the memory at each address

    @property
    def bytes(self) -> int:
        """Return how many, memory that was given back and used again once."""
        return sum(self.sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and look at what it made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage.data_ptr()] = storage.nbytes()
        return made


def _product(of: Tensors, by: Tensors, along: Tensors) -> Tensors:
    return torch.autograd.grad(of, by, along, retain_graph=True)
