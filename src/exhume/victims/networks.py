"""Networks to attack: two-layer and deeper dense nets, a residual net, a vision transformer.

Each takes the data and its own sizes, then how to train (see `Training`) and where:

    two_layer(data, width=1280, loss="logistic", optimizer="sgd", until=1e-4, device="cuda")
"""

from collections.abc import Sequence
from typing import Any

from exhume.data import Data
from exhume.models import architectures
from exhume.models.folder import NetworkModel
from exhume.victims.training import Training, train
from exhume.victims.victim import Victim

AROUND = ("device", "dtype", "show", "checkpoint")
"""Options of `train` itself; all others are fields of `Training`."""


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
    """Train a network of `exhume.models.architectures` on the data.

    Args:
        data: the training set, which also says shape and outputs.
        architecture: its name.
        sizes: its other arguments.
        seed: of the initial weights.
        options: device, dtype, show and checkpoint of `train`, and fields of `Training`.
    """
    arguments = {"shape": list(data.shape), "outputs": data.outputs, **sizes}
    module = architectures.initialise(architectures.build(architecture, arguments), seed)
    around = {word: options.pop(word) for word in AROUND if word in options}
    initial, trained, record = train(module, data, Training(**options), **around)
    model = NetworkModel(architecture, arguments, initial, trained, data.display)
    record = {"data": data.name, "seed": seed, **record}
    return Victim(model.problem(), data, record, initial, trained, model)
