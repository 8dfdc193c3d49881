"""Small networks of every architecture with weights before and after, and slow dense oracles.

The oracles run a plain copy of the module, one sample at a time, with torch.autograd and nothing
of torch.func; none of the code that they check.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from exhume.equation.problem import Problem
from exhume.features import Features
from exhume.features.gradient import ParameterGradients
from exhume.features.network import Network, known_network
from exhume.models import architectures
from exhume.models.formulation import network_problem
from problems import Dense, gaussian

SIZES: dict[str, dict[str, Any]] = {
    "two_layer": {"shape": [4], "width": 7, "activation": "tanh", "bias": True},
    "mlp": {"shape": [2, 2], "widths": [5, 6], "activation": "gelu", "bias": True},
    "resnet": {"shape": [4, 4], "width": 2, "blocks": 1, "kernel": 4},
    "vit": {"shape": [4, 4], "patch": 2, "dim": 4, "depth": 1, "heads": 2},
}


@dataclass(frozen=True)
class Net:
    """A network, its weights before and after, and a plain copy of its module."""

    network: Network
    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    plain: nn.Sequential

    def problem(self, parameters: str = "last", point: str = "midpoint") -> Problem:
        return network_problem(self.network, self.initial, self.trained, parameters, point)

    def points(self, point: str) -> list[dict[str, Tensor]]:
        """Weights at which features are taken, by hand."""
        half = {name: (w + self.trained[name]) / 2 for name, w in self.initial.items()}
        return {
            "initial": [self.initial],
            "final": [self.trained],
            "midpoint": [half],
            "both": [self.initial, self.trained],
        }[point]


def make(name: str, outputs: int = 2, seed: int = 0, step: float = 0.1, **changes: Any) -> Net:
    """A network of that name; the trained weights are the initial ones with noise added."""
    arguments = {**SIZES[name], **changes, "outputs": outputs}
    plain = architectures.initialise(architectures.build(name, arguments), seed).double()
    initial = {key: w.detach().clone() for key, w in plain.state_dict().items()}
    trained = {
        key: w + step * gaussian(*w.shape, seed=seed + i)
        for i, (key, w) in enumerate(initial.items())
    }
    module = architectures.build(name, arguments).double()
    network = known_network(module, tuple(arguments["shape"]), outputs)
    return Net(network, initial, trained, plain)


def dense(net: Net, point: str, names: list[str] | None) -> Dense:
    """The oracle of a net's features by autograd on copies of its plain module.

    Rows are the hidden activations (1, h) at each point, or ∇θ f_c (c, p) of the parameters named.
    """
    modules = [copy.deepcopy(net.plain) for _ in net.points(point)]
    for module, weights in zip(modules, net.points(point), strict=True):
        module.load_state_dict(weights)

    def rows(x: Tensor) -> Tensor:
        return torch.cat([_rows(m, x.reshape(1, *net.network.shape), names) for m in modules])

    return Dense(rows, net.network.dim, rows(torch.ones(net.network.dim).double()).shape[1])


def _rows(module: nn.Sequential, sample: Tensor, names: list[str] | None) -> Tensor:
    if names is None:
        return module[:-1](sample).reshape(1, -1)
    parameters = dict(module.named_parameters())
    chosen = [parameters[name] for name in names]
    rows = [
        torch.cat([part.flatten() for part in torch.autograd.grad(f, chosen, create_graph=True)])
        for f in module(sample).flatten()
    ]
    return torch.stack(rows)


def names_of(net: Net) -> list[str]:
    """All parameters, in the order of the model."""
    return [name for name, _ in net.plain.named_parameters()]


def by_torch(features: Features, **changes: Any) -> ParameterGradients:
    """The same gradients by derivatives of torch, without the fast path of dense layers."""
    assert isinstance(features, ParameterGradients)
    plain = (features.network, features.points, features.name)
    return replace(ParameterGradients(*plain, block=features.block), **changes)
