"""`exhume.audit`: an audit from Python, of a module in memory or of files."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exhume.auditing.forecast import forecast
from exhume.auditing.run import Show, run
from exhume.auditing.settings import Settings
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods import Reconstruction
from exhume.models.card import DataCard
from exhume.models.state import StateOrFile
from exhume.recipes import Recipe


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found."""

    samples: Tensor  # candidates (n, *shape), float64 on the CPU
    found: Reconstruction  # the same with coefficients, residual, outcome and cost
    problem: Problem  # what the attack was given
    verdict: str  # reconstructed, partly, no evidence or cannot tell
    probabilities: Tensor  # that each candidate is a training sample, (n,) float64
    advice: list[str]  # what to try next
    controls: list[dict[str, Any]]  # what the same attack found where there is nothing to find
    claims: list[str]  # what may be claimed without the truth
    limits: list[str]  # what may not
    changes: tuple[str, ...]  # what was changed in the copy of the model that was attacked
    warnings: tuple[str, ...]  # what weakens the attack's premise

    def images(self) -> Tensor:
        """Return the candidates as pixels from 0 to 1, (n, *shape)."""
        display = self.problem.display
        if display is None:
            raise InputError(
                "card: does not say how inputs become pixels; give a shape of two sizes or three, "
                "and the range of the pixels, or their mean and std."
            )
        return display.to_pixels(self.samples.flatten(1)).clamp(0, 1).reshape(self.samples.shape)


def audit(
    model: nn.Module | str,
    initial: StateOrFile | None,
    trained: StateOrFile,
    input_shape: tuple[int, ...] | None = None,
    *,
    card: DataCard | Path | str | None = None,
    out: Path | str | None = None,
    show: Show | None = None,
    **options: Any,
) -> Audit:
    """Recover training samples from the weights of a model before and after training.

    With the premise margin or decay the trained weights will do.

    Args:
        model: a module, whose own weights are not used, or a factory, "package.module:factory".
        initial: state dict before training, or its file; some of its tensors may do. "zero-head"
            where the last layer began at zero and nothing else was trained. None where the premise
            is margin or decay.
        trained: state dict after training, or its file.
        input_shape: of one input, unless the card has it.
        card: what is known of the inputs, or a YAML file with it.
        out: folder for a run as `exhume audit` leaves it. It can be scored later if model and
            weights were named, not given: then they can be opened again.
        show: called with each event.
        **options: any of `exhume.auditing.settings.Settings` (samples, seed, method, parameters,
            point, premise, product_limit, …), and range, mean, std, norm and classes in the place
            of a card. For the premise replay: recipe, a `Recipe` or its file; labels, the samples'
            classes (with mini-batches in their order); public, inputs (N, …) of the same kind. As
            one more control: held_out, inputs (N, …) of that kind that the model never saw.
    """
    named: dict[str, Any] = {"model": model, "initial": initial, "trained": trained}
    if not all(part is None or isinstance(part, str | Path) for part in named.values()):
        named = {}  # what is in memory has no name
    named = {word: part and str(part) for word, part in named.items()}
    told = asdict(card) if isinstance(card, DataCard) else None if card is None else Path(card)
    shape = None if input_shape is None else list(input_shape)
    public, recipe, unseen = (options.pop(word, None) for word in ("public", "recipe", "held_out"))
    if recipe is not None:
        options["recipe"] = asdict(recipe) if isinstance(recipe, Recipe) else Path(recipe)
    settings = Settings.told(card=told, input_shape=shape, **named, **options)
    shown = None if public is None else torch.as_tensor(public).flatten(1)
    source = replace(settings.source(shown), model=model, trained=trained, initial=initial)
    opened = settings.open(source)
    if (hopeless := forecast(settings, opened).hopeless) is not None:
        opened = replace(opened, warnings=(*opened.warnings, hopeless))
    others = None if unseen is None else torch.as_tensor(unseen)
    place = None if out is None else Path(out)
    found, result = run(settings, opened, place, show=show, held_out=others)
    samples = found.samples.reshape(-1, *opened.problem.shape)
    chances = torch.tensor(result["probabilities"], dtype=torch.float64)
    said: Any = {x: result[x] for x in ("verdict", "advice", "controls", "claims", "limits")}
    done: Any = {"changes": opened.changes, "warnings": opened.warnings}
    return Audit(samples, found, opened.problem, probabilities=chances, **said, **done)
