"""Penultimate activations of any module: what the change of its last linear layer is made of.

The Jacobian of c outputs in the last layer has rows e_c ⊗ φ(x). Its Gram matrix is I_c ⊗ ΦΦᵀ, so
the target is kept as c columns of the layer's change and one n×n system serves all outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp

from exhume.features.modules import (
    Function,
    ModuleFeatures,
    applied,
    forward_derivative,
    paired,
    probes,
    sum_over_blocks,
)
from exhume.features.network import Weights, derivatives


@dataclass(frozen=True, eq=False)
class LastLayer(ModuleFeatures):
    """φ(x), the input of the head; k = 1 row a point."""

    @property
    def width(self) -> int:
        """h, the number of inputs of the head."""
        return self.points[0][self.network.head_weight].shape[1]

    @property
    def outputs(self) -> int:
        """Return 0: the rows are activations."""
        return 0

    def rows(self, weights: Weights, inputs: Tensor) -> Tensor:
        """φ(x), (n, 1, h)."""
        return self.network.hidden(weights, inputs)[:, None]

    def linearize(self, candidates: Tensor) -> "LastLayerLinearization":
        """Activations and derivatives at n candidates (n, d)."""
        return LastLayerLinearization(self, candidates.to(self.device, self.dtype))


class LastLayerLinearization:
    """Products with Φ and its derivative, by forward and reverse mode (see `Linearization`)."""

    def __init__(self, features: LastLayer, candidates: Tensor) -> None:
        """Keep the activations of the head's input, not those of the layers before."""
        self.features, self.candidates = features, candidates
        self.chunks = list(features.chunks(len(candidates)))
        self._kept: list[Callable[[Tensor], tuple[Tensor]]] | None = None
        self.phi = features.all_rows(candidates)  # (n, k, h)

    def gram(self) -> Tensor:
        """ΦΦᵀ, (n·k, n·k) float64."""
        phi = self.phi.flatten(0, 1)
        return sum_over_blocks(phi, phi)

    def apply(self, target: Tensor) -> Tensor:
        """ΦT, (n·k, m) float64; the products are taken in the dtype of T."""
        return applied(self.phi.flatten(0, 1), target)

    def combine(self, coefficients: Tensor) -> Tensor:
        """ΦᵀA, (h, m)."""
        return self.phi.flatten(0, 1).T @ coefficients.to(self.phi.dtype)

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Σ_i ∂φ(x_i)[D_i] A_iᵀ, (h, m), one forward derivative a point."""
        a = self._by_point(coefficients)
        total = self.phi.new_zeros(self.phi.shape[2], a.shape[2])
        with torch.no_grad(), derivatives(rounded=True):
            for part in self.chunks:
                for k, function in enumerate(self._functions()):
                    moved = forward_derivative(function, self.candidates[part], direction[part])
                    total += moved.T @ a[part, k]
        return total

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """∂φ(x_i)ᵀ (T A_iᵀ), (n, d), one reverse derivative a point."""
        a = self._by_point(coefficients)
        result = torch.zeros_like(self.candidates)
        with derivatives(rounded=True):
            for part in self.chunks:
                for k, back in enumerate(self._backward(part)):
                    result[part] += back(a[part, k] @ target.T)[0]
        return result

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Derivative of `pull` along D, (n, d): a forward derivative of a reverse one."""
        a = self._by_point(coefficients)
        result = torch.zeros_like(self.candidates)
        with derivatives(rounded=True):
            for part in self.chunks:
                for k, function in enumerate(self._functions()):
                    cotangent = a[part, k] @ target.T

                    def pulled(
                        x: Tensor, function: Function = function, cotangent: Tensor = cotangent
                    ) -> Tensor:
                        back: Tensor = vjp(function, x)[1](cotangent)[0]
                        return back

                    result[part] += forward_derivative(
                        pulled, self.candidates[part], direction[part]
                    )
        return result

    def _backward(self, part: slice) -> list[Callable[[Tensor], tuple[Tensor]]]:
        """Reverse derivatives at some candidates, kept if these are all there are."""
        if self._kept is not None:
            return self._kept
        made = [vjp(function, self.candidates[part])[1] for function in self._functions()]
        if len(self.chunks) == 1:
            self._kept = made
        return made

    def curvature(self, coefficients: Tensor) -> Tensor:
        """C_ij = Σ_kl (A_ik·A_jl) tr(∂φ_ikᵀ∂φ_jl)/d, (n, n) float64, by `probes`."""
        a = self._by_point(coefficients).double()
        n, points, _ = a.shape
        directions = probes(self.candidates.shape[1], self.candidates)
        traces = a.new_zeros(n * points, n * points)
        with torch.no_grad(), derivatives(rounded=True):
            for z in self.features.batches(directions, n):
                x, along = paired(self.candidates, z)
                parts = self.features.chunks(len(x))
                moved = torch.cat([self._moved(x[part], along[part]) for part in parts])
                rows = moved.view(len(z), n * points, -1)
                traces += (rows @ rows.mT).sum(0).double()
        traces /= len(directions)
        weights = torch.einsum("ikm,jlm->ikjl", a, a)
        return (weights * traces.view(n, points, n, points)).sum((1, 3))

    def _moved(self, x: Tensor, z: Tensor) -> Tensor:
        """∂φ(x)[z] at each point, (n, k, h)."""
        return torch.stack([forward_derivative(f, x, z) for f in self._functions()], 1)

    def _functions(self) -> list[Callable[[Tensor], Tensor]]:
        network = self.features.network

        def at(weights: Weights) -> Callable[[Tensor], Tensor]:
            return lambda x: network.hidden(weights, x)

        return [at(weights) for weights in self.features.points]

    def _by_point(self, coefficients: Tensor) -> Tensor:
        """A as (n, k, m)."""
        n, points, _ = self.phi.shape
        return coefficients.to(self.phi.dtype).view(n, points, -1)
