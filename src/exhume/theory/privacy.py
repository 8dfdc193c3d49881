"""Differential privacy against reconstruction: how well any attack can do, and what noise costs.

The attacker knows all but one sample x and the mechanism, which is ρ-zCDP in that sample. Then what
is released holds at most ρ nats of information on x, and that bounds every attack's error. The
line is crossed where ρ is about the dimension of x.
"""

import math
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from exhume.checks import number, whole_number
from exhume.errors import InputError

Array = NDArray[np.float64]
_legendre = lru_cache(maxsize=1)(np.polynomial.legendre.leggauss)

PER_DIMENSION = 0.5 * math.log(2 * math.pi * math.e)  # entropy of a normal number, in nats


def error_bound(rho: float, dim: int, entropy: float | None = None) -> float:
    """Return the least relative error E‖x − x̂‖²/E‖x‖² of any attack on a ρ-zCDP mechanism.

    (1/2πe)·exp((2/d)(h(x') − ρ)), with x' the sample scaled to E‖x'‖² = d and h its entropy in
    nats, by default that of an isotropic Gaussian, for which this is exp(−2ρ/d). Cairney-Leeming,
    Bombari and Mondelli, "A Sharp Transition in Data Reconstruction under Differential Privacy".
    Where x is known to lie in s dimensions, take s for d, and the entropy inside.

    Example:
        >>> round(error_bound(rho=50, dim=100), 6)  # 1/e
        0.367879
    """
    number("rho", rho, above=0)
    whole_number("dim", dim)
    entropy = dim * PER_DIMENSION if entropy is None else entropy
    return math.exp(2 / dim * (entropy - rho) - 2 * PER_DIMENSION)


def rho_at_error(error: float, dim: int, entropy: float | None = None) -> float:
    """Return the ρ at which the bound of `error_bound` falls to a given relative error.

    h(x') − (d/2)·ln(2πe·error), for an isotropic Gaussian (d/2)·ln(1/error).
    """
    number("error", error, above=0)
    whole_number("dim", dim)
    entropy = dim * PER_DIMENSION if entropy is None else entropy
    return entropy - dim * PER_DIMENSION - dim / 2 * math.log(error)


def sphere_error_bound(rho: float, dim: int) -> float:
    """Return the least relative error of any attack where x is uniform on a sphere of known radius.

    Our derivation: a posterior mean of length A·|x| leaves the error 1 − A². Among distributions
    with that mean the von Mises–Fisher one, f ∝ exp(κt), is nearest to uniform: A costs at least
    KL = κA − ln E exp(κt) nats. The error at KL = ρ is the bound, as KL is convex in A².

    Example:
        >>> round(sphere_error_bound(50, 100), 4), round(error_bound(50, 100), 4)
        (0.366, 0.3679)
    """
    number("rho", rho, above=0)
    whole_number("dim", dim, least=2)
    if rho > 40 * dim:
        return 0.0  # less than 1e-34, at a κ too large to compute with
    low = math.log(rho * dim) / 2  # KL ≤ κ²/2d, half of ρ there
    high = low + 1
    while _tilted(math.exp(high), dim)[1] < rho:
        high += 1
    found = scipy.optimize.brentq(
        lambda x: _tilted(math.exp(x), dim)[1] - rho, low, high, xtol=1e-13
    )
    return _tilted(math.exp(found), dim)[0]


def _tilted(kappa: float, dim: int) -> tuple[float, float]:
    """Return 1 − A² and KL of f ∝ exp(κ cos θ) on the sphere, by quadrature around its peak."""
    power = dim - 2
    cosine = 2 * kappa / (power + math.sqrt(power * power + 4 * kappa * kappa))
    theta, tilted = _log_terms(math.acos(min(cosine, 1.0)), kappa * cosine + power, power, kappa)
    _, uniform = _log_terms(math.pi / 2, power, power, 0.0)
    normaliser = np.logaddexp.reduce(tilted)
    # 1 − A = E[2 sin²(θ/2)]: no cancellation where A is near 1
    missing = float((np.exp(tilted - normaliser) * 2 * np.sin(theta / 2) ** 2).sum())
    divergence = float(np.logaddexp.reduce(uniform) - normaliser) - kappa * missing
    return missing * (2 - missing), divergence


def _log_terms(peak: float, sharpness: float, power: int, kappa: float) -> tuple[Array, Array]:
    """Return angles around a peak, and the weighted log of sin^{d−2}(θ) exp(κ(cos θ − 1)) there."""
    at, weights = _legendre(400)
    reach = 14 / math.sqrt(max(sharpness, 1.0))
    low, high = max(0.0, peak - reach), min(math.pi, peak + reach)
    theta = (low + high) / 2 + (high - low) / 2 * at
    logs = power * np.log(np.sin(theta)) - 2 * kappa * np.sin(theta / 2) ** 2
    return theta, logs + np.log(weights * (high - low) / 2)


def epsilon_of(rho: float, delta: float) -> float:
    """Return the ε at which ρ-zCDP is (ε, δ)-DP: ρ + 2√(ρ ln(1/δ)).

    Bun and Steinke, "Concentrated Differential Privacy: Simplifications, Extensions, and Lower
    Bounds", Proposition 1.3.
    """
    number("rho", rho, above=0)
    return rho + 2 * math.sqrt(rho * _surprise(delta))


def rho_of(epsilon: float, delta: float = 0.0) -> float:
    """Return the ρ that belongs to (ε, δ).

    With δ = 0 a mechanism is ε²/2-zCDP (Bun and Steinke, Proposition 1.4). With δ > 0 it is the
    inverse of `epsilon_of`, though (ε, δ)-DP alone implies no ρ-zCDP at all.
    """
    number("epsilon", epsilon, above=0)
    if delta == 0:
        return epsilon * epsilon / 2
    surprise = _surprise(delta)
    # (√(s + ε) − √s)², with the difference of roots as a quotient: exact for small ε
    return (epsilon / (math.sqrt(surprise + epsilon) + math.sqrt(surprise))) ** 2


def _surprise(delta: float) -> float:
    if not 0 < delta < 1:
        raise InputError(f"delta: expected a number between 0 and 1, got {delta!r}.")
    return -math.log(delta)
