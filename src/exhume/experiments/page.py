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
from exhume.experiments import phases
from exhume.experiments.cells.attack import Attack
from exhume.experiments.law import LawCurve, Summary, sentences, setting_of, summarise
from exhume.experiments.phases import model
from exhume.experiments.runner import measured
from exhume.files import write_private
from exhume.report.page import environment
from exhume.report.plots import inline
from exhume.sweep import Cell, Record
from exhume.wording import number, percent


def perform(
    cells: Sequence[Cell], folder: Path, command: str, redact: bool, **options: Any
) -> Summary:
    """Run the cells of a sweep, and write table, figure and page.

    Args:
        cells: of the law.
        folder: where they are written.
        command: that asked for them.
        redact: leave pictures out.
        options: of `exhume.sweep.run`.

    Raises:
        InputError: every cell failed.
    """

    def draw(records: Sequence[Record]) -> Figure:
        summary = summarise(records)
        if not summary.attacks:
            raise InputError(
                f"all {len(cells)} cells failed, the first one with {summary.failed[0].error}"
            )
        return phases.draw(summary)

    records, figure = measured(cells, folder, draw, "law", **options)
    summary = summarise(records)
    page = render(summary, records, figure, command, redact)
    write_private(folder / "law.html", page.encode())
    return summary


def render(
    summary: Summary, records: Sequence[Record], figure: Figure, command: str, redact: bool = False
) -> str:
    """Return the page as text.

    Args:
        summary: of the records.
        records: of the sweep.
        figure: the phase diagram.
        command: that made it.
        redact: leave pictures out.
    """
    data = {getattr(record.cell, "data", "") for record in records}
    return (
        environment()
        .get_template("law.html.jinja")
        .render(
            data=", ".join(sorted(data)),
            tone="exposed" if any(curve.start for curve in summary.attacks) else "calm",
            sentences=sentences(summary),
            failed=[record.error for record in summary.failed],
            figure=inline(figure),
            kinds="model" in _columns(summary),
            starts=starts(summary),
            medians=_medians(summary),
            pictures=[] if redact else _pictures(records),
            redact=redact,
            cells=len(records),
            seconds=sum(record.seconds for record in records),
            device=sweep.made(records, "hardware"),
            version=exhume.__version__,
            torch=torch.__version__,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
        )
    )


def _columns(summary: Summary) -> tuple[str, ...]:
    """What tells curves apart: the model and the rank only where there are several."""
    kinds = len({setting.kind for setting in summary.settings}) > 1
    ranks = any(setting.rank is not None for setting in summary.settings)
    return ("model",) * kinds + ("d", "n") + ("r",) * ranks + ("method",)


def _setting(curve: LawCurve, columns: Sequence[str]) -> list[str]:
    own = curve.setting
    values = {"model": model(own), "d": number(own.dim), "n": number(own.samples)}
    values |= {"r": number(own.rank, "–"), "method": curve.name}
    return [values[column] for column in columns]


def starts(summary: Summary) -> list[list[str]]:
    """Say where recovery starts: headings, then a line for each curve."""
    columns = _columns(summary)
    equations = "p" if all(setting.outputs == 1 for setting in summary.settings) else "p·m"
    units = ["dn", "rn"] if "r" in columns else ["dn"]
    lines = [[*columns, "counted p", "back from p", *(f"{equations}/({unit})" for unit in units)]]
    for curve in summary.attacks:
        width, most = curve.starting_width, "≤ " if curve.at_or_below else ""
        line = [*_setting(curve, columns), f"{curve.counted:,}"]
        line += [most + number(width and round(width), "never"), most + number(curve.start, "–")]
        if "r" in columns:
            line.append(most + number(curve.inside) if curve.inside else "–")
        lines.append(line)
    return lines


def _medians(summary: Summary) -> list[list[str]]:
    """Say what was measured at each place: headings, then a line for each."""
    columns = _columns(summary)
    lines = [[*columns, "p", "p/(dn)", "error", "recovered", "exact", "seeds"]]
    for curve in summary.attacks:
        for place in curve.places:
            numbers = (place.width, place.ratio, place.error)
            shares = (percent(place.recovered), percent(place.exact))
            line = (number(value, "–") for value in numbers)
            lines.append([*_setting(curve, columns), *line, *shares, str(place.seeds)])
    return lines


def _pictures(records: Sequence[Record]) -> list[tuple[str, float, str]]:
    """Model, ratio and PNG, in base64, of the cells that kept one."""
    return [
        (model(setting_of(record)), record.cell.ratio, str(record.values["picture"]))
        for record in records
        if isinstance(record.cell, Attack) and record.values and record.values.get("picture")
    ]
