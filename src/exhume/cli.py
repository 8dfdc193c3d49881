"""The command line: each command is a thin function; errors of input end with exit code 2."""

import inspect
import itertools
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exhume.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor, nn

    from exhume.data import Data
    from exhume.data_card import DataCard
    from exhume.run_folder import Event, Opened
    from exhume.theory import Identifiability
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

LISTS = ("--input_shape", "--range", "--mean", "--std", "--widths")
"""Options that may be written as numbers with commas between them."""


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
    from exhume.evaluate.verdicts import BROKEN

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


def audit(
    model: str | None = None,
    out: Path = Path("run"),
    samples: int | None = None,
    seed: int = 0,
    method: str = "exhume",
    time_limit: float | None = None,
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
    from exhume.auditing import absolute, problem_of
    from exhume.device import usable_device
    from exhume.run_folder import Settings, run

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
    from exhume.data_card import DataCard, read_card

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


def identify(
    model: str | None = None,
    trained: str | None = None,
    arguments: dict[str, Any] | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    level: float = 1.0,
    out: Path | None = None,
) -> None:
    """Say whether a two-layer polynomial network determines its training samples; recover them.

    Ends with exit code 0 if it does, 1 if it does not, and 2 if the theory does not cover it.

    Args:
        model: folder of a model (here the word --model may be left out); or
            package.module:factory or path/file.py:factory. Its code is run.
        trained: weights of a factory's model.
        arguments: of the factory, as JSON.
        rank: dimension of the neurons' span; found if left out.
        tolerance: relative singular value that counts as zero; from the weights if left out.
        level: margin of the active samples, which sets the norm where the weights do not.
        out: new folder for the recovered samples.
    """
    from exhume.files import check_new
    from exhume.theory import identifiability

    if out is not None:
        check_new(out)
    found = identifiability(*_weights_of(model, trained, arguments), rank, tolerance, level)
    console = _console()
    console.print(_identifiability_table(found))
    word = "holds" if found.holds else "fails"
    console.print(f"[bold]the rank condition {word}[/], margin {found.margin:.1e} (1 is the edge)")
    for sentence in (*found.reasons, *found.undetermined):
        console.print(sentence, markup=False)
    if found.samples is not None and found.multipliers is not None:
        shown = ", ".join(f"{b:.3g}" for b in found.multipliers.tolist())
        console.print(
            f"{len(found.samples)} active samples, multipliers λy = {shown}; they leave "
            f"{found.residual:.1e} of the weights unexplained"
        )
    if out is not None:
        _write_identified(out, found)
        console.print(f"written: {out}", markup=False)
    if found.samples is None:
        raise SystemExit(1)


def _weights_of(
    model: str | None, trained: str | None, arguments: dict[str, Any] | None
) -> "tuple[nn.Module, Mapping[str, Tensor] | str]":
    """A model folder's network, or a factory's, with its trained weights."""
    from exhume.checkpoint import read_network
    from exhume.factory import load_factory

    if model is None:
        raise InputError(
            "model: name a model folder, exhume identify FOLDER, or a factory of your own, --model "
            "package.module:factory, with --trained."
        )
    if trained is not None:
        return load_factory(model, arguments), trained
    if arguments is not None or (":" in model and not Path(model).exists()):
        raise InputError(f"model {model!r}: is a factory; give its weights with --trained.")
    network = read_network(Path(model))
    return network.network.module, network.trained


def _identifiability_table(found: "Identifiability") -> "Table":
    from rich.table import Table

    table = Table("", "found", "needed")
    table.add_row("degree of the activation", str(found.degree), "3 or more")
    table.add_row("neurons", str(found.neurons), "")
    table.add_row("dimensions they span", f"{found.rank_of_neurons} of {found.dim}", "")
    table.add_row("equations", str(found.equations), str(found.unknowns))
    table.add_row("rank of the equations", str(found.rank), str(found.unknowns))
    table.add_row("smallest singular value", f"{found.smallest:.1e}", f"{found.tolerance:.1e}")
    table.add_row(
        "rank of the neurons' Gram matrix (sufficient)",
        str(found.sufficient_rank),
        str(found.sufficient_unknowns),
    )
    table.add_row("equations left unsolved", f"{found.misfit:.1e}", "")
    return table


def _write_identified(out: Path, found: "Identifiability") -> None:
    """The recovered samples, and what was found, in a new private folder."""
    from dataclasses import asdict

    from exhume.files import new_folder, write_json, write_tensors

    tensors = ("samples", "multipliers")
    with new_folder(out) as temporary:
        record = {word: x for word, x in asdict(found).items() if word not in tensors}
        record |= {"holds": found.holds, "margin": found.margin}
        write_json(temporary / "identifiability.json", record)
        if found.samples is not None and found.multipliers is not None:
            kept = {"samples": found.samples, "multipliers": found.multipliers}
            write_tensors(temporary / "recovered.safetensors", kept)


def demo(out: Path = Path("runs/demo"), seed: int = 0) -> None:
    """Ten faces: train a model on them, forget them, and dig them out of the weights again.

    Args:
        out: folder for the model, the run and the picture; a demo that is there is replaced.
        seed: of faces, model and attack.
    """
    import shutil

    from rich.markup import escape

    from exhume import report as reports
    from exhume.files import private_folder, read_json

    console = _console()
    model, run, mark = out / "model", out / "run", out / ".demo"
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not mark.exists())):
        raise InputError(f"{out}: is not empty, and not an earlier demo; choose another --out.")
    private_folder(out)
    mark.touch()
    for folder in (model, run):
        shutil.rmtree(folder, ignore_errors=True)
    console.rule("1. a model is trained on ten faces")
    victim("faces", model, samples=10, ratio=4.0, data_seed=seed, seed=seed)
    console.rule("2. the attack sees the weights, not the faces")
    audit(str(model), run, samples=10, seed=seed)
    console.rule("3. only now the faces are looked at again")
    score(run, model / "truth.safetensors")
    picture = reports.gallery_png(run, out / "faces.png")
    result = read_json(run / "score.json")["score"]
    count = round(result["exact"] * 10)
    console.print(f"\n[bold]{count} of 10 faces exact.[/] picture: {escape(str(picture))}")


