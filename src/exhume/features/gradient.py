"""Parameter gradients ∇θ f_1 … ∇θ f_c of any block of a module: the unified form.

A candidate has one row for each output (and point). Products with the rows are forward and
reverse derivatives in the parameters; products with their Jacobian in the inputs are mixed second
derivatives. Nothing of size n·c·p is needed, but it is kept where it fits, since the Gram matrix
comes from it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

from exhume.features import Linearization
from exhume.features.modules import (
    ModuleFeatures,
    applied,
    forward_derivative,
    paired,
    probes,
    sum_over_blocks,
)
from exhume.features.network import Weights, derivatives
from exhume.features.weights import free_memory


@dataclass(frozen=True, eq=False)
class ParameterGradients(ModuleFeatures):
    """∇θ f_c(x) for the parameters named, flattened one after the other; k = c rows a point."""

    block: tuple[str, ...] = ()
    keep: bool | None = None
    """Whether to keep the rows of the candidates; if they fit in half of the memory if None."""

    @property
    def width(self) -> int:
        """p, the number of parameters in the block."""
        return sum(self.points[0][name].numel() for name in self.block)

    @property
    def outputs(self) -> int:
        """Return c, the outputs of the network."""
        return self.network.outputs

    def rows(self, weights: Weights, inputs: Tensor) -> Tensor:
        """∇θ f_c(x), (n, c, p)."""
        own, function = self.split(weights)

        def one(x: Tensor) -> Tensor:
            parts = jacrev(lambda theta: function(theta, x[None])[0])(own)
            return torch.cat([parts[name].flatten(1) for name in self.block], 1)

        result: Tensor = vmap(one)(inputs)
        return result

    def split(
        self, weights: Weights
    ) -> tuple[dict[str, Tensor], Callable[[dict[str, Tensor], Tensor], Tensor]]:
        """The block's parameters, and f(block, x) with the others held fixed."""
        own = {name: weights[name] for name in self.block}
        rest = {name: w for name, w in weights.items() if name not in own}
        return own, lambda theta, x: self.network({**rest, **theta}, x)

    def linearize(self, candidates: Tensor) -> Linearization:
        """Gradients and their derivatives at n candidates (n, d)."""
        return GradientLinearization(self, candidates.to(self.device, self.dtype))


