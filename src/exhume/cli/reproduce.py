"""`exhume reproduce`: results of the sources, run again and judged."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Column, Table

from exhume.cli.console import new_console
from exhume.errors import InputError

if TYPE_CHECKING:
    from exhume.experiments.claims.claim import Claim

EVERY = "all"  # the name that stands for all experiments


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
    from exhume.experiments.claims import CLAIMS
    from exhume.experiments.runner import missing, perform, publish

    console = new_console()
    if list:
        with console.status("finding what each needs; the widths of one are computed"):
            table = _table(CLAIMS)
        console.print(table)
        return
    if document is not None:
        for copied, why in publish(out, document, CLAIMS):
            console.print(copied if why is None else f"{copied}, without its figure: {why}")
        console.print(f"written: {document / 'reproduction.md'}", markup=False)
        return
    chosen = _named(name, scale, CLAIMS)
    options = {"engine": engine, "address": address, "workers": workers}
    device = usable_device(device)
    for claim in chosen:
        if reason := missing(claim, scale):
            if name != EVERY:
                raise InputError(f"{claim.name}: {reason}")
            console.print(f"[bold]{claim.name}[/] left out: {reason}")
            continue
        folder = out / f"{claim.name}-{scale}"
        with sweep.progress(console, len(claim.cells(scale))) as show:
            result = perform(claim, scale, folder, **options, device=device, show=show)
        console.print(f"[bold]{claim.name}[/] ({result['seconds']:.0f} s)")
        for word in ("claim", "figure", "verdict", "note"):
            if result[word]:
                console.print(f"  {word}: {result[word]}", markup=False)
        if result["failed"]:
            console.print(f"  {result['failed']} of {result['cells']} cells failed: see table.csv")
        console.print(f"  results: {folder}", markup=False)


def _named(name: str | None, scale: str, claims: "Mapping[str, Claim]") -> "tuple[Claim, ...]":
    """The claims that a name stands for."""
    if name is None:
        raise InputError("name: say which experiment, or all; exhume reproduce --list shows them.")
    if name == EVERY and scale != "small":
        raise InputError("all: is for --scale small; run full experiments one by one.")
    if name not in (*claims, EVERY):
        known = ", ".join(claims)
        raise InputError(f"unknown experiment {name!r}; there are {known}, and {EVERY}.")
    return tuple(claims.values()) if name == EVERY else (claims[name],)


def _table(claims: "Mapping[str, Claim]") -> Table:
    table = Table(Column("name", no_wrap=True), "claim", "source", "needs", "minutes", "full")
    table.show_lines = True
    for claim in claims.values():
        small, full = claim.minutes
        table.add_row(
            claim.name,
            claim.sentence,
            claim.source.partition(",")[0],
            ", ".join(claim.data("small")) or "nothing",
            f"{small:g}",
            ", ".join((f"{full:g}", "GPU", *claim.data("full"))),
        )
    return table
