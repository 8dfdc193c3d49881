"""Trained models with the truth beside them: dense nets, a residual net, a vision transformer.

They are trained by `train`, or as people do it, by torch's own optimisers (`follow`).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from exhume.data import Data, save
from exhume.device import usable_device
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.files import new_folder
from exhume.models import architectures
from exhume.models.folder import TRUTH, NetworkModel, write_model, write_network
from exhume.models.formulation import premise_named
from exhume.recipes import Recipe
from exhume.victims.training import Show, Trained, Training, laziness, state_of, train

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def follow(
    module: nn.Module,
    data: Data,
    recipe: Recipe,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    show: Show | None = None,
) -> Trained:
    """Train a copy of a network as the recipe says, in eval mode but for batch norms.

    With one output the targets' signs are the labels, and their values for the loss mse.
    """
    for said in recipe.open.values():
        raise InputError(f"recipe: does not say {said}; to train, one is needed.")
    recipe.check_outputs(data.targets.shape[1])
    network = copy.deepcopy(module).to(usable_device(device), dtype).eval()
    for name, weight in network.named_parameters():
        weight.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in recipe.frozen))
    for part in network.modules():
        if isinstance(part, _BatchNorm):
            part.train(recipe.norms == "train")
    initial, like = state_of(network), next(network.parameters())
    inputs = data.inputs.reshape(-1, *data.shape).to(like)
    labels = (data.targets.sign() if recipe.loss == "logistic" else data.targets).to(like)
    words = ("momentum", "nesterov") if recipe.optimizer == "sgd" else ("betas", "eps")
    options = {word: getattr(recipe, word) for word in ("lr", "weight_decay", *words)}
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = OPTIMIZERS[recipe.optimizer](trained, **options)
    batches = recipe.batches(data.samples)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = recipe.rate(step, len(batches))
        optimizer.zero_grad()
        loss = recipe.value(network(inputs[batch]).flatten(1), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if show is not None:
            show(step + 1, loss.item())
    after = state_of(network)  # before batch norms see all samples once more
    with torch.no_grad():
        left = float(recipe.value(network(inputs).flatten(1), labels))
    record = {
        "recipe": asdict(recipe),
        "dtype": str(dtype).removeprefix("torch."),
        "loss": left,
        "steps": len(batches),
        "laziness": laziness(initial, after),
    }
    return Trained(initial, after, record)


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
    head = model.network.head_weight
    moved = "all" if torch.equal(initial[head], trained[head]) else "last"
    return Victim(model.problem(moved), data, record, initial, trained, model)
