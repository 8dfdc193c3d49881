"""Features σ(Vx + b) of one dense layer: V in memory, made from a seed, or read from a file."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from exhume.device import kernels, tensor_cores
from exhume.features import NO_NORM, NO_SIGN, WEAK_SIGN, Features
from exhume.features.activations import Activation, activation
from exhume.features.graphs import Graphs
from exhume.features.weights import (
    FINE,
    Rows,
    Stored,
    Weights,
    blocks,
    free_memory,
    lengths,
    materialise,
    mixed,
    share,
    split,
)

# The most of a block of V: a few must fit in memory, and on a CPU that of one is used again for the
# next (`exhume.features.normals.KEPT`).
BLOCK_BYTES = {"cpu": 30 * 2**20, "cuda": 2**33}
SIZES = 1e-4, 10.0  # of V's entries, root mean square: products with others overflow in float16
ALIGNED = 256  # divides the rows of a block: where 8 does not, float16 products take twice as long
# Entries of V from which a CPU takes half as long where it may round to bfloat16 (without units for
# that, too: another library multiplies then, and rounds nothing)
LARGE = 2**19
# Entries of V that a GPU reads twice in less time than a host takes to launch a product's kernels
LAUNCHED = 2**29
# Features and slopes that a product's graph has a copy of, at most: 400 MB, copied as fast as that
COPIED = 2**26
SUMMED = 65536  # rows that float32 adds up: of more, what is lost shows in the smallest eigenvalues
RELU = activation("relu")
KERNELS = "exhume.features.products_triton"
KEPT_BYTES = 2**30  # features of candidates are kept up to this size, where V is not in memory;
KEPT_SHARE = 4  # on a GPU up to one in so many of its free bytes: searches hold those of two fits


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
    graphs: Graphs = field(default_factory=Graphs, init=False, repr=False, compare=False)

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

    @property
    def coarse(self) -> bool:
        """Tell whether products of steps are of V in half precision."""
        return self.weights.coarse and not self.full_precision

    @property
    def brief(self) -> bool:
        """Tell whether a GPU's host takes longer to launch a product than the GPU to take it.

        Of ReLU alone, as one graph serves all steps: a softplus has another function for each.
        """
        plain = self.activation is RELU and self.bias is None and self.coarse
        return plain and self.device.type == "cuda" and self.width * self.dim <= LAUNCHED

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
        total, coarse = torch.zeros_like(directions), self.coarse
        factors = weights[:, None]
        if coarse:
            (columns, sizes), (factors, size) = _scaled(directions.T), _scaled(factors, whole=True)
            along, scales = columns.T.half(), size * sizes.T
        for part in self.slices():
            if coarse:
                v, _ = self.weights.halves(part.start, part.stop, fine=False)
                total += scales * mixed(v.T, (v @ along).mul_(factors[part]))
            else:
                v = self.weights.rows(part.start, part.stop)
                total += v.T @ (factors[part] * (v @ directions))
        scale = self.dim if self.spread is None else 1 / self.spread**2
        return total * (scale / self.width) - weights.mean() * directions


class _Block(NamedTuple):
    """Features and slopes (n, b) of b rows of V, with these rows (b, d) where they are at hand."""

    rows: slice
    phi: Tensor
    slope: Tensor
    v: Tensor | None  # in half precision where products of steps are


class RandomLinearization:
    """Products with Φ = σ(XVᵀ) and its derivative, block by block (see `Linearization`)."""

    def __init__(
        self, features: RandomFeatures, candidates: Tensor, kept: list[_Block] | None = None
    ) -> None:
        """Keep the features of the candidates if V is in memory, or if they take little of it."""
        self.features, self.candidates, self._coarse = features, candidates, features.coarse
        self._kept = kept
        if kept is None and (features.weights.in_memory or self._small()):
            self._kept = [block._replace(v=None) for block in self._compute(written=False)]
        self._seconds: dict[int, Tensor] = {}
        self._gram: Tensor | None = None  # once it was asked for

    def _small(self) -> bool:
        """Whether features take little memory."""
        needed = 2 * len(self.candidates) * self.features.width * self.candidates.dtype.itemsize
        if self.features.device.type == "cuda":
            return needed <= free_memory(self.features.device) // KEPT_SHARE
        return needed <= KEPT_BYTES

    def _compute(self, written: bool) -> Iterator[_Block]:
        """Make features and slopes of each block, with V if it is to be written."""
        sigma = self.features.activation
        drawn = self._coarse and self.features.weights.drawn(len(self.candidates)) and not written
        plain = sigma is RELU and self.features.bias is None
        fused = kernels(KERNELS, self.features.device) if plain else None
        for part in self.features.slices():
            v, low = (None, None) if drawn else self._read(part)
            if fused is not None and v is not None and low is not None:
                phi, slope = fused.rectified(*self._halves(v, low))
                yield _Block(part, phi, slope, v)
                continue
            z = self._inside(v, low, part)
            slope = sigma.slope(z)
            yield _Block(part, sigma.value(z), slope.half() if self._coarse else slope, v)

    def _read(self, part: slice, fine: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return rows of V as products of steps take them, and what that rounds off."""
        weights = self.features.weights
        if self._coarse:
            return weights.halves(part.start, part.stop, fine)
        return weights.rows(part.start, part.stop), None

    def _inside(self, v: Tensor | None, low: Tensor | None, part: slice) -> Tensor:
        """Vx + b for the rows of a block, (n, b)."""
        weights = self.features.weights
        if v is None:
            x, size = _scaled(self.candidates)
            high = x.half()
            z = weights.across(part.start, part.stop, high, (x - high).half()).mul_(size)
        elif low is not None:
            high, rest, size = self._halves(v, low)
            n = len(rest)
            z = high[:n].add_(high[n:].add_(rest), alpha=1 / FINE).mul_(size)
        else:
            exact = weights.rows(part.start, part.stop) if self._coarse else v
            z = self.candidates @ exact.T
        return z if self.features.bias is None else z + self.features.bias[part]

    def _halves(self, v: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return B (2n, b), C (n, b) and s (n, 1) with XVᵀ = s (B₁ + (B₂ + C)/`FINE`).

        It is so to 5e-6, by what is in float16: three times as fast as in float32. Tensor cores
        round sums towards zero, which is most of it where rows are long.
        """
        x, size = _scaled(self.candidates)
        high, rest = split(x)
        return mixed(torch.cat([high, rest]), v.T), mixed(high, low.T), size

    def _blocks(self, written: bool = False) -> Iterator[_Block]:
        return self._compute(written) if self._kept is None else iter(self._kept)

    def _v(self, block: _Block) -> Tensor:
        """V of a block, read again where it was not kept."""
        return self._read(block.rows, fine=False)[0] if block.v is None else block.v

    def _across(self, left: Tensor, block: _Block) -> Tensor:
        """LVᵀ in float16 for the rows of a block, (n, b)."""
        if block.v is not None:
            return left @ block.v.T
        return self.features.weights.across(block.rows.start, block.rows.stop, left)

    def _along(self, left: Tensor, block: _Block) -> Tensor:
        """LV for float16 L (n, b) and the rows of a block, (n, d)."""
        if block.v is not None:
            return mixed(left, block.v)
        return self.features.weights.along(block.rows.start, block.rows.stop, left)

    def _zeros(self, columns: int) -> Tensor:
        return self.candidates.new_zeros(len(self.candidates), columns, dtype=torch.float64)

    def gram(self) -> Tensor:
        """Return ΦΦᵀ, (n, n) float64."""
        if self._gram is None:
            self._gram = self._zeros(len(self.candidates))
            for block in self._blocks():
                phi = block.phi.double()
                self._gram += phi @ phi.T
        return self._gram

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT, (n, m) float64; the products are taken in the dtype of T.

        ΦΦᵀ is taken on the way where V is made for it, or Φ converted to float64, as who asks for
        that eliminates coefficients: it would cost more later.
        """
        total, gram = self._zeros(target.shape[1]), None
        if self._gram is None and (self._kept is None or target.dtype == torch.float64):
            gram = self._zeros(len(self.candidates))
        for block in self._blocks():
            phi = block.phi.to(target.dtype)
            total += applied(phi, target[block.rows])
            if gram is not None:
                phi = phi.double()
                gram += phi @ phi.T
        self._gram = self._gram if gram is None else gram
        return total

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return ΦᵀA, (p, m)."""
        a = coefficients.to(self.candidates.dtype)
        return torch.cat([block.phi.T @ a for block in self._blocks()])

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i σ'(Vx_i) ⊙ (V D_i) A_iᵀ, (p, m)."""
        a = coefficients.to(self.candidates.dtype)
        if not self._coarse:
            moved = ((b.slope, self._product(direction, self._v(b).T)) for b in self._blocks())
            return torch.cat([product.mul_(slope).T @ a for slope, product in moved])
        if a.shape[1] == 1:  # then A can be in the direction, and sums in float32
            left, size = _scaled(a * direction, whole=True)
            left = left.half()
            sums = [summed(self._across(left, block), block.slope) for block in self._blocks()]
            return torch.cat(sums)[:, None].mul_(size)
        left, size = _scaled(direction)
        right, whole = _scaled((size * a).T, summed=True)
        left, right = left.half(), right.half()
        parts = [right @ self._across(left, b).mul_(b.slope) for b in self._blocks()]
        return torch.cat(parts, 1).to(a).mul_(whole).T

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return [(A Tᵀ) ⊙ σ'(XVᵀ)] V, (n, d)."""
        a = coefficients.to(self.candidates.dtype)
        total = torch.zeros_like(self.candidates)
        if not self._coarse:
            for block in self._blocks():
                weighted = (a @ target[block.rows].T).mul_(block.slope)
                total += self._product(weighted, self._v(block))
            return total
        columns, sizes = _scaled(target.T)
        columns = columns.half()
        if a.shape[1] == 1:  # then A is left for the end: AᵢTᵀ is not made
            for block in self._blocks():
                total += self._along(columns[:, block.rows] * block.slope, block)
            return total.mul_(a * sizes)
        left, whole = _scaled(a * sizes.T, summed=True)
        left = left.half()
        for block in self._blocks():
            total += self._along((left @ columns[:, block.rows]).mul_(block.slope), block)
        return total.mul_(whole)

    def twice(self, direction: Tensor, coefficients: Tensor, root: Tensor) -> Tensor | None:
        """Return JᵀP⊥J D, (n, d), with L⁻¹ of the Gram matrix LLᵀ, from a CUDA graph if `brief`.

        The graph has a copy of the features, which would take longer than launching where they
        are many.
        """
        features, kept = self.features, self._kept
        many = features.width * len(direction) > COPIED
        if not features.brief or kept is None or many:
            return None
        parts = [part for block in kept for part in (block.phi, block.slope)]
        given = direction, coefficients, root, *parts
        return features.graphs("twice", partial(_projected, features), *given)

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return [(A Tᵀ) ⊙ σ''(XVᵀ) ⊙ (D Vᵀ)] V, (n, d); σ'' is kept where the features are."""
        a = coefficients.to(self.candidates.dtype)
        total = torch.zeros_like(self.candidates)
        if self.features.activation.piecewise_linear:
            return total
        for block in self._blocks(written=True):
            rows, v = block.rows, self._v(block)
            second = self._seconds.get(rows.start)
            if second is None:
                second = self.features.activation.second(self._inside(*self._read(rows), rows))
            if self._kept is not None:
                self._seconds[rows.start] = second
            moved = self._product(direction, v.T)
            weighted = (a @ target[rows].T).mul_(second).mul_(moved)
            total += self._product(weighted, v)
        return total

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C = (AAᵀ) ⊙ Σ_k σ'_ik σ'_jk |v_k|²/d, (n, n) float64."""
        total, weights = self._zeros(len(self.candidates)), self.features.weights
        for block in self._blocks(written=True):
            rows, slope, v = block.rows, block.slope, self._v(block)
            stored = weights if isinstance(weights, Stored) else None
            length = stored.lengths[rows] if stored else lengths(v, self.candidates.dtype)
            if not self._coarse:
                total += ((slope * length) @ slope.T).double()
                continue
            root = length.sqrt()
            largest = root.max().clamp_min(torch.finfo(root.dtype).tiny)
            weighted = slope * (root / largest).half()
            for part in blocks(len(v), SUMMED):
                terms = weighted[:, part]
                total += mixed(terms, terms.T).double() * largest.double().square()
        a = coefficients.double()
        return (a @ a.T) * total

    def _product(self, left: Tensor, matrix: Tensor) -> Tensor:
        """L M; in half precision, to 1e-3, where M is; on a CPU that rounds to bfloat16 to 1e-2."""
        if not self._coarse:
            large = matrix.numel() >= LARGE
            if not (large or matrix.is_cuda):
                return left @ matrix
            with tensor_cores(not self.features.full_precision, large):
                return left @ matrix
        left, size = _scaled(left)
        return mixed(left.half(), matrix).to(size).mul_(size)


def _projected(
    features: RandomFeatures, direction: Tensor, a: Tensor, root: Tensor, *parts: Tensor
) -> Tensor:
    """Return JᵀP⊥J D for features and slopes of each block, and L⁻¹ of the Gram matrix LLᵀ."""
    arrays = zip(features.slices(), parts[::2], parts[1::2], strict=True)
    at = RandomLinearization(features, direction, [_Block(*block, None) for block in arrays])
    pushed = at.push(direction, a)
    pushed = pushed - at.combine(root.T @ (root @ at.apply(pushed)))
    return at.pull(pushed, a)


def halved(stored: Stored) -> bool:
    """Tell whether V's entries are of a size that float16 holds, and their products."""
    low, high = SIZES
    return low < float(stored.lengths.mean().sqrt()) < high


def applied(phi: Tensor, target: Tensor) -> Tensor:
    """Return ΦT of rows of T, (n, m)."""
    fused = kernels(KERNELS, phi.device) if target.shape[1] == 1 else None
    if fused is None or phi.dtype != torch.float32:
        return phi @ target
    product: Tensor = fused.product(phi, target[:, 0].contiguous())
    return product[:, None]


def summed(left: Tensor, right: Tensor) -> Tensor:
    """Return Σ_i l_ik r_ik, (b,) in float32, of matrices (n, b); the left one is overwritten."""
    if (fused := kernels(KERNELS, left.device)) is not None:
        total: Tensor = fused.inner(left, right)
        return total
    return left.mul_(right).sum(0, dtype=torch.float32)


def _scaled(rows: Tensor, summed: bool = False, whole: bool = False) -> tuple[Tensor, Tensor]:
    """Divide rows by their largest entry, by the sum of all, or by the largest of the whole.

    As float16 asks for: neither small nor large rows are lost then; and products of rows that sum
    to 1 with others are no larger than these. The whole will do where rows are added up.
    """
    sizes = rows.abs().sum(1, keepdim=True) if summed else rows.abs().amax(1, keepdim=True)
    sizes = (sizes.amax(0, keepdim=True) if whole else sizes).clamp_min(
        torch.finfo(rows.dtype).tiny
    )
    return rows / sizes, sizes
