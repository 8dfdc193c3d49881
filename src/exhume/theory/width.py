"""How wide random features must be for the weights to determine the samples: a PAC bound.

Tansley et al., "Efficient Techniques for Data Reconstruction, with Finite-Width Recovery
Guarantees", prove one of this shape; our constants are derived in docs/theory.md.
G(w) = Σ_i c_i σ(w·u_i) − Σ_j ĉ_j σ(w·û_j) is by how much candidates û_j violate the equation of
a Gaussian feature w: the gap bounds E G², and a *hit* is a w where |G| > τ.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor

from exhume.checks import number, whole_number
from exhume.errors import InputError
from exhume.features.activations import Activation
from exhume.features.activations import activation as named_activation
from exhume.theory import hermite

Array = NDArray[np.float64]

GRID = 160  # angles at which the measure may sit; its witness is checked at three times as many
RING = 64  # nodes of the average over a ring about u: exact up to degree 127 in the cosine
ACTIVE = 4  # most samples, and candidates, that the search moves: others match, and cancel in G
FAR = 40.0  # up to where the slope of an activation is looked at; bundled ones are straight before
UNRESOLVED = "too small; ask for a larger tolerance, fewer samples or a higher floor."


class NoBoundError(InputError):
    """It is raised where the input is sound, but there is no bound for it."""


@dataclass(frozen=True)
class Setting:
    """A setting says what a bound on the width assumes of samples and candidates."""

    samples: int  # n, of samples and of candidates
    rank: int  # r, the dimension of where they lie
    tolerance: float  # ε, distance of unit vectors, up to sign, within which a sample is found
    separation: float  # least distance between two samples, up to sign
    least: float = 1.0  # least |c_i|
    largest: float = 1.0  # largest |c_i| and |ĉ_j|


@dataclass(frozen=True)
class WidthBound:
    """From these widths on exact solutions are the samples, with probability 1 − failure."""

    hoeffding: float  # width by Hoeffding's inequality, the paper's way
    certified: float  # width by hits, with the bound on π that follows from the gap
    numerical: float  # width by hits with the smallest π found: no certificate
    gap: float  # δ, in the units of the coefficients squared
    hit_certified: float  # π that follows from the gap
    hit_numerical: float  # the smallest π found
    log_covering: float  # log N
    failure: float  # the probability that is allowed
    assumptions: tuple[str, ...]  # what has to be true, a sentence each

    def failure_at(self, width: int, numerical: bool = False) -> float:
        """Return the largest probability of failure at a width: N (1 − π)^p, at most 1."""
        hit = self.hit_numerical if numerical else self.hit_certified
        return math.exp(min(0.0, self.log_covering + width * math.log1p(-hit)))


def width_bound(
    samples: int,
    dim: int,
    activation: str | Activation = "relu",
    subspace: int | None = None,
    tolerance: float = 0.1,
    separation: float = 0.5,
    coefficients: tuple[float, float] = (1.0, 1.0),
    failure: float = 0.05,
) -> WidthBound:
    """Return the width from which exact solutions are within `tolerance` of the samples.

    Words are those of `Setting`: distances are over √d, and the separation above 2ε. The activation
    is Lipschitz and no polynomial, `subspace` the dimension of one that candidates are confined to,
    d if None; `coefficients` are the least |c_i|, and the largest |c_i| and |ĉ_j|; `failure` is the
    probability that is allowed. With several outputs it holds for each output alone.

    Example:
        >>> bound = width_bound(1, 2, "relu", tolerance=0.5, separation=1.1)
        >>> 2 < bound.numerical < bound.certified < bound.hoeffding
        True
    """
    rank = dim if subspace is None else subspace
    setting = Setting(samples, rank, tolerance, separation, *coefficients)
    _check(setting, dim, failure)
    sigma = named_activation(activation) if isinstance(activation, str) else activation
    slope = steepest(sigma)
    mass = (2 * samples - 1) * setting.largest / setting.least
    gap = setting.least**2 * kernel_gap(sigma, rank, tolerance, mass)
    if not gap > 0:
        raise NoBoundError(f"kernel gap of {sigma.name} in dimension {rank}: {UNRESOLVED}")
    tau = math.sqrt(gap / 8)
    certified, radius = _certified(sigma, setting, gap)
    found = smallest_hit(sigma, setting, tau, seed=0)
    if not found > 0:
        raise NoBoundError(f"hits of {sigma.name} in dimension {rank}: {UNRESOLVED}")
    numerical = found - found / 20  # a twentieth of the hits found may lie beyond R
    radius = max(radius, scipy.stats.chi.isf(found / 20, rank))
    origin = abs(float(sigma.value(torch.zeros(1, dtype=torch.float64))[0]))
    log_covering = covering(setting, tau, slope, origin, radius)
    needed = log_covering - math.log(failure)
    return WidthBound(
        hoeffding=math.ceil(needed / (2 * certified**2)),
        certified=math.ceil(needed / -math.log1p(-certified)),
        numerical=math.ceil(needed / -math.log1p(-numerical)),
        gap=gap,
        hit_certified=certified,
        hit_numerical=numerical,
        log_covering=log_covering,
        failure=failure,
        assumptions=_assumptions(setting, dim, sigma),
    )


def _certified(sigma: Activation, setting: Setting, gap: float) -> tuple[float, float]:
    """Return π as it follows from the gap, and the R beyond which G² may be left out."""
    total = 2 * setting.samples * setting.largest
    rare = (gap / 8) ** 2 / (total**4 * fourth_moment(sigma))
    reach = scipy.stats.norm.isf(min(rare / (4 * setting.samples), 0.25))
    radius = scipy.stats.chi.isf(min(rare, 0.5), setting.rank)
    z = torch.linspace(-reach, reach, 20_001, dtype=torch.float64)
    largest = (total * float(sigma.value(z).abs().max())) ** 2
    return 5 / 8 * gap / largest, radius


def covering(setting: Setting, tau: float, slope: float, origin: float, radius: float) -> float:
    """Return log N, of a net of solutions that fail, from which G moves by no more than τ.

    G moves by 2n·η_c (|σ(0)| + L R) with the coefficients, the samples' own too, and by n C L R·η_u
    with the candidates; half of τ each. A sphere in R^r has nets of (1 + 2/η)^r points (Vershynin,
    High-Dimensional Probability, corollary 4.2.13), an interval of length 2C has ⌈C/η_c⌉.

    Example:
        >>> found = covering(Setting(1, 2, 0.1, 0.5), tau=1.0, slope=1.0, origin=0.0, radius=1.0)
        >>> found == 2 * math.log(5) + 2 * math.log(4)
        True
    """
    samples, ceiling = setting.samples, setting.largest
    by_coefficient = tau / (4 * samples * (origin + slope * radius))
    by_candidate = tau / (2 * samples * ceiling * slope * radius)
    points = setting.rank * math.log1p(2 / by_candidate)
    sizes = math.log(max(1, math.ceil(ceiling / by_coefficient)))
    return math.log(samples) + samples * points + 2 * samples * sizes


def _assumptions(setting: Setting, dim: int, sigma: Activation) -> tuple[str, ...]:
    rank = setting.rank
    where = f" in a known subspace of dimension {rank}" if rank < dim else ""
    return (
        f"random features {sigma.name}(Vx), V Gaussian and independent of the samples",
        f"{setting.samples} samples of norm √{dim}{where}, and as many candidates there",
        f"samples at least {setting.separation:g}·√d apart, up to sign",
        f"coefficients of the samples between {setting.least:g} and {setting.largest:g} in size, "
        f"in one unit, and those of the candidates up to {setting.largest:g}",
        "the attack ends at an exact solution: a residual of zero",
        f"a sample counts as found with a candidate within {setting.tolerance:g}·√d, up to sign",
    )


def _check(setting: Setting, dim: int, failure: float) -> None:
    whole_number("samples", setting.samples)
    tolerance, separation = setting.tolerance, setting.separation
    if not 2 <= setting.rank <= dim:
        word = "dim" if setting.rank == dim else "subspace"
        raise InputError(f"{word}: expected 2 up to the dimension, {dim}, got {setting.rank}.")
    for name, value in (("tolerance", tolerance), ("failure", failure)):
        if not number(name, value, above=0) < 1:
            raise InputError(f"{name}: expected a number between 0 and 1, got {value}.")
    if not 2 * tolerance < separation <= math.sqrt(2):
        least = f"above 2ε = {2 * tolerance:g}"
        raise InputError(f"separation: expected {least}, up to √2, got {separation}.")
    if not 0 < (floor := setting.least) <= (ceiling := setting.largest) < math.inf:
        raise InputError(
            f"floor and ceiling: expected 0 < floor ≤ ceiling, got {floor}, {ceiling}."
        )


def steepest(sigma: Activation) -> float:
    """Return the Lipschitz constant of σ; refuse a slope that grows without end."""
    near, far = (
        float(sigma.slope(torch.linspace(-x, x, 20_001, dtype=torch.float64)).abs().max())
        for x in (FAR, 2 * FAR)
    )
    if far > 1.01 * near:
        raise NoBoundError(f"activation {sigma.name}: its slope has no bound, so neither has p.")
    return near


def fourth_moment(sigma: Activation) -> float:
    """Return E σ(g)⁴ of a standard normal g."""
    z, weights = hermite.gaussian_rule()
    return float((weights * sigma.value(z) ** 4).sum())


def kernel_gap(activation: str | Activation, rank: int, tolerance: float, mass: float) -> float:
    """Return a lower bound on ‖φ(u) − ∫ φ(z) dν(z)‖² over signed measures ν of mass up to T.

    ν keeps the distance ε to ±u, and is even over rings about u. For any witness h, here the
    residual of non-negative least squares on a grid,
    ‖φ(u) − ∫φ dν‖ ≥ (⟨φ(u), h⟩ − T max_t |⟨φ̄_t, h⟩|) / ‖h‖, the maximum over a finer one.
    """
    sigma = named_activation(activation) if isinstance(activation, str) else activation
    # A spline in the angle, in which the kernel is smooth even if σ has a kink.
    knots = np.linspace(0, math.pi, 4001)
    values = hermite.kernel(sigma, torch.from_numpy(np.cos(knots))).numpy()
    spline = scipy.interpolate.CubicSpline(knots, values)

    def kernel(correlation: Array) -> Array:
        return np.asarray(spline(np.arccos(np.clip(correlation, -1.0, 1.0))))

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
    """Return b of least ‖φ(u) − Σ b_t φ̄_t‖², Σ|b_t| ≤ T; a heavy row holds Σ(b⁺ + b⁻) at T."""
    bordered = np.block([[gram, row[:, None]], [row[None], np.array([[own]])]])
    values, vectors = np.linalg.eigh(bordered)
    kept = values > 1e-15 * values[-1]
    factor = (vectors[:, kept] * np.sqrt(values[kept])).T
    columns, target = factor[:, :-1], factor[:, -1]
    heavy = 1e3 / mass
    system = np.vstack([np.hstack([columns, -columns]), np.full((1, 2 * len(row)), heavy)])
    both, _ = scipy.optimize.nnls(system, np.append(target, heavy * mass), maxiter=100 * len(row))
    weights: Array = both[: len(row)] - both[len(row) :]
    size = float(np.abs(weights).sum())
    return weights * min(1.0, mass / size) if size > 0 else weights


def ring_kernel(kernel: Callable[[Array], Array], rank: int, first: Array, second: Array) -> Array:
    """Return a kernel's average over rings, K̄(s, t) = E K(st + √(1−s²)√(1−t²) ξ), for all s, t.

    ξ, the cosine of two random directions in R^{r−1}, has a density ∝ (1 − ξ²)^((r−4)/2).
    """
    if rank == 2:
        nodes, weights = np.array([-1.0, 1.0]), np.ones(2)
    elif rank == 3:
        nodes, weights = np.cos((np.arange(RING) + 0.5) * math.pi / RING), np.ones(RING)
    elif rank < 100:
        nodes, weights = scipy.special.roots_gegenbauer(RING, (rank - 3) / 2)
    else:
        nodes, weights = scipy.special.roots_legendre(RING)
        nodes = 9 / math.sqrt(rank - 3) * nodes  # beyond it there is nothing left of the density
        weights = weights * np.exp((rank - 4) / 2 * np.log1p(-(nodes**2)))
    weights = weights / weights.sum()
    level = np.multiply.outer(first, second)[..., None]
    spread = np.sqrt(np.multiply.outer(1 - first**2, 1 - second**2))[..., None]
    return np.asarray(kernel(level + spread * nodes) @ weights)


def smallest_hit(
    sigma: Activation, setting: Setting, tau: float, seed: int = 0, starts: int = 96,
    steps: int = 300,
) -> float:  # fmt: skip
    """Return the smallest probability of |G(w)| > τ that is found, over all that a setting allows.

    Adam makes |G| small on a fixed set of w, from many starts; the best are measured on a larger
    set. This is no certificate, since a search can miss the worst case.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order would send the search elsewhere
    try:
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
            first = torch.eye(space, dtype=torch.float64)[:1].expand(starts, 1, space)
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
    finally:
        torch.set_num_threads(threads)


def _starts(
    normal: Callable[..., Tensor], starts: int, count: int, space: int
) -> tuple[Tensor, Tensor]:
    """Draw samples, without e₁, and candidates: anywhere, near samples, near and in a plane."""
    others, candidates = normal(starts, count - 1, space), normal(starts, count, space)
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
