"""`exhume reproduce`: results of the sources, run again and judged."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exhume.cli.console import console as _console
from exhume.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from exhume.reproduce import Experiment

EVERY = "all"
"""The name that stands for all experiments."""


def reproduce(
    name: str | None = None,
    scale: Literal["small", "full"] = "small",
    out: Path = Path("runs/reproduce"),
    engine: str = "loky",
    address: str | None = None,
    workers: int | None = None,
    device: str = "auto",
    list: bool = False,
    document: Path | None = None,
) -> None:
    """Run an experiment of the sources again, and say whether its claim holds.

    Args:
        name: of the experiment (here the word --name may be left out); `all` for every one whose
            data are there, at small scale. Cells that are in the folder are not run again.
        scale: `small` takes minutes on two cores, `full` is for a GPU.
        out: folder for the results, one folder in it for each experiment and scale.
        engine: loky, dask or ray.
        address: of the cluster, for dask and ray.
        workers: how many at a time; all cores if left out.
        device: where to run.
        list: show what can be run.
        document: folder of the docs; the results in `out` are copied there, and the page on
            reproduction is written again.
    """
    from exhume import sweep
    from exhume.device import usable_device
    from exhume.reproduce import EXPERIMENTS, missing, perform, publish

    console = _console()
    if list:
        console.print(_table(EXPERIMENTS))
        return
    if document is not None:
        for copied, why in publish(out, document, EXPERIMENTS):
            console.print(copied if why is None else f"{copied}, without its figure: {why}")
        console.print(f"written: {document / 'reproduction.md'}", markup=False)
        return
    chosen = _named(name, scale, EXPERIMENTS)
    device = usable_device(device)
    for experiment in chosen:
        if reason := missing(experiment, scale):
            if name != EVERY:
                raise InputError(f"{experiment.name}: {reason}")
            console.print(f"[bold]{experiment.name}[/] left out: {reason}")
            continue
        folder = out / f"{experiment.name}-{scale}"
        with sweep.progress(console, len(experiment.cells(scale))) as show:
            result = perform(experiment, scale, folder, engine, address, workers, device, show)
        console.print(f"[bold]{experiment.name}[/] ({result['seconds']:.0f} s)")
        for word in ("claim", "figure", "verdict", "note"):
            if result[word]:
                console.print(f"  {word}: {result[word]}", markup=False)
        if result["failed"]:
            console.print(f"  {result['failed']} of {result['cells']} cells failed: see table.csv")
        console.print(f"  results: {folder}", markup=False)


def _named(
    name: str | None, scale: str, experiments: "Mapping[str, Experiment]"
) -> "tuple[Experiment, ...]":
    """The experiments that a name stands for."""
    if name is None:
        raise InputError("name: say which experiment, or all; exhume reproduce --list shows them.")
    if name == EVERY:
        if scale != "small":
            raise InputError("all: is for --scale small; run full experiments one by one.")
        return tuple(experiments.values())
    if name not in experiments:
        known = ", ".join(experiments)
        raise InputError(f"unknown experiment {name!r}; there are {known}, and {EVERY}.")
    return (experiments[name],)


def _table(experiments: "Mapping[str, Experiment]") -> "Table":
    from rich.table import Column, Table

    table = Table(Column("name", no_wrap=True), "claim", "source", "needs", "minutes", "full")
    table.show_lines = True
    for experiment in experiments.values():
        small, full = experiment.minutes
        table.add_row(
            experiment.name,
            experiment.claim,
            experiment.source.partition(",")[0],
            ", ".join(experiment.data("small")) or "nothing",
            f"{small:g}",
            ", ".join((f"{full:g}", "GPU", *experiment.data("full"))),
        )
    return table
