"""`exhume victim`: train a model to attack."""

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from exhume import data as datasets
from exhume import victims
from exhume.auditing.hindsight import BROKEN
from exhume.checks import number
from exhume.cli.console import new_console
from exhume.data import Data
from exhume.device import usable_device
from exhume.errors import InputError
from exhume.files import check_new
from exhume.recipes import read
from exhume.victims import Victim
from exhume.victims.margin import Flow

TRAINING = ("optimizer", "rate", "momentum", "batch", "decay", "until", "steps", "lazy", "dtype")
# What an architecture takes of the options of `exhume victim` that are not for all
OPTIONS = {
    "random_features": ("width", "ratio", "activation", "ridge", "store"),
    "two_layer": ("width", "ratio", "activation", "bias", "recipe", *TRAINING),
    "mlp": ("widths", "activation", "bias", "recipe", *TRAINING),
    "resnet": ("width", "blocks", "recipe", *TRAINING),
    "vit": ("width", "blocks", "patch", "heads", "recipe", *TRAINING),
    "kkt_mlp": ("widths", "training", "decay", "until", "steps", "level", "dtype"),
}
# Random features and two_layer have so many equations for each unknown, where none are asked
# for: enough for an attack to succeed
RATIO = 5.0
AT_REST = 1e-3  # Up to this stationarity a network is said to be where its premise has it


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
    training: Literal["rest", "flow"] | None = None,
    recipe: Path | None = None,
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
            kkt_mlp is a dense one at a KKT point: trained to the margin, or with decay to rest; or
            on its way there, along gradient flow (see training).
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
        until: loss at which training ends; 1e-8, or 3e-6 for a kkt_mlp along gradient flow.
        steps: the most steps; 100000, or for a kkt_mlp at rest 5000 after the samples are fitted.
        level: loss of a sample on the margin at which a kkt_mlp is held; 1e-4.
        lazy: α of α(f − f₀), trained in the place of f: the larger, the less weights move.
        dtype: precision of the training; float64, or float32 by a recipe.
        training: of a kkt_mlp: rest (the default), until the direction of its weights stays; or
            flow, along gradient flow as published, where deeper layers keep much of their start.
        recipe: of a network, a YAML file that says how it is trained, step by step, in the place
            of loss, optimizer, rate and the like; for `exhume audit --premise replay`.
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
    asked, taken = dict(locals()), OPTIONS[architecture]
    specific = {word: asked[word] for words in OPTIONS.values() for word in words}
    given = {word: x for word, x in specific.items() if x is not None and x is not False}
    if wrong := [word for word in given if word not in taken]:
        raise InputError(f"{wrong[0]}: is not for {architecture}, which takes {', '.join(taken)}.")
    if recipe is not None:
        if wrong := [word for word in (*TRAINING[:-1], "loss") if asked[word] is not None]:
            raise InputError(f"{wrong[0]}: is for the recipe to say; leave it out.")
        given["recipe"] = read(recipe)
    check_new(out)
    if data == "sphere":
        chosen = datasets.sphere(dim, samples, data_seed)
    else:
        centre = centre or ("pixels" if architecture == "kkt_mlp" else "all")
        chosen = datasets.load(data, samples, data_seed, normalise, classes, centre=centre)
    given |= {"seed": seed, "device": usable_device(device)} | ({"loss": loss} if loss else {})
    console = new_console()
    made = _train(console, architecture, chosen, _sized(architecture, given, chosen), out)
    console.print(
        f"[bold]{escape(str(out))}[/]: {made.problem.features.width:,} features, d = {chosen.dim}, "
        f"ratio {made.problem.ratio(samples):.2f}, {_trained(made.training)}"
    )
    model, more = shlex.quote(str(out)), " --premise replay" if recipe is not None else ""
    console.print(f"next: exhume audit {model} --samples {samples}{more} --out RUN", markup=False)


