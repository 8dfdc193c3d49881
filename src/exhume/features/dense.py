"""Gradients of a chain of dense layers in factored form: nothing of size n·c·p is built.

With h_0 = x, z_l = W_l h_{l−1} + b_l, h_l = σ(z_l) and f = z_L, an output's gradient in W_l is
δ_l h_{l−1}ᵀ and in b_l it is δ_l, where δ_l = ∂f/∂z_l. So the inner product of two gradients is a
sum of (δ·δ')(h·h' + 1) over the layers, and derivatives in the inputs are tangents of δ and h:
every product is a few passes over the layers.

Tensors are (…, n, width), with a leading axis for the columns of the coefficients, or for
directions. Lists go from the first layer to the last, or to the last but one where nothing follows
it. In sums and products None stands for zero.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from exhume.errors import InputError
from exhume.features.activations import Activation
from exhume.features.gradient import ParameterGradients
from exhume.features.layers import Chain, dense_chain
from exhume.features.modules import BATCH, probes
from exhume.features.network import Weights, derivatives
from exhume.features.weights import blocks

Layers = tuple[tuple[Tensor, Tensor | None], ...]
"""W_l and b_l of each layer."""

Terms = Sequence[Tensor | None]

ROWS = 1024
"""Rows of the Gram matrix at a time."""


@dataclass(frozen=True, eq=False)
class DenseGradients(ParameterGradients):
    """∇θ f_c(x) for weights and biases of a chain of dense layers; k = c rows a point.

    The rows are those of `ParameterGradients`, but no product forms them: `chunk` and `keep` make
    no difference here.
    """

    def linearize(self, candidates: Tensor) -> "DenseLinearization":
        """Gradients and their derivatives at n candidates (n, d)."""
        return DenseLinearization(self, candidates.to(self.device, self.dtype))

    @cached_property
    def chain(self) -> Chain:
        """The layers."""
        chain = dense_chain(self.network)
        if chain is None:
            raise InputError(
                "DenseGradients: expected a Sequential of dense layers and known activations, got "
                f"{type(self.network.module).__name__}; use ParameterGradients."
            )
        return chain

    @cached_property
    def basis(self) -> Tensor | None:
        """U (d, r), where candidates are coordinates z, x = Uz."""
        basis = self.network.basis
        return None if basis is None else basis.to(self._like)

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """W_l and b_l at each point, with W_1 U for the first where there is a basis."""
        return tuple(self._layers(weights) for weights in self.points)

    def _layers(self, weights: Weights) -> Layers:
        first, *others = (weights[f"{name}.weight"] for name in self.chain.names)
        if self.basis is not None:
            with derivatives(rounded=False):
                first = first @ self.basis
        biases = (weights.get(f"{name}.bias") for name in self.chain.names)
        return tuple(zip((first, *others), biases, strict=True))

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each parameter of the block is among the p."""
        ends = list(itertools.accumulate(self.points[0][name].numel() for name in self.block))
        return {
            name: slice(start, stop)
            for name, start, stop in zip(self.block, [0, *ends[:-1]], ends, strict=True)
        }


