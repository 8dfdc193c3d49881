"""Hermite coefficients of an activation, its kernel, and what they say of a sample's sign.

σ = Σ_k h_k he_k with the orthonormal polynomials he_k = He_k/√k! of a standard Gaussian g. All
integrals are split at 0, where activations have their kinks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import scipy
import torch
from numpy.polynomial import Chebyshev
from numpy.polynomial.hermite_e import hermevander
from torch import Tensor

from exhume.errors import InputError
from exhume.features.activations import Activation
from exhume.features.activations import activation as named

Map = Callable[[Tensor], Tensor]
Function = str | Activation | Map  # by its name, one of `exhume.features.activations`, or any

ORDERS = 100  # the highest order: up to it the recursion for he_k is accurate to 1e-13
FAR = 20.0  # integrals over the line end here, where the density of a Gaussian is 1e-87
FAR_OUT = 12.0  # integrals over the radius end here, where exp(−r²/2) is 1e-31
NODES, FEWER = 24, 17  # of Gauss and Legendre on a panel, and of the rule that tells the error
DEGREE = 96  # of the Chebyshev series of a kernel in the angle; by then it has converged to 1e-12
NEGLIGIBLE = 1e-20  # share of the energy of σ that is rounding: the square of 1e-10

LINEAR = (
    "its odd part is linear: a flipped sample changes the weights by a linear function of the "
    "first layer alone, and several such changes can cancel"
)


@dataclass(frozen=True, eq=False)
class Expansion:
    """An expansion holds the Hermite coefficients of an activation."""

    values: Tensor  # h_0 … h_K, float64
    energy: float  # E σ(g)², which all h_k² add up to
    error: float  # an estimate of the largest error of the coefficients

    @property
    def rest(self) -> float:
        """Return the share of the energy in orders above K."""
        return max(0.0, 1 - float(self.values.square().sum()) / self.energy) if self.energy else 0.0


def coefficients(activation: Function, orders: int = 30) -> Expansion:
    """Return the Hermite coefficients h_k = E[σ(g) He_k(g)]/√k! for k = 0 … K.

    Accurate to about 1e-14 where σ is smooth between multiples of 1/2; a kink elsewhere shows in
    the error.

    Example:
        >>> [round(h, 6) for h in coefficients("relu", 2).values.tolist()]  # 1/√(2π), 1/2, 1/√(4π)
        [0.398942, 0.5, 0.282095]
    """
    if not 0 <= orders <= ORDERS:
        raise InputError(f"orders: expected a whole number from 0 to {ORDERS}, got {orders}.")
    sigma = _function(activation)
    values, sizes, energy = _line(sigma, orders, NODES)
    coarse, _, _ = _line(sigma, orders, FEWER)
    rounding = 4 * torch.finfo(torch.float64).eps * float(sizes.max())
    return Expansion(values, energy, float((values - coarse).abs().max()) + rounding)


def kernel(activation: Function, rho: Tensor | float) -> Tensor:
    """Return κ(ρ) = E[σ(g)σ(g')] = Σ_k h_k² ρ^k of Gaussians with correlation ρ.

    This is the limit of ⟨φ(x), φ(x')⟩/p for random features with ρ = x·x'/d, interpolated between
    Chebyshev points of the angle: to about 1e-12 where σ is smooth on either side of 0, else 1e-4.

    Example:
        >>> [round(k, 9) for k in kernel("relu", torch.tensor([-1.0, 0.0, 1.0])).tolist()]
        [0.0, 0.159154943, 0.5]
    """
    correlations = torch.as_tensor(rho, dtype=torch.float64)
    if not bool((correlations.abs() <= 1 + 1e-9).all()):
        raise InputError("rho: expected correlations from −1 to 1, found others, or NaN.")
    values = _series(activation)(torch.arccos(correlations.clamp(-1, 1)).cpu().numpy())
    return torch.as_tensor(values).to(correlations)


@dataclass(frozen=True)
class SignAmbiguity:
    """This says whether features of σ tell a sample from its negative."""

    verdict: str  # lost, weak or determined, as in `Activation.sign`
    reason: str  # in a sentence
    even: float  # E σ₊(g)² with the even part σ₊(z) = (σ(z) + σ(−z))/2, the sum of h_k² over even k
    odd: float  # the same of the odd part and odd k
    bent: float  # the same over odd k ≥ 3


def sign_ambiguity(activation: Function) -> SignAmbiguity:
    """Tell whether x and −x leave different traces in the last layer.

    Where the odd part is linear, as that of ReLU is, φ(x) − φ(−x) = 2h_1·Vx, and flips whose
    a_i x_i add up to zero leave no trace.
    """
    sigma = _function(activation)
    z, weights = gaussian_rule()
    above, below = _finite(sigma, z), _finite(sigma, -z)
    even, odd = (above + below) / 2, (above - below) / 2
    slope = (weights * odd * z).sum()
    energies = [float((weights * part.square()).sum()) for part in (even, odd, odd - slope * z)]
    least = NEGLIGIBLE * (energies[0] + energies[1])
    verdict, reason = "determined", "it has odd Hermite coefficients of order 3 or more"
    if energies[1] <= least:
        verdict, reason = "lost", "it is even: a sample and its negative have the same features"
    elif energies[0] <= least:
        verdict, reason = "lost", "it is odd: a sample's negative has the features with a minus"
    elif energies[2] <= least:
        verdict, reason = "weak", LINEAR
    return SignAmbiguity(verdict, reason, *energies)


def _function(activation: Function) -> Map:
    sigma = named(activation) if isinstance(activation, str) else activation
    return sigma.value if isinstance(sigma, Activation) else sigma


def _panels(edges: list[float], nodes: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss and Legendre on the panels between the edges, in a row."""
    at, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(nodes))
    low, high = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (edges[:-1], edges[1:]))
    half = (high - low) / 2
    return ((low + high) / 2 + half * at).flatten(), (half * weights).flatten()


def gaussian_rule(nodes: int = NODES) -> tuple[Tensor, Tensor]:
    """Return z and weights for E f(g), split at 0, at all halves and, for sharp ones, towards 0."""
    right = [0.0, *(2.0**-k for k in range(12, 1, -1))]
    right += [0.5 * k for k in range(1, round(2 * FAR) + 1)]
    z, weights = _panels([*(-edge for edge in reversed(right[1:])), *right], nodes)
    return z, weights * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _line(sigma: Map, orders: int, nodes: int) -> tuple[Tensor, Tensor, float]:
    """Return h_k, E|σ he_k| and E σ²."""
    z, weights = gaussian_rule(nodes)
    values = _finite(sigma, z)
    weighted = weights * values
    energies = weighted * values
    if float(energies[[0, -1]].max()) > 1e-20 * float(energies.sum()):
        raise InputError(f"activation: grows too fast for a Gaussian, up to ±{FAR:g}; bound it.")
    units = np.sqrt(scipy.special.factorial(np.arange(orders + 1)))
    terms = weighted[:, None] * torch.from_numpy(hermevander(z.numpy(), orders) / units)
    return terms.sum(0), terms.abs().sum(0), float(energies.sum())


def _finite(sigma: Map, z: Tensor) -> Tensor:
    with torch.no_grad():
        values = sigma(z)
    if values.shape != z.shape or not bool(values.isfinite().all()):
        words = f"a finite number for each entry from {float(z.min()):.3g} to {float(z.max()):.3g}"
        raise InputError(f"activation: expected {words}; found NaN, infinities, or another shape.")
    return values.double()


@lru_cache(maxsize=64)
def _series(activation: Function) -> Chebyshev:
    """Return κ(cos α) as a series in the angle, by its values at the Chebyshev points of [0, π]."""
    polar = np.vectorize(partial(_polar, _function(activation)))
    return Chebyshev.interpolate(polar, DEGREE, [0, math.pi])


def _polar(sigma: Map, alpha: float) -> float:
    """Return κ(cos α) = (1/2π) ∫ dθ ∫ r exp(−r²/2) σ(r cos θ) σ(r cos(θ − α)) dr, by sectors."""
    radius, along = _panels([0.0, 0.25, 0.5, *map(float, range(1, round(FAR_OUT) + 1))], 16)
    along = along * radius * torch.exp(-0.5 * radius * radius)
    graded = [0.0, 1 / 32, 1 / 8, 1 / 2, 7 / 8, 31 / 32, 1.0]
    rays = [-math.pi / 2, alpha - math.pi / 2, math.pi / 2, alpha + math.pi / 2, 1.5 * math.pi]
    total = 0.0
    for low, high in pairwise(rays):
        theta, around = _panels([low + part * (high - low) for part in graded], 12)
        first = _finite(sigma, radius * theta.cos()[:, None])
        second = _finite(sigma, radius * (theta - alpha).cos()[:, None])
        total += float(around @ (first * second) @ along)
    return total / (2 * math.pi)
