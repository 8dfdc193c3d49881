"""What a solution must violate that misses a sample: the kernel gap, and the smallest hit.

φ(u) = σ(w·u) is an element of L² of a Gaussian w in R^r. With samples u_i and coefficients c_i,
candidates û_j and coefficients ĉ_j, the equation of a feature w is violated by
G(w) = Σ_i c_i σ(w·u_i) − Σ_j ĉ_j σ(w·û_j). The gap bounds E G²; a *hit* is a w where |G| > τ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import interpolate, optimize, special
from torch import Tensor

from exhume.features.activations import Activation
from exhume.features.activations import activation as named_activation
from exhume.theory import hermite

Array = NDArray[np.float64]

GRID = 160
"""Angles at which the measure may sit; its witness is checked at three times as many."""

RING = 64
"""Nodes of the average over a ring about u: exact for polynomials of degree 127 in the cosine."""

ACTIVE = 4
"""Most samples, and candidates, that the search moves: the others would be matched exactly, and
cancel in G."""


@dataclass(frozen=True)
class Setting:
    """A setting says what a bound on the width assumes of samples and candidates."""

    samples: int  # n, of samples and of candidates
    rank: int  # r, the dimension of where they lie
    tolerance: float  # ε, distance of unit vectors, up to sign, within which a sample is found
    separation: float  # least distance between two samples, up to sign
    least: float = 1.0  # least |c_i|
    largest: float = 1.0  # largest |c_i| and |ĉ_j|


def kernel_gap(activation: str | Activation, rank: int, tolerance: float, mass: float) -> float:
    """Return a lower bound on ‖φ(u) − ∫ φ(z) dν(z)‖² over signed measures ν of mass up to T.

    ν keeps the distance ε to ±u. The problem is convex, and rotations about u change nothing, so ν
    is a measure on t = u·z in [−t₁, t₁], t₁ = 1 − ε²/2, spread evenly over rings. The discretised
    minimum is found by non-negative least squares. For any witness h, here its residual,

        ‖φ(u) − ∫φ dν‖ ≥ (⟨φ(u), h⟩ − T max_t |⟨φ̄_t, h⟩|) / ‖h‖,

    with the maximum over a finer grid; 0 where no witness is found.

    Example:
        >>> 0.0036 < kernel_gap("relu", 2, 0.3, 1.0) < 0.0038
        True
    """
    sigma = named_activation(activation) if isinstance(activation, str) else activation
    # A spline in the angle, in which the kernel is smooth even if σ has a kink.
    knots = np.linspace(0, math.pi, 4001)
    values = hermite.kernel(sigma, torch.from_numpy(np.cos(knots))).numpy()
    spline = interpolate.CubicSpline(knots, values)

    def kernel(correlation: Array) -> Array:
        result: Array = spline(np.arccos(np.clip(correlation, -1.0, 1.0)))
        return result

    edge = math.acos(1 - tolerance**2 / 2)
    atoms = np.cos(np.linspace(edge, math.pi - edge, GRID))
    check = np.cos(np.linspace(edge, math.pi - edge, 3 * GRID + 1))
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

    K̄(s, t) = E K(st + √(1−s²)√(1−t²) ξ), ξ the cosine of two random directions in R^{r−1}, whose
    density is proportional to (1 − ξ²)^((r−4)/2).
    """
    if rank == 2:
        nodes, weights = np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    elif rank == 3:
        nodes = np.cos((np.arange(RING) + 0.5) * math.pi / RING)
        weights = np.full(RING, 1 / RING)
    elif rank < 100:
        nodes, weights = special.roots_gegenbauer(RING, (rank - 3) / 2)
        weights = weights / weights.sum()
    else:
        nodes, weights = special.roots_legendre(RING)
        nodes = 9 / math.sqrt(rank - 3) * nodes  # beyond it there is nothing left of the density
        weights = weights * np.exp((rank - 4) / 2 * np.log1p(-(nodes**2)))
        weights = weights / weights.sum()
    level = np.multiply.outer(first, second)
    spread = np.sqrt(np.multiply.outer(1 - first**2, 1 - second**2))
    average = np.zeros_like(level)
    for node, weight in zip(nodes, weights, strict=True):
        average += weight * kernel(level + spread * node)
    return average


