"""The only way in: from a model folder, a factory and weights, or a module, to a Problem."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exhume.equation.domain import Box
from exhume.equation.problem import Premise, Problem, ThreatModel
from exhume.errors import InputError, listed
from exhume.features.network import Network, Weights, moved
from exhume.features.weights import Mapped
from exhume.models import formulation
from exhume.models.card import NOT_TOLD, DataCard
from exhume.models.factory import load_factory
from exhume.models.folder import (
    CARD,
    INITIAL,
    TRAINED,
    has_recipe,
    is_network,
    read_model,
    read_network,
    shown,
)
from exhume.models.formulation import DRIFT, LAZY, POINT, Known, Told, needed, premise_named
from exhume.models.prepare import Prepared, prepare
from exhume.models.pretrained import is_pretrained, load_pretrained
from exhume.models.state import ZERO_HEAD, Input, Saved, StateOrFile, check_pair, inputs

RECIPE_AT_HAND = (
    "The model's card says how it was trained, step by step: --premise replay makes use of that, "
    "and does not mind features that moved."
)


@dataclass(frozen=True, eq=False)
class Source:
    """Where a model and its weights come from."""

    model: nn.Module | str | None  # a folder, a factory, or a module (its weights are not used)
    trained: StateOrFile | None = None  # None for a folder, which has its own, and all that follows
    initial: StateOrFile | None = None  # or "zero-head" (see `ZERO_HEAD`)
    card: DataCard | None = None  # what is known of the inputs
    arguments: dict[str, Any] | None = None  # what the factory is called with
    head: str | None = None  # name of the last linear layer; found if None
    known: Known = formulation.NOT_KNOWN  # of the training run; a folder may say its recipe

    @property
    def zero_head(self) -> bool:
        """Return whether the last layer is said to have begun at zero."""
        return isinstance(self.initial, str) and self.initial == ZERO_HEAD

    def folder(self) -> Path | None:
        """Return the model folder, or None where there is a module or a factory with weights."""
        if self.model is None:
            raise InputError(
                "the model of this run was a module in memory, and cannot be opened again; name a "
                "factory and files of weights."
            )
        if self.trained is not None or not isinstance(self.model, str):
            return None
        folder = Path(self.model)
        if ":" in self.model and not folder.exists():
            raise InputError(
                f"model {self.model!r}: is a factory; give its weights with --trained, and for an "
                "audit --initial (which --premise margin and decay do without)."
            )
        for word in ("initial", "arguments", "head", "card"):
            if getattr(self, word) is not None:
                if not folder.exists():
                    raise InputError(
                        f"model {self.model}: no such folder ({word} was given with it)."
                    )
                own = f"{folder} is a model folder, which has its own"
                raise InputError(f"{word}: {own}; leave it out, or name a factory and --trained.")
        return folder

    def module(self) -> nn.Module:
        """Return the module in memory, or call the factory."""
        if isinstance(self.model, str):
            if is_pretrained(self.model):
                return load_pretrained(Path(self.model))
            return load_factory(self.model, self.arguments)
        assert self.model is not None, "folder() refuses this first"
        return self.model


@dataclass(frozen=True, eq=False)
class Opened:
    """A model as a problem, and what was done to it on the way."""

    problem: Problem  # what the auditor may see
    parameters: str = "last"  # the block of parameters that is its target, or whose change is
    point: str | None = None  # where features are taken; None for random ones, which do not move
    changes: tuple[str, ...] = ()  # what was changed in the copy of the model that is attacked
    warnings: tuple[str, ...] = ()  # what weakens the attack's premise, and what the weights lack
    derivative_error: float | None = None  # from finite differences, where it was checked
    target: str | None = None  # of margin and decay: weights, or their change; None for the others
    inputs: tuple[Input, ...] = ()  # what it was made of, by SHA-256
    card: dict[str, Any] | None = None  # what of a model folder's card a report shows


def open_model(
    source: Source,
    parameters: str | None = None,
    point: str | None = None,
    premise: Premise | str | None = None,
    samples: int | None = None,
    check: bool = True,
    target: str | None = None,
) -> Opened:
    """Open a model as the problem that its weights pose.

    Args:
        source: the model and its weights.
        parameters: see `network_problem`; the last layer if None.
        point: the midpoint if None, or final where initial weights are missing or features fixed.
        premise: what a model folder says, or change, if None.
        samples: how many there are, if known, to show whether a premise can hold.
        check: compare derivatives with finite differences; an audit that is over did.
        target: of margin and decay, weights or change; see `target_named`.
    """
    folder = source.folder()
    if folder is None:
        named = premise_named(premise or "change")
        opened = _open_weights(source, (parameters, point), named, check, target)
    else:
        problem = read_model(folder, parameters, point, premise, source.known, target)
        opened = Opened(problem, parameters or "last", (point or POINT) if problem.drift else None)
        if problem.premise is not Premise.CHANGE:
            opened = Opened(problem, "all", None if problem.premise is Premise.REPLAY else "final")
    problem, given = opened.problem, source.known
    told = {"recipe": given.recipe, "labels": given.labels, "public": given.public}
    if problem.premise is not Premise.REPLAY:
        for word in (word for word, value in told.items() if value is not None):
            raise InputError(f"{word}: is for the premise replay; give that too, or leave it out.")
    if problem.premise.weights_alone:
        opened = replace(opened, target="weights" if problem.start is None else "change")
    doubts = list(formulation.doubts(problem, samples))
    weights = getattr(problem.features, "weights", None)
    if folder is not None and isinstance(weights, Mapped) and weights.path.parent != folder:
        doubts.append(f"The first layer is read from {weights.path}, as the model's card says.")
    if folder is not None and problem.premise is Premise.CHANGE and has_recipe(folder):
        doubts.append(RECIPE_AT_HAND)
    known = _inputs(source, problem) if check else ()
    card = None if folder is None else shown(folder)
    return replace(opened, warnings=(*opened.warnings, *doubts), inputs=known, card=card)


def _inputs(source: Source, problem: Problem) -> tuple[Input, ...]:
    """Return what a problem was made of; the settings have the data card and the recipe."""
    folder, given = source.folder(), dict[str, object]()
    if folder is not None:
        for role, name in (("card", CARD), ("trained", TRAINED), ("initial", INITIAL)):
            given[role] = folder / name if (folder / name).is_file() else None
        weights = getattr(problem.features, "weights", None)
        given["first layer"] = weights.path if isinstance(weights, Mapped) else None
    else:
        given["model"] = source.model if isinstance(source.model, str) else None
        for role, part in (("trained", source.trained), ("initial", source.initial)):
            given[role] = part if part is None or isinstance(part, Mapping) else Path(part)
    unread = problem.premise.weights_alone and problem.start is None
    given["initial"] = None if unread or source.zero_head else given["initial"]
    return inputs(given | {"public": source.known.public})


def open_network(source: Source) -> tuple[Network, str | None] | None:
    """Open a network, with its activation where a folder tells it; None for random features."""
    folder = source.folder()
    if folder is None:
        return _prepared(source, check=False, last=False)[0].network, None
    model = read_network(folder) if is_network(folder) else None
    return None if model is None else (model.network, model.arguments.get("activation"))


def open_module(source: Source) -> tuple[nn.Module, StateOrFile]:
    """Open a module as it was trained, and its trained weights."""
    folder = source.folder()
    if folder is not None:
        model = read_network(folder)
        return model.network.module, model.trained
    assert source.trained is not None, "folder() refuses this first"
    return source.module(), source.trained


def _prepared(source: Source, check: bool, last: bool) -> tuple[Prepared, Saved, DataCard]:
    """Return the prepared copy of a module, its weights after training, and its card."""
    card = source.card
    if card is None:
        raise InputError("input_shape: give the shape of one input, such as 3,32,32, or a card.")
    trained = Saved.read(source.trained, "trained weights")  # before any code of a factory is run
    prepared = prepare(source.module(), card.shape, source.head, check, last)
    outputs = prepared.network.outputs
    if card.classes not in (None, outputs) and (card.classes, outputs) != (2, 1):
        raise InputError(f"card: says {card.classes} classes, but the model has {outputs} outputs.")
    return prepared, trained.fitted(prepared.network.module), card


def _open_weights(
    source: Source,
    block: tuple[str | None, str | None],
    premise: Premise,
    check: bool,
    target: str | None,
) -> Opened:
    parameters, point = block
    target = formulation.target_named(premise, target, source.initial is not None)
    if premise is not Premise.CHANGE:
        formulation.check_whole(premise, parameters, point)
        if source.zero_head:
            said = "says that only the last layer was trained, the premise that all were"
            raise InputError(f"{ZERO_HEAD}: {said}; leave one out.")
    last = premise is Premise.REPLAY or (premise is Premise.CHANGE and parameters in (None, "last"))
    prepared, after, card = _prepared(source, check, last)
    network = prepared.network
    if premise is Premise.CHANGE:
        parameters = parameters or "last"
        problem, point, warnings = _change(network, after, source, card, parameters, point)
    elif premise is Premise.REPLAY:
        parameters, point, before = "all", None, _before(source, network, after)
        if absent := [name for name in after.tensors if name not in before.tensors]:
            raise InputError(f"{before.source}: lacks {listed(absent)}, which replay needs.")
        public, domain = source.known.public, card.domain()
        if not card.told and public is not None and public.max() > public.min():
            low, high = float(public.min()), float(public.max())
            domain = Box(2 * low - high, 2 * high - low)  # a width beyond their range
        told = Told(domain, card.display, card.knows)
        initial, trained = _together(before, after)
        problem = formulation.replay_problem(network, initial, trained, source.known, told)
        problem, warnings = _rounded(problem, before, after)
    else:
        parameters, point = "all", "final"
        told = Told(card.domain() if card.told else None, card.display, card.knows)
        saved = [after]
        if target == "change":
            before = _before(source, network, after)
            unknown = {name: torch.zeros_like(w) for name, w in after.tensors.items()}
            saved.insert(0, replace(before, tensors=unknown | before.tensors))
        *start, weights = _together(*saved)
        problem = formulation.weights_problem(network, weights, premise, told, *start)
        problem, warnings = _rounded(problem, *saved)
        if source.initial is not None and target == "weights":
            warnings.append(
                f"Initial weights were given, and are not used: with the premise {premise.value} "
                "the trained weights themselves are the target, unless it is said to be the change."
            )
    if card.untold and source.known.public is None:
        warnings.append(f"It is assumed: {problem.domain.name}. {NOT_TOLD.format(card.dim)}")
    warned = (*prepared.warnings, *warnings)
    return Opened(problem, parameters, point, prepared.changes, warned, prepared.derivative_error)


def _change(
    network: Network, after: Saved, source: Source, card: DataCard, block: str, point: str | None
) -> tuple[Problem, str, list[str]]:
    """Return the problem whose target is the change of a block, the point, and warnings."""
    before = _before(source, network, after)
    missing = [name for name in after.tensors if name not in before.tensors]
    frozen = not missing and all(
        torch.equal(w.double(), after.tensors[name].double())
        for name, w in before.tensors.items()
        if name not in (network.head_weight, network.head_bias)
    )
    lacking = [n for n in needed(network, after.tensors, block, POINT) if n in missing]
    point = point or ("final" if lacking or frozen else POINT)
    if source.zero_head and (block, point) != ("last", "final"):
        raise InputError(f"{ZERO_HEAD}: is of the last layer; leave out parameters and point.")
    if absent := [n for n in needed(network, after.tensors, block, point) if n in missing]:
        lacks = f"lacks {listed(absent)}, which parameters {block!r} at the point {point!r} need"
        raise InputError(f"{before.source}: {lacks}. {_unlocks(network, after.tensors)}")
    told = Told(card.domain(), card.display)
    first, last = _together(before, after)
    problem = formulation.network_problem(network, first, last, block, point, told)
    known = ["some of the initial weights" if missing else "the initial weights"]
    assumed = "training followed the gradient of the loss in the last layer" if frozen else LAZY
    if source.zero_head:
        known, assumed = [], "the last layer began at zero, and nothing else was trained"
    knows = (*known, "the trained weights", "the architecture", *card.knows)
    problem = replace(problem, threat_model=ThreatModel(knows, (assumed, *card.assumes)))
    if frozen and block == "last":
        problem = replace(problem, drift=0.0)
    problem, warnings = _rounded(problem, before, after)
    if lacking and point == "final":
        warnings.append(
            f"Initial weights of {listed(lacking)} are missing: features are taken at the trained "
            "weights, from which they may have moved."
        )
    return problem, point, warnings


def _together(*saved: Saved) -> list[dict[str, Tensor]]:
    """Return weights in one precision: float64 where some are, else float32."""
    wide = any(torch.float64 in weights.dtypes for weights in saved)
    dtype = torch.float64 if wide else torch.float32
    return [moved(weights.tensors, torch.device("cpu"), dtype) for weights in saved]


def _rounded(problem: Problem, *saved: Saved) -> tuple[Problem, list[str]]:
    """Account for the rounding of stored weights: refuse too much of it, warn of half precision."""
    dtypes = {dtype for weights in saved for dtype in weights.dtypes}
    stored = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    coarser = (torch.finfo(stored).eps / torch.finfo(problem.target.dtype).eps) ** 2
    problem = replace(problem, resolution=problem.resolution * coarser)
    kind = str(stored).removeprefix("torch.")
    if problem.resolution > DRIFT:
        raise InputError(
            f"weights: are stored in {kind}, whose rounding is about {problem.resolution:.1e} of "
            f"what training changed, squared, above {DRIFT:g}; save them with more digits."
        )
    if torch.finfo(stored).bits >= 32:
        return problem, []
    return problem, [
        f"Weights are stored in {kind}: rounding alone leaves a relative residual of about "
        f"{problem.resolution:.1e}, and samples with a smaller trace are lost."
    ]


def _before(source: Source, network: Network, after: Saved) -> Saved:
    """Return the weights before training, as far as they are known."""
    initial, trained = source.initial, source.trained
    if initial is None:
        why = "the target is what training changed"
        raise InputError(f"initial weights: none given; {why}. {_unlocks(network, after.tensors)}")
    if source.zero_head:
        own = after.tensors.keys() & {network.head_weight, network.head_bias}
        head = {name: torch.zeros_like(after.tensors[name]) for name in own}
        return replace(after, tensors=after.tensors | head, source=ZERO_HEAD)
    before = Saved.read(initial, "initial weights").fitted(network.module, partial=True)
    if isinstance(initial, Mapping) and isinstance(trained, Mapping):
        places = {name: w.data_ptr() for name, w in trained.items()}
        if all(places.get(name) == w.data_ptr() for name, w in initial.items()):
            raise InputError(
                "initial weights: are in the same memory as the trained ones, which overwrote "
                "them; keep copy.deepcopy(model.state_dict()) before training."
            )
    there = {name: after.tensors[name] for name in before.tensors}
    check_pair(before.tensors, there, before.source, after.source)
    return before


def _unlocks(network: Network, trained: Weights) -> str:
    """Say what each of the initial weights would make possible."""
    head, first = network.head_weight, network.first_dense(trained)
    dense = first is not None and getattr(trained.get(first), "ndim", 0) == 2  # and sees no tiles
    both = "" if not dense or first == head else f" {head} and {first} unlock tansley2026 too."
    last = (
        f"The initial {head} unlocks exhume and iurada2025 on the last layer, at the point final."
        f"{both} If that layer began at zero and alone was trained, give {ZERO_HEAD}. "
    )
    return (
        f"{last if head else ''}All initial weights unlock the points initial, midpoint and both, "
        "and other blocks. None are needed with --premise margin, if the network is homogeneous "
        "and was trained to the margin, and --premise decay, if it came to rest under decay."
    )
