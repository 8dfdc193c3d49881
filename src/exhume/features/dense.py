"""Gradients of a chain of dense layers in factored form (see `passes`), never n·c·p numbers."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from exhume.errors import InputError
from exhume.features.gradient import ParameterGradients
from exhume.features.modules import BATCH, probes
from exhume.features.network import Chain, dense_chain, derivatives
from exhume.features.passes import Factor, Layers, Pass, Split, total
from exhume.features.weights import blocks, share

ROWS = 1024  # of the Gram matrix are made at a time, so that little else is in memory


@dataclass(frozen=True, eq=False)
class DenseGradients(ParameterGradients):
    """∇θ f_c(x) of a chain of dense layers; no product forms the rows, so none are kept.

    A share of them is that in the weights and biases of some units of every layer.
    """

    one_of: tuple[int, int] = (0, 1)  # which share, and of how many

    @property
    def width(self) -> int:
        """Return p, the number of parameters in the block that this share has."""
        return sum(rows.stop - rows.start for rows in self._rows)

    def share(self, index: int, count: int) -> tuple[Self, list[slice]]:
        """Return gradients in the parameters of some units; all need the passes."""
        part = replace(self, one_of=(index, count))
        return part, part._rows

    def linearize(self, candidates: Tensor) -> "DenseLinearization":
        """Return gradients and their derivatives at n candidates (n, d)."""
        return DenseLinearization(self, candidates.to(self.device, self.dtype))

    @cached_property
    def chain(self) -> Chain:
        """Return the layers."""
        chain = dense_chain(self.network)
        if chain is None:
            kind = type(self.network.module).__name__
            raise InputError(f"{kind}: is no chain of dense layers; use ParameterGradients.")
        return chain

    @cached_property
    def basis(self) -> Tensor | None:
        """Return U (d, r), where candidates are coordinates z, x = Uz."""
        basis = self.network.basis
        return None if basis is None else basis.to(self._like)

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """Return W_l and b_l at each point, with W_1 U for the first where there is a basis."""
        result = []
        for weights in self.points:
            first, *others = (weights[f"{name}.weight"] for name in self.chain.names)
            if self.basis is not None:
                with derivatives(rounded=False):
                    first = first @ self.basis
            biases = (weights.get(f"{name}.bias") for name in self.chain.names)
            result.append(tuple(zip((first, *others), biases, strict=True)))
        return tuple(result)

    @cached_property
    def units(self) -> list[slice]:
        """Return which units of each layer this share has."""
        widths = (len(self.points[0][f"{name}.weight"]) for name in self.chain.names)
        return [share(width, *self.one_of) for width in widths]

    @cached_property
    def _rows(self) -> list[slice]:
        """Where this share's part of each name in the block is among the rows of all shares."""
        own, rows, start = dict(zip(self.chain.names, self.units, strict=True)), [], 0
        for name in self.block:
            units, (width, *inputs) = own[name.rpartition(".")[0]], self.points[0][name].shape
            each = math.prod(inputs)
            rows.append(slice(start + units.start * each, start + units.stop * each))
            start += width * each
        return rows

    @cached_property
    def places(self) -> list[tuple[slice | None, slice | None]]:
        """Return where each layer's weight and bias are among the p; None if not in the block."""
        ends = list(itertools.accumulate(rows.stop - rows.start for rows in self._rows))
        own = dict(zip(self.block, map(slice, [0, *ends], ends), strict=True))
        return [(own.get(f"{n}.weight"), own.get(f"{n}.bias")) for n in self.chain.names]

    def lifted(self, layer: int, inputs: Tensor) -> Tensor:
        """Return a layer's inputs; x = Uz where they are coordinates, (…, r) → (…, d)."""
        basis = self.basis
        return inputs if layer or basis is None else inputs @ basis.T.to(inputs)

    def by_layer(self, target: Tensor) -> Split:
        """Return T (p, m) by layer, with T_1 U for the first where there is a basis."""
        columns, basis, places = target.T, self.basis, self.places
        biases = [None if bias is None else columns[:, None, bias] for _, bias in places]
        shapes = [self.points[0][f"{name}.weight"].shape for name in self.chain.names]
        weights: list[Tensor | None] = []
        for (_, inputs), own, (weight, _) in zip(shapes, self.units, places, strict=True):
            shape = len(columns), own.stop - own.start, inputs
            weights.append(None if weight is None else columns[:, weight].reshape(shape))
        if weights[0] is not None and basis is not None:
            weights[0] = weights[0] @ basis.to(weights[0])
        return Split(weights, biases, self.units, [width for width, _ in shapes])


