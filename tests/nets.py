"""Small networks of every architecture with weights before and after, and slow dense oracles.

The oracles run a plain copy of the module, one sample at a time, with torch.autograd and nothing
of torch.func; none of the code that they check.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from exhume.equation.problem import Problem
from exhume.features import Features
from exhume.features.network import Network, known_network
from exhume.models import architectures
from exhume.models.formulation import network_problem
from problems import gaussian

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


def with_options(features: Features, **changes: Any) -> Features:
    """The same features, computed another way (`chunk`, `keep`)."""
    return replace(features, **changes)


def one_row(net: Net, weights: dict[str, Tensor], names: list[str] | None, x: Tensor) -> Tensor:
    """Rows of one sample x (d,) by autograd: hidden activations (1, h), or ∇θ f_c (c, p)."""
    net.plain.load_state_dict(weights)
    sample = x.reshape(1, *net.network.shape)
    if names is None:
        return net.plain[:-1](sample).reshape(1, -1)
    parameters = dict(net.plain.named_parameters())
    outputs = net.plain(sample).flatten()
    rows = []
    for c in range(len(outputs)):
        parts = torch.autograd.grad(
            outputs[c], [parameters[name] for name in names], create_graph=True
        )
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def dense_rows(
    net: Net, points: list[dict[str, Tensor]], names: list[str] | None, x: Tensor
) -> Tensor:
    """Φ, (n·k, p)."""
    rows = [torch.cat([one_row(net, w, names, row) for w in points]) for row in x]
    return torch.cat(rows).detach()


def dense_slopes(
    net: Net,
    points: list[dict[str, Tensor]],
    names: list[str] | None,
    x: Tensor,
    exact: bool = True,
) -> Tensor:
    """∂Φ/∂x of each sample, (n, k, p, d), by double backward or by central differences."""

    def slope(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        if exact:
            return torch.autograd.functional.jacobian(
                lambda at: one_row(net, weights, names, at), row
            )
        h, axes = 1e-5, torch.eye(len(row), dtype=row.dtype)
        ends = [[one_row(net, weights, names, row + s * h * e) for s in (1, -1)] for e in axes]
        return torch.stack([(ahead - behind).detach() / (2 * h) for ahead, behind in ends], 2)

    return torch.stack([torch.cat([slope(weights, row) for weights in points]) for row in x])
