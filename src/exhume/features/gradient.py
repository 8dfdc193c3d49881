"""Parameter gradients ∇θ f_1 … ∇θ f_c of any block of a module: the unified form.

Products with the rows are derivatives in the parameters, those with their Jacobian in the inputs
mixed second ones. The rows, n·c·p numbers, are kept where they fit, for the Gram matrix.
"""

import itertools
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

from exhume.features import Linearization
from exhume.features.graphs import Graphs
from exhume.features.modules import BlockFeatures, Function, ModuleLinearization
from exhume.features.modules import forward_derivative as along
from exhume.features.network import Weights, derivatives
from exhume.features.weights import free_memory


@dataclass(frozen=True, eq=False)
class ParameterGradients(BlockFeatures):
    """∇θ f_c(x) for the parameters named, flattened one after the other; k = c rows a point.

    The rows of the candidates are kept if `keep`, or, if None, where they fit in half the memory.
    """

    keep: bool | None = None
    # of products, on a GPU; a copy with other weights, inputs or activations has its own
    graphs: Graphs = field(default_factory=Graphs, init=False, repr=False)

    def rows_at(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return ∇θ f_c(x), (n, c, p)."""
        own, function = self.split(weights)

        def one(x: Tensor) -> Tensor:
            parts = jacrev(lambda theta: function(theta, x[None])[0])(own)
            return torch.cat([parts[name].flatten(1) for name in self.block], 1)

        result: Tensor = vmap(one)(inputs)
        return result

    def split(self, weights: Weights) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
        """Return the block's parameters, and f(block, x) with the others held fixed."""
        own = {name: weights[name] for name in self.block}
        rest = {name: w for name, w in weights.items() if name not in own}
        return own, lambda theta, x: self.network({**rest, **theta}, x)

    def linearize(self, candidates: Tensor) -> Linearization:
        """Return gradients and their derivatives at n candidates (n, d)."""
        kind = RecordedGradients if self.device.type == "cuda" else GradientLinearization
        return kind(self, candidates)


class GradientLinearization(ModuleLinearization):
    """Products with Φ and its derivative (see `Linearization`)."""

    def __init__(self, features: ParameterGradients, candidates: Tensor) -> None:
        """Keep the rows if they fit."""
        rows = len(candidates) * len(features.points) * features.outputs
        fits = rows * features.width * features.dtype.itemsize < free_memory(features.device) / 2
        super().__init__(features, candidates, fits if features.keep is None else features.keep)
        self.block = features.block
        self.split = [features.split(weights) for weights in features.points]

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT, (n·k, m) float64: forward derivatives of the outputs in the parameters."""
        if self.phi is not None:
            return super().apply(target)
        columns, points = [], range(len(self.split))
        pieces = [self.candidates[part] for part in self.chunks]
        with torch.no_grad(), derivatives(rounded=False):
            for column in target.to(self.candidates.dtype).T:
                parts = [torch.cat([self._along(k, column, x) for k in points], 1) for x in pieces]
                columns.append(torch.cat(parts).flatten())
        return torch.stack(columns, 1).double()

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return ΦᵀA, (p, m): reverse derivatives of the outputs in the parameters."""
        if self.phi is not None:
            return super().combine(coefficients)
        a = self.by_point(coefficients)
        total = a.new_zeros(self.features.width, a.shape[3])
        with derivatives(rounded=False):
            for part, k, m in self._pieces(a.shape[3]):
                total[:, m] += self._mixed(k, a[part, k, :, m])(self.candidates[part])
        return total

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i ∂φ(x_i)[D_i] A_iᵀ, (p, m): forward derivative of a reverse derivative."""
        a = self.by_point(coefficients)
        total = a.new_zeros(self.features.width, a.shape[3])
        with derivatives(rounded=True):
            for part, k, m in self._pieces(a.shape[3]):
                function = self._mixed(k, a[part, k, :, m])
                total[:, m] += along(function, self.candidates[part], direction[part])
        return total

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ A · ∂φ(x_i)ᵀ T, (n, d): reverse derivative of a forward derivative."""
        result = torch.zeros_like(self.candidates)
        with derivatives(rounded=True):
            for part, slope in self._slopes(target, coefficients):
                result[part] += slope(self.candidates[part])
        return result

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return the derivative of `pull` along D, (n, d): forward over what it computes."""
        result = torch.zeros_like(self.candidates)
        with derivatives(rounded=True):
            for part, slope in self._slopes(target, coefficients):
                result[part] += along(slope, self.candidates[part], direction[part])
        return result

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = tr(J_iᵀJ_j)/d, (n, n) float64, by `probes`; n·p numbers and more a time."""
        a = self.by_point(coefficients)
        n = len(self.candidates)

        def one(x: Tensor, weight: Tensor, z: Tensor) -> Tensor:
            functions = [self._mixed(k, weight[k][None]) for k in range(len(self.split))]
            return torch.stack([along(f, x[None], z[None]) for f in functions]).sum(0)

        def derivative(m: int, x: Tensor, z: Tensor, part: slice) -> Tensor:
            candidate = torch.arange(part.start, part.stop, device=x.device) % n
            result: Tensor = vmap(one)(x, a[candidate, ..., m], z)
            return result

        columns = [self.probed(partial(derivative, m)) for m in range(a.shape[3])]
        return torch.stack(columns).sum(0)

    def _pieces(self, columns: int) -> Iterator[tuple[slice, int, int]]:
        """Each chunk of candidates, point and column of the target."""
        return itertools.product(self.chunks, range(len(self.split)), range(columns))

    def _slopes(self, target: Tensor, coefficients: Tensor) -> Iterator[tuple[slice, Function]]:
        """∂⟨ΦᵀA, T⟩/∂x, one function of x for each piece."""
        a = self.by_point(coefficients)

        def weighed(point: int, column: Tensor, weight: Tensor, x: Tensor) -> Tensor:
            return (self._along(point, column, x) * weight).sum()

        for part, k, m in self._pieces(target.shape[1]):
            yield part, grad(partial(weighed, k, target[:, m], a[part, k, :, m]))

    def _along(self, point: int, column: Tensor, x: Tensor) -> Tensor:
        """∂f(x)/∂θ[T], (n, c)."""
        own, function = self.split[point]
        parts = torch.split(column, [own[name].numel() for name in self.block])
        tangent = {n: part.view_as(own[n]) for n, part in zip(self.block, parts, strict=True)}
        changed: Tensor = jvp(lambda theta: function(theta, x), (own,), (tangent,))[1]
        return changed

    def _mixed(self, point: int, weight: Tensor) -> Function:
        """The map x ↦ Σ_ic A_ic ∇θ f_c(x_i), (p,), with A (n, c)."""
        own, function = self.split[point]

        def combined(x: Tensor) -> Tensor:
            back = vjp(lambda theta: function(theta, x), own)[1]
            (parts,) = back(weight)
            return torch.cat([parts[name].flatten() for name in self.block])

        return combined


class RecordedGradients(GradientLinearization):
    """The same, with push and pull from CUDA graphs."""

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i ∂φ(x_i)[D_i] A_iᵀ, (p, m)."""
        return self._replayed("push", direction, coefficients)

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ A · ∂φ(x_i)ᵀ T, (n, d)."""
        return self._replayed("pull", target, coefficients)

    def _replayed(self, name: str, given: Tensor, coefficients: Tensor) -> Tensor:
        bare = copy(self)
        bare.phi = None  # what is recorded would hold it

        def product(x: Tensor, given: Tensor, a: Tensor) -> Tensor:
            bare.candidates = x
            result: Tensor = getattr(super(RecordedGradients, bare), name)(given, a)
            return result

        a = coefficients.to(self.candidates.dtype)
        graphs = cast(ParameterGradients, self.features).graphs
        return graphs(name, product, self.candidates, given, a, rounded=True)
