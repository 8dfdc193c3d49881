"""A recipe says what a training run was, in enough detail to run it again on other samples."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softplus
from torch.utils.data import DataLoader

from exhume.checks import number, one_of, whole_number
from exhume.errors import InputError
from exhume.files import read_yaml

State = tuple[Tensor, ...]  # what a step changes: parameters θ (p,), then the optimiser's buffers
OPTIMIZERS = ("sgd", "adam", "adamw")
LOSSES = ("cross_entropy", "mse", "logistic")
SCHEDULES = ("constant", "cosine", "steps")
NUMBERS = ("lr", "momentum", "weight_decay", "eps", "label_smoothing", "gamma")
TRIED = {  # what may be given as several numbers
    "steps": "number of steps",
    "epochs": "number of epochs",
    "batch_size": "batch size",
}


@dataclass(frozen=True)
class Recipe:
    """A recipe says how weights were trained; names and meanings are torch's.

    Attributes:
        optimizer: sgd, adam or adamw.
        lr: the rate; left out, it is fitted.
        steps: how many steps were taken; or leave it out and give the epochs. Where it is not
            known, several numbers, each of which is tried; so for epochs and batch_size.
        epochs: how often every sample was seen, in the place of steps.
        momentum: of sgd.
        nesterov: whether that is Nesterov's.
        weight_decay: added to the gradient; adamw takes it off the weights. None if left out, also
            for adamw, where torch has 0.01.
        betas: of adam and adamw.
        eps: of adam and adamw.
        batch_size: samples a step; all if left out.
        shuffle: seed of the generator of a DataLoader that shuffles; in order if left out.
        loss: cross_entropy, mse (mean over samples and outputs) or logistic (one output, y = ±1).
        label_smoothing: of cross_entropy.
        schedule: of the rate: constant, cosine (zero a step after the last, were there one) or
            steps.
        warmup: first steps, over which the rate grows in equal parts to lr.
        milestones: for steps, those from which on the rate is multiplied by gamma, counted from
            the first of all, those of the warm-up included.
        gamma: for steps.
        norms: batch norms with their running statistics (eval) or those of each batch (train).
        frozen: names or patterns of parameters that were not trained, such as `features.*`.

    Example:
        >>> Recipe(lr=0.1, steps=4, schedule="cosine").rate(2)
        0.05
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float | None = None
    steps: int | tuple[int, ...] | None = None
    epochs: int | tuple[int, ...] | None = None
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    batch_size: int | tuple[int, ...] | None = None
    shuffle: int | None = None
    loss: Literal["cross_entropy", "mse", "logistic"] = "cross_entropy"
    label_smoothing: float = 0.0
    schedule: Literal["constant", "cosine", "steps"] = "constant"
    warmup: int = 0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    norms: Literal["eval", "train"] = "eval"
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no optimiser could have done."""
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("loss", self.loss, LOSSES)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("norms", self.norms, ("eval", "train"))
        for word in ("milestones", "frozen", "betas", *TRIED):
            value = getattr(self, word)
            if word in ("milestones", "frozen") or isinstance(value, list):
                object.__setattr__(self, word, several(value))
        if self.lr is not None:
            number("lr", self.lr, above=0)
        number("weight_decay", self.weight_decay, least=0)
        number("eps", self.eps, above=0)
        number("gamma", self.gamma, above=0)
        for word in ("warmup", "milestones"):
            for each in several(getattr(self, word)):
                whole_number(word, each, least=0)
        if len(self.betas) != 2:
            raise InputError(f"betas: expected two numbers, got {self.betas}.")
        if self.nesterov and not self.momentum:
            raise InputError("nesterov: is a kind of momentum; give momentum too, or leave it out.")
        if (self.steps is None) == (self.epochs is None):
            raise InputError("recipe: give either steps or epochs, the length of the training run.")
        for word in TRIED:
            tried = several(getattr(self, word))
            for each in tried:
                if each is not None:
                    whole_number(word, each)
            if not tried:
                raise InputError(f"{word}: expected a number, or several, got none.")
            if len(tried) == 1:
                object.__setattr__(self, word, tried[0])
        shares = ("momentum", self.momentum), ("label_smoothing", self.label_smoothing)
        for word, value in (*shares, *(("betas", beta) for beta in self.betas)):
            if not number(word, value, least=0) < 1:
                raise InputError(f"{word}: expected a number below 1, got {value}.")
        if self.milestones and self.schedule != "steps":
            raise InputError("milestones: are those of schedule: steps; give that too.")
        if self.schedule == "steps" and not self.milestones:
            raise InputError("schedule: steps needs milestones, from which on the rate is less.")
        if self.label_smoothing and self.loss != "cross_entropy":
            raise InputError(f"label_smoothing: is for cross_entropy, and the loss is {self.loss}.")
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise InputError(f"momentum: {self.optimizer} has its own; leave it out.")

    def choices(self) -> tuple["Recipe", ...]:
        """Return a recipe for each choice among what was given as several.

        Example:
            >>> [recipe.steps for recipe in Recipe(lr=0.1, steps=(20, 50)).choices()]
            [20, 50]
        """
        each = itertools.product(*(several(getattr(self, word)) for word in TRIED))
        return tuple(replace(self, **dict(zip(TRIED, chosen, strict=True))) for chosen in each)

    @property
    def open(self) -> dict[str, str]:
        """Return the names of what is left to be found, and what that is in words."""
        tried = {
            w: f"its {said}" for w, said in TRIED.items() if len(several(getattr(self, w))) > 1
        }
        return tried if self.lr is not None else {"lr": "its rate", **tried}

    @property
    def buffers(self) -> int:
        """Return how many buffers the optimiser keeps for each parameter."""
        return 2 if self.optimizer != "sgd" else int(self.momentum > 0)

    def length(self, samples: int) -> int:
        """Return how many steps a run on so many samples takes."""
        steps, epochs, size = (one(getattr(self, word)) for word in TRIED)
        return steps or (epochs or 1) * math.ceil(samples / min(size or samples, samples))

    def batches(self, samples: int) -> list[Tensor]:
        """Return the indices of each step's samples, drawn as torch's DataLoader does."""
        generator = None if self.shuffle is None else torch.Generator().manual_seed(self.shuffle)
        length, size = self.length(samples), min(one(self.batch_size) or samples, samples)
        loader: Any = DataLoader(
            range(samples),  # type: ignore[arg-type]
            size,
            shuffle=self.shuffle is not None,
            generator=generator,
        )
        taken: list[Tensor] = []
        while len(taken) < length:
            taken += list(loader)
        return taken[:length]

    def rate(self, step: int, length: int | None = None) -> float:
        """Return the rate of a step of so many, from 0 on; where lr is left out, in units of it."""
        lr = 1.0 if self.lr is None else self.lr
        if step < self.warmup:
            return lr * (step + 1) / self.warmup
        if self.schedule == "cosine":
            share = (step - self.warmup) / max(1, (length or one(self.steps) or 1) - self.warmup)
            return lr * (1 + math.cos(math.pi * share)) / 2
        passed = sum(step >= milestone for milestone in self.milestones)
        return lr * (self.gamma**passed if self.schedule == "steps" else 1.0)

    def in_steps(self, steps: int, length: int) -> "Recipe":
        """Return the recipe of fewer and longer steps that ends nearly where one of `length` does.

        With k = length/steps a velocity is forgotten k times sooner, at a momentum of mᵏ, and a
        lasting gradient moves the weights as far: r′/(1 − mᵏ) = k r/(1 − m) for the rates. Adam's
        averages and the order of mini-batches stay as they are.

        Example:
            >>> Recipe(lr=0.05, steps=100).in_steps(25, 100).lr
            0.2
        """
        factor, kept = length / steps, self.momentum ** (length / steps)
        pace = factor * (1 - kept) / (1 - self.momentum)
        return replace(
            self,
            lr=self.lr and self.lr * pace,
            steps=steps,
            epochs=None,
            momentum=kept,
            warmup=round(self.warmup / factor),
            milestones=tuple(round(each / factor) for each in self.milestones),
        )

    def check_outputs(self, outputs: int) -> None:
        """Refuse a loss that is not one for so many outputs of a network."""
        if self.loss == "cross_entropy" and outputs == 1:
            raise InputError(
                "recipe: cross_entropy needs two outputs or more, and the model has one; "
                "write loss: logistic, or loss: mse."
            )
        if self.loss == "logistic" and outputs > 1:
            raise InputError(f"recipe: logistic is for one output, and the model has {outputs}.")

    def value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch of outputs and labels, (n, c) both."""
        if self.loss == "mse":
            return (outputs - labels).square().mean()
        if self.loss == "logistic":
            return softplus(-labels * outputs).mean()
        smooth = self.label_smoothing
        shares = (1 - smooth) * labels + smooth / labels.shape[1]
        return -(shares * log_softmax(outputs, 1)).sum(1).mean()

    def update(
        self,
        step: int,
        rate: float | Tensor,
        state: State,
        gradient: Tensor,
        pooled: Callable[[Tensor], Tensor] | None = None,
    ) -> State:
        """Return the state after a step along the gradient (p,), as torch's optimisers take it.

        Adam's mean squares (p,) are what `pooled` makes of them, if it is given.
        """
        theta, *buffers = state
        if self.optimizer == "adamw":
            theta = theta * (1 - rate * self.weight_decay)
        elif self.weight_decay:
            gradient = gradient + self.weight_decay * theta
        if self.optimizer == "sgd":
            if not buffers:
                return (theta - rate * gradient,)
            velocity = self.momentum * buffers[0] + gradient
            along = gradient + self.momentum * velocity if self.nesterov else velocity
            return theta - rate * along, velocity
        b, c = self.betas
        mean = b * buffers[0] + (1 - b) * gradient
        square = c * buffers[1] + (1 - c) * gradient * gradient
        felt = square if pooled is None else pooled(square)
        seen = felt > 0  # √ has no derivative at zero, where a parameter never had a gradient
        size = torch.where(seen, felt, 1.0).sqrt() * seen / math.sqrt(1 - c ** (step + 1))
        along = mean / (1 - b ** (step + 1)) / (size + self.eps)
        return theta - rate * along, mean, square

    @classmethod
    def of(cls, entries: Mapping[str, Any], source: str = "recipe") -> "Recipe":
        """Return the recipe that a file holds."""
        if not isinstance(entries, Mapping):
            raise InputError(f"{source}: expected entries such as `lr: 0.01`, a line each.")
        if unknown := entries.keys() - {field.name for field in fields(cls)}:
            raise InputError(f"{source}: {min(map(str, unknown))!r} is no entry of a recipe.")
        texts = {w: float_of(v) for w, v in entries.items() if w in NUMBERS and isinstance(v, str)}
        try:
            return cls(**{**entries, **texts})
        except InputError as error:
            raise InputError(f"{source}: {error}") from error


