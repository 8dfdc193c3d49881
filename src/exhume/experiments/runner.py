"""Run cells and write down what they measured, for `exhume law` and `exhume reproduce` alike."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure

from exhume import __version__, data, sweep
from exhume.errors import InputError
from exhume.experiments.claims.claim import Claim, Scale
from exhume.files import write_json, write_private
from exhume.report import plots
from exhume.sweep import Cell, Record

Drawn = TypeVar("Drawn", bound=Figure | None)


def measured(
    cells: Sequence[Cell], folder: Path, draw: Callable[[Any], Drawn], name: str, **options: Any
) -> tuple[list[Record], Drawn]:
    """Run the cells that are not in the folder yet, with the options of `exhume.sweep.run`.

    Table and figure are written there, the figure as PNG and SVG of that name, if there is one.
    """
    records = sweep.run(cells, folder=folder, **options)
    figure = draw(records)
    plain = [  # a table has no place for a picture
        replace(r, values=r.values and {k: v for k, v in r.values.items() if k != "picture"})
        for r in records
    ]
    sweep.write_csv(folder / "table.csv", plain)
    if figure is not None:
        write_private(folder / f"{name}.png", plots.png(figure))
        write_private(folder / f"{name}.svg", plots.svg(figure).encode())
    return records, figure


def missing(claim: Claim, scale: Scale) -> str | None:
    """Say why the data of a claim cannot be read here; None if they can."""
    for name in claim.data(scale):
        try:
            data.load(name, 2)
        except InputError as error:
            return str(error)
    return None


def perform(claim: Claim, scale: Scale, folder: Path, **options: Any) -> dict[str, Any]:
    """Judge a claim on its cells, run with the options of `exhume.sweep.run`.

    Returned is what result.json holds: the finding, with what it takes to find it again.
    """

    def draw(records: Sequence[Record]) -> Figure | None:
        return claim.draw(records) if any(r.values is not None for r in records) else None

    records, figure = measured(claim.cells(scale), folder, draw, "figure", **options)
    command = f"exhume reproduce {claim.name} --scale {scale}"
    result = {
        "name": claim.name,
        "scale": scale,
        "source": claim.source,
        "claim": claim.sentence,
        **asdict(claim.judge(records)),
        "command": f"EXHUME_DATA=… {command}" if claim.data(scale) else command,
        **{word: sweep.made(records, word) for word in ("hardware", "torch", "date")},
        "exhume": __version__,
        "seconds": round(sum(record.seconds for record in records), 1),
        "cells": len(records),
        "failed": sum(record.error is not None for record in records),
        "drawn": figure is not None,
    }
    write_json(folder / "result.json", result)
    return result
