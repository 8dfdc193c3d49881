"""The subspace that the samples span, from what training did to a dense first layer.

Every step of gradient descent adds Σ_i δ_i x_iᵀ to W₁, so the rows of its change lie in the span
of the samples, exactly, whatever the step size, with momentum or without. L2 weight decay also
shrinks the initial weights: W₁ = c·W₁(0) + Σ_i δ_i x_iᵀ, with one number c to be found. An
optimiser that rescales each entry (Adam) breaks the argument, and the spectrum shows it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.errors import InputError
from exhume.problem import FirstLayer

GAP = 10.0
"""Least ratio of neighbouring singular values that counts as the end of the samples' span."""

ENERGY = 1e-6
"""Share of the change's energy that the rule `energy` leaves out."""


@dataclass(frozen=True, eq=False)
class Subspace:
    """An estimate of the samples' span.

    Attributes:
        basis: U (d, r), orthonormal columns, float64.
        spectrum: singular values of the change, relative to the largest.
        kept: c, what is left of the initial weights; 1 without weight decay.
        gap: the ratio of singular values on either side of the rank.
    """

    basis: Tensor
    spectrum: Tensor
    kept: float
    gap: float

    @property
    def rank(self) -> int:
        """R."""
        return self.basis.shape[1]


def estimate(layer: FirstLayer, rank: int | str = "gap") -> Subspace:
    """The samples' span from a first layer's change.

    Args:
        layer: the layer before and after training.
        rank: r, or a rule: `gap` (the largest ratio of neighbouring singular values; refused
            where none stands out) or `energy` (all but 1e-6 of the squared change).
    """
    kept = shrinkage(layer.initial, layer.trained)
    change = layer.trained - kept * layer.initial
    _, values, rows = torch.linalg.svd(change, full_matrices=False)
    spectrum = values / values[0].clamp_min(torch.finfo(values.dtype).tiny)
    r = _rank(spectrum, rank)
    after = spectrum[r].item() if r < len(spectrum) else 0.0
    gap = spectrum[r - 1].item() / max(after, torch.finfo(values.dtype).tiny)
    return Subspace(rows[:r].T.contiguous(), spectrum, kept, gap)


def shrinkage(initial: Tensor, trained: Tensor) -> float:
    """The c of W₁ = c·W₁(0) + (rank below d), by the eigenvalue that W₁(0)⁺W₁ repeats.

    That matrix is c·I plus one of low rank, so all but rank-many of its eigenvalues are c. Where
    none is repeated (the layer is no wider than d, or all directions moved), c is 1.

    Example:
        >>> W = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).double()
        >>> x = torch.ones(1, 6, dtype=torch.float64)
        >>> round(shrinkage(W, 0.9 * W + 0.1 * W[:, :1] @ x), 6)
        0.9
    """
    h, d = initial.shape
    if h <= d:
        return 1.0
    quotient = torch.linalg.lstsq(initial, trained).solution
    values = torch.linalg.eigvals(quotient).real
    near = (values[:, None] - values[None, :]).abs() < 1e-4 * values.abs().max()
    count, centre = near.sum(1).max(0)
    if int(count) < 2:
        return 1.0
    kept = values[near[centre]].median().item()
    return 1.0 if abs(kept - 1) < 1e-6 else kept


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
    floor = torch.finfo(spectrum.dtype).eps
    ratios = spectrum[:-1].clamp_min(floor) / spectrum[1:].clamp_min(floor)
    if len(ratios) == 0 or ratios.max() < GAP:
        largest = f"{ratios.max().item():.1f}" if len(ratios) else "none"
        raise InputError(
            "the change of the first layer spans all directions: no gap in its singular values "
            f"(largest ratio of neighbours {largest}, at least {GAP:g} is asked for). Either the "
            "optimiser rescales each entry, as Adam does, or there are as many samples as input "
            "entries; both break the subspace argument. Use the method 'exhume', or force a rank."
        )
    return int(ratios.argmax()) + 1