def _sized(architecture: str, given: dict[str, Any], data: Data) -> dict[str, Any]:
    """The options as the functions of `victims` know them."""
    ratio = number("ratio", given.pop("ratio", RATIO), above=0)
    if "ratio" in OPTIONS[architecture]:
        given.setdefault("width", round(ratio * data.dim * data.samples / data.outputs))
    needed = {"mlp": "widths", "resnet": "width"}.get(architecture)
    if needed is not None and needed not in given:
        raise InputError(f"{needed}: {architecture} needs it.")
    if isinstance(given.get("widths"), int):
        given["widths"] = [given["widths"]]
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"])
    largest = float(data.inputs.abs().max())
    if architecture == "kkt_mlp" and largest > 1:
        advice = "use a set of images, and leave out --normalise and --centre."
        raise InputError(f"kkt_mlp: inputs go up to {largest:.2g}, not in [−1, 1]; {advice}")
    names = {"width": "dim", "blocks": "depth"} if architecture == "vit" else {}
    return {names.get(word, word): value for word, value in given.items()}


def _train(
    console: Console, architecture: str, data: Data, given: dict[str, Any], out: Path
) -> Victim:
    """Train and save; what there is of a network at Ctrl-C stays in a file beside `out`."""
    make: Callable[..., Victim] = getattr(victims, architecture)
    if architecture == "random_features":
        store = given.pop("store", False)
        with console.status(f"training {given['width']:,} random features on {data.name}"):
            made = make(data, **given)
            made.save(out, store)
        return made
    kept = out.parent / f".{out.name}.training"
    until = given.get("until", victims.Training.until)
    if architecture == "kkt_mlp":
        flow = given.get("training") == "flow"
        until = given.get("until", Flow.until) if flow else given.get("level", 0.0)
    else:
        given["checkpoint"] = kept
        if kept.exists():
            console.print(f"going on from {kept}", markup=False)
    try:
        with _training(console, until) as show:
            made = make(data, show=show, **given)
    except KeyboardInterrupt:
        there = f"the same command goes on from {kept}" if kept.exists() else ""
        raise KeyboardInterrupt(there) from None
    made.save(out)
    return made


def _trained(record: dict[str, Any]) -> str:
    """How far the training came, and whether the premise of a network at rest holds."""
    if "fit" in record:
        return f"training error {record['fit']:.1e}"
    came = f"loss {record['loss']:.1e}", f"after {record['steps']:,} steps"
    if "stationarity" not in record:
        moved, reached = record["laziness"]["first"], record.get("reached", True)
        missed = "" if reached else f" (not the {record['settings']['until']:g} asked for)"
        return f"{came[0]}{missed} {came[1]}, first layer moved by {moved:.1%}"
    off, left, premise = record["stationarity"], record["violation"], record["premise"]
    if record.get("training") == "flow":
        parts = [
            f"{name} {own['start']:.0%} its start, {own['residual']:.0%} left by the samples "
            f"({own['change']:.0%} of its change)"
            for name, own in record["layers"].items()
        ]
        flow = f"along gradient flow for a time of {record['time']:.3g}"
        return f"{came[0]} {came[1]} {flow}. Of each layer: {'; '.join(parts)}"
    holds, why = "holds in direction", ", as ReLUs come to rest on their kinks"
    if off > AT_REST or left > BROKEN:
        holds, why = "does not hold yet; give more --steps", ""
    where = "the margin" if premise == "margin" else "rest under weight decay"
    return (
        f"{came[0]} {came[1]}. Trained to {where}: the premise {premise} {holds} (stationarity "
        f"{off:.1e}, {AT_REST:g} asked for). The samples leave {left:.1e} of the weights{why}"
    )


@contextmanager
def _training(console: Console, until: float) -> Iterator[Callable[[int, float], None]]:
    """A bar that grows with the logarithm of the loss."""
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.description}"))
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task, first = bar.add_task("starting …", total=1.0), 0.0

        def show(step: int, loss: float) -> None:
            nonlocal first
            first = first or loss
            falling = 0 < until < loss < first
            done = math.log(first / loss) / math.log(first / until) if falling else 0.0
            bar.update(task, completed=done, description=f"step {step:,}, loss {loss:.1e}")

        yield show
