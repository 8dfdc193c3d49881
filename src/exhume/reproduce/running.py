"""Run an experiment, judge it, and write down what was found."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from exhume import __version__, data, sweep
from exhume.errors import InputError
from exhume.experiments import figures
from exhume.experiments.attack import without_picture
from exhume.files import write_json, write_private
from exhume.reproduce.experiment import Experiment, Scale
from exhume.sweep import Record


def missing(experiment: Experiment, scale: Scale) -> str | None:
    """Why the data of an experiment cannot be read here; None if they can."""
    for name in experiment.data(scale):
        try:
            data.load(name, 2)
        except InputError as error:
            return str(error)
    return None


def perform(
    experiment: Experiment,
    scale: Scale,
    folder: Path,
    engine: str = "loky",
    address: str | None = None,
    workers: int | None = None,
    device: str = "cpu",
    show: Callable[[Record], None] | None = None,
) -> dict[str, Any]:
    """Run the cells that are not in the folder yet, judge, and write the result.

    Writes cells/, table.csv, figure.png, figure.svg and result.json.

    Returns:
        What result.json holds.
    """
    cells = experiment.cells(scale)
    records = sweep.run(cells, engine, folder, address, workers, device, show=show)
    sweep.write_csv(folder / "table.csv", map(without_picture, records))
    figure = experiment.draw(records) if any(r.values is not None for r in records) else None
    if figure is not None:
        write_private(folder / "figure.png", figures.png(figure))
        write_private(folder / "figure.svg", figures.svg(figure).encode())
    result = described(experiment, scale, records) | {"drawn": figure is not None}
    write_json(folder / "result.json", result)
    return result


def described(experiment: Experiment, scale: Scale, records: Sequence[Record]) -> dict[str, Any]:
    """The finding, with what it takes to find it again: plain JSON values."""
    return {
        "name": experiment.name,
        "scale": scale,
        "source": experiment.source,
        "claim": experiment.claim,
        **asdict(experiment.judge(records)),
        "command": command(experiment, scale),
        **{word: sweep.made(records, word) for word in ("hardware", "torch", "date")},
        "exhume": __version__,
        "seconds": round(sum(record.seconds for record in records), 1),
        "cells": len(records),
        "failed": sum(record.error is not None for record in records),
    }


def command(experiment: Experiment, scale: Scale) -> str:
    """What to type to run it."""
    words = f"exhume reproduce {experiment.name} --scale {scale}"
    return f"EXHUME_DATA=… {words}" if experiment.data(scale) else words