def float_of(text: str) -> float | str:
    """Return the number that a text is; YAML takes 1e-3 for a text, where people mean a number."""
    try:
        return float(text)
    except ValueError:
        return text


def one(value: int | tuple[int, ...] | None) -> int | None:
    """Return the only value of an entry, or refuse several."""
    if isinstance(value, tuple):
        raise InputError(f"recipe: a run takes one of {value}; see `Recipe.choices`.")
    return value


def several(value: Any) -> tuple[Any, ...]:
    """Return the values that one entry holds: those of a tuple or list, or itself."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def read(path: Path | str) -> Recipe:
    """Read a recipe from a YAML file; entries are the attributes of `Recipe`."""
    return Recipe.of(read_yaml(Path(path)), str(path))


def from_optimizer(optimizer: torch.optim.Optimizer, **entries: Any) -> Recipe:
    """Return the recipe of a torch optimiser, with what it does not know (steps, batch_size, …).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> from_optimizer(torch.optim.SGD([weight], lr=0.2, momentum=0.9), steps=10).momentum
        0.9
    """
    kind = type(optimizer).__name__.lower()
    one_of("optimizer", kind, OPTIMIZERS)
    if len(optimizer.param_groups) > 1:
        raise InputError("optimizer: has several groups of parameters; a recipe has one rate.")
    group = optimizer.param_groups[0]
    for word in ("amsgrad", "maximize", "dampening"):
        if group.get(word):
            raise InputError(f"optimizer: {word} is on, which a recipe does not know.")
    if "initial_lr" in group and "schedule" not in entries:
        raise InputError("optimizer: has a schedule, which it does not know; give schedule=… too.")
    if kind == "adam" and group.get("decoupled_weight_decay"):
        kind = "adamw"
    known = ("momentum", "nesterov", "weight_decay", "betas", "eps")
    told = {word: group[word] for word in known if word in group}
    rate = float(group.get("initial_lr", group["lr"]))
    return Recipe(**{"optimizer": kind, "lr": rate, **told, **entries})
