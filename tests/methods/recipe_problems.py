"""Small problems for the methods: weights of ReLU networks, some with samples planted in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box, Domain, Sphere
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.features.dense import DenseGradients
from exhume.features.network import known_network
from exhume.methods.penalties import balanced_labels
from exhume.models import architectures
from nets import Net, make
from problems import THREAT, gaussian

DIM, SAMPLES = 6, 3


def premise_of(rule: Rule) -> Premise:
    """The premise that brings a rule with it."""
    return Premise.MARGIN if rule is Rule.MARGIN else Premise.CHANGE


def net_of(outputs: int, seed: int = 0) -> Net:
    """ReLU, two hidden layers with biases; images of 2×3."""
    widths = {"shape": [2, 3], "widths": [6, 5], "activation": "relu"}
    return make("mlp", outputs, seed, step=0.3, **widths)


def flat(weights: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """All of those weights in one column."""
    return torch.cat([weights[name].flatten() for name in names])[:, None]


def posed(net: Net, rule: Rule, point: str = "final", domain: Domain | None = None) -> Problem:
    """Target θ for the margin, θ − θ₀ otherwise."""
    names = tuple(name for name, _ in net.plain.named_parameters())
    target = flat(net.trained, names)
    if rule is Rule.FREE:
        target = target - flat(net.initial, names)
    features = DenseGradients(net.network, tuple(net.points(point)), "gradients", block=names)
    box = domain or Sphere()
    return Problem(target, features, THREAT, net.network.shape, box, premise=premise_of(rule))


def combined(
    outputs: int = 1,
    rule: Rule = Rule.MARGIN,
    samples: int = 4,
    activation: str = "relu",
    shape: tuple[int, ...] = (2, 3),
) -> Problem:
    """A target that is a combination of gradients at samples, so some candidates explain it."""
    net = make("mlp", outputs, 0, shape=list(shape), widths=[12, 9], activation=activation)
    names = tuple(name for name, _ in net.network.module.named_parameters())
    features = DenseGradients(net.network, (net.trained,), "gradients", block=names)
    labels = balanced_labels(samples, outputs)
    if rule is Rule.FREE:
        weights = gaussian(samples * outputs, 1, seed=2)
    else:
        signs = labels[:, None] if outputs == 1 else 2 * torch.eye(outputs)[labels] - 1
        weights = (0.5 * signs).double().reshape(-1, 1)
    target = features.linearize(0.5 * gaussian(samples, features.dim, seed=1)).combine(weights)
    domain = Box(-1.0, 1.0)
    return Problem(target, features, THREAT, shape, domain, premise=premise_of(rule))


@dataclass(frozen=True)
class Planted:
    """A problem with a known answer: samples (n, d) and coefficients (n,)."""

    problem: Problem
    samples: Tensor
    coefficients: Tensor

    def cells(self, x: Tensor) -> Tensor:
        """Which first neurons are on, (n, h): within such a cell all gradients are affine in x."""
        features = self.problem.features
        assert isinstance(features, DenseGradients)
        weights = features.points[0]
        on: Tensor = x @ weights["1.weight"].T + weights["1.bias"] > 0
        return on


def planted(premise: Premise = Premise.MARGIN, width: int = 100, seed: int = 0) -> Planted:
    """Δ = Φ(X)ᵀA at weights of random ReLUs that are not Δ.

    For the margin A = K⁻¹(γy), so that ΦΔ = γy: all samples are exactly on it. Else A is random.
    ‖Δ‖ is the norm of the weights, so that sharpness has its usual unit.
    """
    arguments = {"shape": [DIM], "widths": [width], "outputs": 1, "bias": "first"}
    net = architectures.initialise(architectures.build("mlp", arguments), seed).double()
    weights = {name: w.detach().clone() for name, w in net.state_dict().items()}
    weights["1.bias"] = 0.3 * gaussian(width, seed=seed + 3)
    names = tuple(name for name, _ in net.named_parameters())
    network = known_network(net, (DIM,), 1)
    features = DenseGradients(network, (weights,), "gradients", block=names)
    x = (0.5 * gaussian(SAMPLES, DIM, seed=seed + 1)).clamp(-1, 1)
    there = features.linearize(x)
    labels = torch.tensor([[1.0], [-1.0], [1.0]]).double()
    a = torch.linalg.solve(there.gram(), labels)
    if premise is Premise.MARGIN:
        assert (a * labels > 0).all()  # else this is no KKT point
    else:
        a = gaussian(SAMPLES, 1, seed=seed + 9)
        a = a + 0.3 * a.sign()
    size = torch.cat([w.flatten() for w in weights.values()]).norm()
    a = a * size / there.combine(a).norm()
    target = there.combine(a)
    first = target[: width * DIM, 0].reshape(width, DIM)
    layer = FirstLayer(torch.zeros_like(first), first)
    domain = Box(-1.0, 1.0)
    problem = Problem(target, features, THREAT, (DIM,), domain, first_layer=layer, premise=premise)
    return Planted(problem, x, a[:, 0])
