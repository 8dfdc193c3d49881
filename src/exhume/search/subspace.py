"""The subspace that the samples span, from what training did to a dense first layer.

Every step of gradient descent adds Σ_i δ_i x_iᵀ to W₁, so the rows of its change lie in the span
of the samples, exactly. Weight decay also shrinks the initial weights: W₁ = c·W₁(0) + Σ_i δ_i x_iᵀ.
An optimiser that rescales each entry (Adam) breaks this, as the spectrum shows: docs/theory.md.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from exhume.equation.problem import FirstLayer
from exhume.errors import InputError
from exhume.features.weights import blocks

GAP = 3.0  # ratio of singular values at which the span ends; random neighbours differ by less
REST = 1e-2  # share of the energy beyond the gap, at most; rounding leaves less, Adam more
ALONE = 1e4  # the factor where one value alone lies beyond: by chance the last are often far apart
FEW = 10  # from so many on, values are not small together by chance, and `GAP` is enough
NOISE = 1e-7  # singular values below this share of the largest are rounding: roots of squares
ROUNDED = 1e3  # roundings of an entry that may add up in training; what is larger has another cause
TAIL = 1e-4  # share of the largest singular value up to which what lies beyond the gap does no harm
ENERGY = 1e-6  # left out by the rule `energy`: samples with less than a thousandth of the largest
LOOKED = 3072**2  # the most entries of a matrix that is taken apart to count: some seconds of work
INSTEAD = "Use the method 'exhume', or force a rank."  # where the argument breaks
Grams = tuple[Tensor, Tensor, Tensor]  # W₀ᵀW₀, W₀ᵀΔ and ΔᵀΔ with Δ = W₁ − W₀, (d, d), in float64


@dataclass(frozen=True, eq=False)
class Subspace:
    """An estimate of the samples' span."""

    basis: Tensor  # U (d, r), orthonormal columns, float64
    spectrum: Tensor  # singular values of the change, relative to the largest
    kept: float  # c, what is left of the initial weights; 1 without weight decay
    gap: float  # the ratio of singular values on either side of the rank

    @property
    def rank(self) -> int:
        """The dimension of the span."""
        return self.basis.shape[1]


def estimate(layer: FirstLayer, rank: int | str = "gap") -> Subspace:
    """Estimate the samples' span from a first layer's change.

    The rank is r, or a rule: `gap` (the last large ratio of neighbouring singular values; refused
    where none stands out) or `energy` (all but 1e-6 of the squared change).
    """
    axes = _axes(layer)
    grams = _grams(layer, axes)
    kept = 1.0
    units = len(layer.initial)  # a narrow layer has no more singular values than these
    spectrum, vectors = _spectrum(grams, kept, units)
    if not _end(spectrum):
        kept = shrinkage(*grams[:2], tall=units > layer.initial.shape[1])
        spectrum, vectors = _spectrum(grams, kept, units)
    kept, spectrum, vectors = _refined(grams, kept, spectrum, vectors)
    r = _rank(spectrum, rank)
    after = spectrum[r].item() if r < len(spectrum) else 0.0
    if rank == "gap" and after > max(TAIL, _rounding(layer, grams, kept, spectrum)):
        raise InputError(
            f"the change of the first layer lies mostly in {r} directions, but more than rounding "
            f"is outside: Adam trained it, or weights are stored in half precision. {INSTEAD}"
        )
    gap = spectrum[r - 1].item() / max(after, NOISE)
    basis = vectors[:, :r] if axes is None else axes.cpu() @ vectors[:, :r]
    return Subspace(basis.contiguous(), spectrum, kept, gap)


@lru_cache(maxsize=1)  # one audit asks for that of its layer many times, some seconds each
def span(layer: FirstLayer | None) -> Subspace | None:
    """Return the samples' span, where a first layer's change shows it.

    None where the span does not end clearly, where there is no such layer, and where its inputs are
    too many to look.
    """
    if layer is None or _size(layer) > LOOKED:
        return None
    try:
        return estimate(layer)
    except InputError:  # there are as many samples as directions, or the weights are not from there
        return None


def directions(layer: FirstLayer | None) -> int | None:
    """Return in how many directions a first layer changed: as many as there are samples.

    Fewer if these depend on each other linearly; None where `span` is.
    """
    found = span(layer)
    return None if found is None else found.rank


def _size(layer: FirstLayer) -> int:
    """Return the entries of the matrix that is taken apart: that of all inputs, or of all rows."""
    h, d = layer.initial.shape
    return d * min(d, 2 * h)


def _axes(layer: FirstLayer) -> Tensor | None:
    """Return orthonormal columns (d, 2h) that span all rows of both weights; None if 2h ≥ d."""
    h, d = layer.initial.shape
    if 2 * h >= d:
        return None
    axes: Tensor = torch.linalg.qr(torch.cat([layer.initial, layer.trained]).double().T)[0]
    return axes


def _grams(layer: FirstLayer, axes: Tensor | None) -> Grams:
    """Return the grams of a layer along the axes, or along the inputs, block by block."""
    d = layer.initial.shape[1] if axes is None else axes.shape[1]
    zero = torch.zeros(d, d, dtype=torch.float64, device=layer.initial.device)
    own, mixed, change = zero.clone(), zero.clone(), zero.clone()
    for part in blocks(layer.initial.shape[0], 16384):
        w = layer.initial[part].double()
        delta = layer.trained[part].double() - w
        w, delta = (x if axes is None else x @ axes for x in (w, delta))
        own += w.T @ w
        mixed += w.T @ delta
        change += delta.T @ delta
    return own, mixed, change


