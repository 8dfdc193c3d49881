"""Networks to attack: two-layer and deeper dense nets, a residual net, a vision transformer.

Each takes the data and its own sizes, then how to train (see `Training`) and where:

    two_layer(data, width=1280, loss="logistic", optimizer="sgd", until=1e-4, device="cuda")
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from exhume.data import Data
from exhume.equation.pixels import Pixels
from exhume.models import architectures
from exhume.models.folder import NetworkModel
from exhume.victims import Victim
from exhume.victims.training import Training, train


def two_layer(
    data: Data,
    width: int,
    activation: str = "relu",
    loss: str = "squared",
    seed: int = 0,
    bias: bool = False,
    **options: Any,
) -> Victim:
    """f(x) = W₂ σ(W₁x), both layers trained.

    Args:
        data: the training set.
        width: of the hidden layer.
        activation: σ.
        loss: squared, logistic or cross_entropy.
        seed: of the initial weights.
        bias: whether the layers have biases.
        options: of `network`, and settings of `Training`.
    """
    sizes = {"width": width, "activation": activation, "bias": bias}
    return network(data, "two_layer", sizes, loss, seed, **options)


def mlp(
    data: Data,
    widths: Sequence[int],
    activation: str = "relu",
    loss: str = "squared",
    seed: int = 0,
    bias: bool = False,
    **options: Any,
) -> Victim:
    """A dense network with hidden layers of these widths, all layers trained; see `two_layer`."""
    sizes = {"widths": list(widths), "activation": activation, "bias": bias}
    return network(data, "mlp", sizes, loss, seed, **options)


def resnet(
    data: Data,
    width: int,
    blocks: int = 4,
    loss: str = "squared",
    seed: int = 0,
    **options: Any,
) -> Victim:
    """The law's residual network with so many channels, for images; see `two_layer`."""
    return network(data, "resnet", {"width": width, "blocks": blocks}, loss, seed, **options)


def vit(
    data: Data,
    patch: int = 4,
    dim: int = 64,
    depth: int = 2,
    heads: int = 4,
    loss: str = "squared",
    seed: int = 0,
    **options: Any,
) -> Victim:
    """A small vision transformer, for images; see `two_layer`."""
    sizes = {"patch": patch, "dim": dim, "depth": depth, "heads": heads}
    return network(data, "vit", sizes, loss, seed, **options)


def network(
    data: Data,
    architecture: str,
    sizes: dict[str, Any],
    loss: str = "squared",
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    show: Callable[[int, float], None] | None = None,
    checkpoint: Path | None = None,
    **training: Any,
) -> Victim:
    """Train a network of `exhume.models.architectures` on the data.

    Args:
        data: the training set.
        architecture: its name.
        sizes: its arguments, without shape and outputs, which are those of the data.
        loss: squared, logistic or cross_entropy.
        seed: of the initial weights.
        device: where to train.
        dtype: in which precision.
        show: called with the step and the loss now and then.
        checkpoint: file to go on from after an interruption.
        training: further settings of `Training`.
    """
    arguments = {"shape": list(data.shape), "outputs": data.outputs, **sizes}
    module = architectures.initialise(architectures.build(architecture, arguments), seed)
    settings = Training(loss=loss, **training)
    done = train(module, data, settings, device, dtype, show, checkpoint)
    pixels = Pixels(data.transform.shift, data.transform.scale) if len(data.shape) > 1 else None
    model = NetworkModel.of(architecture, arguments, done.initial, done.trained, pixels)
    record = {"data": data.name, "seed": seed, **done.record}
    return Victim(model.problem(), data, record, done.initial, done.trained, model)
