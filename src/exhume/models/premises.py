"""Whether trained weights alone can bear out a premise: what of it they show, and what they deny.

MARGIN asks for a network that is homogeneous in its weights, f(sθ) = s^L f(θ). Both MARGIN and
DECAY say θ = Σ_i Σ_c A_ic ∇θ f_c(x_i), so a dense first layer is W₁ = Σ_i δ_i x_iᵀ: n samples leave
nothing beyond n directions. Initial weights that are still there do.
"""

import math

import torch
from torch import Tensor

from exhume.checks import one_of
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.errors import InputError
from exhume.features import Features
from exhume.models.formulation import DRIFT

INPUTS = 8
"""Random inputs at which outputs are compared: one could be at a zero of the network."""

HOMOGENEOUS = 1e-6
"""The share of the outputs at 2θ that rounding may explain; float64 leaves far less."""


def premise_named(word: str | Premise) -> Premise:
    """Return the premise of that name."""
    if isinstance(word, Premise):
        return word
    return Premise(one_of("premise", word, [premise.value for premise in Premise]))


def check_whole(premise: Premise, parameters: str | None, point: str | None) -> None:
    """Refuse a block or a point where all trained weights are the target."""
    if parameters not in (None, "all") or point not in (None, "final"):
        raise InputError(
            f"premise {premise.value}: takes all trained weights, and features at them (parameters "
            "all, point final); leave out the parameters and the point, or give the premise "
            "change, which needs the initial weights."
        )


def degree(features: Features, inputs: Tensor) -> tuple[float, float]:
    """Return the L of f(2θ) ≈ 2^L f(θ), and the share ‖f(2θ) − 2^L f(θ)‖ / ‖f(2θ)‖ that it misses.

    L is not a number where outputs are zero or change sign; the share is then 1. Both are 0 where
    the features are not those of a whole network.

    Args:
        features: of f, whose last point is θ; buffers, such as a norm's statistics, are not in θ.
        inputs: (n, d).
    """
    features = features.to(features.device, torch.float64)
    once, twice = features.predict(inputs), features.predict(inputs, 2.0)
    if once is None or twice is None:
        return 0.0, 0.0
    size, common = float(once.square().sum()), float((once * twice).sum())
    if size == 0 or common <= 0:
        return math.nan, 1.0
    factor = common / size
    return math.log2(factor), float((twice - factor * once).norm() / twice.norm())


def beyond(layer: FirstLayer, samples: int) -> float:
    """Return Σ_{i>n} s_i², of the singular values s of W₁: what n samples cannot leave.

    Example:
        >>> layer = FirstLayer(torch.zeros(2, 2), torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
        >>> beyond(layer, 1), beyond(layer, 2)
        (4.0, 0.0)
    """
    sizes, _ = layer.spectrum
    return float(sizes[samples:].square().sum())


def doubts(problem: Problem, samples: int | None) -> tuple[str, ...]:
    """Return what of the weights speaks against the premise of a problem, a sentence each.

    There is nothing where the target is the change of the weights. `samples` says how many there
    are, if that is known.
    """
    found: list[str] = []
    if problem.premise is Premise.MARGIN:
        inputs = problem.domain.start(INPUTS, problem.dim, torch.Generator().manual_seed(0))
        _, missed = degree(problem.features, inputs)
        if missed > HOMOGENEOUS:
            found.append(
                "The premise margin cannot hold exactly: the network is not homogeneous in its "
                f"weights. With all of them doubled, {missed:.1e} of its outputs is no multiple of "
                "what they were. Biases in deeper layers, norms, and activations that bend other "
                "than at zero do this."
            )
    layer = None if problem.premise is Premise.CHANGE else problem.first_layer
    if layer is not None and samples is not None:
        share = beyond(layer, samples) / float(problem.target.double().square().sum())
        if share > DRIFT:
            found.append(
                f"The weights contradict the premise {problem.premise.value}: the first layer "
                f"holds {share:.1e} of their square beyond its {samples} largest directions, where "
                f"{samples} samples can leave nothing, so that at least as much stays unexplained. "
                "Its initial weights are still there, for training ended too early, or there are "
                "more samples."
            )
    return tuple(found)
