"""How wide random features must be for the weights to determine the samples: a PAC bound.

Tansley et al., "Efficient Techniques for Data Reconstruction, with Finite-Width Recovery
Guarantees", prove that with probability 1 − δ over the random first layer, every exact minimiser is
close to the training set once the width passes a bound in the dimension r of the data's subspace.
Their constants are not public. What stands here is our own derivation from the same ingredients
(Hoeffding's inequality, a covering of the candidates, the gap of the kernel), with every constant
computed.

Setting: unit vectors u_i in R^r (a sample over √d, in coordinates of the subspace), Gaussian
w_1 … w_p in R^r, and weights θ_k = Σ_i c_i σ(w_k·u_i). A solution (ĉ, û) is exact if

    G(w) = Σ_i c_i σ(w·u_i) − Σ_j ĉ_j σ(w·û_j)

is zero at every w_k. It fails if a sample has no candidate within ε, up to sign.

1. Gap. Where sample 0 has none, E G² ≥ δ = c² · min ‖φ(u_0) − Σ_j b_j φ(z_j)‖² with all z_j at
   distance ε or more from ±u_0 and Σ|b_j| ≤ T = (2n − 1) C/c, c and C floor and ceiling of the
   coefficients. Over measures in place of atoms this is convex and symmetric about u_0, so it is a
   problem on an interval, solved with a witness that bounds it from below (`kernel_gap`).
2. Hits. Let π be the probability that |G(w)| > τ = √(δ/8) and |w| ≤ R. Two ways to π:
   certified, E G² ≤ τ² + M π + tails with M the largest G² there, so π ≥ ⅝ δ/M;
   numerical, the smallest π that a search over samples, candidates and coefficients finds.
3. Covering. A net of N points moves G by at most τ where |w| ≤ R: a hit at the net's point is an
   equation that its whole neighbourhood violates. So an exact solution fails with probability at
   most N (1 − π)^p. Hoeffding's inequality for the mean of G², which is what the paper uses, gives
   N exp(−2p (⅝ δ/M)²).

All of it grows as n·r·log: the bound has the shape of the law.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import interpolate, optimize, special, stats
from torch import Tensor

from exhume.errors import InputError
from exhume.features.activations import Activation
from exhume.features.activations import activation as named_activation
from exhume.theory import hermite

Array = NDArray[np.float64]

GRID = 160
"""Angles at which the measure of the kernel gap may sit."""

RING = 64
"""Nodes of the average over a ring about u_0."""

ACTIVE = 4
"""Most samples, and candidates, that the search for the smallest π moves."""

FAR = 40.0
"""Up to where the slope of an activation is looked at."""


class NoBoundError(InputError):
    """The input is sound, but there is no bound for it."""


@dataclass(frozen=True)
class WidthBound:
    """From which width on exact solutions are the samples, with probability 1 − failure.

    Attributes:
        hoeffding: width by Hoeffding's inequality, the paper's way.
        certified: width by hits, with the bound on π that follows from the gap; the best whose
            constants are bounds themselves, up to the grids they are computed on.
        numerical: width by hits with the smallest π found: no certificate, since a search can miss
            the worst case.
        gap: δ, in the units of the coefficients squared.
        hit_certified: π that follows from the gap.
        hit_numerical: the smallest π found.
        log_covering: log N.
        failure: the probability that is allowed.
        assumptions: what has to be true, a sentence each.
    """

    hoeffding: float
    certified: float
    numerical: float
    gap: float
    hit_certified: float
    hit_numerical: float
    log_covering: float
    failure: float
    assumptions: tuple[str, ...]

    def failure_at(self, width: int, numerical: bool = False) -> float:
        """Largest probability of failure at a width: N (1 − π)^p, at most 1."""
        hit = self.hit_numerical if numerical else self.hit_certified
        return math.exp(min(0.0, self.log_covering + width * math.log1p(-hit)))


def width_bound(
    samples: int,
    dim: int,
    activation: str | Activation = "relu",
    subspace: int | None = None,
    tolerance: float = 0.1,
    separation: float = 0.5,
    floor: float = 1.0,
    ceiling: float = 1.0,
    failure: float = 0.05,
) -> WidthBound:
    """The width from which exact solutions are within `tolerance` of the samples.

    Our derivation (see the module); the shape, and that r takes the place of d, is the theorem of
    Tansley et al. With several outputs it holds for each output alone.

    Args:
        samples: n, of samples and of candidates.
        dim: d.
        activation: σ, Lipschitz and no polynomial.
        subspace: r, of a subspace that the candidates are confined to; d if None.
        tolerance: ε, distance over √d, up to sign, within which a sample counts as found.
        separation: least distance over √d between two samples, up to sign; above 2ε.
        floor: least |c_i|.
        ceiling: largest |c_i| and |ĉ_j|.
        failure: probability that is allowed.

    Example:
        >>> bound = width_bound(1, 2, "relu", tolerance=0.5, separation=1.1)
        >>> 2 < bound.numerical < bound.certified < bound.hoeffding
        True
    """
    rank = dim if subspace is None else subspace
    _check(samples, dim, rank, tolerance, separation, floor, ceiling, failure)
    sigma = named_activation(activation) if isinstance(activation, str) else activation
    steepest = _steepest(sigma)
    mass = (2 * samples - 1) * ceiling / floor
    gap = floor**2 * kernel_gap(sigma, rank, tolerance, mass)
    total = 2 * samples * ceiling
    if not gap > 0:
        raise NoBoundError(
            f"kernel gap of {sigma.name} in dimension {rank}: not above what can be resolved, so "
            f"there is no bound. Ask for a larger tolerance (now {tolerance:g}), fewer samples or "
            "a higher floor of the coefficients."
        )
    tau = math.sqrt(gap / 8)

    # Tails beyond which G² may be left out: a share of the gap, by Cauchy and Schwarz.
    fourth = total**4 * _moment(sigma, 4)
    rare = (gap / 8) ** 2 / fourth
    reach = stats.norm.isf(min(rare / (4 * samples), 0.25))
    radius = stats.chi.isf(min(rare, 0.5), rank)
    largest = (total * _largest(sigma, reach)) ** 2
    certified = 5 / 8 * gap / largest

    found = smallest_hit(sigma, rank, samples, tolerance, separation, floor, ceiling, tau, seed=0)
    if not found > 0:
        raise NoBoundError(
            f"hits of {sigma.name} in dimension {rank}: a solution was found that violates no "
            "equation noticeably; ask for a larger tolerance or a higher floor."
        )
    outside = found / 20
    wide = max(radius, stats.chi.isf(outside, rank))
    log_covering = covering(samples, rank, ceiling, tau, steepest, abs(_at(sigma, 0.0)), wide)
    needed = log_covering - math.log(failure)
    numerical = found - outside
    return WidthBound(
        hoeffding=math.ceil(needed / (2 * certified**2)),
        certified=math.ceil(needed / -math.log1p(-certified)),
        numerical=math.ceil(needed / -math.log1p(-numerical)),
        gap=gap,
        hit_certified=certified,
        hit_numerical=numerical,
        log_covering=log_covering,
        failure=failure,
        assumptions=_assumptions(samples, dim, rank, sigma, tolerance, separation, floor, ceiling),
    )


def covering(
    samples: int,
    rank: int,
    ceiling: float,
    tau: float,
    steepest: float,
    origin: float,
    radius: float,
) -> float:
    """The logarithm of N, of a net of solutions that fail, from which G moves by no more than τ.

    G moves by 2n·η_c (|σ(0)| + L R) with the coefficients, and by n C L R·η_u with the candidates;
    half of τ each. A sphere in R^r has nets of (1 + 2/η)^r points (Vershynin, High-Dimensional
    Probability, corollary 4.2.13), inside any part of it; an interval of length 2C has ⌈C/η_c⌉.
    The samples' own coefficients are covered too, since training chose them after the features.
    Any of n samples may be the one that is missed.

    Args:
        samples: n.
        rank: r.
        ceiling: C.
        tau: τ.
        steepest: L, the Lipschitz constant of σ.
        origin: |σ(0)|.
        radius: R.

    Example:
        >>> covering(1, 2, 1.0, 1.0, 1.0, 0.0, 1.0) == 2 * math.log(5) + 2 * math.log(4)
        True
    """
    by_coefficient = tau / (4 * samples * (origin + steepest * radius))
    by_candidate = tau / (2 * samples * ceiling * steepest * radius)
    points = rank * math.log1p(2 / by_candidate)
    return (
        math.log(samples)
        + samples * points
        + 2 * samples * math.log(max(1, math.ceil(ceiling / by_coefficient)))
    )


def kernel_gap(activation: str | Activation, rank: int, tolerance: float, mass: float) -> float:
    """Least ‖φ(u) − ∫ φ(z) dν(z)‖² over signed measures of mass up to T, none of it near ±u.

    φ(u) = σ(w·u) in L² of a Gaussian w in R^r. The problem is convex, and rotations about u change
    nothing, so ν is a measure on t = u·z in [−t₁, t₁], t₁ = 1 − ε²/2, spread evenly over rings.
    With K(ρ) the kernel and K̄(s, t) its average over two rings, the discretised minimum is found
    by non-negative least squares. What is returned is a lower bound: for any witness h,

        ‖φ(u) − ∫φ dν‖ ≥ (⟨φ(u), h⟩ − T max_t |⟨φ̄_t, h⟩|) / ‖h‖,

    taken at the residual h of the minimum, with the maximum over a finer grid. Our derivation.

    Args:
        activation: σ.
        rank: r, at least 2.
        tolerance: ε.
        mass: T.

    Returns:
        The squared distance, 0 where no witness is found.

    Example:
        A single atom of ReLU features can do no better than the nearest one allowed.

        >>> 0.0036 < kernel_gap("relu", 2, 0.3, 1.0) < 0.0038
        True
    """
    sigma = named_activation(activation) if isinstance(activation, str) else activation
    kernel = _kernel(sigma)
    edge = math.acos(1 - tolerance**2 / 2)
    angles = np.linspace(edge, math.pi - edge, GRID)
    finer = np.linspace(edge, math.pi - edge, 3 * GRID + 1)
    atoms, check = np.cos(angles), np.cos(finer)
    gram = _ring_kernel(kernel, rank, atoms, atoms)
    row, own = kernel(atoms), float(kernel(np.ones(1))[0])
    weights = _least(gram, row, own, mass)
    squared = own - 2 * weights @ row + weights @ gram @ weights
    if not squared > 0:
        return 0.0
    witness = kernel(check) - _ring_kernel(kernel, rank, check, atoms) @ weights
    reached = own - weights @ row - mass * np.abs(witness).max()
    return max(0.0, float(reached)) ** 2 / float(squared)


def _least(gram: Array, row: Array, own: float, mass: float) -> Array:
    """Weights b of least ‖φ(u) − Σ b_t φ̄_t‖² with Σ|b_t| ≤ T, to be made good by a witness.

    b = b⁺ − b⁻, both non-negative; a heavy row holds Σ(b⁺ + b⁻) at T, where opposite weights on one
    atom use up what is not needed.
    """
    values, vectors = np.linalg.eigh(
        np.block([[gram, row[:, None]], [row[None], np.array([[own]])]])
    )
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


def _ring_kernel(kernel: Callable[[Array], Array], rank: int, first: Array, second: Array) -> Array:
    """K̄(s, t) = E K(st + √(1−s²)√(1−t²) ξ), ξ the cosine of two random directions in R^{r−1}."""
    nodes, weights = _ring(rank)
    level = np.multiply.outer(first, second)
    spread = np.sqrt(np.multiply.outer(1 - first**2, 1 - second**2))
    average = np.zeros_like(level)
    for node, weight in zip(nodes, weights, strict=True):
        average += weight * kernel(level + spread * node)
    return average


def _kernel(sigma: Activation) -> Callable[[Array], Array]:
    """K(ρ) for arrays: a spline in the angle, in which K is smooth also where σ has a kink."""
    angles = np.linspace(0, math.pi, 4001)
    values = hermite.kernel(sigma, torch.from_numpy(np.cos(angles))).numpy()
    spline = interpolate.CubicSpline(angles, values)

    def kernel(correlation: Array) -> Array:
        result: Array = spline(np.arccos(np.clip(correlation, -1.0, 1.0)))
        return result

    return kernel


def _ring(rank: int) -> tuple[Array, Array]:
    """Nodes and weights of ξ, with density proportional to (1 − ξ²)^((r−4)/2)."""
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


def smallest_hit(
    activation: str | Activation,
    rank: int,
    samples: int,
    tolerance: float,
    separation: float,
    floor: float,
    ceiling: float,
    tau: float,
    seed: int = 0,
    starts: int = 96,
    steps: int = 300,
) -> float:
    """The smallest probability of |G(w)| > τ that is found, over everything the assumptions allow.

    Samples, candidates and coefficients are moved by Adam to make |G| small on a fixed set of
    Gaussian w, from many starts; the best are measured on a larger set. At most `ACTIVE` samples
    are moved: the others would be matched exactly and cancel. Our derivation; no certificate.

    Args:
        activation: σ.
        rank: r.
        samples: n.
        tolerance: ε.
        separation: of the samples.
        floor: of the coefficients.
        ceiling: of the coefficients.
        tau: τ.
        seed: of starts and w.
        starts: how many.
        steps: of Adam.
    """
    sigma = named_activation(activation) if isinstance(activation, str) else activation
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order would send the search elsewhere
    try:
        return _smallest_hit(
            sigma, rank, min(samples, ACTIVE), tolerance, separation, floor, ceiling, tau, seed,
            starts, steps,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def _smallest_hit(
    sigma: Activation,
    rank: int,
    count: int,
    tolerance: float,
    separation: float,
    floor: float,
    ceiling: float,
    tau: float,
    seed: int,
    starts: int,
    steps: int,
) -> float:
    space = min(rank, 2 * count)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, more = normal(1024, space), normal(32_768, space)
    others = normal(starts, count - 1, space)
    candidates = normal(starts, count, space)
    # Two thirds of the starts have a candidate close to each sample, as solutions that nearly fit
    # have, and half of those lie in one plane, where the worst ones have been seen.
    own = torch.eye(space, dtype=torch.float64)[:1].expand(starts, 1, space)
    near = torch.cat([own, others], 1)
    near = near / near.norm(dim=2, keepdim=True) + 0.3 * normal(starts, count, space)
    third = starts // 3
    candidates[third:] = near[third:]
    for points in (others, candidates):
        points[2 * third :, :, 2:] = 0
    sizes, signs = normal(starts, count), normal(starts, count).sign()
    fitted = 2 * signs + normal(starts, count)
    variables = [x.requires_grad_() for x in (others, candidates, sizes, fitted)]

    def outputs(w: Tensor) -> Tensor:
        """G at w, (starts, number of w)."""
        first = torch.zeros(starts, 1, space, dtype=torch.float64)
        first[:, 0, 0] = 1
        true = torch.cat([first, _apart(others, separation)], 1)
        guess = _apart(candidates, tolerance)
        own = signs * (floor + (ceiling - floor) * torch.sigmoid(sizes))
        features = sigma.value(torch.cat([true, guess], 1) @ w.T)
        coefficients = torch.cat([own, -ceiling * torch.tanh(fitted)], 1)
        return (coefficients[:, :, None] * features).sum(1)

    optimiser = torch.optim.Adam(variables, lr=0.1)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, 0.002)
    for step in range(steps):
        optimiser.zero_grad()
        g = outputs(inputs)
        if step < steps // 3:
            loss = (g.square().mean(1) + 1e-12).log().sum()
        else:  # a soft step that becomes sharp
            soft = 2 * tau * 0.05 ** ((step - steps // 3) / (steps - steps // 3))
            loss = torch.sigmoid((g.abs() - tau) / soft).mean(1).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        decay.step()
    with torch.no_grad():
        share = (outputs(more).abs() > tau).double().mean(1).min().item()
    return max(share - 3 * math.sqrt(share / len(more)), 0.0)


def _apart(vectors: Tensor, distance: float) -> Tensor:
    """Unit vectors (…, r), turned away from ±e₁ to that distance where they are nearer."""
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    most = 1 - distance**2 / 2
    level = unit[..., :1].clamp(-most, most)
    rest = unit[..., 1:]
    rest = rest / rest.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.cat([level, (1 - level.square()).sqrt() * rest], -1)


def _assumptions(
    samples: int,
    dim: int,
    rank: int,
    sigma: Activation,
    tolerance: float,
    separation: float,
    floor: float,
    ceiling: float,
) -> tuple[str, ...]:
    where = f" in a known subspace of dimension {rank}" if rank < dim else ""
    return (
        f"random features {sigma.name}(Vx), V Gaussian and independent of the samples",
        f"{samples} samples of norm √{dim}{where}, and as many candidates there",
        f"samples at least {separation:g}·√d apart, up to sign",
        f"coefficients of the samples between {floor:g} and {ceiling:g} in size, in one unit, and "
        f"those of the candidates up to {ceiling:g}",
        "the attack ends at an exact solution: a residual of zero",
        f"a sample counts as found with a candidate within {tolerance:g}·√d, up to sign",
    )


def _check(
    samples: int,
    dim: int,
    rank: int,
    tolerance: float,
    separation: float,
    floor: float,
    ceiling: float,
    failure: float,
) -> None:
    if samples < 1:
        raise InputError(f"samples: expected at least 1, got {samples}.")
    if not 2 <= rank <= dim:
        word = "dim" if rank == dim else "subspace"
        raise InputError(f"{word}: expected 2 up to the dimension, {dim}, got {rank}.")
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance: expected a number between 0 and 1, got {tolerance}.")
    if not 2 * tolerance < separation <= math.sqrt(2):
        raise InputError(
            f"separation: expected more than twice the tolerance ({2 * tolerance:g}) and at most "
            f"√2, got {separation}."
        )
    if not 0 < floor <= ceiling < math.inf:
        raise InputError(
            f"floor and ceiling: expected 0 < floor ≤ ceiling, got {floor}, {ceiling}."
        )
    if not 0 < failure < 1:
        raise InputError(f"failure: expected a probability between 0 and 1, got {failure}.")


def _at(sigma: Activation, place: float) -> float:
    return float(sigma.value(torch.tensor([place], dtype=torch.float64))[0])


def _steepest(sigma: Activation) -> float:
    """Lipschitz constant of σ; refuse a slope that still grows far out, as a polynomial's does."""
    near, far = (
        float(sigma.slope(torch.linspace(-x, x, 20_001, dtype=torch.float64)).abs().max())
        for x in (FAR, 2 * FAR)
    )
    if far > 1.01 * near:
        raise NoBoundError(
            f"activation {sigma.name}: its slope is not bounded, which the bound needs; a "
            "polynomial also has a kernel of finite rank, which many sets of samples share."
        )
    return near


def _largest(sigma: Activation, reach: float) -> float:
    """Largest |σ(z)| over |z| ≤ reach."""
    return float(
        sigma.value(torch.linspace(-reach, reach, 20_001, dtype=torch.float64)).abs().max()
    )


def _moment(sigma: Activation, order: int) -> float:
    """E|σ(g)|^order of a standard normal g, the trapezoidal rule on a fine grid."""
    z = torch.linspace(-14, 14, 56_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float(torch.trapezoid(density * sigma.value(z).abs() ** order, z))
