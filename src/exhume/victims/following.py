"""Victims can be trained as people do it: by torch's own optimisers, step by step by a recipe."""

import copy
from dataclasses import asdict
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from exhume.data import Data
from exhume.device import usable_device
from exhume.errors import InputError
from exhume.recipes import Recipe
from exhume.victims.training import Show, Trained, laziness, state_of

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
