"""The kernel gap: how far features of a sample stay from those of candidates that miss it.

φ(u) = σ(w·u) is an element of L² of a Gaussian w in R^r. A solution that misses u has to make φ(u)
up from vectors at distance ε or more from ±u, with coefficients whose sizes add up to T at most.
The gap is the least squared distance that it leaves.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import interpolate, optimize, special

from exhume.features.activations import Activation
from exhume.features.activations import activation as named_activation
from exhume.theory import hermite

Array = NDArray[np.float64]

GRID = 160
"""Angles at which the measure may sit; its witness is checked at three times as many."""

RING = 64
"""Nodes of the average over a ring about u: exact for polynomials of degree 127 in the cosine."""


def kernel_gap(activation: str | Activation, rank: int, tolerance: float, mass: float) -> float:
    """Return a lower bound on ‖φ(u) − ∫ φ(z) dν(z)‖² over signed measures ν of mass up to T.

    The problem is convex, and rotations about u change nothing, so ν is a measure on t = u·z in
    [−t₁, t₁], t₁ = 1 − ε²/2, spread evenly over rings. With K(ρ) the kernel and K̄(s, t) its average
    over two rings, the discretised minimum is found by non-negative least squares. For any witness
    h, which here is the residual of that minimum,

        ‖φ(u) − ∫φ dν‖ ≥ (⟨φ(u), h⟩ − T max_t |⟨φ̄_t, h⟩|) / ‖h‖,

    with the maximum over a finer grid.

    Args:
        activation: σ.
        rank: r, at least 2.
        tolerance: ε.
        mass: T.

    Returns:
        The squared distance, 0 where no witness is found.

    Example:
        >>> 0.0036 < kernel_gap("relu", 2, 0.3, 1.0) < 0.0038
        True
    """
    sigma = named_activation(activation) if isinstance(activation, str) else activation
    kernel = _kernel(sigma)
    edge = math.acos(1 - tolerance**2 / 2)
    angles = np.linspace(edge, math.pi - edge, GRID)
    finer = np.linspace(edge, math.pi - edge, 3 * GRID + 1)
    atoms, check = np.cos(angles), np.cos(finer)
    gram = ring_kernel(kernel, rank, atoms, atoms)
    row, own = kernel(atoms), float(kernel(np.ones(1))[0])
    weights = _least(gram, row, own, mass)
    squared = own - 2 * weights @ row + weights @ gram @ weights
    if not squared > 0:
        return 0.0
    witness = kernel(check) - ring_kernel(kernel, rank, check, atoms) @ weights
    reached = own - weights @ row - mass * np.abs(witness).max()
    return max(0.0, float(reached)) ** 2 / float(squared)


def _least(gram: Array, row: Array, own: float, mass: float) -> Array:
    """Return weights b of least ‖φ(u) − Σ b_t φ̄_t‖² with Σ|b_t| ≤ T.

    b = b⁺ − b⁻, both non-negative; a heavy row holds Σ(b⁺ + b⁻) at T, where opposite weights on one
    atom use up what is not needed.
    """
    bordered = np.block([[gram, row[:, None]], [row[None], np.array([[own]])]])
    values, vectors = np.linalg.eigh(bordered)
    kept = values > 1e-15 * values[-1]
    factor = (vectors[:, kept] * np.sqrt(values[kept])).T
    columns, target = factor[:, :-1], factor[:, -1]
    heavy = 1e3 / mass
    system = np.vstack([np.hstack([columns, -columns]), np.full((1, 2 * len(row)), heavy)])
    both, _ = optimize.nnls(system, np.append(target, heavy * mass), maxiter=100 * len(row))
    positive, negative = np.split(both, 2)
    weights: Array = positive - negative
    size = float(np.abs(weights).sum())
    return weights * min(1.0, mass / size) if size > 0 else weights


def ring_kernel(kernel: Callable[[Array], Array], rank: int, first: Array, second: Array) -> Array:
    """Return the average of a kernel over the rings at levels s and t, for all pairs of levels.

    K̄(s, t) = E K(st + √(1−s²)√(1−t²) ξ), ξ the cosine of two random directions in R^{r−1}.
    """
    level = np.multiply.outer(first, second)
    spread = np.sqrt(np.multiply.outer(1 - first**2, 1 - second**2))
    average = np.zeros_like(level)
    for node, weight in zip(*_ring(rank), strict=True):
        average += weight * kernel(level + spread * node)
    return average


def _ring(rank: int) -> tuple[Array, Array]:
    """Return nodes and weights for ξ, whose density is proportional to (1 − ξ²)^((r−4)/2)."""
    if rank == 2:
        return np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    if rank == 3:
        steps = (np.arange(RING) + 0.5) * math.pi / RING
        return np.cos(steps), np.full(RING, 1 / RING)
    if rank < 100:
        nodes, weights = special.roots_gegenbauer(RING, (rank - 3) / 2)
        return nodes, weights / weights.sum()
    reach = 9 / math.sqrt(rank - 3)  # beyond it there is nothing left of the density
    nodes, weights = special.roots_legendre(RING)
    nodes = reach * nodes
    weights = weights * np.exp((rank - 4) / 2 * np.log1p(-(nodes**2)))
    return nodes, weights / weights.sum()


def _kernel(sigma: Activation) -> Callable[[Array], Array]:
    """Return K(ρ) for arrays: a spline in the angle, in which K is smooth even if σ has a kink."""
    angles = np.linspace(0, math.pi, 4001)
    values = hermite.kernel(sigma, torch.from_numpy(np.cos(angles))).numpy()
    spline = interpolate.CubicSpline(angles, values)

    def kernel(correlation: Array) -> Array:
        result: Array = spline(np.arccos(np.clip(correlation, -1.0, 1.0)))
        return result

    return kernel
