"""Layers of a module that the features know: activations, and chains of dense layers."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from exhume.features.activations import Activation, activation
from exhume.features.network import Network


class Elementwise(nn.Module):
    """An activation as a layer."""

    def __init__(self, name: str) -> None:
        """Take the activation of that name, see `exhume.features.activations.activation`."""
        super().__init__()
        self.activation = activation(name)

    def forward(self, z: Tensor) -> Tensor:
        """Return σ(z), entry by entry."""
        return self.activation.value(z)

    def extra_repr(self) -> str:
        """Return the activation's name."""
        return self.activation.name


def known_activation(module: nn.Module) -> Activation | None:
    """Return the activation that a layer computes, if it is one of ours."""
    if isinstance(module, Elementwise):
        return module.activation
    names = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.GELU: "gelu", nn.Softplus: "softplus"}
    plain = getattr(module, "approximate", "none") == "none" and getattr(module, "beta", 1) == 1
    return activation(names[type(module)]) if plain and type(module) in names else None


def with_activation(module: nn.Module, surrogate: Activation) -> nn.Module | None:
    """Return a copy, on the same weights, with another activation for every ReLU; None if none."""
    found = [
        (path, name)
        for path, parent in module.named_modules()
        for name, part in parent._modules.items()  # named_children would name a shared layer once
        if part is not None and (known := known_activation(part)) and known.name == "relu"
    ]
    if not found:
        return None
    shared = copy.deepcopy(module, {id(x): x for x in (*module.parameters(), *module.buffers())})
    for path, name in found:
        layer = Elementwise("relu").train(module.training)
        layer.activation = surrogate
        setattr(shared.get_submodule(path), name, layer)
    return shared


class Chain(NamedTuple):
    """The dense layers of a network."""

    names: tuple[str, ...]  # of the layers, first to last
    activations: tuple[Activation, ...]  # after each of them but the last


def dense_chain(network: Network) -> Chain | None:
    """Return the layers of Sequential(Flatten, Linear, σ, …, Linear), or None for others."""
    if type(network.module) is not nn.Sequential:
        return None
    parts = [
        (name, part)
        for name, part in network.module._modules.items()  # named_children leaves out repetitions
        if not isinstance(part, nn.Dropout | nn.Identity | None)
        and not (isinstance(part, nn.Flatten) and (part.start_dim, part.end_dim) == (1, -1))
    ]
    names = tuple(name for name, _ in parts[0::2])
    dense = [part for _, part in parts[0::2] if type(part) is nn.Linear]
    between = [known_activation(part) for _, part in parts[1::2]]
    activations = tuple(sigma for sigma in between if sigma is not None)
    tensors = [id(tensor) for part in dense for tensor in part.parameters()]
    fits = (
        len(dense) == len(names) == len(activations) + 1
        and len(between) == len(activations)
        and dense[0].in_features == torch.Size(network.shape).numel()
        and len(set(tensors)) == len(tensors)
    )
    return Chain(names, activations) if fits else None
