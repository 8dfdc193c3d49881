"""Model folders: from files to a Problem. The truth lives in a file that is not read here.

`card.json` says what the model is. A network has two state dicts, `initial.safetensors` and
`trained.safetensors`; random features have the last layer, "last" (p, m), in the second, and V,
"first" (p, d), in the first, in a memory-mapped file, or as nothing but a seed in the card.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exhume.checks import one_of, sizes, whole_number
from exhume.equation.pixels import Pixels
from exhume.equation.problem import Premise, Problem, ThreatModel
from exhume.errors import InputError
from exhume.features.activations import activation
from exhume.features.network import Network, known_network
from exhume.features.random import RandomFeatures
from exhume.features.weights import GENERATORS, Mapped, Seeded, Stored, Weights, blocks
from exhume.files import read_json, read_tensors, write_json, write_tensors
from exhume.models import architectures, formulation
from exhume.models.formulation import NOT_KNOWN, POINT, Known, Told, premise_named
from exhume.models.state import StateDict, check_pair, fit_state, read_state
from exhume.recipes import Recipe
from exhume.wording import finite

IN_PROBLEM = ("shape", "outputs")  # arguments of an architecture that the problem has already
CARD, TRAINED, INITIAL = "card.json", "trained.safetensors", "initial.safetensors"
TRUTH = "truth.safetensors"

NORM, SHOWN = "the norm of the inputs (√d)", "shift and scale of the pixels"
KNOWS = ("the trained last layer", "the random first layer V", "the activation", NORM)
ASSUMES = ("the last layer is a combination of the training samples' features",)


def random_features_problem(
    weights: Weights,
    activation_name: str,
    last: Tensor,
    shape: tuple[int, ...],
    display: Pixels | None = None,
) -> Problem:
    """Return the problem that a random-features model poses, V (p, d) and its last layer (p, m)."""
    parts = () if isinstance(weights, Seeded) else blocks(weights.shape[0], 65536)
    largest = [weights.rows(x.start, x.stop).float().abs().max().item() for x in parts]
    if not all(map(math.isfinite, largest)):
        raise InputError("first layer: holds NaN or infinite entries; the weights are damaged.")
    if largest and max(largest) == 0:
        raise InputError("first layer: is zero everywhere, so every input looks the same to it.")
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.to(weights.device, torch.float32)
    return Problem(
        last.to(weights.device, weights.dtype),
        RandomFeatures(weights, activation(activation_name)),
        ThreatModel(KNOWS + ((SHOWN,) if display else ()), ASSUMES),
        shape,
        display=display,
        resolution=0.1 * torch.finfo(last.dtype).eps ** 2 if last.is_floating_point() else 0.0,
    )


@dataclass(frozen=True, eq=False)
class NetworkModel:
    """A network of `exhume.models.architectures` with its weights before and after training."""

    architecture: str
    arguments: dict[str, Any]
    initial: StateDict
    trained: StateDict
    display: Pixels | None  # how inputs become pixels

    @cached_property
    def network(self) -> Network:
        """Build the module; ours need no check of their derivatives, the tests do that."""
        with torch.device("meta"):
            module = architectures.build(self.architecture, self.arguments)
        return known_network(module, tuple(self.arguments["shape"]), self.arguments["outputs"])

    def problem(
        self,
        parameters: str = "last",
        point: str = POINT,
        premise: Premise = Premise.CHANGE,
        known: Known = NOT_KNOWN,
        target: str = "weights",
    ) -> Problem:
        """Return the problem of a block's change, or of all weights with the other premises.

        With the target `change`, margin and decay have the change of all weights.
        """
        told = Told(display=self.display, knows=(SHOWN,) if self.display else ())
        if premise.weights_alone:
            initial = self.initial if target == "change" else None
            return formulation.weights_problem(self.network, self.trained, premise, told, initial)
        told, weights = replace(told, knows=(NORM, *told.knows)), (self.initial, self.trained)
        if premise is Premise.REPLAY:
            return formulation.replay_problem(self.network, *weights, known, told)
        return formulation.network_problem(self.network, *weights, parameters, point, told)


def write_network(folder: Path, model: NetworkModel, training: dict[str, Any]) -> None:
    """Write a network as a model folder."""
    write_tensors(folder / INITIAL, model.initial)
    write_tensors(folder / TRAINED, model.trained)
    architecture = {"name": model.architecture, "arguments": model.arguments}
    _write_card(folder, "network", {"architecture": architecture}, model.display, training)


def write_model(
    folder: Path, problem: Problem, training: dict[str, Any], store: bool = False
) -> None:
    """Write a random-features model; V as a tensor, unless a seed or a file elsewhere will do."""
    features = problem.features
    if not isinstance(features, RandomFeatures):
        raise InputError("only random-features models can be written as a model folder.")
    weights = features.weights
    first: dict[str, Any] = {"source": "file", "file": INITIAL}
    if isinstance(weights, Seeded) and not store:
        first = {"source": "seed", "seed": weights.seed, "generator": weights.generator}
    elif isinstance(weights, Mapped) and not store:
        first = {"source": "map", "file": str(weights.path.resolve())}
    else:
        write_tensors(folder / INITIAL, {"first": weights.rows(0, features.width)})
    sizes = {
        "activation": features.activation.name,
        "width": features.width,
        "dim": features.dim,
        "outputs": problem.target.shape[1],
        "shape": list(problem.shape),
        "first": first,
    }
    write_tensors(folder / TRAINED, {"last": problem.target})
    _write_card(folder, "random_features", sizes, problem.display, training)


def _write_card(
    folder: Path, kind: str, sizes: dict[str, Any], display: Pixels | None, training: dict[str, Any]
) -> None:
    shown = asdict(display) if display else None
    card = {"schema": 1, "kind": kind, **sizes, "display": shown, "training": training}
    write_json(folder / CARD, card)


def _read_card(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of a model folder, and its card."""
    if not folder.is_dir():
        advice = "make one with `exhume victim … --out`, or name a module of yours by --model"
        raise InputError(f"{folder}: no such folder; {advice}.")
    card = read_json(folder / CARD)
    kind = card.get("kind") if isinstance(card, dict) else None
    if kind not in ("network", "random_features"):
        raise InputError(f"{folder / CARD}: expected the kind 'random_features' or 'network'.")
    return kind, card


