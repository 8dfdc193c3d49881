"""From initial and trained weights of a network to a Problem: the unified formulation.

The change of a block of parameters in training is a combination of the samples' gradients,
Δθ ≈ Σ_i Σ_c A_ic ∇θ f_c(x_i), at a point on the way from the initial to the trained weights. For
the last linear layer this is ΔW_L ≈ Φ(X)ᵀA with Φ its inputs (see `features.last_layer`).
"""

import torch
from torch import Tensor

from exhume.equation.domain import Box, Domain, Sphere
from exhume.equation.pixels import Pixels
from exhume.equation.problem import FirstLayer, Premise, Problem, ThreatModel
from exhume.errors import InputError
from exhume.features import Features
from exhume.features.activations import Activation
from exhume.features.dense import DenseGradients
from exhume.features.gradient import ParameterGradients
from exhume.features.last_layer import LastLayer
from exhume.features.layers import dense_chain
from exhume.features.network import Network, Weights, midpoint, named_block
from exhume.features.random import RandomFeatures
from exhume.features.weights import Stored

POINTS = ("initial", "final", "midpoint", "both")
"""Where features may be taken; `both` is initial and final, with coefficients of their own."""

POINT = "midpoint"
"""Where they are taken unless told otherwise: there the residual at the truth is mostly least."""

LAZY = (
    "features of the samples moved little in training (the lazy regime), and training followed "
    "the gradient of the loss"
)
"""What is assumed where all weights were trained."""

ASSUMED = {
    Premise.MARGIN: (
        "training with a logistic or cross-entropy loss went on until the direction of the weights "
        "no longer changed, and the network is homogeneous in its weights"
    ),
    Premise.DECAY: "training with weight decay came to rest at a stationary point of its loss",
}
"""What is assumed where the weights themselves are the target."""

BOUNDED = "inputs lie in [−1, 1]: neither their norm nor their range was told"
"""What is assumed of the inputs then, if nothing is known of them."""

DRIFT = 1e-2
"""The most of the target that may be left at the truth for an attack to be worth its time."""


def network_problem(
    network: Network,
    initial: Weights,
    trained: Weights,
    parameters: str = "last",
    point: str = POINT,
    domain: Domain | None = None,
    display: Pixels | None = None,
    knows: tuple[str, ...] = (),
) -> Problem:
    """The problem that a network poses, given its weights before and after training.

    Args:
        network: the module as a function.
        initial: its parameters and buffers before training, at least those of `needed`.
        trained: the same after training.
        parameters: `last` for the inputs of the last linear layer (its bias is left out), or a
            block of parameters whose gradients are taken (`all`, `first`, names, patterns).
        point: where on the way features are taken: initial, final, midpoint or both.
        domain: where the samples may lie; the sphere of radius √d if None.
        display: how inputs become pixels, where the auditor is told.
        knows: what else the attacker is told, for the report.
    """
    if point not in POINTS:
        raise InputError(f"point: expected one of {', '.join(POINTS)}, got {point!r}.")
    target = _change(network, initial, trained, parameters)
    change = float(target.double().square().sum())
    resolution = 0.0
    if change > 0:
        block = _trained_block(network, initial, trained, parameters)
        size = sum(float(trained[name].double().square().sum()) for name in block)
        eps = max(torch.finfo(trained[name].dtype).eps for name in block)
        resolution = 0.1 * eps**2 * 2 * size / change
    told = ThreatModel(
        knows=(
            "the initial weights",
            "the trained weights",
            "the architecture",
            *knows,
        ),
        assumes=(LAZY,),
    )
    return Problem(
        target,
        features_at(network, initial, trained, parameters, point),
        told,
        network.shape,
        domain or Sphere(),
        display,
        resolution,
        DRIFT,
        first_layer(network, initial, trained),
    )


