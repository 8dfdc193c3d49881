"""`exhume victim`: train a model to attack."""

import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exhume.cli.console import console as _console
from exhume.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from exhume.data import Data
    from exhume.victims import Victim

TRAINING = ("optimizer", "rate", "momentum", "batch", "decay", "until", "steps", "lazy", "dtype")
OPTIONS = {
    "random_features": ("width", "ratio", "activation", "ridge", "store"),
    "two_layer": ("width", "ratio", "activation", "bias", *TRAINING),
    "mlp": ("widths", "activation", "bias", *TRAINING),
    "resnet": ("width", "blocks", *TRAINING),
    "vit": ("width", "blocks", "patch", "heads", *TRAINING),
    "kkt_mlp": ("widths", "decay", "steps", "level", "dtype"),
}
"""Options of `exhume victim` that an architecture takes, beside those of all."""

AT_REST = 1e-3
"""Stationarity up to which a network is said to be where its premise has it."""


def victim(
    data: str,
    out: Path = Path("victim"),
    samples: int = 10,
    dim: int = 100,
    architecture: Literal["random_features", "two_layer", "mlp", "resnet", "vit", "kkt_mlp"] = (
        "random_features"
    ),
    width: int | None = None,
    widths: int | list[int] | None = None,
    ratio: float | None = None,
    activation: str | None = None,
    bias: bool = False,
    blocks: int | None = None,
    patch: int | None = None,
    heads: int | None = None,
    loss: Literal["squared", "logistic", "cross_entropy"] | None = None,
    ridge: float | None = None,
    optimizer: Literal["gd", "sgd", "adam"] | None = None,
    rate: float | None = None,
    momentum: float | None = None,
    batch: int | None = None,
    decay: float | None = None,
    until: float | None = None,
    steps: int | None = None,
    level: float | None = None,
    lazy: float | None = None,
    dtype: Literal["float32", "float64"] | None = None,
    classes: Literal["all", "parity", "vehicles", "random"] | list[int] | None = None,
    normalise: bool | None = None,
    centre: Literal["all", "pixels"] | None = None,
    data_seed: int = 0,
    seed: int = 0,
    store: bool = False,
    device: str = "cpu",
) -> None:
    """Train a model to attack; its training data is kept in a file apart.

    The training of a network can be interrupted: the same command goes on with it.

    Args:
        data: sphere, digits, faces, photos, or (from the folder EXHUME_DATA) cifar10, mnist,
            fashion_mnist, tiny_imagenet.
        out: folder to write the model to; must be new.
        samples: number of training samples.
        dim: dimension of the inputs, for sphere.
        architecture: random features with a trained last layer, or a network trained as a whole;
            kkt_mlp is a dense one at a KKT point: trained to the margin, or with decay to rest.
        width: random features, hidden units (two_layer), channels (resnet), or numbers in a token
            (vit, 64). Random features and two_layer have it chosen by the ratio if left out.
        widths: of the hidden layers of an mlp, such as 200,100, or a kkt_mlp (500,500).
        ratio: width × outputs ÷ (dimension × samples), where no width is given; 5.
        activation: relu (the default), relu+tanh, tanh, gelu, erf, softplus, or
            polynomial:c0,c1,…; for random features, two_layer and mlp.
        bias: give the layers of two_layer and mlp biases.
        blocks: of a resnet (4) or vit (2).
        patch: side of a patch of a vit; 4.
        heads: of the attention of a vit; 4.
        loss: what training minimises: squared if left out, but for kkt_mlp logistic or, with
            several outputs, cross_entropy, which is for networks.
        ridge: penalty on the last layer of random features, relative to the features' size; 0.
        optimizer: of a network: gd (full batches, the default), sgd or adam.
        rate: of its steps; chosen from the curvature if left out.
        momentum: of gd (0) and sgd (0.9).
        batch: samples in a minibatch of sgd and adam; all if left out.
        decay: of the weights; 0. A kkt_mlp without it is trained to the margin.
        until: loss at which training ends; 1e-8.
        steps: the most steps; 100000. Of a kkt_mlp, those after the samples are fitted; 5000.
        level: loss of a sample on the margin at which a kkt_mlp is held; 1e-4.
        lazy: α of α(f − f₀), trained in the place of f: the larger, the less weights move.
        dtype: precision of the training; float64.
        classes: all, parity, vehicles (cifar10), random, or a list of labels; each data set has
            its default.
        normalise: rescale each sample to norm √d; yes, unless centred pixel by pixel.
        centre: what is subtracted: all, the mean of all pixels, which are then divided by their
            deviation; or pixels, the mean image alone, so that inputs stay in [−1, 1], which an
            audit of a kkt_mlp takes them to do: its default.
        data_seed: which samples.
        seed: of the random first layer, or of all initial weights.
        store: write the first layer of random features itself, where its seed would do.
        device: where to train.
    """
    from rich.markup import escape

    from exhume import data as datasets
    from exhume.device import usable_device
    from exhume.files import check_new

    every: dict[str, Any] = {
        **{"width": width, "widths": [widths] if isinstance(widths, int) else widths},
        **{"ratio": ratio, "activation": activation, "bias": bias or None, "blocks": blocks},
        **{"patch": patch, "heads": heads, "ridge": ridge, "store": store or None},
        **{"optimizer": optimizer, "rate": rate, "momentum": momentum, "batch": batch},
        **{"decay": decay, "until": until, "steps": steps, "lazy": lazy, "dtype": dtype},
        **{"level": level},
    }
    given = {word: value for word, value in every.items() if value is not None}
    for word in given:
        if word not in OPTIONS[architecture]:
            raise InputError(
                f"{word}: is not for {architecture}, which takes "
                f"{', '.join(OPTIONS[architecture])}."
            )
    check_new(out)
    if data == "sphere":
        chosen = datasets.sphere(dim, samples, data_seed)
    else:
        centre = centre or ("pixels" if architecture == "kkt_mlp" else "all")
        chosen = datasets.load(data, samples, data_seed, normalise, classes, centre=centre)
    if "ratio" in OPTIONS[architecture] and width is None:
        given["width"] = _width(given.pop("ratio", 5.0), chosen)
    given.pop("ratio", None)
    console = _console()
    where = usable_device(device)
    if architecture == "kkt_mlp":
        made = _at_rest(console, chosen, given, loss, seed, where, out)
    elif architecture == "random_features":
        made = _random_features(console, chosen, given, loss or "squared", seed, where, out)
    else:
        made = _network(console, chosen, architecture, given, loss or "squared", seed, where, out)
    console.print(
        f"[bold]{escape(str(out))}[/]: {made.problem.features.width:,} features, d = {chosen.dim}, "
        f"ratio {made.problem.ratio(samples):.2f}, {_trained(made.training)}"
    )
    next_step = f"exhume audit {shlex.quote(str(out))} --samples {samples} --out RUN"
    console.print(f"next: {next_step}", markup=False)


