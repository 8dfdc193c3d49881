"""Differential privacy against reconstruction: how well any attack can do, and what noise costs.

The attacker knows all but one sample x and the mechanism, which is ρ-zCDP in that sample. Then what
is released holds at most ρ nats of information on x, and that bounds every attack's error. The
line is crossed where ρ is about the dimension of x.

Inside: `error_bound`, `sphere_error_bound`, `rho_at_error`, the entropies `gaussian_entropy`,
`box_entropy` and `ball_entropy`, `effective_dimension`, `noise_variance`, `epsilon_of`, `rho_of`.
"""

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

from exhume.errors import InputError

Array = NDArray[np.float64]

PER_DIMENSION = 0.5 * math.log(2 * math.pi * math.e)
"""Entropy of a standard Gaussian number."""

RANK = 1e-10
"""Share of the largest variance below which a direction counts as empty."""


def error_bound(rho: float, dim: int, entropy: float | None = None) -> float:
    """The least relative error E‖x − x̂‖²/E‖x‖² of any attack on a ρ-zCDP mechanism.

    (1/2πe)·exp((2/d)(h(x') − ρ)), with x' the sample scaled to E‖x'‖² = d. Cairney-Leeming, Bombari
    and Mondelli, "A Sharp Transition in Data Reconstruction under Differential Privacy": the
    paper's statement. For an isotropic Gaussian, exp(−2ρ/d): our evaluation of it. Where x is known
    to lie in s dimensions, take s for d, and the entropy inside.

    Args:
        rho: ρ of zero-concentrated differential privacy.
        dim: d, or s.
        entropy: h(x') in nats; that of an isotropic Gaussian, the largest there is, if None.

    Example:
        >>> round(error_bound(rho=50, dim=100), 6)  # 1/e
        0.367879
    """
    _positive(rho=rho, dim=dim)
    entropy = gaussian_entropy(dim) if entropy is None else entropy
    return math.exp(2 / dim * (entropy - rho) - 2 * PER_DIMENSION)


def rho_at_error(error: float, dim: int, entropy: float | None = None) -> float:
    """The ρ at which the bound of `error_bound` falls to a given relative error.

    h(x') − (d/2)·ln(2πe·error), our inversion of the bound of Cairney-Leeming et al.; for an
    isotropic Gaussian (d/2)·ln(1/error), so that ρ must be of the order of d before an attack can
    do well. Not positive where the bound does not forbid that error at any ρ.

    Args:
        error: relative, E‖x − x̂‖²/E‖x‖².
        dim: d, or the dimension s of a known subspace.
        entropy: h(x') in nats; that of an isotropic Gaussian if None.

    Example:
        >>> round(rho_at_error(0.5, 3072), 1)
        1064.7
    """
    _positive(error=error, dim=dim)
    entropy = gaussian_entropy(dim) if entropy is None else entropy
    return entropy - dim * PER_DIMENSION - dim / 2 * math.log(error)


def gaussian_entropy(dim: int, covariance: Tensor | None = None) -> float:
    """h(x') of a centred Gaussian, scaled to E‖x'‖² = d: ½ ln((2πe)^d det Σ'), tr Σ' = d.

    A textbook formula.

    Args:
        dim: d.
        covariance: Σ (d, d), of full rank, at any scale; isotropic if None.

    Example:
        >>> round(gaussian_entropy(2, torch.diag(torch.tensor([3.0, 1.0]))), 6)
        2.694036
    """
    _positive(dim=dim)
    if covariance is None:
        return dim * PER_DIMENSION
    values = _variances(covariance)
    if len(values) != dim:
        raise InputError(f"covariance: expected shape ({dim}, {dim}), got {len(values)} rows.")
    if not bool(values.min() > RANK * values.max()):
        raise InputError(
            "covariance: is singular, and the entropy −∞; restrict x to the span of the data, and "
            "take its dimension for d."
        )
    return dim * PER_DIMENSION + 0.5 * float((values / values.mean()).log().sum())


