"""How wide random features must be for the weights to determine the samples: a PAC bound.

Tansley et al., "Efficient Techniques for Data Reconstruction, with Finite-Width Recovery
Guarantees", prove a bound of this shape in the dimension r of the data's subspace; their constants
are not public. These are our own derivation from a gap, hits and a covering: docs/theory.md has it.
"""

import math
from dataclasses import dataclass

import torch
from scipy import stats

from exhume.checks import number, whole_number
from exhume.errors import InputError
from exhume.features.activations import Activation
from exhume.features.activations import activation as named_activation
from exhume.theory.gap import Setting, kernel_gap, smallest_hit

FAR = 40.0
"""Up to where the slope of an activation is looked at; all bundled ones are straight before it."""

UNRESOLVED = "too small; ask for a larger tolerance, fewer samples or a higher floor."


class NoBoundError(InputError):
    """It is raised where the input is sound, but there is no bound for it."""


@dataclass(frozen=True)
class WidthBound:
    """From these widths on exact solutions are the samples, with probability 1 − failure."""

    hoeffding: float  # width by Hoeffding's inequality, the paper's way
    # width by hits, with the bound on π that follows from the gap; certified up to the grids that
    # its constants are computed on
    certified: float
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

    With several outputs it holds for each output alone.

    Args:
        samples: n, of samples and of candidates.
        dim: d.
        activation: σ, Lipschitz and no polynomial.
        subspace: r, of a subspace that the candidates are confined to; d if None.
        tolerance: ε, distance over √d, up to sign, within which a sample counts as found.
        separation: least distance over √d between two samples, up to sign; above 2ε.
        coefficients: least |c_i|, and largest |c_i| and |ĉ_j|.
        failure: probability that is allowed.

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
    radius = max(radius, stats.chi.isf(found / 20, rank))
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
    """Return π as it follows from the gap, and the R beyond which G² may be left out.

    The tails are a share of the gap, by the inequality of Cauchy and Schwarz.
    """
    total = 2 * setting.samples * setting.largest
    rare = (gap / 8) ** 2 / (total**4 * fourth_moment(sigma))
    reach = stats.norm.isf(min(rare / (4 * setting.samples), 0.25))
    radius = stats.chi.isf(min(rare, 0.5), setting.rank)
    z = torch.linspace(-reach, reach, 20_001, dtype=torch.float64)
    largest = (total * float(sigma.value(z).abs().max())) ** 2
    return 5 / 8 * gap / largest, radius


def covering(setting: Setting, tau: float, slope: float, origin: float, radius: float) -> float:
    """Return log N, of a net of solutions that fail, from which G moves by no more than τ.

    G moves by 2n·η_c (|σ(0)| + L R) with the coefficients, and by n C L R·η_u with the candidates,
    L the slope of σ; half of τ each. A sphere in R^r has nets of (1 + 2/η)^r points (Vershynin,
    High-Dimensional Probability, corollary 4.2.13), an interval of length 2C has ⌈C/η_c⌉. Training
    chose the samples' own coefficients after the features, so they are covered too.

    Example:
        >>> found = covering(Setting(1, 2, 0.1, 0.5), tau=1.0, slope=1.0, origin=0.0, radius=1.0)
        >>> found == 2 * math.log(5) + 2 * math.log(4)
        True
    """
    samples, ceiling = setting.samples, setting.largest
    by_coefficient = tau / (4 * samples * (origin + slope * radius))
    by_candidate = tau / (2 * samples * ceiling * slope * radius)
    points = setting.rank * math.log1p(2 / by_candidate)
    return (
        math.log(samples)
        + samples * points
        + 2 * samples * math.log(max(1, math.ceil(ceiling / by_coefficient)))
    )


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
        raise InputError(
            f"separation: expected above 2ε = {2 * tolerance:g}, up to √2, got {separation}."
        )
    if not 0 < setting.least <= setting.largest < math.inf:
        sizes = f"{setting.least}, {setting.largest}"
        raise InputError(f"floor and ceiling: expected 0 < floor ≤ ceiling, got {sizes}.")


def steepest(sigma: Activation) -> float:
    """Return the Lipschitz constant of σ; refuse a slope that grows without end."""
    near, far = (
        float(sigma.slope(torch.linspace(-x, x, 20_001, dtype=torch.float64)).abs().max())
        for x in (FAR, 2 * FAR)
    )
    if far > 1.01 * near:
        raise NoBoundError(
            f"activation {sigma.name}: its slope is unbounded, so there is no bound."
        )
    return near


def fourth_moment(sigma: Activation) -> float:
    """Return E σ(g)⁴ of a standard normal g, by the trapezoidal rule on a fine grid."""
    z = torch.linspace(-14, 14, 56_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float(torch.trapezoid(density * sigma.value(z).abs() ** 4, z))
