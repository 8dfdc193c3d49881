"""Penultimate activations of any module: what the change of its last linear layer is made of.

The Jacobian of c outputs in the last layer has rows e_c ⊗ φ(x). Its Gram matrix is I_c ⊗ ΦΦᵀ, so
the target is kept as c columns of the layer's change and one n×n system serves all outputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import vjp

from exhume.features.modules import Function, ModuleFeatures, ModuleLinearization
from exhume.features.modules import forward_derivative as along
from exhume.features.network import Weights, derivatives


@dataclass(frozen=True, eq=False)
class LastLayer(ModuleFeatures):
    """φ(x), the input of the head; k = 1 row a point."""

    @property
    def width(self) -> int:
        """Return h, the number of inputs of the head."""
        return self.points[0][self.network.head_weight].shape[1]

    def rows_at(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return φ(x), (n, 1, h)."""
        return self.network.hidden(weights, inputs)[:, None]

    def linearize(self, candidates: Tensor) -> "LastLayerLinearization":
        """Return activations and derivatives at n candidates (n, d)."""
        return LastLayerLinearization(self, candidates)


class LastLayerLinearization(ModuleLinearization):
    """Products with Φ and its derivative, by forward and reverse mode (see `Linearization`)."""

    def __init__(self, features: LastLayer, candidates: Tensor) -> None:
        """Keep the activations of the head's input, not those of the layers before."""
        super().__init__(features, candidates)
        network = features.network
        self.functions: list[Function] = [partial(network.hidden, w) for w in features.points]
        self._kept: dict[int, Callable[[Tensor], tuple[Tensor]]] = {}

    def _pieces(self) -> Iterator[tuple[slice, int, Function]]:
        """The map x ↦ φ(x) for each chunk of candidates and each point."""
        for part in self.chunks:
            for k, function in enumerate(self.functions):
                yield part, k, function

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i ∂φ(x_i)[D_i] A_iᵀ, (h, m), one forward derivative a point."""
        a = self.by_point(coefficients)
        total = a.new_zeros(self.features.width, a.shape[3])
        with torch.no_grad(), derivatives(rounded=True):
            for part, k, function in self._pieces():
                moved = along(function, self.candidates[part], direction[part])
                total += moved.T @ a[part, k, 0]
        return total

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return ∂φ(x_i)ᵀ (T A_iᵀ), (n, d), one reverse derivative a point."""
        a = self.by_point(coefficients)
        result = torch.zeros_like(self.candidates)
        with derivatives(rounded=True):
            for part, k, function in self._pieces():
                back = self._kept.get(k) or vjp(function, self.candidates[part])[1]
                if len(self.chunks) == 1:
                    self._kept[k] = back
                result[part] += back(a[part, k, 0] @ target.T)[0]
        return result

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return the derivative of `pull` along D, (n, d): forward over reverse."""
        a = self.by_point(coefficients)
        result = torch.zeros_like(self.candidates)

        def pulled(function: Function, weight: Tensor, x: Tensor) -> Tensor:
            back: Tensor = vjp(function, x)[1](weight)[0]
            return back

        with derivatives(rounded=True):
            for part, k, function in self._pieces():
                slope = partial(pulled, function, a[part, k, 0] @ target.T)
                result[part] += along(slope, self.candidates[part], direction[part])
        return result

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = Σ_kl (A_ik·A_jl) tr(∂φ_ikᵀ∂φ_jl)/d, (n, n) float64, by `probes`."""

        def derivative(x: Tensor, z: Tensor, part: slice) -> Tensor:
            return torch.stack([along(f, x, z) for f in self.functions], 1)

        with torch.no_grad():
            traces = self.probed(derivative)
        a = self.by_point(coefficients)[:, :, 0].double()
        n, points, _ = a.shape
        weights = torch.einsum("ikm,jlm->ikjl", a, a)
        return (weights * traces.view(n, points, n, points)).sum((1, 3))
