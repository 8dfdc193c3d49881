"""Model folders: from files to a Problem. The truth lives in a file that is not read here.

A network of `models.architectures` is `card.json` (which one, its sizes) and two state dicts,
`initial.safetensors` and `trained.safetensors`. A random-features model is `card.json` (shapes,
activation, where V comes from), `trained.safetensors` (the last layer, "last" (p, m)), and V
itself, as `initial.safetensors` ("first" (p, d)), as a memory-mapped `first.npy`, or as nothing
but a seed in the card.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exhume.equation.pixels import Pixels
from exhume.equation.problem import Premise, Problem, ThreatModel
from exhume.errors import InputError
from exhume.features.activations import activation
from exhume.features.network import Network, known_network
from exhume.features.random import RandomFeatures
from exhume.features.weights import Mapped, Seeded, Stored, Weights, blocks
from exhume.files import read_json, read_tensors, write_json, write_tensors
from exhume.models import architectures
from exhume.models.formulation import POINT, network_problem, weights_problem
from exhume.models.premises import check_whole, premise_named
from exhume.models.state import check_pair, fit_state, read_state

CARD, TRAINED, INITIAL, MAPPED, TRUTH = (
    "card.json",
    "trained.safetensors",
    "initial.safetensors",
    "first.npy",
    "truth.safetensors",
)

RANDOM_FEATURES = ThreatModel(
    knows=(
        "the trained last layer",
        "the random first layer V",
        "the activation",
        "the norm of the inputs (√d)",
    ),
    assumes=("the last layer is a combination of the training samples' features",),
)


def random_features_problem(
    weights: Weights,
    activation_name: str,
    last: Tensor,
    shape: tuple[int, ...],
    display: Pixels | None = None,
) -> Problem:
    """The problem that a random-features model poses.

    Args:
        weights: V (p, d).
        activation_name: σ.
        last: trained last layer, (p, m).
        shape: of one input.
        display: shift and scale of the pixels, where the auditor is told.
    """
    if not isinstance(weights, Seeded):
        _check_first_layer(weights)
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.to(weights.device, torch.float32)
    features = RandomFeatures(weights, activation(activation_name))
    target = last.to(weights.device, weights.dtype)
    knows = RANDOM_FEATURES.knows + (("shift and scale of the pixels",) if display else ())
    return Problem(
        target,
        features,
        replace(RANDOM_FEATURES, knows=knows),
        shape,
        display=display,
        resolution=0.1 * torch.finfo(last.dtype).eps ** 2 if last.is_floating_point() else 0.0,
    )


def _check_first_layer(weights: Weights) -> None:
    """Refuse a V that no features could come from."""
    largest = 0.0
    for part in blocks(weights.shape[0], 65536):
        rows = weights.rows(part.start, part.stop).float()
        if not rows.isfinite().all():
            raise InputError("first layer: holds NaN or infinite entries; the weights are damaged.")
        largest = max(largest, rows.abs().max().item())
    if largest == 0:
        raise InputError("first layer: is zero everywhere, so every input looks the same to it.")


@dataclass(frozen=True, eq=False)
class NetworkModel:
    """A network of `exhume.models.architectures` with its weights before and after training.

    Attributes:
        architecture: its name.
        arguments: its sizes.
        network: as a function.
        initial: weights before training.
        trained: weights after training.
        display: how inputs become pixels.
    """

    architecture: str
    arguments: dict[str, Any]
    network: Network
    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    display: Pixels | None

    @classmethod
    def of(
        cls,
        architecture: str,
        arguments: dict[str, Any],
        initial: dict[str, Tensor],
        trained: dict[str, Tensor],
        display: Pixels | None,
    ) -> "NetworkModel":
        """Build the module; ours need no check of their derivatives, the tests do that."""
        with torch.device("meta"):
            module = architectures.build(architecture, arguments)
        network = known_network(module, tuple(arguments["shape"]), arguments["outputs"])
        return cls(architecture, arguments, network, initial, trained, display)

    def problem(
        self,
        parameters: str = "last",
        point: str = POINT,
        premise: Premise = Premise.CHANGE,
    ) -> Problem:
        """The problem that a block of its parameters poses; all, where not their change does."""
        pixels = ("shift and scale of the pixels",) if self.display else ()
        if premise is not Premise.CHANGE:
            return weights_problem(
                self.network, self.trained, premise, display=self.display, knows=pixels
            )
        knows = ("the norm of the inputs (√d)", *pixels)
        return network_problem(
            self.network,
            self.initial,
            self.trained,
            parameters,
            point,
            display=self.display,
            knows=knows,
        )


def write_network(folder: Path, model: NetworkModel, training: dict[str, Any]) -> None:
    """Write a network as a model folder."""
    card = {
        "schema": 1,
        "kind": "network",
        "architecture": {"name": model.architecture, "arguments": model.arguments},
        "display": asdict(model.display) if model.display else None,
        "training": training,
    }
    write_tensors(folder / INITIAL, model.initial)
    write_tensors(folder / TRAINED, model.trained)
    write_json(folder / CARD, card)


def _read_network(folder: Path, card: dict[str, Any], change: bool = True) -> NetworkModel:
    """The network; without its initial weights where their change is not asked for."""
    path = folder / CARD
    try:
        name = str(card["architecture"]["name"])
        arguments = dict(card["architecture"]["arguments"])
        display = Pixels(**card["display"]) if card.get("display") else None
        shape, outputs = arguments["shape"], arguments["outputs"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged; missing or malformed: {error}.") from error
    try:
        with torch.device("meta"):
            module = architectures.build(name, arguments)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    network = known_network(module, tuple(shape), outputs)
    trained, initial = (
        fit_state(read_state(folder / file), module, str(folder / file)) if wanted else {}
        for file, wanted in ((TRAINED, True), (INITIAL, change))
    )
    if change:
        check_pair(initial, trained, str(folder / INITIAL), str(folder / TRAINED))
    return NetworkModel(name, arguments, network, initial, trained, display)


def write_model(
    folder: Path, problem: Problem, training: dict[str, Any], store: bool = False
) -> None:
    """Write a random-features model; V as a tensor, unless a seed or a file elsewhere will do."""
    features = problem.features
    if not isinstance(features, RandomFeatures):
        raise InputError("only random-features models can be written as a model folder.")
    weights = features.weights
    card: dict[str, Any] = {
        "schema": 1,
        "kind": "random_features",
        "activation": features.activation.name,
        "width": features.width,
        "dim": features.dim,
        "outputs": problem.target.shape[1],
        "shape": list(problem.shape),
        "first": {"source": "file", "file": INITIAL},
        "display": asdict(problem.display) if problem.display else None,
        "training": training,
    }
    if isinstance(weights, Seeded) and not store:
        card["first"] = {"source": "seed", "seed": weights.seed}
    elif isinstance(weights, Mapped) and not store:
        card["first"] = {"source": "map", "file": str(weights.path.resolve())}
    else:
        write_tensors(folder / INITIAL, {"first": weights.rows(0, features.width)})
    write_tensors(folder / TRAINED, {"last": problem.target})
    write_json(folder / CARD, card)


def _read_card(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such folder; make one with `exhume victim … --out {folder}`."
        )
    card = read_json(folder / CARD)
    return card if isinstance(card, dict) else {}


def _premise(path: Path, card: dict[str, Any]) -> Premise:
    """What the card says of the training; a change of weights where it says nothing."""
    training = card.get("training")
    word = training.get("premise") if isinstance(training, dict) else None
    try:
        return Premise.CHANGE if word is None else premise_named(word)
    except InputError as error:
        raise InputError(f"{path}: is damaged; {error}") from error


def is_network(folder: Path) -> bool:
    """Whether a model folder holds a network, not random features."""
    return _read_card(folder).get("kind") == "network"


def read_network(folder: Path) -> NetworkModel:
    """The network of a model folder, with its weights before and after training."""
    card = _read_card(folder)
    if card.get("kind") != "network":
        raise InputError(
            f"{folder / CARD}: expected a card of kind 'network', got {card.get('kind')!r}."
        )
    return _read_network(folder, card)


def read_model(
    folder: Path,
    parameters: str | None = None,
    point: str | None = None,
    premise: Premise | str | None = None,
) -> Problem:
    """The problem posed by a model folder.

    Args:
        folder: made by `exhume victim`.
        parameters: of a network, see `network_problem`; the last layer if None.
        point: likewise; the midpoint if None.
        premise: change, margin or decay; what the card says of the training if None. For the last
            two all trained weights are the target, and initial ones are not read.
    """
    path, card = folder / CARD, _read_card(folder)
    kind = card.get("kind")
    chosen = _premise(path, card) if premise is None else premise_named(premise)
    if kind == "network":
        change = chosen is Premise.CHANGE
        if not change:
            check_whole(chosen, parameters, point)
        model = _read_network(folder, card, change)
        return model.problem(parameters or "last", point or POINT, chosen)
    if kind != "random_features":
        raise InputError(f"{path}: expected a card of kind 'random_features' or 'network'.")
    if parameters not in (None, "last") or point is not None:
        raise InputError(
            f"{folder}: is a random-features model: only its last layer was trained, and its "
            "features did not move; leave out the parameters and the point."
        )
    if chosen is not Premise.CHANGE:
        raise InputError(
            f"premise {chosen.value}: is for networks trained as a whole, but {folder} is a "
            "random-features model, whose last layer is a combination by itself; leave it out."
        )
    try:
        width, dim, outputs = int(card["width"]), int(card["dim"]), int(card["outputs"])
        shape = tuple(int(length) for length in card["shape"])
        first, name = dict(card["first"]), str(card["activation"])
        file = folder / str(first.get("file", ""))
        source = str(first["source"])
        seed = int(first["seed"]) if source == "seed" else 0
        if source == "file" and file.parent != folder:
            raise ValueError(f"first.file = {str(first['file'])!r} is not in this folder")
        if source not in ("seed", "file", "map"):
            raise ValueError(f"first.source = {source!r}")
        if min(width, dim, outputs, *shape) < 1 or seed < 0:
            raise ValueError("a size, shape or seed that is too small")
        display = Pixels(**card["display"]) if card.get("display") else None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is damaged; missing or malformed: {error}.") from error
    last = read_tensors(folder / TRAINED, ("last",))["last"]
    if tuple(last.shape) != (width, outputs):
        raise InputError(
            f"{folder / TRAINED}: tensor 'last' has shape {tuple(last.shape)}, but {path.name} "
            f"says width {width} and outputs {outputs}; expected ({width}, {outputs})."
        )
    weights: Weights
    if source == "seed":
        weights = Seeded(width, dim, seed)
    elif source == "map":
        weights = Mapped(file)
    else:
        first_layer = read_tensors(file, ("first",))["first"]
        if first_layer.ndim != 2:
            raise InputError(
                f"{file}: tensor 'first' has shape {tuple(first_layer.shape)}, expected "
                f"({width}, {dim})."
            )
        weights = Stored(first_layer)
    if weights.shape != (width, dim):
        raise InputError(
            f"{file}: the first layer has shape {weights.shape}, but {path.name} says "
            f"({width}, {dim})."
        )
    try:
        return random_features_problem(weights, name, last, shape, display)
    except InputError as error:
        raise InputError(f"{folder} ({TRAINED}, {CARD} and the first layer): {error}") from error
