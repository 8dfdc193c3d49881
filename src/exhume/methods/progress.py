"""What a method is (`Method`), where it stands (`Progress`), and the way to a checkpoint.

What a method carries from move to move is a frozen dataclass of its own, which may hold tensors,
numbers, words, enums, None, a solver's state, tuples, and other such dataclasses. `pack` and
`unpack` write and read any of them, so that a run that was killed goes on to the same bits,
but for what is marked as passing.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Protocol, Self, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted, fitted_with
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.solvers import PASSING, Outcome


@dataclass(frozen=True, eq=False, kw_only=True)
class Progress:
    """Where a method stands; each derives a class with what it carries from move to move."""

    seed: int  # of the whole run; each round draws from its own stream
    samples: int | None  # the number asked for, or None if it is to be found
    state: Any  # of the trial at hand: a solver's, or one that counts `steps` and `products` too
    phase: str = "explore"  # what that trial is for, in one word
    rounds: int = 0  # how many trials were begun before this one
    steps: int = 0  # how many steps were taken in those
    products: int = 0  # how many products they cost
    explained: int | None = None  # how many candidates explained the weights, where known
    outcome: Outcome | None = None  # None while there is more to do

    @property
    def candidates(self) -> Tensor:
        """The candidates of the trial at hand, (n, d); of a solver, where nothing else is said."""
        candidates: Tensor = self.state.fit.candidates
        return candidates

    @property
    def residual(self) -> float:
        """Their relative residual."""
        return float(self.state.fit.value)

    @property
    def total_steps(self) -> int:
        """How many steps were taken so far."""
        return self.steps + int(self.state.steps)

    @property
    def total_products(self) -> int:
        """How many products were taken so far: the unit of cost."""
        return self.products + int(self.state.products)

    def seen(self, problem: Problem) -> Problem:
        """Return the problem as the trial at hand sees it: there its fits are made."""
        return problem

    def next_round(self, state: Any, **changes: Any) -> Self:
        """Begin another trial; the cost of this one is added to the total."""
        steps, products, rounds = self.total_steps, self.total_products, self.rounds + 1
        return replace(self, state=state, rounds=rounds, steps=steps, products=products, **changes)


class Method(Protocol):
    """A named recipe of pure functions: how to begin, what to do next, and what to answer."""

    @property
    def name(self) -> str:
        """Its name, as the user writes it."""

    def view(self, problem: Problem) -> Problem:
        """Return the problem as this method sees it; the others are given what this returns."""

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """Begin the first trial."""

    def advance(self, problem: Problem, progress: Any) -> Progress:
        """Make one move: a solver step, or one of the search."""

    def finish(self, problem: Problem, progress: Any) -> Fit:
        """Return the answer as it stands, also when there was more to do."""


def stream(seed: int, round_: int) -> torch.Generator:
    """Return the random numbers of one round, the same whether or not a run was interrupted."""
    state = np.random.SeedSequence([seed, round_]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


# Checkpoints

Refit = Callable[[Tensor, Tensor | None], Fit | None]  # of candidates and a method's own A


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Progress as a file can hold it."""

    tensors: Mapping[str, Tensor]  # by their path in the progress, such as `state.fit.candidates`
    record: Any  # everything else, as JSON has it
    seconds: float  # how long the run had taken
    source: str = "checkpoint"  # where it was read from, for the message if it cannot be used


def pack(progress: Progress, seconds: float) -> Checkpoint:
    """Return the progress as a checkpoint."""
    tensors: dict[str, Tensor] = {}
    return Checkpoint(tensors, _packed(progress, "", tensors), seconds)


def unpack(problem: Problem, checkpoint: Checkpoint) -> Any:
    """Return the progress that a checkpoint holds; fits are made last (`Progress.seen`)."""
    device = problem.features.device
    # Clones are as aligned as the tensors were, without which sums may differ in their last bit.
    tensors = {path: tensor.clone().to(device) for path, tensor in checkpoint.tensors.items()}
    try:
        outline = _unpacked(Progress, checkpoint.record, tensors, lambda candidates, own: None)
        view = outline.seen(problem)

        def fit(candidates: Tensor, own: Tensor | None) -> Fit:
            return fitted(view, candidates) if own is None else fitted_with(view, candidates, own)

        return _unpacked(Progress, checkpoint.record, tensors, fit)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{checkpoint.source}: cannot be used ({error}); start again in another folder."
        ) from error


def _packed(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return the value as JSON, with its tensors put aside under their paths."""
    if isinstance(value, Tensor):
        tensors[path[1:]] = value
        return {"tensor": path[1:]}
    if isinstance(value, Fit):
        own = None if value.eliminated else value.coefficients
        return {"fit": _packed((value.candidates, own), path, tensors)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_packed(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if is_dataclass(value):
        parts = {
            field.name: _packed(getattr(value, field.name), f"{path}.{field.name}", tensors)
            for field in fields(value)
            if field.metadata != PASSING
        }
        return {"class": type(value).__name__, **parts}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path}: a checkpoint cannot hold a {type(value).__name__}")


def _unpacked(kind: Any, value: Any, tensors: Mapping[str, Tensor], fit: Refit) -> Any:
    """Return what was packed, as an instance of what the annotation `kind` allows."""
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    classes = tuple(choice for choice in choices if isinstance(choice, type))
    if isinstance(value, list):
        items = get_args(next(choice for choice in choices if get_origin(choice) is tuple))
        each = items[:1] * len(value) if items[-1] is Ellipsis else items
        pairs = zip(each, value, strict=True)
        return tuple(_unpacked(item, part, tensors, fit) for item, part in pairs)
    if isinstance(value, dict) and value.keys() == {"tensor"}:
        return tensors[value["tensor"]]
    if isinstance(value, dict) and value.keys() == {"fit"}:
        candidates, own = (item and tensors[item["tensor"]] for item in value["fit"])
        return fit(candidates, own)
    if isinstance(value, dict):
        known = list(classes)
        for choice in known:  # with all that are derived from them
            known += choice.__subclasses__()
        named = [c for c in known if c.__name__ == value["class"] and is_dataclass(c)]
        if not named:
            raise ValueError(f"{value['class']} is not what belongs there")
        cls: Any = named[0]
        names = {field.name for field in fields(cls) if field.metadata != PASSING}
        hints = get_type_hints(cls)
        if names != value.keys() - {"class"}:
            raise ValueError(f"its {cls.__name__} has other fields than this version's")
        return cls(**{name: _unpacked(hints[name], value[name], tensors, fit) for name in names})
    for choice in classes:
        if issubclass(choice, Enum) and value is not None:
            return choice(value)
    if not isinstance(value, (*classes, int) if float in classes else classes):
        raise TypeError(f"{value!r} is not what belongs there")
    return value