@contextmanager
def _card_of(folder: Path) -> Iterator[None]:
    """Name the card of a folder in whatever goes wrong when its entries are used."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{folder / CARD}: is damaged; {error}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{folder / CARD}: is damaged; missing or malformed: {error}.") from error


def shown(folder: Path) -> dict[str, Any]:
    """Return what of a model's card a report shows: the architecture, and how it was trained."""
    kind, card = _read_card(folder)
    with _card_of(folder):
        training, named = card.get("training") or {}, None
        if kind == "network":
            made = card["architecture"]
            sizes = {key: x for key, x in made["arguments"].items() if key not in IN_PROBLEM}
            named = ", ".join([made["name"], *(f"{key} {x}" for key, x in sizes.items())])
        moved = (training.get("laziness") or {}).get("first")
        return {
            "architecture": named,
            "laziness": finite(moved),
            "stationarity": finite(training.get("stationarity")),
        }


def has_recipe(folder: Path) -> bool:
    """Return whether a model's card says how it was trained, step by step."""
    training = _read_card(folder)[1].get("training")
    return isinstance(training, dict) and bool(training.get("recipe"))


def is_network(folder: Path) -> bool:
    """Return whether a model folder holds a network, not random features."""
    return _read_card(folder)[0] == "network"


def read_network(folder: Path, change: bool = True) -> NetworkModel:
    """Read the network of a model folder; without `change`, only its weights after training."""
    kind, card = _read_card(folder)
    if kind != "network":
        raise InputError(f"{folder / CARD}: expected a card of kind 'network', got {kind!r}.")
    with _card_of(folder):
        name, arguments = card["architecture"]["name"], dict(card["architecture"]["arguments"])
        model = NetworkModel(str(name), arguments, {}, {}, _display(card))
        module = model.network.module

    def weights(name: str) -> StateDict:
        return fit_state(read_state(folder / name), module, str(folder / name))

    trained, initial = weights(TRAINED), weights(INITIAL) if change else {}
    if change:
        check_pair(initial, trained, str(folder / INITIAL), str(folder / TRAINED))
    return replace(model, initial=initial, trained=trained)