def weights_problem(
    network: Network,
    trained: Weights,
    premise: Premise,
    domain: Domain | None = None,
    display: Pixels | None = None,
    knows: tuple[str, ...] = (),
) -> Problem:
    """The problem that the trained weights alone pose: θ = Σ_i Σ_c A_ic ∇θ f_c(x_i).

    Args:
        network: the module as a function.
        trained: its parameters and buffers after training.
        premise: MARGIN or DECAY.
        domain: where the samples may lie; the box [−1, 1] if None.
        display: how inputs become pixels, where the auditor is told.
        knows: what else the attacker is told, for the report.
    """
    if premise is Premise.CHANGE:
        raise InputError("premise change: needs the initial weights; see network_problem.")
    zero = {name: torch.zeros_like(w) for name, w in trained.items()}
    block = _block(network, trained, "all")
    eps = max(torch.finfo(trained[name].dtype).eps for name in block)
    assumes = (ASSUMED[premise], *(() if domain else (BOUNDED,)))
    return Problem(
        _change(network, zero, trained, "all"),
        features_at(network, zero, trained, "all", "final"),
        ThreatModel(("the trained weights", "the architecture", *knows), assumes),
        network.shape,
        domain or Box(-1.0, 1.0),
        display,
        0.1 * eps**2,
        DRIFT,
        first_layer(network, zero, trained),
        premise,
    )


def needed(network: Network, trained: Weights, parameters: str, point: str) -> tuple[str, ...]:
    """The names of the initial weights without which there is no such problem.

    The head's bias has no part in what the head is given.
    """
    if point == "final":
        return _block(network, trained, parameters)
    bias = network.head_weight.removesuffix("weight") + "bias"
    return tuple(name for name in trained if not (parameters == "last" and name == bias))


def features_at(
    network: Network, initial: Weights, trained: Weights, parameters: str, point: str
) -> Features:
    """The features of a block at a point; dense layers have a fast path."""
    before = {name: initial.get(name, w) for name, w in trained.items()}
    points: tuple[Weights, ...] = {
        "initial": (before,),
        "final": (trained,),
        "midpoint": (midpoint(before, trained),),
        "both": (before, trained),
    }[point]
    where = {"both": "the initial and the final weights", "midpoint": "the midpoint of training"}
    title = where.get(point, f"the {point} weights")
    chain = dense_chain(network)
    if parameters == "last":
        if chain is not None and chain.names[1:] == (network.head,) and len(points) == 1:
            name, sigma = chain.names[0], chain.activations[0]
            return _dense(points[0], name, sigma, f"last layer, features at {title}")
        return LastLayer(network, points, f"last layer, features at {title}")
    block = _trained_block(network, initial, trained, parameters)
    kind = ParameterGradients if chain is None else DenseGradients
    return kind(network, points, f"gradients of {parameters} parameters at {title}", block=block)


def _change(network: Network, initial: Weights, trained: Weights, parameters: str) -> Tensor:
    """The target: ΔW_Lᵀ (h, c), or the change of a block as one column."""
    block = _trained_block(network, initial, trained, parameters)
    changes = {name: trained[name] - initial[name] for name in block}
    if not changes:
        names = ", ".join(_block(network, trained, parameters))
        raise InputError(
            f"parameters {parameters!r} ({names}) did not change in training, so they "
            "hold no trace of any sample; choose others."
        )
    if parameters == "last":
        return changes[block[0]].T.contiguous()
    return torch.cat([change.flatten() for change in changes.values()])[:, None]


def _trained_block(
    network: Network, initial: Weights, trained: Weights, parameters: str
) -> tuple[str, ...]:
    """The block without what was frozen: its change is zero, its gradients are not."""
    block = _block(network, trained, parameters)
    return tuple(name for name in block if not torch.equal(initial[name], trained[name]))


def _block(network: Network, weights: Weights, parameters: str) -> tuple[str, ...]:
    if parameters == "last":
        return (network.head_weight,)
    trainable = tuple(name for name, _ in network.module.named_parameters() if name in weights)
    return named_block(weights, trainable, parameters)


def first_layer(network: Network, initial: Weights, trained: Weights) -> FirstLayer | None:
    """The first layer, where it is dense, sees the input itself, and was trained.

    Where the weights themselves are the target, it counts as having begun at zero.
    """
    name = network.first_dense(trained)
    if name is None or name not in initial or torch.equal(initial[name], trained[name]):
        return None
    return FirstLayer(initial[name], trained[name])


def _dense(weights: Weights, name: str, sigma: Activation, title: str) -> RandomFeatures:
    v, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    return RandomFeatures(
        Stored(v),
        sigma,
        bias=bias,
        spread=float(v.double().square().mean().sqrt()),
        title=title,
    )
