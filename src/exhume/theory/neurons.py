"""Two-layer networks with a polynomial activation, as numbers: f(x) = Σ_k a_k σ(w_k·x).

A hidden bias is one more entry of w_k, and every sample has a 1 there: w·x + β = (w, β)·(x, 1).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from exhume.errors import InputError
from exhume.features.layers import Elementwise
from exhume.models.state import StateOrFile, fit_state, read_state

# Every refusal ends with it: a model that this theory does not cover may be covered there
LOCAL = "See exhume.theory.local_identifiability for what other weights determine at a solution."
AGREEMENT = 1e-3  # most that outputs may differ: rounding is below, other functions are above


@dataclass(frozen=True, eq=False)
class Neurons:
    """Neurons make up a two-layer network with activation σ(z) = Σ_q s_q z^q and one output."""

    first: Tensor  # w_k, (K, d) float64; (K, d + 1) with the hidden bias where there is one
    last: Tensor  # a_k, (K,)
    coefficients: tuple[float, ...]  # s_0 … s_α, the last of them not zero
    lifted: bool = False  # whether the last entry of w_k is a bias
    eps: float = torch.finfo(torch.float64).eps  # relative rounding of the weights as stored

    @property
    def degree(self) -> int:
        """Return α, the highest degree."""
        return len(self.coefficients) - 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the q with s_q ≠ 0, lowest first."""
        return tuple(q for q, s in enumerate(self.coefficients) if s)

    def value(self, z: Tensor) -> Tensor:
        """Return σ(z)."""
        return torch.stack([self.coefficients[q] * z**q for q in self.degrees]).sum(0)

    def slope(self, z: Tensor) -> Tensor:
        """Return σ'(z)."""
        return torch.stack([q * self.coefficients[q] * z ** (q - 1) for q in self.degrees]).sum(0)


def output(neurons: Neurons, samples: Tensor) -> Tensor:
    """Return f(x_i) = Σ_k a_k σ(w_k·x_i), (n, d) → (n,)."""
    return neurons.value(samples @ neurons.first.T) @ neurons.last


def explained(neurons: Neurons, samples: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_i b_i ∇θ f(x_i): a_k Σ_i b_i σ'(w_k·x_i) x_i, (K, d), and Σ_i b_i σ(w_k·x_i)."""
    z = neurons.first @ samples.T
    first = neurons.last[:, None] * ((neurons.slope(z) * multipliers) @ samples)
    return first, neurons.value(z) @ multipliers


def violation(neurons: Neurons, samples: Tensor, multipliers: Tensor) -> float:
    """Return |θ − Σ_i b_i ∇θ f(x_i)| / |θ|: how far the weights are from stationary."""
    first, last = explained(neurons, samples, multipliers)
    missed = (neurons.first - first).square().sum() + (neurons.last - last).square().sum()
    size = neurons.first.square().sum() + neurons.last.square().sum()
    return float((missed / size).sqrt())


def neurons_of(model: nn.Module, trained: StateOrFile | None) -> Neurons:
    """Return the neurons of a module with its own weights, or those given, or refuse it.

    It is Linear, `Elementwise` with a polynomial, Linear with one output and no bias; a Flatten may
    come first.
    """
    hidden, sigma, head = _layers(model)
    source = str(trained) if isinstance(trained, Path | str) else "trained weights"
    given = read_state(Path(trained)) if isinstance(trained, Path | str) else trained
    own = model.state_dict() if given is None else given
    eps = max(torch.finfo(w.dtype).eps for w in own.values() if w.is_floating_point())
    state = {n: w.cpu().double() for n, w in fit_state(own, model, source).items()}
    names = {id(w): name for name, w in model.named_parameters()}
    first, last = state[names[id(hidden.weight)]], state[names[id(head.weight)]][0]
    lifted = hidden.bias is not None
    if lifted:
        first = torch.cat([first, state[names[id(hidden.bias)]][:, None]], 1)
    neurons = Neurons(first, last, _coefficients(sigma), lifted, eps)
    size = first.norm(dim=1).max().clamp_min(torch.finfo(torch.float64).tiny)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, hidden.in_features, generator=generator, dtype=torch.float64) / size
    expected = output(neurons, pad(inputs, (0, 1), value=1.0) if lifted else inputs)
    with torch.no_grad():
        found: Tensor = functional_call(model, state, (inputs,))
    if found.numel() != 4 or (found.flatten() - expected).norm() > AGREEMENT * expected.norm():
        words = "its outputs are not Σ a_k σ(w_k·x) of its layers; write it as a Sequential."
        raise InputError(f"model: {words} {LOCAL}")
    return neurons


def _layers(model: nn.Module) -> tuple[nn.Linear, Elementwise, nn.Linear]:
    """Return the three parts, or raise a sentence on what else was found."""
    leaves = [part for part in model.modules() if not any(True for _ in part.children())]
    if leaves and isinstance(leaves[0], nn.Flatten):
        leaves = leaves[1:]
    match leaves:
        case [nn.Linear() as hidden, Elementwise() as sigma, nn.Linear() as head]:
            if head.out_features != 1 or head.bias is not None:
                found = f"{head.out_features} outputs and {'no' if head.bias is None else 'a'} bias"
                raise InputError(f"model: the last layer has {found}, not 1 without. {LOCAL}")
            return hidden, sigma, head
    found = ", ".join(type(part).__name__ for part in leaves) or "nothing"
    expected = "two linear layers and a polynomial activation (Linear, Elementwise, Linear)"
    raise InputError(f"model: expected {expected}, found {found}. {LOCAL}")


def _coefficients(sigma: Elementwise) -> tuple[float, ...]:
    """Return s_0 … s_α of an activation of degree 3 or more, or the reason why not."""
    name = sigma.activation.name
    kind, _, rest = name.partition(":")
    if kind != "polynomial":
        raise InputError(f"activation {name}: is no polynomial. {LOCAL}")
    coefficients = [float(c) for c in rest.split(",")]
    while coefficients and coefficients[-1] == 0:
        coefficients.pop()
    degree = len(coefficients) - 1
    if degree < 3:
        reason = {
            2: "shows the matrix Σ b_i x_i x_iᵀ, a sum of rank-one terms in infinitely many ways",
            1: "shows the vector Σ b_i x_i and no more",
        }.get(degree, "does not see the samples")
        raise InputError(f"activation {name}: degree {degree} {reason}; use 3 or more. {LOCAL}")
    if coefficients[0]:
        words = f"constant term {coefficients[0]:g} is not covered; use one with σ(0) = 0."
        raise InputError(f"activation {name}: its {words} {LOCAL}")
    return tuple(coefficients)