class GradientLinearization:
    """Products with Φ and its derivative (see `Linearization`)."""

    def __init__(self, features: ParameterGradients, candidates: Tensor) -> None:
        """Keep the rows if they fit."""
        self.features, self.candidates = features, candidates
        self.chunks = list(features.chunks(len(candidates)))
        self.split = [features.split(weights) for weights in features.points]
        outputs = features.network.outputs
        size = len(candidates) * len(self.split) * outputs * features.width * candidates.itemsize
        keep = features.keep
        if keep is None:
            keep = size < free_memory(features.device) / 2
        self.phi = features.all_rows(candidates).flatten(0, 1) if keep else None  # (n·k, p)

    def gram(self) -> Tensor:
        """ΦΦᵀ, (n·k, n·k) float64; row by row where Φ is not kept."""
        if self.phi is not None:
            return sum_over_blocks(self.phi, self.phi)
        count = len(self.candidates) * len(self.split) * self.features.network.outputs
        identity = torch.eye(count, dtype=self.candidates.dtype, device=self.candidates.device)
        columns = [self.apply(self.combine(row[:, None])) for row in identity]
        gram = torch.cat(columns, 1)
        return (gram + gram.T) / 2

    def apply(self, target: Tensor) -> Tensor:
        """ΦT, (n·k, m) float64: forward derivatives of the outputs in the parameters."""
        if self.phi is not None:
            return applied(self.phi, target)
        columns = []
        with torch.no_grad(), derivatives(rounded=False):
            for column in target.to(self.candidates.dtype).T:
                parts = [
                    torch.cat([self._along(k, column, x) for k in range(len(self.split))], 1)
                    for x in (self.candidates[part] for part in self.chunks)
                ]
                columns.append(torch.cat(parts).flatten())
        return torch.stack(columns, 1).double()

    def combine(self, coefficients: Tensor) -> Tensor:
        """ΦᵀA, (p, m): reverse derivatives of the outputs in the parameters."""
        a = coefficients.to(self.candidates.dtype)
        if self.phi is not None:
            return self.phi.T @ a
        by_point = self._by_point(a)
        total = a.new_zeros(self.features.width, a.shape[1])
        with derivatives(rounded=False):
            for part in self.chunks:
                for k in range(len(self.split)):
                    for m in range(a.shape[1]):
                        total[:, m] += self._mixed(k, by_point[part, k, :, m])(
                            self.candidates[part]
                        )
        return total

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Σ_i ∂φ(x_i)[D_i] A_iᵀ, (p, m): forward derivative of a reverse derivative."""
        a = self._by_point(coefficients)
        total = a.new_zeros(self.features.width, a.shape[3])
        with derivatives(rounded=True):
            for part in self.chunks:
                x, along = self.candidates[part], direction[part]
                for k in range(len(self.split)):
                    for m in range(a.shape[3]):
                        total[:, m] += forward_derivative(
                            self._mixed(k, a[part, k, :, m]), x, along
                        )
        return total

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Σ A · ∂φ(x_i)ᵀ T, (n, d): reverse derivative of a forward derivative."""
        result = torch.zeros_like(self.candidates)
        with derivatives(rounded=True):
            for part, function in self._weighed(target, coefficients):
                result[part] += grad(function)(self.candidates[part])
        return result

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Derivative of `pull` along D, (n, d): the forward derivative of what it computes."""
        result = torch.zeros_like(self.candidates)
        with derivatives(rounded=True):
            for part, function in self._weighed(target, coefficients):
                x, along = self.candidates[part], direction[part]
                result[part] += forward_derivative(grad(function), x, along)
        return result

    def _weighed(
        self, target: Tensor, coefficients: Tensor
    ) -> Iterator[tuple[slice, Callable[[Tensor], Tensor]]]:
        """⟨ΦᵀA, T⟩ as functions of x to be summed: one for each chunk, point and column."""
        a = self._by_point(coefficients)

        def at(point: int, column: Tensor, weight: Tensor) -> Callable[[Tensor], Tensor]:
            return lambda x: (self._along(point, column, x) * weight).sum()

        for part in self.chunks:
            for k in range(len(self.split)):
                for m, column in enumerate(target.T):
                    yield part, at(k, column, a[part, k, :, m])

    def curvature(self, coefficients: Tensor) -> Tensor:
        """C_ij = tr(J_iᵀJ_j)/d, (n, n) float64, by `probes`; n·p numbers and more at a time."""
        a = self._by_point(coefficients)
        n = len(self.candidates)
        total = torch.zeros(n, n, dtype=torch.float64, device=a.device)
        directions = probes(self.candidates.shape[1], self.candidates)

        def one(x: Tensor, weight: Tensor, z: Tensor) -> Tensor:
            moved = torch.zeros_like(x[:0].sum())
            for k in range(len(self.split)):
                function = self._mixed(k, weight[k][None])
                moved = moved + forward_derivative(function, x[None], z[None])
            return moved

        with derivatives(rounded=True):
            for z in self.features.batches(directions, n):
                x, along = paired(self.candidates, z)
                for m in range(a.shape[3]):
                    weight = a[..., m].repeat(len(x) // n, 1, 1)
                    parts = self.features.chunks(len(x))
                    moved = [vmap(one)(x[part], weight[part], along[part]) for part in parts]
                    rows = torch.cat(moved).view(len(x) // n, n, -1)
                    total += (rows @ rows.mT).sum(0).double()
        return total / len(directions)

    def _along(self, point: int, column: Tensor, x: Tensor) -> Tensor:
        """∂f(x)/∂θ[T], (n, c)."""
        own, function = self.split[point]
        tangent = self._unflattened(column)
        along: Tensor = jvp(lambda theta: function(theta, x), (own,), (tangent,))[1]
        return along

    def _mixed(self, point: int, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """The map x ↦ Σ_ic A_ic ∇θ f_c(x_i), (p,), with A (n, c)."""
        own, function = self.split[point]

        def combined(x: Tensor) -> Tensor:
            back = vjp(lambda theta: function(theta, x), own)[1]
            (parts,) = back(weight)
            return torch.cat([parts[name].flatten() for name in self.features.block])

        return combined

    def _unflattened(self, column: Tensor) -> dict[str, Tensor]:
        own, _ = self.split[0]
        sizes = [own[name].numel() for name in self.features.block]
        parts: tuple[Tensor, ...] = torch.split(column, sizes)
        return {
            name: part.view_as(own[name])
            for name, part in zip(self.features.block, parts, strict=True)
        }

    def _by_point(self, coefficients: Tensor) -> Tensor:
        """A as (n, points, c, m)."""
        n, points = len(self.candidates), len(self.split)
        return coefficients.to(self.candidates.dtype).view(
            n, points, self.features.network.outputs, -1
        )