def times(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """The matrix product."""
    return None if left is None or right is None else left @ right


def scaled(*factors: Tensor | None) -> Tensor | None:
    """The product entry by entry."""
    result: Tensor | None = None
    for factor in factors:
        if factor is None:
            return None
        result = factor if result is None else result * factor
    return result


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum."""
    result: Tensor | None = None
    for term in terms:
        if term is not None:
            result = term if result is None else result + term
    return result


class Factor(NamedTuple):
    """A part of a layer's gradient of each candidate: left ⊗ right for W, left · one for b.

    Attributes:
        left: (…, n, width).
        right: (…, n, inputs), or one row for all candidates.
        one: what a bias is multiplied by: 1, or 0 for a tangent.
    """

    left: Tensor
    right: Tensor
    one: int


class Split(NamedTuple):
    """A target (p, m) by layer: T_l (m, width, inputs) and t_l (m, 1, width), where held."""

    weights: Terms
    biases: Terms


class Pass:
    """What n candidates leave in the layers at one point, with derivatives in the candidates.

    Throughout, u_l = Σ_c A_c ∂f_c/∂h_l and v_l = Σ_c A_c ∂f_c/∂z_l for coefficients A (m, n, c),
    q_l is the tangent of z_l for weights along T, and a dot is the tangent for candidates along D.
    """

    def __init__(
        self, layers: Layers, activations: tuple[Activation, ...], candidates: Tensor
    ) -> None:
        """The forward pass: z_l = W_l h_{l−1} + b_l, h_l = σ(z_l)."""
        self.weights, self.activations = [w for w, _ in layers], activations
        self.inputs, self.slopes = [candidates], []
        self._sums = []
        for (w, b), sigma in zip(layers, activations, strict=False):  # all but the last
            z = linear(self.inputs[-1], w, b)
            self._sums.append(z)
            self.inputs.append(sigma.value(z))
            self.slopes.append(sigma.slope(z))

    @cached_property
    def seconds(self) -> Terms:
        """σ''(z_l)."""
        pairs = zip(self.activations, self._sums, strict=True)
        return [None if sigma.piecewise_linear else sigma.second(z) for sigma, z in pairs]

    @cached_property
    def thirds(self) -> Terms:
        """σ'''(z_l)."""
        pairs = zip(self.activations, self._sums, strict=True)
        return [None if sigma.piecewise_linear else sigma.third(z) for sigma, z in pairs]

    @property
    def bent(self) -> bool:
        """Whether any slope changes with the candidates."""
        return not all(sigma.piecewise_linear for sigma in self.activations)

    @cached_property
    def deltas(self) -> list[Tensor]:
        """∂f_c/∂z_l of each layer but the last, (c, n, width)."""
        last = self.weights[-1]
        identity = torch.eye(len(last), dtype=last.dtype, device=last.device)
        return self._backward(identity[:, None])[1][:-1]

    def gradient(self, coefficients: Tensor) -> list[list[Factor]]:
        """Σ_c A_ic ∇θ f_c(x_i) by layer: v_l ⊗ h_{l−1}."""
        _, v = self._backward(coefficients)
        return [[Factor(*pair, 1)] for pair in zip(v, self.inputs, strict=True)]

    def gradient_along(self, direction: Tensor, coefficients: Tensor) -> list[list[Factor]]:
        """Its tangent by layer: v̇_l ⊗ h_{l−1} + v_l ⊗ ḣ_{l−1}."""
        u, v = self._backward(coefficients)
        z_dot, h_dot = self._along(direction)
        _, v_dot = self._backward_along(u, z_dot)
        result = []
        for k, h in enumerate(self.inputs):
            moved = v_dot[k]
            bent = [] if moved is None else [Factor(moved, h, 1)]
            result.append([*bent, Factor(v[k], h_dot[k], 0)])
        return result

    def pull(self, target: Split, coefficients: Tensor) -> Tensor:
        """∂⟨v_l h_{l−1}ᵀ, T_l⟩/∂x summed over layers, (n, d).

        The reverse derivative of Σ A · q_L: g_{l−1} = v_l T_l + y_l W_l is that in h_{l−1}, and
        y_l = σ' ⊙ g_l + σ'' ⊙ q_l ⊙ u_l that in z_l, from y_L = 0.
        """
        u, v = self._backward(coefficients)
        q = self._shifted(target) if self.bent else self.seconds
        g: Tensor | None = None
        y: Tensor | None = None
        for k in reversed(range(len(self.weights))):
            g = total(times(v[k], target.weights[k]), times(y, self.weights[k]))
            if k:
                bent = scaled(self.seconds[k - 1], q[k - 1], u[k - 1])
                y = total(scaled(self.slopes[k - 1], g), bent)
        return self._summed(g)

    def bend(self, direction: Tensor, target: Split, coefficients: Tensor) -> Tensor:
        """The tangent of `pull`, (n, d), term by term."""
        if not self.bent:
            return torch.zeros_like(self.inputs[0])
        u, v = self._backward(coefficients)
        z_dot, h_dot = self._along(direction)
        u_dot, v_dot = self._backward_along(u, z_dot)
        q = self._shifted(target)
        q_dot = self._shifted_along(target, q, z_dot, h_dot)
        y: Tensor | None = None
        y_dot: Tensor | None = None
        g_dot: Tensor | None = None
        for k in reversed(range(len(self.weights))):
            g = total(times(v[k], target.weights[k]), times(y, self.weights[k]))
            g_dot = total(times(v_dot[k], target.weights[k]), times(y_dot, self.weights[k]))
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

    def _backward(self, coefficients: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """u_l = v_{l+1} W_{l+1} and v_l = σ' ⊙ u_l, from v_L = A."""
        u: list[Tensor] = []
        v = [coefficients]
        for w, slope in zip(self.weights[:0:-1], self.slopes[::-1], strict=True):
            u.append(v[-1] @ w)
            v.append(u[-1] * slope)
        return u[::-1], v[::-1]

    def _backward_along(self, u: Terms, z_dot: Terms) -> tuple[Terms, Terms]:
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

    def _shifted(self, target: Split) -> Terms:
        """q_l = T_l h_{l−1} + t_l + W_l (σ' ⊙ q_{l−1})."""
        q: list[Tensor | None] = []
        for k in range(len(self.slopes)):
            below = scaled(self.slopes[k - 1], q[-1]) if k else None
            own = _layered(self.inputs[k], target.weights[k])
            q.append(total(own, target.biases[k], times(below, self.weights[k].T)))
        return q

    def _shifted_along(self, target: Split, q: Terms, z_dot: Terms, h_dot: list[Tensor]) -> Terms:
        """q̇_l = T_l ḣ_{l−1} + W_l (σ' ⊙ q̇_{l−1} + σ'' ⊙ ż_{l−1} ⊙ q_{l−1})."""
        q_dot: list[Tensor | None] = []
        for k in range(len(self.slopes)):
            below = None
            if k:
                bent = scaled(self.seconds[k - 1], z_dot[k - 1], q[k - 1])
                below = total(scaled(self.slopes[k - 1], q_dot[-1]), bent)
            own = _layered(h_dot[k], target.weights[k])
            q_dot.append(total(own, times(below, self.weights[k].T)))
        return q_dot


def _layered(inputs: Tensor, weight: Tensor | None) -> Tensor | None:
    """T h for each of several T (m, width, inputs), with h (n, inputs): (m, n, width)."""
    return None if weight is None else inputs[None] @ weight.mT


class DenseLinearization:
    """Products with Φ and its derivative (see `Linearization`)."""

    def __init__(self, features: DenseGradients, candidates: Tensor) -> None:
        """One forward pass a point."""
        self.features, self.candidates = features, candidates
        with torch.no_grad(), derivatives(rounded=False):
            self.passes = [
                Pass(layers, features.chain.activations, candidates) for layers in features.layers
            ]

    def gram(self) -> Tensor:
        """ΦΦᵀ = Σ_l (δ_l δ_lᵀ) ⊙ (h_{l−1} h_{l−1}ᵀ + 1), (n·k, n·k) float64.

        Its upper triangle is made in blocks of rows, so that little but the matrix is in memory.
        """
        c, nodes = self.features.network.outputs, len(self.candidates) * len(self.passes)
        gram = torch.zeros(nodes, c, nodes, c, dtype=torch.float64, device=self.candidates.device)
        parts = list(blocks(nodes, max(1, ROWS // c)))
        with torch.no_grad(), derivatives(rounded=False):
            for k in range(len(self.features.chain.names)):
                outer = self._inputs_gram(k)
                if outer is None:
                    continue
                if k == len(self.features.chain.activations):  # δ is the identity
                    gram.diagonal(dim1=1, dim2=3).add_(outer[:, :, None])
                    continue
                delta = self._by_node([here.deltas[k].transpose(0, 1) for here in self.passes])
                for part in parts:
                    right = delta[part.start :]
                    block = (delta[part].flatten(0, 1) @ right.flatten(0, 1).T).view(
                        -1, c, len(right), c
                    )
                    block *= outer[part, None, part.start :, None]
                    gram[part, :, part.start :] += block
        result = gram.view(nodes * c, nodes * c)
        for part in parts:
            rows = slice(part.start * c, part.stop * c)
            result[rows.stop :, rows] = result[rows, rows.stop :].T
        return result

    def apply(self, target: Tensor) -> Tensor:
        """ΦT = Σ_l δ_l · (T_l h_{l−1} + t_l), (n·k, m) float64, in the dtype of T."""
        n, dtype = len(self.candidates), target.dtype
        shape = (n, self.features.network.outputs, target.shape[1])
        results = []
        with torch.no_grad(), derivatives(rounded=False):
            split = self._split(target)
            for here in self.passes:
                result = torch.zeros(shape, dtype=dtype, device=target.device)
                for k, h in enumerate(here.inputs):
                    weight = _layered(h.to(dtype), split.weights[k])
                    moved = total(weight, split.biases[k])  # (m, n or 1, width)
                    if moved is None:
                        continue
                    if k == len(here.slopes):  # δ is the identity
                        result += moved.permute(1, 2, 0)
                        continue
                    delta = here.deltas[k].to(dtype)
                    result += torch.einsum("cnw,mnw->ncm", delta, moved.expand(-1, n, -1))
                results.append(result)
        return torch.cat(results, 1).flatten(0, 1).double()

    def combine(self, coefficients: Tensor) -> Tensor:
        """ΦᵀA, (p, m), one product of matrices a layer."""
        with torch.no_grad(), derivatives(rounded=False):
            pairs = zip(self.passes, self._by_point(coefficients), strict=True)
            return self._assembled([here.gradient(a) for here, a in pairs])

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Σ_i ∂φ(x_i)[D_i] A_iᵀ, (p, m)."""
        with torch.no_grad(), derivatives(rounded=True):
            pairs = zip(self.passes, self._by_point(coefficients), strict=True)
            return self._assembled([here.gradient_along(direction, a) for here, a in pairs])

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Σ A · ∂φ(x_i)ᵀ T, (n, d)."""
        with torch.no_grad(), derivatives(rounded=True):
            split = self._split(target)
            pairs = zip(self.passes, self._by_point(coefficients), strict=True)
            return torch.stack([here.pull(split, a) for here, a in pairs]).sum(0)

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Derivative of `pull` along D, (n, d)."""
        with torch.no_grad(), derivatives(rounded=True):
            split = self._split(target)
            pairs = zip(self.passes, self._by_point(coefficients), strict=True)
            return torch.stack([here.bend(direction, split, a) for here, a in pairs]).sum(0)

    def curvature(self, coefficients: Tensor) -> Tensor:
        """C_ij = tr(J_iᵀJ_j)/d, (n, n) float64, by `probes`, from inner products of factors."""
        n, weights = len(self.candidates), self._by_point(coefficients)
        directions = probes(self.candidates.shape[1], self.candidates)
        widest = max(len(w) for w in self.passes[0].weights)
        count = max(1, BATCH // (n * weights.shape[1] * max(n, widest)))
        result = torch.zeros(n, n, dtype=torch.float64, device=self.candidates.device)
        with torch.no_grad(), derivatives(rounded=True):
            for part in blocks(len(directions), count):
                along = directions[part, None, None]  # (q, 1, 1, d)
                by_point = [
                    here.gradient_along(along, a)
                    for here, a in zip(self.passes, weights, strict=True)
                ]
                for k, factors in enumerate(_by_layer(by_point)):
                    for a, b in itertools.combinations_with_replacement(factors, 2):
                        outer = self._inner(k, a, b)
                        if outer is not None:
                            inner = (a.left @ b.left.mT) * outer
                            inner = inner.flatten(0, -3).sum(0).double()
                            result += inner if a is b else inner + inner.T
        return result / len(directions)

    def _inner(self, layer: int, one: Factor, other: Factor) -> Tensor | None:
        """Inner products of what two factors hold on the right, where the block holds it."""
        weight, bias = self._held(layer)
        product = None
        if weight:
            left, right = (self._lifted(layer, factor.right) for factor in (one, other))
            product = left @ right.mT
        both = one.one * other.one if bias else 0
        if not both:
            return product
        return product + 1 if product is not None else one.right.new_ones(1, 1)

    def _inputs_gram(self, layer: int) -> Tensor | None:
        """Inner products h·h' + 1 of a layer's inputs in float64, all points, where held."""
        weight, bias = self._held(layer)
        if not weight and not bias:
            return None
        nodes = len(self.candidates) * len(self.passes)
        ones = torch.full(
            (nodes, nodes), float(bias), dtype=torch.float64, device=self.candidates.device
        )
        if not weight:
            return ones
        h = self._by_node(
            [self._lifted(layer, here.inputs[layer].double()) for here in self.passes]
        )
        return ones.addmm_(h, h.T)

    def _by_node(self, points: list[Tensor]) -> Tensor:
        """Float64 (n·points, …) from (n, …) of each point."""
        return torch.stack([part.double() for part in points], 1).flatten(0, 1)

    def _held(self, layer: int) -> tuple[bool, bool]:
        """Whether the block holds a layer's weight and its bias."""
        name, places = self.features.chain.names[layer], self.features.places
        return f"{name}.weight" in places, f"{name}.bias" in places

    def _lifted(self, layer: int, inputs: Tensor) -> Tensor:
        """A layer's inputs; x = Uz where they are coordinates, (…, r) → (…, d)."""
        basis = self.features.basis
        return inputs if layer or basis is None else inputs @ basis.T.to(inputs)

    def _split(self, target: Tensor) -> Split:
        """T by layer, with T_1 U for the first where there is a basis."""
        weights: list[Tensor | None] = []
        biases: list[Tensor | None] = []
        columns, places, basis = target.T, self.features.places, self.features.basis
        for k, name in enumerate(self.features.chain.names):
            place = places.get(f"{name}.weight")
            weight = None
            if place is not None:
                shape = self.features.points[0][f"{name}.weight"].shape
                weight = columns[:, place].reshape(-1, *shape)
                if k == 0 and basis is not None:
                    weight = weight @ basis.to(weight)
            weights.append(weight)
            place = places.get(f"{name}.bias")
            biases.append(None if place is None else columns[:, None, place])
        return Split(weights, biases)

    def _assembled(self, by_point: list[list[list[Factor]]]) -> Tensor:
        """Gradients summed over candidates and points, (p, m)."""
        columns = len(by_point[0][-1][0].left)
        result = self.candidates.new_empty(columns, self.features.width)
        places, basis = self.features.places, self.features.basis
        for k, (name, factors) in enumerate(
            zip(self.features.chain.names, _by_layer(by_point), strict=True)
        ):
            place = places.get(f"{name}.weight")
            if place is not None:
                left = torch.cat([factor.left for factor in factors], 1)
                right = torch.cat([factor.right for factor in factors])
                for rows, out in zip(left, result[:, place], strict=True):
                    if k == 0 and basis is not None:
                        torch.mm(rows.T @ right, basis.T, out=out.view(rows.shape[1], -1))
                    else:
                        torch.mm(rows.T, right, out=out.view(rows.shape[1], -1))
            place = places.get(f"{name}.bias")
            if place is not None:
                sums = total(*(factor.left.sum(1) for factor in factors if factor.one))
                result[:, place] = 0 if sums is None else sums
        return result.T

    def _by_point(self, coefficients: Tensor) -> Tensor:
        """A as (points, m, n, c)."""
        n, points = len(self.candidates), len(self.passes)
        a = coefficients.to(self.candidates.dtype)
        return a.view(n, points, self.features.network.outputs, -1).permute(1, 3, 0, 2).contiguous()


def _by_layer(by_point: list[list[list[Factor]]]) -> list[list[Factor]]:
    """The factors of all points together, for each layer."""
    return [list(itertools.chain(*layers)) for layers in zip(*by_point, strict=True)]
