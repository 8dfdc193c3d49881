"""A sweep of the law as one offline page, in the look of the report."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from matplotlib.figure import Figure

import exhume
from exhume import sweep
from exhume.experiments.cells.attack import Attack
from exhume.experiments.law import LawCurve, Summary, sentences, setting_of
from exhume.experiments.phases import model
from exhume.report.page import environment
from exhume.report.plots import inline
from exhume.sweep import Record


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
            kinds=len({setting.kind for setting in summary.settings}) > 1,
            ranks=any(setting.rank is not None for setting in summary.settings),
            starts=[_start(curve) for curve in summary.attacks],
            rows=[
                _setting(curve) | asdict(place)
                for curve in summary.attacks
                for place in curve.places
            ],
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


def _setting(curve: LawCurve) -> dict[str, Any]:
    return asdict(curve.setting) | {"model": model(curve.setting), "method": curve.name}


def _start(curve: LawCurve) -> dict[str, Any]:
    """One line of the table of starts."""
    ratio, inside, width = curve.start, curve.inside, curve.starting_width
    return _setting(curve) | {
        "ratio": ratio and float(f"{ratio:.3g}"),
        "inside": inside and float(f"{inside:.3g}"),
        "width": width and round(width),
        "at_or_below": curve.at_or_below,
        "counted": curve.counted,
    }


def _pictures(records: Sequence[Record]) -> list[tuple[str, float, str]]:
    """Model, ratio and PNG, in base64, of the cells that kept one."""
    return [
        (model(setting_of(record)), record.cell.ratio, str(record.values["picture"]))
        for record in records
        if isinstance(record.cell, Attack) and record.values and record.values.get("picture")
    ]
