"""Activations of the bundled models, each with its derivatives, and smooth stand-ins for ReLU."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import softplus as torch_softplus

from exhume.checks import number
from exhume.errors import InputError

LEAK = 0.02  # the published ReLU surrogate has this slope backward where the unit is off
THRESHOLD = 40.0  # beyond this softplus is the identity: float64 cannot tell them apart


@dataclass(frozen=True)
class Activation:
    """An activation is an element-wise function with the derivative that the attack uses for it."""

    name: str  # what the user writes, for example ``relu`` or ``polynomial:1,0,0.5``
    value: Callable[[Tensor], Tensor]  # σ(z)
    slope: Callable[[Tensor], Tensor]  # σ'(z); exact, except in the surrogates of ReLU
    homogeneous: bool = False  # σ(cz) = cσ(z) for c > 0, so that a sample's norm leaves no trace
    # can a sample be told from its negative? `lost` if σ is even or odd, `weak` if its odd part is
    # linear (then flips add up to a linear function), else `determined`
    sign: str = "determined"
    piecewise_linear: bool = False  # the slope is constant between kinks, its derivatives zero

    def second(self, z: Tensor) -> Tensor:
        """Return σ''(z), the derivative of the slope."""
        return self._differentiated(self.slope, z)

    def third(self, z: Tensor) -> Tensor:
        """Return σ'''(z), the derivative of `second`."""
        return self._differentiated(self.second, z)

    def _differentiated(self, function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        if self.piecewise_linear:
            return torch.zeros_like(z)
        derivative: Tensor = grad(lambda at: function(at).sum())(z)
        return derivative

    def leaky_backward(self) -> "Activation":
        """Return ReLU with the slope `LEAK` where it is off; other activations stay."""
        leaky = replace(self, slope=lambda z: _step(z) * (1 - LEAK) + LEAK)
        return leaky if self.name == "relu" else self


def softplus(beta: float | Tensor) -> Activation:
    """Return σ(z) = log(1 + exp(βz))/β, which is ReLU in the limit of large β.

    A tensor has one β for each of several z, as far as they are broadcast.
    """
    return Activation(
        _named("softplus", "beta", beta),
        lambda z: torch_softplus(beta * z, threshold=THRESHOLD) / beta,
        lambda z: torch.sigmoid(beta * z),
        sign="weak",
    )


def smoothed_relu(alpha: float | Tensor) -> Activation:
    """Return the published surrogate: ReLU forward, the slope sigmoid(αz) of softplus backward."""
    name, smooth = _named("smoothed_relu", "alpha", alpha), softplus(alpha)

    def value(z: Tensor) -> Tensor:
        backward = smooth.value(z)
        return backward + (torch.relu(z) - backward).detach()

    return Activation(name, value, smooth.slope, homogeneous=True, sign="weak")


def _named(kind: str, what: str, sharpness: float | Tensor) -> str:
    if isinstance(sharpness, Tensor):
        return kind
    return f"{kind}:{number(f'{kind}: {what}', sharpness, above=0)!r}".removesuffix(".0")


def _step(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


def _tanh_slope(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z).square()


def _gelu_slope(z: Tensor) -> Tensor:
    below: Tensor = torch.special.ndtr(z)
    return below + z * (torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))


_KNOWN = (
    Activation("relu", torch.relu, _step, True, "weak", piecewise_linear=True),
    Activation("relu+tanh", lambda z: z.relu() + z.tanh(), lambda z: _step(z) + _tanh_slope(z)),
    Activation("tanh", torch.tanh, _tanh_slope, sign="lost"),
    Activation("gelu", torch.nn.functional.gelu, _gelu_slope, sign="weak"),
    Activation("erf", torch.erf, lambda z: 2 * math.pi**-0.5 * torch.exp(-z * z), sign="lost"),
    replace(softplus(1.0), name="softplus"),
)
_NAMED = {sigma.name: sigma for sigma in _KNOWN}


def polynomial(*coefficients: float) -> Activation:
    """Return the polynomial σ(z) = c₀ + c₁z + c₂z² + … of given coefficients."""
    if len(coefficients) < 2 or not all(math.isfinite(c) for c in coefficients):
        raise InputError(
            f"polynomial: expected two or more finite coefficients, got {list(coefficients)}; "
            "write for example polynomial:0,0,0,1 for a cube."
        )
    derivative = tuple(k * c for k, c in enumerate(coefficients))[1:]
    even, odd, bent = any(coefficients[0::2]), any(coefficients[1::2]), any(coefficients[3::2])
    return Activation(
        "polynomial:" + ",".join(repr(float(c)).removesuffix(".0") for c in coefficients),
        lambda z: _horner(coefficients, z),
        lambda z: _horner(derivative, z),
        sign="lost" if not (even and odd) else "determined" if bent else "weak",
        piecewise_linear=not any(coefficients[2:]),
    )


def _horner(coefficients: tuple[float, ...], z: Tensor) -> Tensor:
    result = torch.full_like(z, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = result * z + c
    return result


def activation(name: str) -> Activation:
    """Return the activation of that name, or ``polynomial:c0,c1,…``, lowest degree first."""
    kind, _, rest = name.partition(":")
    if kind == "polynomial":
        try:
            coefficients = [float(c) for c in rest.split(",") if c.strip()]
        except ValueError as error:
            raise InputError(f"activation {name!r}: {rest!r} is not a list of numbers.") from error
        return polynomial(*coefficients)
    if name not in _NAMED:
        known = ", ".join([*_NAMED, "polynomial:c0,c1,…"])
        raise InputError(f"unknown activation {name!r}; known are {known}.")
    return _NAMED[name]