@contextmanager
def _interrupted(out: Path) -> Iterator[None]:
    """On Ctrl-C, say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with the same command and --resume ({out})", file=sys.stderr)
        raise SystemExit(130) from None


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


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the command `exhume`."""
    from jsonargparse import auto_cli, set_parsing_settings

    from exhume import __version__, bench

    set_parsing_settings(instantiate_subclass_spec_in_any=False)
    commands: dict[str, Any] = {
        "victim": victim,
        "audit": audit,
        "score": score,
        "report": report,
        "identify": identify,
        "demo": demo,
        "bench": {"_help": "Measurements, each printed with the hardware.", **bench.COMMANDS},
    }
    words = plain(sys.argv[1:] if arguments is None else arguments)
    try:
        auto_cli(commands, args=words, prog="exhume", version=__version__)
    except InputError as error:
        print(f"exhume: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def plain(words: list[str]) -> list[str]:
    """Let options be written as people write them.

    `--time-limit 3`, `--resume` alone, `--range 0,1`, and the folder of a model without a word.

    Example:
        >>> plain(["audit", "a-b", "--resume", "--time-limit=3-4", "--range", "-1,1"])
        ['audit', '--model', 'a-b', '--resume=true', '--time_limit=3-4', '--range', '[-1,1]']
    """
    functions = (victim, audit, score, report, identify, demo)
    flags = {
        f"--{name}"
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation in (bool, bool | None)
    }
    result: list[str] = []
    for word, following in itertools.pairwise([*words, ""]):
        before = result[-1] if result else ""
        if before.startswith("--") and "=" not in before:  # the value of an option
            result.append(_bracketed(word) if before in LISTS else word)
            continue
        word = re.sub(r"^--[\w-]+", lambda m: "--" + m[0][2:].replace("-", "_"), word)
        name, equals, value = word.partition("=")
        if word in flags and following not in ("true", "false"):
            word += "=true"
        elif equals and name in LISTS:
            word = f"{name}={_bracketed(value)}"
        elif (
            result[:1] in (["audit"], ["identify"])
            and "--model" not in result
            and not word.startswith("-")
        ):
            result.append("--model")
        result.append(word)
    return result


def _bracketed(numbers: str) -> str:
    """Numbers with commas between them as a list."""
    return f"[{numbers}]" if "," in numbers and not numbers.startswith("[") else numbers


if __name__ == "__main__":
    main()