def smallest_hit(
    sigma: Activation, setting: Setting, tau: float, seed: int = 0, starts: int = 96,
    steps: int = 300,
) -> float:  # fmt: skip
    """Return the smallest probability of |G(w)| > τ that is found, over all that a setting allows.

    Samples, candidates and coefficients are moved by Adam to make |G| small on a fixed set of
    Gaussian w, from many starts; the best are measured on a larger set. This is no certificate,
    since a search can miss the worst case.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order would send the search elsewhere
    try:
        return _searched(sigma, setting, tau, seed, starts, steps)
    finally:
        torch.set_num_threads(threads)


def _searched(
    sigma: Activation, setting: Setting, tau: float, seed: int, starts: int, steps: int
) -> float:
    generator = torch.Generator().manual_seed(seed)
    count = min(setting.samples, ACTIVE)
    space = min(setting.rank, 2 * count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, more = normal(1024, space), normal(32_768, space)
    others, candidates = _starts(normal, starts, count, space)
    sizes, signs = normal(starts, count), normal(starts, count).sign()
    fitted = 2 * signs + normal(starts, count)
    variables = [x.requires_grad_() for x in (others, candidates, sizes, fitted)]
    span = setting.largest - setting.least

    def violations(w: Tensor) -> Tensor:
        """G at w, (starts, number of w)."""
        first = torch.zeros(starts, 1, space, dtype=torch.float64)
        first[:, 0, 0] = 1
        true = torch.cat([first, apart(others, setting.separation)], 1)
        guess = apart(candidates, setting.tolerance)
        own = signs * (setting.least + span * torch.sigmoid(sizes))
        features = sigma.value(torch.cat([true, guess], 1) @ w.T)
        coefficients = torch.cat([own, -setting.largest * torch.tanh(fitted)], 1)
        return (coefficients[:, :, None] * features).sum(1)

    optimiser = torch.optim.Adam(variables, lr=0.1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 0.002)
    for step in range(steps):
        optimiser.zero_grad()
        g = violations(inputs)
        if step < steps // 3:
            loss = (g.square().mean(1) + 1e-12).log().sum()
        else:  # a soft step that becomes sharp
            soft = 2 * tau * 0.05 ** ((step - steps // 3) / (steps - steps // 3))
            loss = torch.sigmoid((g.abs() - tau) / soft).mean(1).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        decay.step()
    with torch.no_grad():
        share = (violations(more).abs() > tau).double().mean(1).min().item()
    return max(share - 3 * math.sqrt(share / len(more)), 0.0)


def _starts(
    normal: Callable[..., Tensor], starts: int, count: int, space: int
) -> tuple[Tensor, Tensor]:
    """Draw all samples but the first, which is e₁, and the candidates.

    Two thirds of the starts have a candidate close to each sample, as solutions that nearly fit
    have, and half of those lie in one plane, where the worst ones have been seen.
    """
    others = normal(starts, count - 1, space)
    candidates = normal(starts, count, space)
    own = torch.eye(space, dtype=torch.float64)[:1].expand(starts, 1, space)
    near = torch.cat([own, others], 1)
    near = near / near.norm(dim=2, keepdim=True) + 0.3 * normal(starts, count, space)
    third = starts // 3
    candidates[third:] = near[third:]
    for points in (others, candidates):
        points[2 * third :, :, 2:] = 0
    return others, candidates


def apart(vectors: Tensor, distance: float) -> Tensor:
    """Return unit vectors (…, r), turned away from ±e₁ to that distance where they are nearer."""
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    most = 1 - distance**2 / 2
    level = unit[..., :1].clamp(-most, most)
    rest = unit[..., 1:]
    rest = rest / rest.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.cat([level, (1 - level.square()).sqrt() * rest], -1)
