"""Trained models with the truth beside them: dense nets, a residual net, a vision transformer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from exhume.data import Data, save
from exhume.equation.problem import Premise, Problem
from exhume.files import new_folder
from exhume.models import architectures
from exhume.models.folder import TRUTH, NetworkModel, write_model, write_network
from exhume.models.formulation import premise_named
from exhume.victims.following import follow
from exhume.victims.training import Training, train

AROUND = ("device", "dtype", "show", "checkpoint")  # of `train` itself, not of `Training`


@dataclass(frozen=True)
class Victim:
    """A `Victim` is a trained model with the truth beside it."""

    problem: Problem  # what the auditor may see
    truth: Data  # the training data, for the evaluation only
    training: dict[str, Any]  # how it was trained, for the card
    # the weights before training, by name; empty where a seed stands for them
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    trained: Mapping[str, Tensor] = field(default_factory=dict)  # the weights after it
    model: NetworkModel | None = None  # the network, and what is told of it, if it is one

    def posed(
        self,
        parameters: str = "last",
        point: str = "midpoint",
        premise: Premise | str = "change",
        target: str = "weights",
    ) -> Problem:
        """Return the problem that other parameters, another point or another premise poses.

        Names are those of `exhume audit`; for margin and decay all weights are the target, or
        with the target `change` what training made of them.
        """
        if self.model is None:
            return self.problem
        return self.model.problem(parameters, point, premise_named(premise), target=target)

    def save(self, folder: Path, store: bool = False) -> None:
        """Write model and truth to a new or empty folder, the truth in a file of its own.

        With `store`, V itself is written where a seed, or a file elsewhere, would do.
        """
        with new_folder(folder) as temporary:
            if self.model is not None:
                write_network(temporary, self.model, self.training)
            else:
                write_model(temporary, self.problem, self.training, store)
            save(self.truth, temporary / TRUTH)


def two_layer(
    data: Data, width: int, activation: str = "relu", bias: bool = False, **options: Any
) -> Victim:
    """Train both layers of f(x) = W₂ σ(W₁x), with the options of `network`."""
    sizes = {"width": width, "activation": activation, "bias": bias}
    return network(data, "two_layer", sizes, **options)


def mlp(
    data: Data, widths: Sequence[int], activation: str = "relu", bias: bool = False, **options: Any
) -> Victim:
    """Train a dense network with hidden layers of these widths, with the options of `network`."""
    sizes = {"widths": list(widths), "activation": activation, "bias": bias}
    return network(data, "mlp", sizes, **options)


def resnet(data: Data, width: int, blocks: int = 4, **options: Any) -> Victim:
    """Train the law's residual network with so many channels, for images; see `network`."""
    return network(data, "resnet", {"width": width, "blocks": blocks}, **options)


def vit(
    data: Data, patch: int = 4, dim: int = 64, depth: int = 2, heads: int = 4, **options: Any
) -> Victim:
    """Train a small vision transformer, for images; see `network`."""
    sizes = {"patch": patch, "dim": dim, "depth": depth, "heads": heads}
    return network(data, "vit", sizes, **options)


def network(
    data: Data, architecture: str, sizes: dict[str, Any], seed: int = 0, **options: Any
) -> Victim:
    """Train a network of `exhume.models.architectures`, with its sizes, on the data.

    The seed is that of the initial weights; options are device, dtype, show and checkpoint of
    `train`, and fields of `Training`; or a recipe in their place.
    """
    arguments = {"shape": list(data.shape), "outputs": data.outputs, **sizes}
    module = architectures.initialise(architectures.build(architecture, arguments), seed)
    around = {word: options.pop(word) for word in AROUND if word in options}
    if (recipe := options.pop("recipe", None)) is not None:
        around.pop("checkpoint", None)
        initial, trained, record = follow(module, data, recipe, **around)
    else:
        initial, trained, record = train(module, data, Training(**options), **around)
    model = NetworkModel(architecture, arguments, initial, trained, data.display)
    record = {"data": data.name, "seed": seed, **record}
    return Victim(model.problem(), data, record, initial, trained, model)