def _width(ratio: float, data: "Data") -> int:
    if not ratio > 0:
        raise InputError(f"ratio: expected a number above 0, got {ratio}.")
    return round(ratio * data.dim * data.samples / data.outputs)


def _random_features(
    console: "Console",
    data: "Data",
    given: dict[str, Any],
    loss: str,
    seed: int,
    device: str,
    out: Path,
) -> "Victim":
    from exhume.victims import random_features

    store = given.pop("store", False)
    width = given["width"]
    said = f"training {width:,} random features on {data.samples} samples of {data.name}"
    with console.status(said):
        made = random_features(data, loss=loss, seed=seed, device=device, **given)
        made.save(out, store)
    return made


def _network(
    console: "Console",
    data: "Data",
    architecture: str,
    given: dict[str, Any],
    loss: str,
    seed: int,
    device: str,
    out: Path,
) -> "Victim":
    """Train a network; what there is at Ctrl-C stays in a file beside `out`."""
    import torch

    from exhume import victims

    for word in ("width", "widths"):
        if word in OPTIONS[architecture] and word not in given and architecture != "vit":
            raise InputError(f"{word}: {architecture} needs it.")
    if architecture == "vit":
        names = {"width": "dim", "blocks": "depth"}
        given = {names.get(word, word): value for word, value in given.items()}
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    kept = out.parent / f".{out.name}.training"
    if kept.exists():
        console.print(f"going on from {kept}", markup=False)
    make = getattr(victims, architecture)
    try:
        with _training(console, given.get("until", victims.Training.until)) as show:
            made: Victim = make(
                data, loss=loss, seed=seed, device=device, show=show, checkpoint=kept, **given
            )
    except KeyboardInterrupt:
        there = f"; the same command goes on from {kept}" if kept.exists() else ""
        print(f"\ninterrupted{there}", file=sys.stderr)
        raise SystemExit(130) from None
    made.save(out)
    return made


def _at_rest(
    console: "Console",
    data: "Data",
    given: dict[str, Any],
    loss: str | None,
    seed: int,
    device: str,
    out: Path,
) -> "Victim":
    """Train a network to a KKT point."""
    import torch

    from exhume.victims import kkt_mlp

    largest = float(data.inputs.abs().max())
    if largest > 1:
        raise InputError(
            f"kkt_mlp: inputs go up to {largest:.2g}, but an audit of trained weights alone takes "
            "them to lie in [−1, 1]; use a set of images, and leave out --normalise and --centre."
        )
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    with _training(console, given.get("level", 0.0)) as show:
        made = kkt_mlp(data, loss=loss, seed=seed, device=device, show=show, **given)
    made.save(out)
    return made


def _trained(record: dict[str, Any]) -> str:
    """How far the training came."""
    if "stationarity" in record:
        return _rested(record)
    if "fit" in record:
        return f"training error {record['fit']:.1e}"
    missed = "" if record["reached"] else f" (not the {record['settings']['until']:g} asked for)"
    return (
        f"loss {record['loss']:.1e}{missed} after {record['steps']:,} steps, first layer moved by "
        f"{record['laziness']['first']:.1%}"
    )


def _rested(record: dict[str, Any]) -> str:
    """Whether the premise of a network at rest holds, and what kinks leave of it."""
    from exhume.auditing.evidence import BROKEN

    off, left = record["stationarity"], record["violation"]
    holds, why = "holds in direction", ", as ReLUs come to rest on their kinks"
    if off > AT_REST or left > BROKEN:
        holds, why = "does not hold yet; give more --steps", ""
    where = "the margin" if record["premise"] == "margin" else "rest under weight decay"
    return (
        f"loss {record['loss']:.1e} after {record['steps']:,} steps. Trained to {where}: the "
        f"premise {record['premise']} {holds} (stationarity {off:.1e}, {AT_REST:g} asked for). The "
        f"samples leave {left:.1e} of the weights{why}"
    )


@contextmanager
def _training(console: "Console", until: float) -> Iterator[Callable[[int, float], None]]:
    """A bar that grows with the logarithm of the loss."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.description}"))
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("starting …", total=1.0)
        first = 0.0

        def show(step: int, loss: float) -> None:
            nonlocal first
            first = first or loss
            done = 0.0
            if until < loss < first and until > 0:
                done = math.log(first / loss) / math.log(first / until)
            bar.update(task, completed=done, description=f"step {step:,}, loss {loss:.1e}")

        yield show
