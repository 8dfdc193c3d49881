"""A sweep of the law as one offline page, in the look of the report."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import exhume
from exhume import sweep
from exhume.errors import InputError
from exhume.experiments.law import HEADINGS, Summary, curve_of, draw, summarise
from exhume.experiments.runner import measured
from exhume.files import write_private
from exhume.report.page import environment
from exhume.report.plots import inline
from exhume.sweep import Cell, Record
from exhume.wording import number, percent

# The columns of the table of medians that follow the setting and the method.
MEASURED = ("p", "error", "recovered", "exact", "seeds")


def perform(
    cells: Sequence[Cell], folder: Path, command: str, redact: bool, **options: Any
) -> Summary:
    """Run the cells of a sweep with the options of `sweep.run`, and write table, figure and page.

    An InputError is raised if every cell failed.
    """

    def drawn(records: Sequence[Record]) -> Figure:
        summary = summarise(records)
        if not summary.attacks:
            first = summary.failed[0].error
            raise InputError(f"all {len(cells)} cells failed, the first one with {first}")
        return draw(summary)

    records, figure = measured(cells, folder, drawn, "law", **options)
    summary = summarise(records)
    page = render(summary, records, figure, command, redact)
    write_private(folder / "law.html", page.encode())
    return summary


def render(
    summary: Summary, records: Sequence[Record], figure: Figure, command: str, redact: bool = False
) -> str:
    """Return the page as text, with the command that made it, without pictures if redacted."""
    curves = (*summary.fits, *summary.attacks)
    medians = []
    for curve in summary.attacks:
        for at in curve.places:
            errors = (number(at.width), number(at.error, "–"))
            shares = map(percent, (at.recovered, at.exact))
            medians.append([*curve.row[:5], *errors, *shares, str(at.seeds)])
    pictures = [
        (curve_of(record).model, getattr(record.cell, "ratio", None), record.values["picture"])
        for record in records
        if record.values and record.values.get("picture") and not redact
    ]
    template = environment().get_template("law.html.jinja")
    return template.render(
        data=", ".join(sorted({getattr(record.cell, "data", "") for record in records})),
        tone="calm" if all(curve.start is None for curve in summary.attacks) else "exposed",
        sentences=[curve.sentence for curve in curves],
        failed=[record.error for record in summary.failed],
        figure=inline(figure),
        starts=[HEADINGS, *(curve.row for curve in curves)],
        medians=[[*HEADINGS[:5], *MEASURED], *medians],
        pictures=pictures,
        redact=redact,
        cells=len(records),
        seconds=sum(record.seconds for record in records),
        device=sweep.made(records, "hardware"),
        version=exhume.__version__,
        torch=torch.__version__,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
    )