def read_model(
    folder: Path,
    parameters: str | None = None,
    point: str | None = None,
    premise: Premise | str | None = None,
    known: Known = NOT_KNOWN,
    target: str | None = None,
) -> Problem:
    """Read the problem that a model folder poses; premise and recipe are the card's if None.

    With margin and decay the initial weights are not looked at, unless the target is `change`.
    """
    kind, card = _read_card(folder)
    training = card.get("training")
    told = training.get("premise") if isinstance(training, dict) else None
    with _card_of(folder):
        own = Premise.CHANGE if told is None else premise_named(told)
    chosen = own if premise is None else premise_named(premise)
    if kind == "network":
        if chosen is not Premise.CHANGE:
            formulation.check_whole(chosen, parameters, point)
        target = formulation.target_named(chosen, target, False)
        model = read_network(folder, target == "change")
        if known.recipe is None and has_recipe(folder):
            recipe = Recipe.of(card["training"]["recipe"], f"recipe in {folder / CARD}")
            known = replace(known, recipe=recipe)
        return model.problem(parameters or "last", point or POINT, chosen, known, target)
    if parameters not in (None, "last") or point is not None:
        raise InputError(f"{folder}: is a random-features model; leave out parameters and point.")
    if chosen is not Premise.CHANGE:
        whole = "is for networks trained as a whole; leave it out"
        raise InputError(f"premise {chosen.value}: {whole} for the random features of {folder}.")
    formulation.target_named(chosen, target, True)
    return _read_random_features(folder, card)


def _display(card: dict[str, Any]) -> Pixels | None:
    display = card.get("display") or None
    if not isinstance(display, dict | None):
        raise ValueError(f"display = {display!r}")
    return None if display is None else Pixels(**display)


def _read_random_features(folder: Path, card: dict[str, Any]) -> Problem:
    with _card_of(folder):
        width, dim, outputs = int(card["width"]), int(card["dim"]), int(card["outputs"])
        shape = sizes("shape", card["shape"])
        if min(width, dim, outputs) < 1:
            raise ValueError("a size that is too small")
        name, display, first = str(card["activation"]), _display(card), dict(card["first"])
        source = one_of("first.source", first["source"], ("seed", "file", "map"))
        seed = whole_number("first.seed", first["seed"], 0) if source == "seed" else 0
        named = first.get("generator", "tiles")  # which older cards do not name
        generator = one_of("first.generator", named, GENERATORS)
        file = folder / str(first.get("file", ""))
        if source == "file" and file.parent != folder:
            raise ValueError(f"first.file = {str(first['file'])!r} is not in this folder")
    last = read_tensors(folder / TRAINED, ("last",))["last"]
    if tuple(last.shape) != (width, outputs):
        shapes = f"has shape {tuple(last.shape)}, but {CARD} says ({width}, {outputs})"
        raise InputError(f"{folder / TRAINED}: tensor 'last' {shapes}.")
    weights: Weights
    if source == "file":
        stored = read_tensors(file, ("first",))["first"]
        weights, found = Stored(stored), tuple(stored.shape)
    else:
        seeded = Seeded(width, dim, seed, generator=generator)
        weights = seeded if source == "seed" else Mapped(file)
        found = weights.shape
    if found != (width, dim):
        raise InputError(f"{file}: the first layer is {found}, but {CARD} says ({width}, {dim}).")
    try:
        return random_features_problem(weights, name, last, shape, display)
    except InputError as error:
        raise InputError(f"{folder} ({TRAINED}, {CARD} and the first layer): {error}") from error
