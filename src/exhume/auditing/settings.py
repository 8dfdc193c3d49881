"""The options of an audit: one list, for the command line, Python and config.yaml alike."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from torch import Tensor

from exhume.checks import shaped
from exhume.device import usable_device
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods import check_numbers, method_named, preset
from exhume.methods.progress import Method
from exhume.methods.tansley2026 import Tansley2026
from exhume.models.card import DataCard, read_card
from exhume.models.formulation import Known, premise_named
from exhume.models.opening import Opened, Source, open_model
from exhume.models.pretrained import is_pretrained
from exhume.models.state import ZERO_HEAD
from exhume.recipes import Recipe, read


@dataclass(frozen=True)
class Settings:
    """What an audit is asked for: the options of `exhume audit` and `exhume.audit`.

    Attributes:
        model: a model folder; or, with `trained`, a factory (see `models.factory`); or None for a
            module in memory, which cannot be opened again.
        samples: number of training samples; found if left out.
        seed: of everything random.
        method: exhume (our best), tansley2026 (in the subspace that a dense first layer reveals),
            iurada2025 and loo2023 (a change of weights, as published), haim2022 (one output
            trained to the margin), buzaglo2023 (several outputs, or weight decay), shen2026
            (one of the four before it, with splits), simudy2025 (a training run, as published), or
            unmixed (images out of the rows of a dense first layer).
        preset: a published run of haim2022, buzaglo2023, loo2023 or shen2026 by name, such as b9:
            its settings and its length, in the place of tuning.
        time_limit: seconds after which the best so far is taken.
        product_limit: passes over the features' derivative after which it is: a budget that, unlike
            seconds, is the same on every machine.
        device: where to compute.
        parameters: of a network, what is attacked: last (the default), first, all, or names and
            patterns with commas between them.
        point: of a network, where features are taken; the midpoint of training if left out, or
            final where initial weights are missing.
        rank: of the subspace of tansley2026: a number, gap, energy, or count (of the samples).
        initial: weights of your model before training (.safetensors, .pt, …), or zero-head if its
            last layer began at zero and nothing else was trained. Some of the weights may do.
        trained: weights of your model after training.
        arguments: of the factory, as JSON.
        head: name of the last linear layer of your model; found if left out.
        card: what is known of the inputs.
        premise: why the weights hold the samples: change (training moved them along the samples'
            gradients), margin (it went on, with a logistic or cross-entropy loss, until their
            direction no longer changed; the network is homogeneous in them) or decay (it came to
            rest under weight decay). These two take all trained weights, and need no initial
            ones (see target). With replay, the training run itself is simulated, as the recipe
            has it. What the card of a model folder says, or change, if left out.
        target: of margin and decay, what the samples' gradients add up to: weights, the trained
            ones, or change, what training made of the initial ones, where layers need not have
            forgotten their start. If left out it is weights, but for margin with --initial.
        recipe: for replay, how the model was trained (see `exhume.recipes.Recipe`).
        labels: for replay, the samples' classes, such as 3,0,3, in any order; where training took
            mini-batches, in the order of the samples. Found if left out.
        controls: attack once more from another start; where something was found, also where there
            is nothing to find: the target permuted, and other initial weights. As much there means
            no evidence.
        public: for replay, a folder of images of the same kind as the samples, to start from.
    """

    model: str | None = None
    samples: int | None = None
    seed: int = 0
    method: str = "exhume"
    time_limit: float | None = None
    product_limit: int | None = None
    device: str = "cpu"
    parameters: str | None = None
    point: Literal["initial", "final", "midpoint", "both"] | None = None
    rank: int | Literal["gap", "energy", "count"] | None = None
    initial: str | None = None
    trained: str | None = None
    arguments: dict[str, Any] | None = None
    head: str | None = None
    card: DataCard | None = None
    premise: Literal["change", "margin", "decay", "replay"] | None = None
    target: Literal["weights", "change"] | None = None
    recipe: Recipe | None = None
    labels: tuple[int, ...] | None = None
    public: str | None = None
    preset: str | None = None
    controls: bool = True

    def __post_init__(self) -> None:
        """Refuse numbers and names that no run could use."""
        check_numbers(self.samples, self.seed, self.time_limit, self.product_limit)
        method_named(self.method)
        if self.preset is not None:
            preset(self.method, self.preset)
        if self.premise is not None:
            object.__setattr__(self, "premise", premise_named(self.premise).value)

    @classmethod
    def told(
        cls,
        card: Path | dict[str, Any] | None = None,
        input_shape: int | list[int] | None = None,
        range: list[float] | None = None,
        mean: float | list[float] | None = None,
        std: float | list[float] | None = None,
        norm: float | Literal["sqrt_d"] | None = None,
        classes: int | None = None,
        recipe: Path | dict[str, Any] | None = None,
        labels: int | list[int] | None = None,
        device: str = "auto",
        **options: Any,
    ) -> "Settings":
        """Return the settings that options as people give them stand for.

        What is told of the inputs becomes a data card, and the device is one that is there.

        Args:
            card: YAML file with what is known of the inputs: shape, range, mean, std, norm,
                classes.
            input_shape: of one input, such as 3,32,32. This and what follows may stand for a card.
            range: of the pixels, such as 0,1.
            mean: subtracted from the pixels; a number, or one for each channel.
            std: what is left is divided by it; a number, or one for each channel.
            norm: of an input, where all have the same; or sqrt_d.
            classes: how many there are.
            recipe: for --premise replay, a YAML file that says how the model was trained:
                optimizer, lr, steps, batch_size, loss, … (see docs/commands.md).
            labels: for --premise replay, the samples' classes, such as 3,0,3, in any order; where
                training took mini-batches, in the order of the samples. Found if left out.
            device: auto, cpu, cuda, cuda:1, …
            **options: the other settings by name.
        """
        entries = {"range": range, "mean": mean, "std": std, "norm": norm, "classes": classes}
        told = {word: value for word, value in entries.items() if value is not None}
        shape = _tuple(input_shape)
        if told and card is not None:
            raise InputError(f"{next(iter(told))}: write it in the card, or leave the card out.")
        if told and shape is None:
            raise InputError(f"{next(iter(told))}: say the shape of one input too: --input-shape.")
        made = None
        if isinstance(card, Path):
            made = read_card(card, shape)
        elif card is not None or shape is not None:
            made = DataCard.of(told if card is None else card, "card", shape)
        if recipe is not None:
            options["recipe"] = read(recipe) if isinstance(recipe, Path) else Recipe.of(recipe)
        device, known = usable_device(device), _tuple(labels)
        return cls(card=made, labels=known, device=device, **options).located()

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str = "config.yaml") -> "Settings":
        """Return the settings that a file holds; older ones lack some, which get their defaults."""
        if unknown := config.keys() - {field.name for field in fields(cls)}:
            raise InputError(f"{source}: {min(unknown)!r} is no setting of this version.")
        values = dict(config)
        if values.get("card") is not None:
            values["card"] = DataCard.of(values["card"], f"card in {source}")
        if values.get("recipe") is not None:
            values["recipe"] = Recipe.of(values["recipe"], f"recipe in {source}")
        if values.get("labels") is not None:
            values["labels"] = tuple(shaped(f"labels in {source}", values["labels"], [int]))
        kinds = {f"{name}?": kind for name, kind in get_type_hints(cls).items()}
        return cls(**shaped(source, values, kinds))

    def located(self) -> "Settings":
        """Return the same with files named so that they are found from anywhere."""

        def found(name: str | None) -> str | None:
            return name if name in (None, ZERO_HEAD) else str(Path(name).resolve())

        model, trained = self.model, self.trained
        if is_pretrained(model):  # whose weights are beside its configuration
            model, trained = found(model), trained or model
        elif trained is None:
            model = found(model)
        elif model is not None:
            where, colon, name = model.rpartition(":")
            if where.endswith(".py") or "/" in where:
                model = f"{found(where)}{colon}{name}"
        return replace(
            self,
            model=model,
            initial=found(self.initial),
            trained=found(trained),
            public=found(self.public),
        )

    def source(self, public: Tensor | None = None) -> Source:
        """Return the model and the weights that the settings name; public inputs are (N, d)."""
        known = Known(self.recipe, self.labels, public)
        told = self.card, self.arguments, self.head, known
        return Source(self.model, self.trained, self.initial, *told)

    def open(self, source: Source | None = None) -> Opened:
        """Open the model that the settings name, or one in memory."""
        asked = self.parameters, self.point, self.premise, self.samples
        return open_model(source or self.source(), *asked, target=self.target)

    def attack(self, problem: Problem) -> Method:
        """Return the method that is asked for, with its rank, or with a preset."""
        method, rank = method_named(self.method, problem), self.rank
        if self.preset is not None:
            method = preset(self.method, self.preset, problem)
        if rank is None:
            return method
        if not isinstance(method, Tansley2026):
            raise InputError(f"rank: {self.method} takes none; leave it out, or use tansley2026.")
        if problem.first_layer is None:
            raise InputError("rank: no change of a dense first layer is known; leave it out.")
        if rank != "count":
            return replace(method, rank=rank)
        if self.samples is None:
            raise InputError("rank: count is the number of samples; give that too.")
        return replace(method, rank=self.samples)


def _tuple(given: int | list[int] | None) -> tuple[int, ...] | None:
    """Return the numbers of an option, of which a single one needs no list."""
    return None if given is None else (given,) if isinstance(given, int) else tuple(given)
