"""Passes through a chain of dense layers, with their derivatives in the inputs.

With h_0 = x, z_l = W_l h_{l−1} + b_l, h_l = σ(z_l) and f = z_L, an output's gradient in W_l is
δ_l h_{l−1}ᵀ and in b_l it is δ_l, where δ_l = ∂f/∂z_l. Tensors are (…, n, width), led by columns of
the coefficients or directions; lists go from the first layer on; None stands for zero.
"""

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import add, mul
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from exhume.features.activations import Activation

Layers = tuple[tuple[Tensor, Tensor | None], ...]  # W_l and b_l of each layer
PerLayer = Sequence[Tensor | None]
Back = tuple[list[Tensor], list[Tensor]]  # u_l and v_l, see `Pass`


def times(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the matrix product."""
    return None if left is None or right is None else left @ right


def scaled(*factors: Tensor | None) -> Tensor | None:
    """Return the product entry by entry."""
    known = [factor for factor in factors if factor is not None]
    return reduce(mul, known) if len(known) == len(factors) else None


def total(*terms: Tensor | None) -> Tensor | None:
    """Return the sum."""
    known = [term for term in terms if term is not None]
    return reduce(add, known) if known else None


class Factor(NamedTuple):
    """A part of a layer's gradient of each candidate: left ⊗ right for W, left · one for b."""

    left: Tensor  # (…, n, width)
    right: Tensor  # (…, n, inputs), or one row for all candidates
    one: int  # what a bias is multiplied by: 1, or 0 for a tangent


class Split(NamedTuple):
    """A target (p, m) by layer: T_l (m, units, inputs) and t_l (m, 1, units), where held.

    The units may be some of a layer's: the others have a target of zero.
    """

    weights: PerLayer
    biases: PerLayer
    units: Sequence[slice]  # of each layer
    widths: Sequence[int]  # of the layers with all units

    def forward(self, layer: int, inputs: Tensor, constant: bool = True) -> Tensor | None:
        """Return T h + t, with h (…, n, inputs): (m, n, width); without t where not constant."""
        weight, bias = self.weights[layer], self.biases[layer] if constant else None
        moved = total(None if weight is None else inputs @ weight.mT, bias)
        own, width = self.units[layer], self.widths[layer]
        if moved is None or own.stop - own.start == width:
            return moved
        return pad(moved, (own.start, width - own.stop))

    def back(self, layer: int, outputs: Tensor | None) -> Tensor | None:
        """Return v T, with v (…, n, width): (m, n, inputs)."""
        return times(
            None if outputs is None else outputs[..., self.units[layer]], self.weights[layer]
        )


class Pass:
    """What n candidates leave in the layers at one point, with derivatives in the candidates.

    Throughout, u_l = Σ_c A_c ∂f_c/∂h_l and v_l = Σ_c A_c ∂f_c/∂z_l for coefficients A (m, n, c),
    q_l is the tangent of z_l for weights along T, and a dot is the tangent for candidates along D.
    """

    def __init__(self, layers: Layers, activations: Sequence[Activation], x: Tensor) -> None:
        """Go forward: z_l = W_l h_{l−1} + b_l, h_l = σ(z_l)."""
        self.weights, self.activations = [w for w, _ in layers], activations
        self.inputs, self.slopes, self._sums = [x], [], []
        self.bent = not all(sigma.piecewise_linear for sigma in activations)  # slopes change
        for (w, b), sigma in zip(layers, activations, strict=False):  # all but the last
            z = linear(self.inputs[-1], w, b)
            self._sums.append(z)
            self.inputs.append(sigma.value(z))
            self.slopes.append(sigma.slope(z))

    @cached_property
    def seconds(self) -> PerLayer:
        """Return σ''(z_l)."""
        pairs = zip(self.activations, self._sums, strict=True)
        return [None if sigma.piecewise_linear else sigma.second(z) for sigma, z in pairs]

    @cached_property
    def thirds(self) -> PerLayer:
        """Return σ'''(z_l)."""
        pairs = zip(self.activations, self._sums, strict=True)
        return [None if sigma.piecewise_linear else sigma.third(z) for sigma, z in pairs]

    @cached_property
    def deltas(self) -> list[Tensor]:
        """Return ∂f_c/∂z_l of each layer, (c, n, width)."""
        last = self.weights[-1]
        identity = torch.eye(len(last), dtype=last.dtype, device=last.device)
        deltas = self.backward(identity[:, None])[1]
        return [delta.expand(-1, len(self.inputs[0]), -1) for delta in deltas]

    def gradient(self, coefficients: Tensor) -> list[list[Factor]]:
        """Return Σ_c A_ic ∇θ f_c(x_i) by layer: v_l ⊗ h_{l−1}."""
        _, v = self.backward(coefficients)
        return [[Factor(*pair, 1)] for pair in zip(v, self.inputs, strict=True)]

    def gradient_along(self, direction: Tensor, coefficients: Tensor) -> list[list[Factor]]:
        """Return its tangent by layer: v̇_l ⊗ h_{l−1} + v_l ⊗ ḣ_{l−1}."""
        u, v = self.backward(coefficients)
        z_dot, h_dot = self._along(direction)
        _, v_dot = self._backward_along(u, z_dot)
        layers = zip(self.inputs, v, h_dot, v_dot, strict=True)
        return [
            [*([] if moved is None else [Factor(moved, h, 1)]), Factor(back, along, 0)]
            for h, back, along, moved in layers
        ]

    def pull(self, target: Split, coefficients: Tensor) -> Tensor:
        """Return ∂⟨v_l h_{l−1}ᵀ, T_l⟩/∂x summed over layers, (n, d).

        It is the reverse derivative of Σ A · q_L: g_{l−1} = v_l T_l + y_l W_l is that in h_{l−1},
        and y_l = σ' ⊙ g_l + σ'' ⊙ q_l ⊙ u_l that in z_l, from y_L = 0.
        """
        q = self.shifted(target) if self.bent else self.seconds
        return self._summed(self.pulled(target, self.backward(coefficients), q))

    def pulled(self, target: Split, back: Back, q: PerLayer) -> Tensor | None:
        """Return it by columns, (m, n, d), from u_l and v_l, and from q_l."""
        u, v = back
        g: Tensor | None = None
        y: Tensor | None = None
        for k in reversed(range(len(self.weights))):
            g = total(target.back(k, v[k]), times(y, self.weights[k]))
            if k:
                bent = scaled(self.seconds[k - 1], q[k - 1], u[k - 1])
                y = total(scaled(self.slopes[k - 1], g), bent)
        return g

    def bend(self, direction: Tensor, target: Split, coefficients: Tensor) -> Tensor:
        """Return the tangent of `pull`, (n, d), term by term."""
        if not self.bent:
            return torch.zeros_like(self.inputs[0])
        u, v = self.backward(coefficients)
        z_dot, h_dot = self._along(direction)
        u_dot, v_dot = self._backward_along(u, z_dot)
        q = self.shifted(target)
        q_dot = self._shifted_along(target, q, z_dot, h_dot)
        y: Tensor | None = None
        y_dot: Tensor | None = None
        g_dot: Tensor | None = None
        for k in reversed(range(len(self.weights))):
            g = total(target.back(k, v[k]), times(y, self.weights[k]))
            g_dot = total(target.back(k, v_dot[k]), times(y_dot, self.weights[k]))
            if k:
                slope, second, third = (s[k - 1] for s in (self.slopes, self.seconds, self.thirds))
                y = total(scaled(slope, g), scaled(second, q[k - 1], u[k - 1]))
                y_dot = total(
                    scaled(slope, g_dot),
                    scaled(second, z_dot[k - 1], g),
                    scaled(third, z_dot[k - 1], q[k - 1], u[k - 1]),
                    scaled(second, q_dot[k - 1], u[k - 1]),
                    scaled(second, q[k - 1], u_dot[k - 1]),
                )
        return self._summed(g_dot)

    def _summed(self, columns: Tensor | None) -> Tensor:
        """The sum over the columns of the target, (m, n, d) → (n, d)."""
        return torch.zeros_like(self.inputs[0]) if columns is None else columns.sum(0)

    def backward(self, coefficients: Tensor) -> Back:
        """Return u_l = v_{l+1} W_{l+1} and v_l = σ' ⊙ u_l, from v_L = A."""
        u: list[Tensor] = []
        v = [coefficients]
        for w, slope in zip(self.weights[:0:-1], self.slopes[::-1], strict=True):
            u.append(v[-1] @ w)
            v.append(u[-1] * slope)
        return u[::-1], v[::-1]

    def _backward_along(self, u: PerLayer, z_dot: PerLayer) -> tuple[PerLayer, PerLayer]:
        """u̇_l = v̇_{l+1} W_{l+1} and v̇_l = σ' ⊙ u̇_l + σ'' ⊙ ż_l ⊙ u_l, from v̇_L = 0."""
        u_dot: list[Tensor | None] = []
        v_dot: list[Tensor | None] = [None]
        for k in reversed(range(len(self.slopes))):
            u_dot.append(times(v_dot[-1], self.weights[k + 1]))
            bent = scaled(self.seconds[k], z_dot[k], u[k])
            v_dot.append(total(scaled(self.slopes[k], u_dot[-1]), bent))
        return u_dot[::-1], v_dot[::-1]

    def _along(self, direction: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """ż_l = W_l ḣ_{l−1} and ḣ_l = σ' ⊙ ż_l, from ḣ_0 = D."""
        z_dot: list[Tensor] = []
        h_dot = [direction]
        for w, slope in zip(self.weights, self.slopes, strict=False):
            z_dot.append(h_dot[-1] @ w.T)
            h_dot.append(z_dot[-1] * slope)
        return z_dot, h_dot

    def shifted(self, target: Split, layers: int | None = None) -> PerLayer:
        """Return q_l = T_l h_{l−1} + t_l + W_l (σ' ⊙ q_{l−1}), of the last layer too if so many."""
        q: list[Tensor | None] = []
        for k in range(layers or len(self.slopes)):
            below = scaled(self.slopes[k - 1], q[-1]) if k else None
            own = target.forward(k, self.inputs[k])
            q.append(total(own, times(below, self.weights[k].T)))
        return q

    def _shifted_along(
        self, target: Split, q: PerLayer, z_dot: PerLayer, h_dot: list[Tensor]
    ) -> PerLayer:
        """q̇_l = T_l ḣ_{l−1} + W_l (σ' ⊙ q̇_{l−1} + σ'' ⊙ ż_{l−1} ⊙ q_{l−1})."""
        q_dot: list[Tensor | None] = []
        for k in range(len(self.slopes)):
            below = None
            if k:
                bent = scaled(self.seconds[k - 1], z_dot[k - 1], q[k - 1])
                below = total(scaled(self.slopes[k - 1], q_dot[-1]), bent)
            own = target.forward(k, h_dot[k], constant=False)
            q_dot.append(total(own, times(below, self.weights[k].T)))
        return q_dot