class DenseLinearization:
    """Products with Φ and its derivative (see `Linearization`)."""

    def __init__(self, features: DenseGradients, candidates: Tensor) -> None:
        """Make one forward pass a point."""
        self.features, self.candidates = features, candidates
        with torch.no_grad(), derivatives(rounded=False):
            activations = features.chain.activations
            self.passes = [Pass(layers, activations, candidates) for layers in features.layers]

    def gram(self) -> Tensor:
        """Return ΦΦᵀ = Σ_l (δ_l δ_lᵀ) ⊙ (h_{l−1} h_{l−1}ᵀ + 1), (n·k, n·k) float64."""
        c, nodes = self.features.outputs, len(self.candidates) * len(self.passes)
        gram = torch.zeros(nodes, c, nodes, c, dtype=torch.float64, device=self.candidates.device)
        parts = list(blocks(nodes, max(1, ROWS // c)))
        with torch.no_grad(), derivatives(rounded=False):
            for k in range(len(self.features.places)):
                outer = self._inputs_gram(k)
                if outer is None:
                    continue
                own = [here.deltas[k][..., self.features.units[k]] for here in self.passes]
                delta = self._by_node([delta.transpose(0, 1) for delta in own])
                for part in parts:
                    right = delta[part.start :]
                    block = delta[part].flatten(0, 1) @ right.flatten(0, 1).T
                    block = block.view(-1, c, len(right), c)
                    gram[part, :, part.start :] += block * outer[part, None, part.start :, None]
        result = gram.view(nodes * c, nodes * c)
        for part in parts:  # only the upper triangle was made
            rows = slice(part.start * c, part.stop * c)
            result[rows.stop :, rows] = result[rows, rows.stop :].T
        return result

    def _inputs_gram(self, layer: int) -> Tensor | None:
        """Inner products h·h' + 1 of a layer's inputs in float64, all points, where held."""
        weight, bias = self.features.places[layer]
        if weight is None and bias is None:
            return None
        nodes, one = len(self.candidates) * len(self.passes), float(bias is not None)
        ones = torch.full((nodes, nodes), one, dtype=torch.float64, device=self.candidates.device)
        if weight is None:
            return ones
        h = self._by_node(
            [self.features.lifted(layer, x.inputs[layer].double()) for x in self.passes]
        )
        return ones.addmm_(h, h.T)

    def _by_node(self, points: list[Tensor]) -> Tensor:
        """Float64 (n·points, …) from (n, …) of each point."""
        return torch.stack([part.double() for part in points], 1).flatten(0, 1)

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT = Σ_l δ_l · (T_l h_{l−1} + t_l), (n·k, m) float64, in the dtype of T."""
        n, dtype = len(self.candidates), target.dtype
        results = []
        with torch.no_grad(), derivatives(rounded=False):
            split = self.features.by_layer(target)
            for here in self.passes:
                result = target.new_zeros(n, self.features.outputs, target.shape[1])
                for k, h in enumerate(here.inputs):
                    moved = split.forward(k, h.to(dtype))  # (m, n or 1, width)
                    if moved is not None:
                        delta = here.deltas[k].to(dtype)
                        result += torch.einsum("cnw,mnw->ncm", delta, moved.expand(-1, n, -1))
                results.append(result)
        return torch.cat(results, 1).flatten(0, 1).double()

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return ΦᵀA, (p, m), one product of matrices a layer."""
        with torch.no_grad(), derivatives(rounded=False):
            return self._assembled([here.gradient(a) for here, a in self._paired(coefficients)])

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i ∂φ(x_i)[D_i] A_iᵀ, (p, m)."""
        with torch.no_grad(), derivatives(rounded=True):
            pairs = self._paired(coefficients)
            return self._assembled([here.gradient_along(direction, a) for here, a in pairs])

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ A · ∂φ(x_i)ᵀ T, (n, d)."""
        with torch.no_grad(), derivatives(rounded=True):
            split, pairs = self.features.by_layer(target), self._paired(coefficients)
            return torch.stack([here.pull(split, a) for here, a in pairs]).sum(0)

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return the derivative of `pull` along D, (n, d)."""
        with torch.no_grad(), derivatives(rounded=True):
            split, pairs = self.features.by_layer(target), self._paired(coefficients)
            return torch.stack([here.bend(direction, split, a) for here, a in pairs]).sum(0)

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = tr(J_iᵀJ_j)/d, (n, n) float64, by `probes`, from products of factors."""
        n, directions = len(self.candidates), probes(self.candidates)
        widest = max(len(w) for w in self.passes[0].weights)
        count = max(1, BATCH // (n * coefficients.shape[1] * max(n, widest)))
        result = torch.zeros(n, n, dtype=torch.float64, device=self.candidates.device)
        with torch.no_grad(), derivatives(rounded=True):
            for part in blocks(len(directions), count):
                along = directions[part, None, None]  # (q, 1, 1, d)
                pairs = self._paired(coefficients)
                by_point = [here.gradient_along(along, a) for here, a in pairs]
                for k, factors in enumerate(_by_layer(by_point)):
                    for a, b in itertools.combinations_with_replacement(factors, 2):
                        outer = self._inner(k, a, b)
                        if outer is not None:
                            own = self.features.units[k]
                            inner = (a.left[..., own] @ b.left[..., own].mT) * outer
                            inner = inner.flatten(0, -3).sum(0).double()
                            result += inner if a is b else inner + inner.T
        return result / len(directions)

    def _inner(self, layer: int, one: Factor, other: Factor) -> Tensor | None:
        """Inner products of what two factors hold on the right, where the block holds it."""
        weight, bias = self.features.places[layer]
        product = None
        if weight is not None:
            left, right = (self.features.lifted(layer, factor.right) for factor in (one, other))
            product = left @ right.mT
        if bias is None or not one.one * other.one:
            return product
        return product + 1 if product is not None else one.right.new_ones(1, 1)

    def _assembled(self, by_point: list[list[list[Factor]]]) -> Tensor:
        """Gradients summed over candidates and points, (p, m)."""
        columns = len(by_point[0][-1][0].left)
        result = self.candidates.new_empty(columns, self.features.width)
        for k, factors in enumerate(_by_layer(by_point)):
            (weight, bias), own = self.features.places[k], self.features.units[k]
            basis = None if k else self.features.basis
            if weight is not None:
                left = torch.cat([factor.left[..., own] for factor in factors], 1)
                right = torch.cat([factor.right for factor in factors])
                for rows, out in zip(left, result[:, weight], strict=True):
                    pair = (rows.T, right) if basis is None else (rows.T @ right, basis.T)
                    torch.mm(*pair, out=out.view(rows.shape[1], pair[1].shape[1]))
            if bias is not None:
                parts = (factor.left[..., own] for factor in factors if factor.one)
                sums = total(*(part.sum(1) for part in parts))
                result[:, bias] = 0 if sums is None else sums
        return result.T

    def _paired(self, coefficients: Tensor) -> list[tuple[Pass, Tensor]]:
        """The pass of each point with its part of A, (m, n, c)."""
        a = coefficients.to(self.candidates.dtype)
        a = a.view(len(self.candidates), len(self.passes), self.features.outputs, -1)
        return list(zip(self.passes, a.permute(1, 3, 0, 2).contiguous(), strict=True))


def _by_layer(by_point: list[list[list[Factor]]]) -> list[list[Factor]]:
    """The factors of all points together, for each layer."""
    return [list(itertools.chain(*layers)) for layers in zip(*by_point, strict=True)]
