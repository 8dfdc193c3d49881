"""`exhume audit`, `exhume score`, `exhume report`: the steps of an audit."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exhume.cli.console import console as _console
from exhume.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from exhume.auditing.folder import Event, Opened
    from exhume.models.card import DataCard


def audit(
    model: str | None = None,
    out: Path = Path("run"),
    samples: int | None = None,
    seed: int = 0,
    method: str = "exhume",
    time_limit: float | None = None,
    product_limit: int | None = None,
    device: str = "auto",
    resume: bool = False,
    parameters: str | None = None,
    point: Literal["initial", "final", "midpoint", "both"] | None = None,
    rank: int | Literal["gap", "energy", "count"] | None = None,
    initial: str | None = None,
    trained: str | None = None,
    arguments: dict[str, Any] | None = None,
    head: str | None = None,
    card: Path | dict[str, Any] | None = None,
    input_shape: int | list[int] | None = None,
    range: list[float] | None = None,
    mean: float | list[float] | None = None,
    std: float | list[float] | None = None,
    norm: float | Literal["sqrt_d"] | None = None,
    classes: int | None = None,
    premise: Literal["change", "margin", "decay"] | None = None,
) -> None:
    """Recover training samples from a model; the truth is never read.

    The model is a folder, `exhume audit FOLDER`, or your own: a factory and its weights before and
    after training, `exhume audit --model package.module:factory --initial FILE --trained FILE
    --input-shape 3,32,32`. With --premise margin or decay the trained weights will do.

    Args:
        model: folder made by `exhume victim` (here the word --model may be left out); or
            package.module:factory or path/file.py:factory, a function or class that makes your
            model. Its code is run.
        out: folder for the run; must be new, unless the run is resumed.
        samples: number of training samples; found if left out.
        seed: of everything random.
        method: exhume (our best), tansley2026 (in the subspace that a dense first layer reveals),
            iurada2025 and loo2023 (a change of weights, as published), haim2022 (one output
            trained to the margin), buzaglo2023 (several outputs, or weight decay), or shen2026
            (one of the four before it, with splits).
        time_limit: seconds after which the best so far is taken.
        product_limit: passes over the features' derivative after which it is: a budget that, unlike
            seconds, is the same on every machine.
        device: auto, cpu, cuda, cuda:1, …
        resume: go on with an interrupted run.
        parameters: of a network, what is attacked: last (the default), first, all, or names and
            patterns with commas between them.
        point: of a network, where features are taken; the midpoint of training if left out.
        rank: of the subspace of tansley2026: a number, gap, energy, or count (of the samples).
        initial: weights of your model before training (.safetensors, .pt, …), or zero-head if its
            last layer began at zero and nothing else was trained. Some of the weights may do.
        trained: weights of your model after training.
        arguments: of the factory, as JSON.
        head: name of the last linear layer of your model; found if left out.
        card: YAML file with what is known of the inputs: shape, range, mean, std, norm, classes.
        input_shape: of one input, such as 3,32,32. This and what follows may stand for a card.
        range: of the pixels, such as 0,1.
        mean: subtracted from the pixels; a number, or one for each channel.
        std: what is left is divided by it; likewise.
        norm: of an input, where all have the same; or sqrt_d.
        classes: how many there are.
        premise: why the weights hold the samples: change (training moved them along the samples'
            gradients), margin (it went on, with a logistic or cross-entropy loss, until their
            direction no longer changed; the network is homogeneous in them) or decay (it came to
            rest under weight decay). The last two take all trained weights, and need no initial
            ones. What the card of a model folder says, or change, if left out.
    """
    from exhume import report as reports
    from exhume.auditing.audit import absolute, problem_of
    from exhume.auditing.folder import Settings, run
    from exhume.device import usable_device

    if model is None:
        raise InputError(
            "model: name a model folder, exhume audit FOLDER, or a factory of your own, --model "
            "package.module:factory, with --initial and --trained."
        )
    told = {"range": range, "mean": mean, "std": std, "norm": norm, "classes": classes}
    settings = absolute(
        Settings(
            model=model,
            samples=samples,
            seed=seed,
            method=method,
            time_limit=time_limit,
            product_limit=product_limit,
            device=usable_device(device),
            parameters=parameters,
            point=point,
            rank=rank,
            initial=initial,
            trained=trained,
            arguments=arguments,
            head=head,
            card=_data_card(card, input_shape, told),
            premise=premise,
        )
    )
    console = _console()
    opened = problem_of(settings)
    if premise is None and opened.problem.premise.value != "change":
        word = opened.problem.premise.value
        console.print(f"premise {word}, as the model's card says; give --premise for another")
    _say_prepared(console, opened)
    with _interrupted(out), _progress(console, time_limit) as show:
        _, result = run(settings, opened, out, resume, show)
    console.print(
        f"[bold]{result['outcome']}[/]: {result['candidates']} candidates, residual "
        f"{result['residual']:.1e}, {result['seconds']:.1f} s. {result['sentence']}"
    )
    page = reports.write(out)
    console.print(f"report: {page}", markup=False)


def _data_card(
    card: Path | dict[str, Any] | None, shape: int | list[int] | None, told: dict[str, Any]
) -> "DataCard | None":
    """What is told of the inputs, by a file or by options."""
    from exhume.models.card import DataCard, read_card

    told = {word: value for word, value in told.items() if value is not None}
    sizes = None if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    if card is not None and told:
        raise InputError(f"{next(iter(told))}: write it in the card, or leave the card out.")
    if isinstance(card, Path):
        return read_card(card, sizes)
    if card is not None:
        return DataCard.of(card, shape=sizes)
    if sizes is None and told:
        raise InputError(f"{next(iter(told))}: say the shape of one input too: --input-shape.")
    return None if sizes is None else DataCard.of(told, "data card", sizes)


def _say_prepared(console: "Console", opened: "Opened") -> None:
    """What was changed in a model, in brief, and what weakens the attack."""
    if opened.changes:
        brief = "; ".join(change.partition(": ")[0].rstrip(".") for change in opened.changes)
        console.print(f"prepared a copy of the model: {brief}", markup=False)
    for warning in opened.warnings:
        console.print(f"warning: {warning}", markup=False)


def score(run: Path, truth: Path | None = None, model: str | None = None) -> None:
    """Compare a run with the training data: matches, errors, chance; floors and angles.

    Args:
        run: folder of an audit.
        truth: the training data; truth.safetensors in the model's folder if left out.
        model: the factory of a model of your own, once more; without it there are no floors.
    """
    from rich.table import Table

    from exhume import report as reports
    from exhume.evaluate.runs import score_run

    record = score_run(run, truth, model)
    reports.write(run)
    result, chance = record["score"], record["chance"]["neighbour"] or {}
    table = Table("", "this run", "nearest other sample")
    for key in ("recovered", "exact", "recall", "precision", "error", "cosine", "psnr", "ssim"):
        if result.get(key) is not None:
            other = chance.get(key)
            table.add_row(key, f"{result[key]:.4g}", "" if other is None else f"{other:.4g}")
    console = _console()
    console.print(table)
    if "published" in record:
        console.print(reports.published_figures(record["published"]), markup=False)
    if "verdict" not in record:
        console.print("give --model, the factory, to see the floor and the verdict")
        return
    console.print(
        f"residual at the truth {record['residual_at_truth']:.1e}, span residual "
        f"{record['span_residual']:.1e}"
    )
    if record["floors"]:
        floors = ", ".join(f"{point} {value:.1e}" for point, value in record["floors"].items())
        console.print(f"floor with features at: {floors}", markup=False)
    span = record.get("subspace")
    if isinstance(span, dict):
        console.print(
            f"first layer: {span['rank']} directions, largest angle to the samples' span "
            f"{span['largest_angle']:.1e}°"
        )
    elif span is not None:
        console.print(f"first layer: {span}", markup=False)
    console.print(record["verdict"], markup=False)


def report(run: Path, redact: bool = False) -> None:
    """Write the report of a run again, as one HTML file.

    Args:
        run: folder of an audit.
        redact: leave out everything that shows a sample, in report-redacted.html.
    """
    from exhume import report as reports

    _console().print(f"report: {reports.write(run, redact)}", markup=False)


@contextmanager
def _interrupted(out: Path) -> Iterator[None]:
    """On Ctrl-C, say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with the same command and --resume ({out})", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def _progress(console: "Console", limit: float | None) -> Iterator[Callable[["Event"], None]]:
    """A live line: phase, residual, candidates settled, time."""
    from rich.live import Live
    from rich.text import Text

    with Live(Text("starting …"), console=console, refresh_per_second=8, transient=True) as live:

        def show(event: "Event") -> None:
            left = (
                "" if limit is None else f", at most {max(0.0, limit - event.seconds):.0f} s left"
            )
            live.update(
                Text(
                    f"{event.phase:8} residual {event.residual:.1e}   "
                    f"{event.settled} of {event.candidates} candidates settled   "
                    f"step {event.step}   {event.seconds:.1f} s{left}"
                )
            )

        yield show