def box_entropy(dim: int, low: float = 0.0, high: float = 1.0) -> float:
    """h(x') of x uniform in the box [low, high]^d, scaled to E‖x'‖² = d.

    d·ln((high − low)/√((low² + low·high + high²)/3)), a textbook formula.

    Example:
        >>> round(box_entropy(1, -1.0, 1.0), 6)  # ln √12
        1.242453
    """
    _positive(dim=dim)
    if not low < high:
        raise InputError(f"low, high: expected low < high, got {low} and {high}.")
    return dim * math.log((high - low) / math.sqrt((low * low + low * high + high * high) / 3))


def ball_entropy(dim: int) -> float:
    """h(x') of x uniform in a ball, scaled to E‖x'‖² = d: the log of the volume at radius √(d+2).

    A textbook formula. On the sphere itself the entropy is −∞ and `error_bound` says nothing: use
    `sphere_error_bound`.

    Example:
        >>> round(ball_entropy(1), 6)  # an interval: ln √12
        1.242453
    """
    _positive(dim=dim)
    return dim / 2 * math.log(math.pi * (dim + 2)) - math.lgamma(dim / 2 + 1)


def sphere_error_bound(rho: float, dim: int) -> float:
    """The least relative error of any attack where x is uniform on a sphere of known radius.

    Our derivation, beside that of Cairney-Leeming et al., whose entropy is −∞ here. What is left
    unknown of x has a mean of length A·|x|, so that the error is 1 − A². Of all distributions on
    the sphere with that mean the one nearest to uniform is the von Mises–Fisher one, f ∝ exp(κt)
    with t the cosine to the mean: knowing A costs at least KL = κA − ln E exp(κt) nats, E over the
    uniform distribution. The error at KL = ρ is the bound, as KL is convex in A². In the limit of
    large d it is exp(−2ρ/d) again.

    Args:
        rho: ρ.
        dim: d, 2 or more.

    Example:
        >>> round(sphere_error_bound(50, 100), 4), round(error_bound(50, 100), 4)
        (0.366, 0.3679)
    """
    _positive(rho=rho, dim=dim)
    if dim < 2:
        raise InputError(f"dim: expected 2 or more for a sphere, got {dim}.")
    if rho > 40 * dim:
        return 0.0  # less than 1e-34, at a κ too large to compute with
    low = math.log(rho * dim) / 2  # KL ≤ κ²/2d, half of ρ there
    high = low + 1
    while _tilted(math.exp(high), dim)[1] < rho:
        high += 1
    found = optimize.brentq(lambda x: _tilted(math.exp(x), dim)[1] - rho, low, high, xtol=1e-13)
    return _tilted(math.exp(found), dim)[0]


def _tilted(kappa: float, dim: int) -> tuple[float, float]:
    """1 − A² and KL of f ∝ exp(κ cos θ) on the sphere, by quadrature in the angle θ.

    The density of θ is ∝ sin^{d−2}(θ) exp(κ cos θ). Nodes are laid around its peak.
    """
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
    """Angles around a peak, and the log of sin^{d−2}(θ) exp(κ(cos θ − 1)) there, with weights."""
    at, weights = _legendre()
    reach = 14 / math.sqrt(max(sharpness, 1.0))
    low, high = max(0.0, peak - reach), min(math.pi, peak + reach)
    theta = (low + high) / 2 + (high - low) / 2 * at
    logs = power * np.log(np.sin(theta)) - 2 * kappa * np.sin(theta / 2) ** 2
    return theta, logs + np.log(weights * (high - low) / 2)


@lru_cache(maxsize=1)
def _legendre() -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(400)


def effective_dimension(
    covariance: Tensor, rule: Literal["participation", "rank"] = "participation"
) -> float:
    """How many dimensions data have, to hold against ρ: safe is ρ well below it.

    The threshold is that of Cairney-Leeming et al., who state it for d and for a known subspace.
    To put the participation ratio (tr Σ)²/tr Σ² in its place is our rule of thumb: it is s for
    s equal variances, and less where they differ.

    Args:
        covariance: Σ (d, d).
        rule: the participation ratio, or the rank of Σ.

    Example:
        >>> effective_dimension(torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])))
        3.0
    """
    values = _variances(covariance)
    if rule == "rank":
        return float((values > RANK * values.max()).sum())
    if rule != "participation":
        raise InputError(f"rule: expected participation or rank, got {rule!r}.")
    return float(values.sum() ** 2 / values.square().sum())


