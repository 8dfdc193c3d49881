"""What the features of any module share: sizes, chunks of candidates, random probes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.func import jvp

from exhume.features import Linearization
from exhume.features.activations import Activation
from exhume.features.layers import with_activation
from exhume.features.network import Network, Weights, derivatives, moved
from exhume.features.weights import blocks, free_memory

AXES, PROBES = 32, 8
"""Directions for the curvature: the axes where there are no more than so many, else random ones."""

SHARE = 0.1
"""Share of the free memory that the activations of one chunk of candidates may take."""

BATCH = 2**24
"""Most numbers in the rows of all candidates along a batch of directions."""

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ModuleFeatures:
    """Features of a network at one or two points in weight space.

    Attributes:
        network: the module as a function.
        points: weights at which the features are taken; with two, a candidate has the rows of
            both, each with coefficients of its own.
        title: what they are, for a report.
        chunk: candidates at a time; chosen from the free memory if None.
    """

    network: Network
    points: tuple[Weights, ...]
    title: str
    chunk: int | None = None

    @property
    def name(self) -> str:
        """For a report."""
        return self.title

    @property
    def dim(self) -> int:
        """The dimension of a candidate."""
        return self.network.dim

    @property
    def outputs(self) -> int:
        """Return c, how many outputs have their gradients in the rows of a candidate."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        """In which precision the weights are."""
        return self._like.dtype

    @property
    def _like(self) -> Tensor:
        return next(w for w in self.points[0].values() if w.is_floating_point())

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same features elsewhere."""
        return replace(self, points=tuple(moved(w, device, dtype) for w in self.points))

    def resident(self) -> Self:
        """Return them as they are: a module's weights are in memory."""
        return self

    def exact(self) -> Self:
        """Return them as they are: a module's products are rounded only where that is harmless."""
        return self

    def leaky(self) -> Self:
        """Return them as they are: torch differentiates a module as it is."""
        return self

    def predict(self, candidates: Tensor, factor: float = 1.0) -> Tensor | None:
        """Return f(x; factor · θ), (n, c), at the last point."""
        parameters = {name for name, _ in self.network.module.named_parameters()}
        weights = self.points[-1]
        if factor != 1:
            weights = {n: factor * w if n in parameters else w for n, w in weights.items()}
        with torch.no_grad(), derivatives(rounded=False):
            return self.network(weights, candidates.to(self.device, self.dtype))

    def restrict(self, basis: Tensor) -> Self:
        """The features z ↦ φ(Uz) of coordinates in the span of U (d, r)."""
        inner = self.network.basis
        basis = (
            basis.to(self._like) if inner is None else inner.to(self._like) @ basis.to(self._like)
        )
        return replace(self, network=replace(self.network, basis=basis))

    def substituted(self, activation: Activation) -> Self:
        """The same features with that activation in the place of every ReLU that is a layer."""
        module = with_activation(self.network.module, activation)
        if module is None:
            return self
        return replace(self, network=replace(self.network, module=module))

    def moment(self, weights: Tensor, directions: Tensor) -> Tensor | None:
        """None: a general module has no moment that points at samples."""
        return None

    def rows(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Features at one point, (n, d) → (n, k, p)."""
        raise NotImplementedError

    def linearize(self, candidates: Tensor) -> Linearization:
        """Features and derivatives at n candidates (n, d)."""
        raise NotImplementedError

    def all_rows(self, candidates: Tensor) -> Tensor:
        """Features at every point in full precision, (n, d) → (n, k, p)."""
        with torch.no_grad(), derivatives(rounded=False):
            return torch.cat(
                [
                    torch.cat([self.rows(weights, candidates[part]) for weights in self.points], 1)
                    for part in self.chunks(len(candidates))
                ]
            )

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Norm and sign, where the features of two random inputs do not show them."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, self.dim, generator=generator, dtype=torch.float64)
        gram = self.linearize(torch.cat([x, 2 * x, -x])).gram()
        rows = len(gram) // 6
        inner = gram.view(6, rows, 6, rows).diagonal(dim1=1, dim2=3).sum(2)
        cosines = inner / inner.diagonal().outer(inner.diagonal()).sqrt()
        sentences = []
        if _parallel(cosines[:2, 2:4]):
            sentences.append(
                "A sample's norm leaves no trace in these features; it is assumed, not found."
            )
        if _parallel(cosines[:2, 4:]):
            sentences.append(
                "A sample and its negative leave the same trace; the sign cannot be found."
            )
        return tuple(sentences)

    def chunks(self, candidates: int) -> Iterator[slice]:
        """Ranges of candidates whose activations fit in memory together."""
        return blocks(candidates, self.chunk or max(1, self._room()))

    def batches(self, directions: Tensor, candidates: int) -> Iterator[Tensor]:
        """Directions (q, d), so many at a time that the rows of all candidates are few."""
        count = max(1, BATCH // (candidates * self.width * len(self.points)))
        for part in blocks(len(directions), count):
            yield directions[part]

    @property
    def width(self) -> int:
        """p, the number of rows of the target."""
        raise NotImplementedError

    def _room(self) -> int:
        return int(SHARE * free_memory(self.device) / (self._activations * 4))

    @cached_property
    def _activations(self) -> int:
        """Bytes that one candidate leaves in all layers together."""
        total = 0

        def count(module: object, arguments: object, output: object) -> None:
            nonlocal total
            if isinstance(output, Tensor):
                total += output.numel() * output.element_size()

        handles = [m.register_forward_hook(count) for m in self.network.module.modules()]
        try:
            with torch.no_grad(), derivatives(rounded=True):
                self.network(self.points[0], torch.zeros(1, self.dim).to(self._like))
        finally:
            for handle in handles:
                handle.remove()
        return max(total, 1)


def _parallel(cosines: Tensor) -> bool:
    return bool((cosines.diagonal().abs() > 1 - 1e-6).all())


def probes(dim: int, like: Tensor) -> Tensor:
    """Directions Z (q, d) over which the mean of |Jz|² is tr(JᵀJ)/d.

    The axes, exactly; or random signs over √d, on average, where there are too many axes.
    """
    if dim <= AXES:
        return torch.eye(dim).to(like)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (PROBES, dim), generator=generator).to(like) * 2 - 1
    scaled: Tensor = signs / dim**0.5
    return scaled


def paired(candidates: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Every candidate (n, d) with every direction (q, d), (q·n, d) each, candidates first."""
    n, q = len(candidates), len(directions)
    return candidates.repeat(q, 1), directions.repeat_interleave(n, 0)


def forward_derivative(function: Function, inputs: Tensor, direction: Tensor) -> Tensor:
    """∂f(x)[d]."""
    derivative: Tensor = jvp(function, (inputs,), (direction,))[1]
    return derivative


def applied(rows: Tensor, target: Tensor) -> Tensor:
    """ΦT in float64, (r, p) and (p, m) → (r, m), the products taken in the dtype of T."""
    if target.dtype == torch.float64:
        return sum_over_blocks(rows, target.T)
    return (rows @ target).double()


def sum_over_blocks(left: Tensor, right: Tensor, block: int = 65536) -> Tensor:
    """L Rᵀ in float64, (n, p) and (k, p) → (n, k), without a float64 copy of either."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for part in blocks(left.shape[1], block):
        total += left[:, part].double() @ right[:, part].double().T
    return total
