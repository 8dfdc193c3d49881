"""What the features of any module share, and the simplest of them: the input of the last layer.

The Jacobian of c outputs in the last layer has rows e_c ⊗ φ(x). Its Gram matrix is I_c ⊗ ΦΦᵀ, so
the target is kept as c columns of the layer's change and one n×n system serves all outputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor
from torch.func import jvp, vjp
from torch.nn.modules.module import register_module_forward_hook

from exhume.features import NO_NORM, NO_SIGN, Features
from exhume.features.activations import Activation
from exhume.features.network import Network, Weights, derivatives, moved, with_activation
from exhume.features.weights import blocks, free_memory, share

AXES = 32  # in so few dimensions the curvature is exact, because every axis is a probe
PROBES = 8  # in more, so many random ones do: damping needs no more than the size of it
SHARE = 0.1  # of the free memory for a chunk's activations; derivatives of several orders need more
BATCH = 2**24  # the most numbers in the rows of all candidates along a batch of probes (64 MiB)
BLOCK = 65536  # columns that sums over p in float64 convert at a time, to keep the copy small

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ModuleFeatures(Features):
    """Features of a network at one or two points in weight space."""

    network: Network  # the module as a function
    points: tuple[Weights, ...]  # where they are taken; with two, a candidate has the rows of both
    title: str  # what they are, for a report
    chunk: int | None = None  # candidates at a time; chosen from the free memory if None

    def rows_at(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return features at one point, (n, d) → (n, k, p)."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Return the title."""
        return self.title

    @property
    def dim(self) -> int:
        """Return d, the dimension of a candidate."""
        return self.network.dim

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        """Return in which precision the weights are."""
        return self._like.dtype

    @property
    def _like(self) -> Tensor:
        return next(w for w in self.points[0].values() if w.is_floating_point())

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same features elsewhere."""
        return replace(self, points=tuple(moved(w, device, dtype) for w in self.points))

    def restrict(self, basis: Tensor) -> Self:
        """Return the features z ↦ φ(Uz) of coordinates in the span of U (d, r)."""
        basis, inner = basis.to(self._like), self.network.basis
        if inner is not None:
            basis = inner.to(self._like) @ basis
        return replace(self, network=replace(self.network, basis=basis))

    def substituted(self, activation: Activation) -> Self:
        """Return the same features with that activation in every ReLU that is a layer."""
        module = with_activation(self.network.module, activation)
        if module is None:
            return self
        return replace(self, network=replace(self.network, module=module))

    def predict(self, candidates: Tensor, factor: float = 1.0) -> Tensor:
        """Return f(x; factor · θ), (n, c), at the last point θ; buffers are no part of θ."""
        weights = dict(self.points[-1])
        if factor != 1:
            own = (name for name, _ in self.network.module.named_parameters())
            weights |= {name: factor * weights[name] for name in own if name in weights}
        with torch.no_grad(), derivatives(rounded=False):
            return self.network(weights, candidates.to(self.device, self.dtype))

    def all_rows(self, candidates: Tensor) -> Tensor:
        """Return features at every point in full precision, (n, d) → (n, k, p)."""
        with torch.no_grad(), derivatives(rounded=False):
            parts = [candidates[part] for part in self.chunks(len(candidates))]
            rows = [torch.cat([self.rows_at(w, x) for w in self.points], 1) for x in parts]
            return torch.cat(rows)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Say so where the features of two random inputs show neither norm nor sign."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, self.dim, generator=generator, dtype=torch.float64)
        gram = self.linearize(torch.cat([x, 2 * x, -x])).gram()
        rows = len(gram) // 6
        inner = gram.view(6, rows, 6, rows).diagonal(dim1=1, dim2=3).sum(2)
        cosines = inner / inner.diagonal().outer(inner.diagonal()).sqrt()
        hidden = ((cosines[:2, 2:4], NO_NORM), (cosines[:2, 4:], NO_SIGN))
        return tuple(words for c, words in hidden if (c.diagonal().abs() > 1 - 1e-6).all())

    def chunks(self, candidates: int) -> Iterator[slice]:
        """Return ranges of candidates whose activations fit in memory together."""
        room = int(SHARE * free_memory(self.device) / (self._activations * 4))
        return blocks(candidates, self.chunk or max(1, room))

    @cached_property
    def _activations(self) -> int:
        """Bytes that one candidate leaves in all layers together."""
        sizes: list[int] = []
        own = set(self.network.module.modules())  # the hook hears of every module, in any thread

        def count(module: object, arguments: object, output: object) -> None:
            if module in own and isinstance(output, Tensor):
                sizes.append(output.numel() * output.element_size())

        with torch.no_grad(), derivatives(rounded=True), register_module_forward_hook(count):
            self.network(self.points[0], torch.zeros(1, self.dim).to(self._like))
        return max(sum(sizes), 1)


class ModuleLinearization:
    """What linearisations share that may keep the rows Φ (n·k, p) of the candidates."""

    def __init__(self, features: ModuleFeatures, candidates: Tensor, keep: bool = True) -> None:
        """Compute the rows if they are to be kept: Φ may be too large."""
        self.features = features
        self.candidates = candidates.to(features.device, features.dtype)
        self.chunks = list(features.chunks(len(candidates)))
        self.phi = features.all_rows(self.candidates).flatten(0, 1) if keep else None

    def gram(self) -> Tensor:
        """Return ΦΦᵀ, (n·k, n·k) float64, row by row where Φ is not kept."""
        if self.phi is not None:
            return sum_over_blocks(self.phi, self.phi)
        count = len(self.candidates) * len(self.features.points) * max(1, self.features.outputs)
        identity = torch.eye(count, dtype=self.candidates.dtype, device=self.candidates.device)
        gram = torch.cat([self.apply(self.combine(row[:, None])) for row in identity], 1)
        return (gram + gram.T) / 2

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT, (n·k, m) float64; the products are taken in the dtype of T."""
        assert self.phi is not None
        if target.dtype == torch.float64:
            return sum_over_blocks(self.phi, target.T)
        return (self.phi @ target).double()

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return ΦᵀA, (p, m)."""
        assert self.phi is not None
        return self.phi.T @ coefficients.to(self.phi.dtype)

    def by_point(self, coefficients: Tensor) -> Tensor:
        """Return A as (n, points, rows a point, m)."""
        n, points = len(self.candidates), len(self.features.points)
        a = coefficients.to(self.candidates.dtype)
        return a.view(n, points, max(1, self.features.outputs), -1)

    def probed(self, derivative: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
        """Return the mean of JJᵀ over `probes` z, float64, with J the rows ∂φ(x)[z], (…, p).

        The derivative takes candidates, directions, and which of all pairs these are.
        """
        n, directions = len(self.candidates), probes(self.candidates)
        count = max(1, BATCH // (n * self.features.width * len(self.features.points)))
        products = []
        with derivatives(rounded=True):
            for batch in blocks(len(directions), count):
                z = directions[batch]
                x, along = self.candidates.repeat(len(z), 1), z.repeat_interleave(n, 0)
                parts = self.features.chunks(len(x))
                moved = torch.cat([derivative(x[part], along[part], part) for part in parts])
                rows = moved.reshape(len(z), -1, self.features.width)
                products.append((rows @ rows.mT).sum(0).double())
        return torch.stack(products).sum(0) / len(directions)


@dataclass(frozen=True, eq=False)
class BlockFeatures(ModuleFeatures):
    """Features that are as wide as a block of parameters."""

    block: tuple[str, ...] = ()  # their names, in the order of the target

    @property
    def width(self) -> int:
        """Return p, the number of parameters in the block."""
        return sum(self.points[0][name].numel() for name in self.block)

    @property
    def outputs(self) -> int:
        """Return c, the outputs of the network."""
        return self.network.outputs


@dataclass(frozen=True, eq=False)
class LastLayer(ModuleFeatures):
    """φ(x), the input of the head; k = 1 row a point."""

    own: slice | None = None  # which inputs of the head; all if None

    @property
    def width(self) -> int:
        """Return h, the number of inputs of the head."""
        every = self.points[0][self.network.head_weight].shape[1]
        return every if self.own is None else self.own.stop - self.own.start

    def share(self, index: int, count: int) -> tuple[Self, list[slice]]:
        """Return the features of consecutive inputs of the head; all need the layers before."""
        own = share(self.width, index, count)
        return replace(self, own=own), [own]

    def hidden(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return φ(x), (n, h)."""
        values = self.network.hidden(weights, inputs)
        return values if self.own is None else values[:, self.own]

    @property
    def patches(self) -> tuple[int, int] | None:
        """Return the patches of a network that begins with them: a transformer adds up tokens."""
        return self.network.patches

    def rows_at(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return φ(x), (n, 1, h)."""
        return self.hidden(weights, inputs)[:, None]

    def linearize(self, candidates: Tensor) -> "LastLayerLinearization":
        """Return activations and derivatives at n candidates (n, d)."""
        return LastLayerLinearization(self, candidates)


class LastLayerLinearization(ModuleLinearization):
    """Products with Φ and its derivative, by forward and reverse mode (see `Linearization`)."""

    def __init__(self, features: LastLayer, candidates: Tensor) -> None:
        """Keep the activations of the head's input, not those of the layers before."""
        super().__init__(features, candidates)
        self.functions: list[Function] = [partial(features.hidden, w) for w in features.points]
        self._kept: dict[int, Callable[[Tensor], tuple[Tensor]]] = {}

    def _pieces(self) -> Iterator[tuple[slice, int, Function]]:
        """The map x ↦ φ(x) for each chunk of candidates and each point."""
        return ((part, k, f) for part in self.chunks for k, f in enumerate(self.functions))

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i ∂φ(x_i)[D_i] A_iᵀ, (h, m), one forward derivative a point."""
        a = self.by_point(coefficients)
        total = a.new_zeros(self.features.width, a.shape[3])
        with torch.no_grad(), derivatives(rounded=True):
            for part, k, function in self._pieces():
                moved = forward_derivative(function, self.candidates[part], direction[part])
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
                result[part] += forward_derivative(slope, self.candidates[part], direction[part])
        return result

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = Σ_kl (A_ik·A_jl) tr(∂φ_ikᵀ∂φ_jl)/d, (n, n) float64, by `probes`."""

        def derivative(x: Tensor, z: Tensor, part: slice) -> Tensor:
            return torch.stack([forward_derivative(f, x, z) for f in self.functions], 1)

        with torch.no_grad():
            traces = self.probed(derivative)
        a = self.by_point(coefficients)[:, :, 0].double()
        n, points, _ = a.shape
        weights = torch.einsum("ikm,jlm->ikjl", a, a)
        return (weights * traces.view(n, points, n, points)).sum((1, 3))


def probes(candidates: Tensor) -> Tensor:
    """Return directions Z (q, d) over which the mean of |Jz|² is tr(JᵀJ)/d.

    They are the axes, or random signs over √d where there are too many: right on average.
    """
    dim = candidates.shape[1]
    if dim <= AXES:
        return torch.eye(dim).to(candidates)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (PROBES, dim), generator=generator).to(candidates) * 2 - 1
    return signs.div(dim**0.5)


def forward_derivative(function: Function, inputs: Tensor, direction: Tensor) -> Tensor:
    """Return ∂f(x)[d]."""
    derivative: Tensor = jvp(function, (inputs,), (direction,))[1]
    return derivative


def sum_over_blocks(left: Tensor, right: Tensor, block: int = BLOCK) -> Tensor:
    """Return L Rᵀ in float64, (n, p) and (k, p) → (n, k), without a float64 copy of either."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for part in blocks(left.shape[1], block):
        total += left[:, part].double() @ right[:, part].double().T
    return total
