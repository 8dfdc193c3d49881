"""Features σ(Vx + b) of one dense layer: V in memory, made from a seed, or read from a file."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from exhume.device import tensor_cores
from exhume.features import NO_NORM, NO_SIGN, WEAK_SIGN, Features
from exhume.features.activations import Activation
from exhume.features.weights import (
    FINE,
    Rows,
    Stored,
    Weights,
    blocks,
    free_memory,
    materialise,
    share,
    split,
)

# The most of a block of V: a few must fit in memory, and on a CPU that of one is used again for the
# next (`exhume.features.normals.KEPT`).
BLOCK_BYTES = {"cpu": 30 * 2**20, "cuda": 2**33}
SIZES = 1e-4, 10.0  # of V's entries, root mean square: products with others overflow in float16
ALIGNED = 256  # divides the rows of a block: where 8 does not, float16 products take twice as long
KEPT_BYTES = 2**30  # features of candidates are kept up to this size, where V is not in memory


@dataclass(frozen=True)
class RandomFeatures(Features):
    """φ(x) = σ(Vx + b), V (p, d): random features, and the hidden layer of a two-layer network."""

    weights: Weights  # where V comes from
    activation: Activation  # σ with its derivative
    block: int | None = None  # rows of V a block; chosen from `BLOCK_BYTES` if None
    full_precision: bool = False  # keep the products of steps in float32 on a GPU too
    bias: Tensor | None = None  # b (p,), or None for zero
    spread: float | None = None  # root mean square of the entries of V; 1/√d if None
    title: str = "random features"  # what they are, for a report

    @property
    def name(self) -> str:
        """Say what they are, with the activation."""
        return f"{self.title}, {self.activation.name}"

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Name norm and sign, as far as the activation hides them."""
        if self.bias is not None and self.bias.any():
            return ()
        norm = (NO_NORM,) if self.activation.homogeneous else ()
        sign = {"determined": (), "weak": (WEAK_SIGN,), "lost": (NO_SIGN,)}[self.activation.sign]
        return norm + sign

    @property
    def dim(self) -> int:
        """Return d, the dimension of a candidate."""
        return self.weights.shape[1]

    @property
    def width(self) -> int:
        """Return p, the number of features."""
        return self.weights.shape[0]

    @property
    def device(self) -> torch.device:
        """Return where V is handed out."""
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        """Return in which precision V is handed out."""
        return self.weights.dtype

    def exact(self) -> Self:
        """Return the same features with products in full precision, and no half copy of V."""
        weights = self.weights.to(self.device, self.dtype)  # which leaves the copy behind
        return replace(self, weights=weights, full_precision=True)

    def leaky(self) -> Self:
        """Return the same features with the published backward slope, if σ is ReLU."""
        return replace(self, activation=self.activation.leaky_backward())

    def substituted(self, activation: Activation) -> Self:
        """Return the same features with that activation, if theirs is ReLU."""
        return replace(self, activation=activation) if self.activation.name == "relu" else self

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same features elsewhere."""
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return replace(self, weights=self.weights.to(device, dtype), bias=bias)

    def resident(self) -> Self:
        """Return the same with V in memory, if it takes less than half of what is free.

        On a GPU a copy in float16 goes beside it for steps, if that takes less than half of the
        rest, and one of what that rounds off, for features, if both do.
        """
        needed = self.width * self.dim * self.dtype.itemsize
        if not self.weights.in_memory and needed > free_memory(self.device) / 2:
            return self
        stored, free = materialise(self.weights), free_memory(self.device) / 2
        copied = self.device.type == "cuda" and self.dtype == torch.float32 and stored.half is None
        if copied and not self.full_precision and needed / 2 <= free and halved(stored):
            both = needed <= free
            copy = split(stored.tensor) if both else (stored.tensor.half(),)
            stored = Stored(stored.tensor, *copy)
        return replace(self, weights=stored)

    def restrict(self, basis: Tensor) -> Self:
        """Return the features z ↦ φ(Uz) of coordinates in the span of U (d, r): VU for V."""
        u = basis.to(self.device, self.dtype)
        reduced = torch.cat([self.weights.rows(x.start, x.stop) @ u for x in self.slices()])
        spread = float(reduced.double().square().mean().sqrt())
        return replace(self, weights=Stored(reduced), spread=spread)

    def share(self, index: int, count: int) -> tuple[Self, list[slice]]:
        """Return the features of consecutive rows of V."""
        rows, weights = share(self.width, index, count), self.weights
        own = Stored(weights.tensor[rows]) if isinstance(weights, Stored) else Rows(weights, rows)
        bias = None if self.bias is None else self.bias[rows]
        return replace(self, weights=own, bias=bias), [rows]

    def slices(self) -> Iterator[slice]:
        """Return the blocks of rows in which V is read."""
        most = BLOCK_BYTES.get(self.device.type, BLOCK_BYTES["cpu"])
        rows = max(1, most // (self.dim * self.dtype.itemsize))
        return blocks(self.width, self.block or max(rows % ALIGNED, rows - rows % ALIGNED))

    def linearize(self, candidates: Tensor) -> "RandomLinearization":
        """Return features and derivatives at n candidates (n, d)."""
        return RandomLinearization(self, candidates.to(self.device, self.dtype))

    def moment(self, weights: Tensor, directions: Tensor) -> Tensor:
        """Return M₂(w) Q with M₂(w) = (1/p) Σ_k w_k (v_k v_kᵀ/s² − I): (p,), (d, k) → (d, k).

        s is the `spread` of V's entries, 1/√d unless given. For w = Σ A_i σ(Vx_i) with Gaussian V
        the mean of M₂ is c₂ Σ A_i x_i x_iᵀ / d, with c₂ the second Hermite coefficient: its extreme
        eigenvectors point at samples.
        """
        total = torch.zeros_like(directions)
        for part in self.slices():
            v = self.weights.rows(part.start, part.stop)
            total += v.T @ (weights[part, None] * (v @ directions))
        scale = self.dim if self.spread is None else 1 / self.spread**2
        return total * (scale / self.width) - weights.mean() * directions


class _Block(NamedTuple):
    """Features and slopes (n, b) of b rows of V, with these rows (b, d) where they are at hand."""

    rows: slice
    phi: Tensor
    slope: Tensor
    v: Tensor | None


class RandomLinearization:
    """Products with Φ = σ(XVᵀ) and its derivative, block by block (see `Linearization`)."""

    def __init__(self, features: RandomFeatures, candidates: Tensor) -> None:
        """Keep the features of the candidates if V is in memory, or if they take little of it."""
        self.features, self.candidates = features, candidates
        needed = 2 * len(candidates) * features.width * candidates.dtype.itemsize
        keep = features.weights.in_memory or needed <= KEPT_BYTES
        self._kept = [block._replace(v=None) for block in self._compute()] if keep else None
        self._seconds: dict[int, Tensor] = {}
        self._gram: Tensor | None = None  # where nothing is kept, once V was read

    def _compute(self) -> Iterator[_Block]:
        sigma = self.features.activation
        for part in self.features.slices():
            v = self.features.weights.rows(part.start, part.stop)
            z = self._inside(v, part)
            slope = sigma.slope(z)
            slope = slope if self.features.weights.half is None else slope.half()
            yield _Block(part, sigma.value(z), slope, v)

    def _inside(self, v: Tensor, part: slice) -> Tensor:
        """Vx + b for the rows of a block, (n, b)."""
        half, low = self.features.weights.half, self.features.weights.low
        if half is None or low is None:
            z = self.candidates @ v.T
        else:  # XVᵀ but for 2⁻²² of it, by what is in float16: three times as fast as in float32
            x, size = _scaled(self.candidates)
            (high, rest), n = split(x), len(x)
            both = _mixed(torch.cat([high, rest]), half[part].T)
            z = both[n:].add_(_mixed(high, low[part].T)).div_(FINE).add_(both[:n]).mul_(size)
        return z if self.features.bias is None else z + self.features.bias[part]

    def _blocks(self) -> Iterator[_Block]:
        return self._compute() if self._kept is None else iter(self._kept)

    def _with_v(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, slopes and V of each block; V is read again where it was not kept."""
        for rows, _, slope, v in self._blocks():
            yield rows, slope, self.features.weights.rows(rows.start, rows.stop) if v is None else v

    def _zeros(self, columns: int) -> Tensor:
        return self.candidates.new_zeros(len(self.candidates), columns, dtype=torch.float64)

    def gram(self) -> Tensor:
        """Return ΦΦᵀ, (n, n) float64."""
        if self._gram is not None:
            return self._gram
        total = self._zeros(len(self.candidates))
        for block in self._blocks():
            phi = block.phi.double()
            total += phi @ phi.T
        return total

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT, (n, m) float64; the products are taken in the dtype of T.

        Where nothing is kept ΦΦᵀ is taken on the way, as making V again would cost far more.
        """
        total, gram = self._zeros(target.shape[1]), self._zeros(len(self.candidates))
        for block in self._blocks():
            total += block.phi.to(target.dtype) @ target[block.rows]
            if self._kept is None and self._gram is None:
                phi = block.phi.double()
                gram += phi @ phi.T
        self._gram = gram if self._kept is None and self._gram is None else self._gram
        return total

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return ΦᵀA, (p, m)."""
        a = coefficients.to(self.candidates.dtype)
        return torch.cat([block.phi.T @ a for block in self._blocks()])

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i σ'(Vx_i) ⊙ (V D_i) A_iᵀ, (p, m)."""
        a, half = coefficients.to(self.candidates.dtype), self.features.weights.half
        if half is None:
            moved = ((s, self._product(direction, v, r, across=True)) for r, s, v in self._with_v())
            return torch.cat([product.mul_(slope).T @ a for slope, product in moved])
        left, size = _scaled(direction)
        right, whole = _scaled((size * a).T, summed=True)
        left, right = left.half(), right.half()
        parts = [right @ (left @ half[rows].T).mul_(slope) for rows, slope, _ in self._with_v()]
        return torch.cat(parts, 1).to(a).mul_(whole).T

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return [(A Tᵀ) ⊙ σ'(XVᵀ)] V, (n, d)."""
        a, half = coefficients.to(self.candidates.dtype), self.features.weights.half
        total = torch.zeros_like(self.candidates)
        if half is None:
            for rows, slope, v in self._with_v():
                total += self._product((a @ target[rows].T).mul_(slope), v, rows)
            return total
        columns, sizes = _scaled(target.T)
        left, whole = _scaled(a * sizes.T, summed=True)
        columns, left = columns.half(), left.half()
        for rows, slope, _ in self._with_v():
            total += (left @ columns[:, rows]).mul_(slope) @ half[rows]
        return total.mul_(whole)

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return [(A Tᵀ) ⊙ σ''(XVᵀ) ⊙ (D Vᵀ)] V, (n, d); σ'' is kept where the features are."""
        a = coefficients.to(self.candidates.dtype)
        total = torch.zeros_like(self.candidates)
        if self.features.activation.piecewise_linear:
            return total
        for rows, _, v in self._with_v():
            second = self._seconds.get(rows.start)
            if second is None:
                second = self.features.activation.second(self._inside(v, rows))
            if self._kept is not None:
                self._seconds[rows.start] = second
            moved = self._product(direction, v, rows, across=True)
            weighted = (a @ target[rows].T).mul_(second).mul_(moved)
            total += self._product(weighted, v, rows)
        return total

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C = (AAᵀ) ⊙ Σ_k σ'_ik σ'_jk |v_k|²/d, (n, n) float64."""
        total = self._zeros(len(self.candidates))
        weights = self.features.weights
        for rows, slope, v in self._with_v():
            stored = weights if isinstance(weights, Stored) else None
            length = v.square().mean(1) if stored is None else stored.lengths[rows]
            total += ((slope.to(v) * length) @ slope.to(v).T).double()
        a = coefficients.double()
        return (a @ a.T) * total

    def _product(self, left: Tensor, v: Tensor, rows: slice, across: bool = False) -> Tensor:
        """L V (or L Vᵀ, across) for rows of V; in half precision, to 1e-3, if there is a copy."""
        half = self.features.weights.half
        matrix = v if half is None else half[rows]
        matrix = matrix.T if across else matrix
        if half is None:
            with tensor_cores(not self.features.full_precision):
                return left @ matrix
        left, size = _scaled(left)
        return (left.half() @ matrix).to(size).mul_(size)


def halved(stored: Stored) -> bool:
    """Tell whether V's entries are of a size that float16 holds, and their products."""
    low, high = SIZES
    return low < float(stored.lengths.mean().sqrt()) < high


def _scaled(rows: Tensor, summed: bool = False) -> tuple[Tensor, Tensor]:
    """Divide rows by their largest entry, or by the sum of all, as float16 asks for.

    Neither small nor large rows are lost then; and products of rows that sum to 1 with others are
    no larger than these.
    """
    sizes = rows.abs().sum(1, keepdim=True) if summed else rows.abs().amax(1, keepdim=True)
    sizes = sizes.clamp_min(torch.finfo(rows.dtype).tiny)
    return rows / sizes, sizes


def _mixed(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of float16 matrices in float32, which a GPU's tensor cores add up in."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