def noise_variance(
    rho: float, samples: int, decay: float, radius: float, slope: float = 1.0
) -> float:
    """The variance σ² = 2R²C²/(λ²ρn²) of output noise that makes ridge regression ρ-zCDP.

    Cairney-Leeming et al., output perturbation with a Huber loss: the paper's statement. It is
    the Gaussian mechanism, ρ = Δ²/(2σ²) (Bun and Steinke), at the sensitivity Δ = 2RC/(λn) of the
    minimiser of (1/n) Σ ℓ(θ·x_i − y_i) + (λ/2)|θ|².

    Args:
        rho: ρ.
        samples: n.
        decay: λ.
        radius: R, the largest norm of a sample.
        slope: C, the largest |ℓ'|.

    Example:
        >>> round(noise_variance(rho=0.5, samples=100, decay=0.1, radius=1.0), 9)
        0.04
    """
    _positive(rho=rho, samples=samples, decay=decay, radius=radius, slope=slope)
    return 2 * (radius * slope / (decay * samples)) ** 2 / rho


def epsilon_of(rho: float, delta: float) -> float:
    """The ε at which ρ-zCDP is (ε, δ)-DP: ρ + 2√(ρ ln(1/δ)).

    Bun and Steinke, "Concentrated Differential Privacy: Simplifications, Extensions, and Lower
    Bounds", Proposition 1.3: the paper's statement.

    Example:
        >>> round(epsilon_of(0.5, 1e-5), 4)
        5.2985
    """
    _positive(rho=rho)
    return rho + 2 * math.sqrt(rho * _surprise(delta))


def rho_of(epsilon: float, delta: float = 0.0) -> float:
    """The ρ that belongs to (ε, δ).

    With δ = 0 a mechanism is ε²/2-zCDP (Bun and Steinke, Proposition 1.4: the paper's statement).
    With δ > 0, (√(ln(1/δ) + ε) − √ln(1/δ))², the inverse of `epsilon_of` (our derivation): the
    largest ρ from which (ε, δ) follows that way. (ε, δ)-DP alone implies no ρ-zCDP at all.

    Example:
        >>> round(rho_of(epsilon_of(0.5, 1e-5), 1e-5), 12), rho_of(2.0)
        (0.5, 2.0)
    """
    _positive(epsilon=epsilon)
    if delta == 0:
        return epsilon * epsilon / 2
    surprise = _surprise(delta)
    # (√(s + ε) − √s)², with the difference of roots as a quotient: exact for small ε
    return (epsilon / (math.sqrt(surprise + epsilon) + math.sqrt(surprise))) ** 2


def _surprise(delta: float) -> float:
    if not 0 < delta < 1:
        raise InputError(f"delta: expected a number between 0 and 1, got {delta!r}.")
    return -math.log(delta)


def _variances(covariance: Tensor) -> Tensor:
    """Eigenvalues of a covariance, (d,) float64 on the CPU."""
    matrix = torch.as_tensor(covariance).detach().cpu().double()
    square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] and len(matrix)
    if not square or not bool(matrix.isfinite().all()) or not torch.allclose(matrix, matrix.T):
        raise InputError(
            f"covariance: expected a symmetric (d, d) matrix of finite numbers, got shape "
            f"{tuple(matrix.shape)}; for rows of data, take torch.cov(rows.T)."
        )
    values: Tensor = torch.linalg.eigvalsh(matrix)
    if not bool(values.max() > 0) or bool(values.min() < -1e-6 * values.max()):
        raise InputError("covariance: is zero, or has negative variances; is it a covariance?")
    return values.clamp_min(0)


def _positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name}: expected a finite number above 0, got {value!r}.")
