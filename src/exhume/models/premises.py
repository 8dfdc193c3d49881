"""Whether trained weights alone can bear out a premise: what of it they show, and what they deny.

MARGIN asks for a network that is homogeneous in its weights, f(sθ) = s^L f(θ). Both MARGIN and
DECAY say θ = Σ_i Σ_c A_ic ∇θ f_c(x_i), so a dense first layer is W₁ = Σ_i δ_i x_iᵀ: n samples leave
nothing beyond n directions. Initial weights that are still there do.
"""

import math

import torch
from torch import Tensor

from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.errors import InputError
from exhume.features.modules import ModuleFeatures
from exhume.features.network import Network, Weights, derivatives, moved
from exhume.models.formulation import DRIFT

INPUTS = 8
"""Random inputs at which outputs are compared."""

HOMOGENEOUS = 1e-6
"""Share of the outputs at 2θ, from which it is no rounding that no L fits them."""


def premise_named(word: str | Premise) -> Premise:
    """The premise of that name.

    Example:
        >>> premise_named("margin").name
        'MARGIN'
    """
    try:
        return Premise(word)
    except ValueError:
        known = ", ".join(premise.value for premise in Premise)
        raise InputError(f"premise: expected one of {known}, got {word!r}.") from None


def check_whole(premise: Premise, parameters: str | None, point: str | None) -> None:
    """Refuse a block or a point where all trained weights are the target."""
    if parameters not in (None, "all") or point not in (None, "final"):
        raise InputError(
            f"premise {premise.value}: takes all trained weights, and features at them (parameters "
            "all, point final); leave out the parameters and the point, or give the premise "
            "change, which needs the initial weights."
        )


def degree(network: Network, weights: Weights, inputs: Tensor) -> tuple[float, float]:
    """The L of f(2θ) ≈ 2^L f(θ), and the share ‖f(2θ) − 2^L f(θ)‖ / ‖f(2θ)‖ that it misses.

    Buffers, such as the statistics of a norm, are no part of θ.

    Args:
        network: f.
        weights: θ and buffers, in float64.
        inputs: (n, d).

    Returns:
        L, not a number where outputs are zero or change sign, and what it misses, from 0 to 1.
    """
    parameters = {name for name, _ in network.module.named_parameters()}
    twice = {name: 2 * w if name in parameters else w for name, w in weights.items()}
    with torch.no_grad(), derivatives(rounded=False):
        once, after = network(weights, inputs), network(twice, inputs)
    size, common = float(once.square().sum()), float((once * after).sum())
    if size == 0 or common <= 0:
        return math.nan, 1.0
    factor = common / size
    return math.log2(factor), float((after - factor * once).norm() / after.norm())


def beyond(layer: FirstLayer, samples: int) -> float:
    """Σ_{i>n} s_i², the singular values s of W₁ beyond the n largest: what n samples cannot leave.

    Example:
        >>> layer = FirstLayer(torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
        >>> beyond(layer, 1), beyond(layer, 2)
        (4.0, 0.0)
    """
    sizes, _ = layer.spectrum
    return float(sizes[samples:].square().sum())


def doubts(problem: Problem, samples: int | None) -> tuple[str, ...]:
    """What of the weights speaks against the premise of a problem, a sentence each.

    Args:
        problem: whose target is the trained weights; where it is their change, there are none.
        samples: how many there are, if that is known.
    """
    if problem.premise is Premise.CHANGE:
        return ()
    return (*_unhomogeneous(problem), *_left_over(problem, samples))


def _unhomogeneous(problem: Problem) -> list[str]:
    features = problem.features
    if problem.premise is not Premise.MARGIN or not isinstance(features, ModuleFeatures):
        return []
    inputs = problem.domain.start(INPUTS, problem.dim, torch.Generator().manual_seed(0))
    weights = moved(features.points[-1], inputs.device, inputs.dtype)
    _, missed = degree(features.network, weights, inputs)
    if missed <= HOMOGENEOUS:
        return []
    return [
        "The premise margin cannot hold exactly: the network is not homogeneous in its weights. "
        f"With all of them doubled, {missed:.1e} of its outputs is no multiple of what they were. "
        "Biases in deeper layers, norms, and activations that bend other than at zero do this."
    ]


def _left_over(problem: Problem, samples: int | None) -> list[str]:
    layer = problem.first_layer
    if layer is None or samples is None:
        return []
    share = beyond(layer, samples) / float(problem.target.double().square().sum())
    if share <= DRIFT:
        return []
    return [
        f"The weights contradict the premise {problem.premise.value}: the first layer holds "
        f"{share:.1e} of their square beyond its {samples} largest directions, where {samples} "
        "samples can leave nothing, so that at least as much stays unexplained. Its initial "
        "weights are still there, for training ended too early, or there are more samples."
    ]
