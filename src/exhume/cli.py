"""The command line: each command is a thin function; errors of input end with exit code 2."""

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exhume.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from exhume.audit import Event


def victim(
    data: str,
    out: Path = Path("victim"),
    samples: int = 10,
    dim: int = 100,
    width: int | None = None,
    ratio: float = 5.0,
    activation: str = "relu",
    loss: Literal["squared", "logistic"] = "squared",
    ridge: float = 0.0,
    classes: Literal["all", "parity", "random"] | list[int] | None = None,
    normalise: bool = True,
    data_seed: int = 0,
    seed: int = 0,
    store: bool = False,
) -> None:
    """Train a random-features model to attack; its training data is kept in a file apart.

    Args:
        data: sphere, digits, faces, photos, or (from the folder EXHUME_DATA) cifar10, mnist,
            fashion_mnist, tiny_imagenet.
        out: folder to write the model to; must be new.
        samples: number of training samples.
        dim: dimension of the inputs, for sphere.
        width: number of random features; chosen by the ratio if left out.
        ratio: width × outputs ÷ (dimension × samples), where no width is given.
        activation: relu, relu+tanh, tanh, gelu, erf, softplus, or polynomial:c0,c1,…
        loss: what θ minimises.
        ridge: penalty on θ, relative to the features' size.
        classes: all, parity, random, or a list of labels; each data set has its default.
        normalise: rescale each sample to norm √d.
        data_seed: which samples.
        seed: of the random first layer.
        store: write the first layer itself, where its seed would do.
    """
    from rich.markup import escape

    from exhume import data as datasets
    from exhume.victims import random_features

    console = _console()
    if data == "sphere":
        chosen = datasets.sphere(dim, samples, data_seed)
    else:
        chosen = datasets.load(data, samples, data_seed, normalise, classes)
    if width is None and not ratio > 0:
        raise InputError(f"ratio: expected a number above 0, got {ratio}.")
    if width is None:
        width = round(ratio * chosen.dim * chosen.samples / chosen.outputs)
    with console.status(f"training {width:,} random features on {samples} samples of {data}"):
        made = random_features(chosen, width, activation, seed, loss, ridge)
        made.save(out, store)
    console.print(
        f"[bold]{escape(str(out))}[/]: {width:,} features, d = {chosen.dim}, ratio "
        f"{made.problem.ratio(samples):.2f}, training error {made.training['fit']:.1e}"
    )
    console.print(f"next: exhume audit {out} --samples {samples} --out RUN", markup=False)


def audit(
    model: Path,
    out: Path = Path("run"),
    samples: int | None = None,
    seed: int = 0,
    method: str = "exhume",
    time_limit: float | None = None,
    device: str = "auto",
    resume: bool = False,
) -> None:
    """Recover training samples from a model folder; the truth is never read.

    Args:
        model: folder made by `exhume victim`.
        out: folder for the run; must be new, unless the run is resumed.
        samples: number of training samples; found if left out.
        seed: of everything random.
        method: exhume (our best) or iurada2025 (as published).
        time_limit: seconds after which the best so far is taken.
        device: auto, cpu, cuda, cuda:1, …
        resume: go on with an interrupted run.
    """
    from exhume import report as reports
    from exhume.audit import Settings
    from exhume.audit import audit as run_audit
    from exhume.device import usable_device

    where = usable_device(device)
    settings = Settings(str(model.resolve()), samples, seed, method, time_limit, where)
    console = _console()
    with _interrupted(out), _progress(console, time_limit) as show:
        result = run_audit(settings, out, resume, show)
    console.print(
        f"[bold]{result['outcome']}[/]: {result['candidates']} candidates, residual "
        f"{result['residual']:.1e}, {result['seconds']:.1f} s. {result['sentence']}"
    )
    page = reports.write(out)
    console.print(f"report: {page}", markup=False)


def score(run: Path, truth: Path | None = None) -> None:
    """Compare a run with the training data: matches, errors, chance.

    Args:
        run: folder of an audit.
        truth: the training data; truth.safetensors in the model's folder if left out.
    """
    from rich.table import Table

    from exhume import report as reports
    from exhume.evaluate.runs import score_run

    record = score_run(run, truth)
    reports.write(run)
    result, chance = record["score"], record["chance"]["neighbour"] or {}
    table = Table("", "this run", "nearest other sample")
    for key in ("recovered", "exact", "recall", "precision", "error", "cosine", "psnr", "ssim"):
        if result.get(key) is not None:
            other = chance.get(key)
            table.add_row(key, f"{result[key]:.4g}", "" if other is None else f"{other:.4g}")
    console = _console()
    console.print(table)
    console.print(
        f"residual at the truth {record['residual_at_truth']:.1e}, span residual "
        f"{record['span_residual']:.1e}"
    )


def report(run: Path, redact: bool = False) -> None:
    """Write the report of a run again, as one HTML file.

    Args:
        run: folder of an audit.
        redact: leave out everything that shows a sample, in report-redacted.html.
    """
    from exhume import report as reports

    _console().print(f"report: {reports.write(run, redact)}", markup=False)


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
    audit(model, run, samples=10, seed=seed)
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
    """Let options be written as people write them: `--time-limit 3`, and `--resume` alone.

    Example:
        >>> plain(["audit", "a-b", "--resume", "--time-limit=3-4"])
        ['audit', 'a-b', '--resume=true', '--time_limit=3-4']
    """
    functions = (victim, audit, score, report, demo)
    flags = {
        f"--{name}"
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation is bool
    }
    result = []
    for word, following in itertools.pairwise([*words, ""]):
        word = re.sub(r"^--[\w-]+", lambda m: "--" + m[0][2:].replace("-", "_"), word)
        alone = word in flags and following not in ("true", "false")
        result.append(word + "=true" if alone else word)
    return result


if __name__ == "__main__":
    main()
