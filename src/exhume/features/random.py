"""Features σ(Vx + b) of one dense layer: V in memory, made from a seed, or read from a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.features.activations import Activation
from exhume.features.weights import (
    Stored,
    Weights,
    blocks,
    free_memory,
    materialise,
    with_half,
)

BLOCK_BYTES = {"cpu": 2**28, "cuda": 2**33}
"""Size of one block of V by device; a few of these are in use where there is no room for more."""


SIGN = {
    "determined": (),
    "weak": ("A sample and its negative leave nearly the same trace; the sign is least certain.",),
    "lost": ("A sample and its negative leave the same trace; the sign cannot be found.",),
}


KEPT_BYTES = 2**30
"""Most memory for the features of the candidates where V itself is not in memory."""


@dataclass(frozen=True)
class RandomFeatures:
    """φ(x) = σ(Vx + b), V (p, d): random features, and the hidden layer of a two-layer network.

    Attributes:
        weights: where V comes from.
        activation: σ with its derivative.
        block: rows of V a block; chosen from `BLOCK_BYTES` if None.
        full_precision: keep the products of steps in float32 on a GPU too.
        bias: b (p,), or None for zero.
        spread: root mean square of the entries of V; 1/√d if None.
        title: what they are, for a report.
    """

    weights: Weights
    activation: Activation
    block: int | None = None
    full_precision: bool = False
    bias: Tensor | None = None
    spread: float | None = None
    title: str = "random features"

    @property
    def name(self) -> str:
        """With the activation."""
        return f"{self.title}, {self.activation.name}"

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Norm and sign, as far as the activation hides them."""
        norm = "A sample's norm leaves no trace in these features; it is assumed, not found."
        if self.bias is not None and self.bias.any():
            return ()
        return (*((norm,) if self.activation.homogeneous else ()), *SIGN[self.activation.sign])

    @property
    def dim(self) -> int:
        """The dimension of a candidate."""
        return self.weights.shape[1]

    @property
    def width(self) -> int:
        """The number of features."""
        return self.weights.shape[0]

    @property
    def device(self) -> torch.device:
        """Where V is handed out."""
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """In which precision V is handed out."""
        return self.weights.dtype

    @property
    def outputs(self) -> int:
        """Return 0: the rows are activations."""
        return 0

    def predict(self, candidates: Tensor, factor: float = 1.0) -> None:
        """Return None: one layer has no outputs."""

    def exact(self) -> "RandomFeatures":
        """Return the same features with products in full precision, and no half copy of V."""
        weights = self.weights
        if isinstance(weights, Stored):
            weights = Stored(weights.tensor)
        return replace(self, weights=weights, full_precision=True)

    def leaky(self) -> "RandomFeatures":
        """Return the same features with the published backward slope, if σ is ReLU."""
        return replace(self, activation=self.activation.leaky_backward())

    def to(self, device: torch.device, dtype: torch.dtype) -> "RandomFeatures":
        """The same features elsewhere."""
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return replace(self, weights=self.weights.to(device, dtype), bias=bias)

    def resident(self) -> "RandomFeatures":
        """The same features with V in memory, if it takes less than half of what is free."""
        weights = self.weights
        if not isinstance(weights, Stored):
            if self.width * self.dim * self.dtype.itemsize > free_memory(self.device) / 2:
                return self
            weights = materialise(weights)
        return replace(self, weights=weights if self.full_precision else with_half(weights))

    def restrict(self, basis: Tensor) -> "RandomFeatures":
        """The features z ↦ φ(Uz) of coordinates in the span of U (d, r): VU takes V's place."""
        u = basis.to(self.device, self.dtype)
        parts = [self.weights.rows(part.start, part.stop) @ u for part in self.slices()]
        reduced = torch.cat(parts)
        spread = float(reduced.double().square().mean().sqrt())
        return replace(self, weights=Stored(reduced), spread=spread)

    def substituted(self, activation: Activation) -> "RandomFeatures":
        """The same features with that activation, if theirs is ReLU."""
        return replace(self, activation=activation) if self.activation.name == "relu" else self

    def slices(self) -> Iterator[slice]:
        """The blocks of rows in which V is read."""
        most = BLOCK_BYTES.get(self.device.type, BLOCK_BYTES["cpu"])
        return blocks(self.width, self.block or max(1, most // (self.dim * self.dtype.itemsize)))

    def linearize(self, candidates: Tensor) -> "RandomLinearization":
        """Features and derivatives at n candidates (n, d)."""
        return RandomLinearization(self, candidates.to(self.device, self.dtype))

    def moment(self, weights: Tensor, directions: Tensor) -> Tensor:
        """M₂(w) Q with M₂(w) = (1/p) Σ_k w_k (v_k v_kᵀ/s² − I): (p,), (d, k) → (d, k).

        s² = 1/d is the variance of the entries of V, or `spread`² where that is known. For
        w = Σ A_i σ(Vx_i) with Gaussian V the mean of M₂ is c₂ Σ A_i x_i x_iᵀ / d, c₂ the second
        Hermite coefficient: the samples are its extreme eigenvectors.
        """
        total = torch.zeros_like(directions)
        for part in self.slices():
            v = self.weights.rows(part.start, part.stop)
            total += v.T @ (weights[part, None] * (v @ directions))
        scale = self.dim if self.spread is None else 1 / self.spread**2
        return total * (scale / self.width) - weights.mean() * directions


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Let a GPU round the factors of float32 products and convolutions to TF32, or not."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def product(
    rows: Tensor, matrix: Tensor, half: Tensor | None, full_precision: bool = False
) -> Tensor:
    """RM (n, q), in half precision if there is such a copy of M, else in TF32 or float32.

    Each row is scaled to its largest entry, so that neither small nor large ones are lost.
    The relative error is about 1e-3 on a GPU: enough for steps, not for values.
    """
    if half is None:
        with tensor_cores(not full_precision):
            return rows @ matrix
    scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return ((rows / scale).half() @ half).to(rows.dtype).mul_(scale)


@dataclass(frozen=True, eq=False)
class _Block:
    rows: slice
    phi: Tensor  # (n, b)
    slope: Tensor  # (n, b)


class RandomLinearization:
    """Products with Φ = σ(XVᵀ) and its derivative, block by block (see `Linearization`)."""

    def __init__(self, features: RandomFeatures, candidates: Tensor) -> None:
        """Keep the features of the candidates if V is in memory, or if they take little of it."""
        self.features = features
        self.candidates = candidates
        needed = 2 * len(candidates) * features.width * candidates.dtype.itemsize
        keep = isinstance(features.weights, Stored) or needed <= KEPT_BYTES
        self._kept = [block for block, _ in self._compute()] if keep else None
        self._seconds: list[Tensor] = []

    def _compute(self) -> Iterator[tuple[_Block, Tensor]]:
        sigma = self.features.activation
        for part in self.features.slices():
            v = self.features.weights.rows(part.start, part.stop)
            z = self._inside(v, part)
            yield _Block(part, sigma.value(z), sigma.slope(z)), v

    def _inside(self, v: Tensor, part: slice) -> Tensor:
        """Vx + b for the rows of a block, (n, b)."""
        z = self.candidates @ v.T
        return z if self.features.bias is None else z + self.features.bias[part]

    def _blocks(self) -> Iterator[_Block]:
        """The features alone: no pass over V if they are kept."""
        return iter(self._kept) if self._kept is not None else (b for b, _ in self._compute())

    def _blocks_with_v(self) -> Iterator[tuple[_Block, Tensor]]:
        if self._kept is None:
            yield from self._compute()
        else:
            for b in self._kept:
                yield b, self.features.weights.rows(b.rows.start, b.rows.stop)

    def gram(self) -> Tensor:
        """ΦΦᵀ, (n, n) float64."""
        total = self._zeros(len(self.candidates))
        for b in self._blocks():
            phi = b.phi.double()
            total += phi @ phi.T
        return total

    def apply(self, target: Tensor) -> Tensor:
        """ΦT, (n, m) float64; the products are taken in the dtype of T."""
        total = self._zeros(target.shape[1])
        for b in self._blocks():
            total += b.phi.to(target.dtype) @ target[b.rows]
        return total

    def combine(self, coefficients: Tensor) -> Tensor:
        """ΦᵀA, (p, m)."""
        a = coefficients.to(self.candidates.dtype)
        return torch.cat([b.phi.T @ a for b in self._blocks()])

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Σ_i σ'(Vx_i) ⊙ (V D_i) A_iᵀ, (p, m)."""
        a = coefficients.to(self.candidates.dtype)
        parts = []
        for b, v in self._blocks_with_v():
            half = self._half(b.rows)
            half = None if half is None else half.T
            moved = product(direction, v.T, half, self.features.full_precision)
            parts.append(moved.mul_(b.slope).T @ a)
        return torch.cat(parts)

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """[(A Tᵀ) ⊙ σ'(XVᵀ)] V, (n, d)."""
        a = coefficients.to(self.candidates.dtype)
        total = torch.zeros_like(self.candidates)
        for b, v in self._blocks_with_v():
            weighted = (a @ target[b.rows].T).mul_(b.slope)
            total += product(weighted, v, self._half(b.rows), self.features.full_precision)
        return total

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """[(A Tᵀ) ⊙ σ''(XVᵀ) ⊙ (D Vᵀ)] V, (n, d)."""
        a = coefficients.to(self.candidates.dtype)
        total = torch.zeros_like(self.candidates)
        if self.features.activation.piecewise_linear:
            return total
        for part, v, second in self._bends():
            half = self._half(part)
            across = None if half is None else half.T
            moved = product(direction, v.T, across, self.features.full_precision)
            weighted = (a @ target[part].T).mul_(second).mul_(moved)
            total += product(weighted, v, half, self.features.full_precision)
        return total

    def _bends(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, V and σ''(XVᵀ) of each block; the last is kept where the features are."""
        for k, part in enumerate(self.features.slices()):
            v = self.features.weights.rows(part.start, part.stop)
            if k < len(self._seconds):
                second = self._seconds[k]
            else:
                second = self.features.activation.second(self._inside(v, part))
                if self._kept is not None:
                    self._seconds.append(second)
            yield part, v, second

    def curvature(self, coefficients: Tensor) -> Tensor:
        """C = (AAᵀ) ⊙ Σ_k σ'_ik σ'_jk |v_k|²/d, (n, n) float64."""
        total = self._zeros(len(self.candidates))
        for b, v in self._blocks_with_v():
            total += ((b.slope * v.square().mean(1)) @ b.slope.T).double()
        a = coefficients.double()
        return (a @ a.T) * total

    def _half(self, rows: slice) -> Tensor | None:
        weights = self.features.weights
        return (
            weights.half[rows] if isinstance(weights, Stored) and weights.half is not None else None
        )

    def _zeros(self, columns: int) -> Tensor:
        return torch.zeros(
            len(self.candidates), columns, dtype=torch.float64, device=self.candidates.device
        )