def _spectrum(grams: Grams, kept: float, count: int) -> tuple[Tensor, Tensor]:
    """Return the singular values of W₁ − c·W₀ over the largest, and right vectors as columns."""
    own, mixed, change = grams
    rest = 1 - kept  # W₁ − cW₀ = Δ + (1 − c)W₀
    gram = change + rest * (mixed + mixed.T) + rest**2 * own
    values, vectors = torch.linalg.eigh(gram)
    values = values.flip(0).clamp_min(0).sqrt()
    tiny = torch.finfo(values.dtype).tiny
    return (values / values[0].clamp_min(tiny))[:count].cpu(), vectors.flip(1).cpu()


def _rounding(layer: FirstLayer, grams: Grams, kept: float, spectrum: Tensor) -> float:
    """Return the largest singular value that rounding can leave, over that of the change."""
    own, mixed, change = grams
    h, d = layer.initial.shape
    rest = 1 - kept
    energy = change.trace() + 2 * rest * mixed.trace() + rest**2 * own.trace()
    largest = (energy.clamp_min(0).cpu() / spectrum.square().sum()).sqrt()
    entry = (own.trace().cpu() / (h * d)).sqrt() * torch.finfo(layer.trained.dtype).eps
    cancelled = NOISE * (change.trace() + rest**2 * own.trace()).sqrt().cpu()
    rounded = ROUNDED * entry * (h**0.5 + d**0.5)  # what independent entries of that size have
    return float(cancelled.maximum(rounded) / largest.clamp_min(1e-300))


def _refined(
    grams: Grams, kept: float, spectrum: Tensor, vectors: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Find c again from the directions V that no sample has a part in: W₁V = c·W₀V there."""
    own, mixed, _ = grams
    while (r := _end(spectrum)) and spectrum[r] > NOISE:
        beyond, gap = vectors[:, r:].to(own), _gaps(spectrum)[r - 1]
        before = float((beyond * (own @ beyond)).sum())
        if before <= 0:
            break
        c = 1 + float((beyond * (mixed @ beyond)).sum()) / before
        other, axes = _spectrum(grams, c, len(spectrum))
        if not (s := _end(other)) or _gaps(other)[s - 1] < 1.1 * gap:
            break
        kept, spectrum, vectors = c, other, axes
    return kept, spectrum, vectors


def shrinkage(own: Tensor, mixed: Tensor, tall: bool = True) -> float:
    """Return the c of W₁ = c·W₁(0) + (rank below d), by the eigenvalue that W₁(0)⁺W₁ repeats.

    That matrix is c·I plus one of low rank. Where no eigenvalue is repeated (the layer is not tall,
    or all directions moved), c is 1.
    """
    if not tall:
        return 1.0
    values = 1 + torch.linalg.eigvals(torch.linalg.pinv(own, hermitian=True) @ mixed)
    apart = (values[:, None] - values[None, :]).abs().fill_diagonal_(torch.inf)
    nearest, which = apart.min(1)
    closest = int(nearest.argmin())
    if not nearest[closest] < 1e-4 * values.abs().max():
        return 1.0
    return float(values[[closest, int(which[closest])]].real.mean())


def _rank(spectrum: Tensor, rank: int | str) -> int:
    most = len(spectrum)
    if isinstance(rank, int):
        if not 1 <= rank <= most:
            raise InputError(f"rank: expected a number from 1 to {most}, got {rank}.")
        return rank
    if rank == "energy":
        energy = spectrum.square().cumsum(0) / spectrum.square().sum()
        return int((energy < 1 - ENERGY).sum()) + 1
    if rank != "gap":
        raise InputError(f"rank: expected a number, gap or energy, got {rank!r}.")
    r = _end(spectrum)
    if r == 0:
        raise InputError(
            "the change of the first layer spans all directions: no gap in its singular values. "
            "Either the optimiser rescales each entry, as Adam does, or there are as many samples "
            f"as input entries or units. {INSTEAD}"
        )
    return r


def _gaps(spectrum: Tensor) -> Tensor:
    """Return ratios of neighbouring singular values, 0 where they do not show the end of a span."""
    energy = spectrum.square()
    beyond = 1 - energy.cumsum(0) / energy.sum()
    above, below = spectrum[:-1].clamp_min(NOISE), spectrum[1:].clamp_min(NOISE)
    ratios, last = above / below, spectrum[spectrum > NOISE].min()
    count = torch.arange(len(ratios), 0, -1).double()  # the fewer lie beyond, the more is asked for
    enough = (ALONE ** count.pow(-1.5)).maximum((below / last).where(count < FEW, 0)).clamp_min(GAP)
    return ratios.where((beyond[:-1] <= REST) & (ratios >= enough), 0.0)


def _end(spectrum: Tensor) -> int:
    """Return the rank at the last gap half as wide as the widest, in logarithms, or 0."""
    gaps = _gaps(spectrum)
    # A direction too many does little harm; one too few puts a sample out of reach.
    wide = (gaps > 0) & (gaps.square() >= max(gaps.tolist(), default=0.0))
    return int(wide.nonzero().max()) + 1 if wide.any() else 0
