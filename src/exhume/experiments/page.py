"""A sweep of the law as one offline page, in the look of the report."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from matplotlib.figure import Figure

import exhume
from exhume.experiments import figures
from exhume.experiments.attack import Attack
from exhume.experiments.law import Curve, Summary, sentences, setting_of
from exhume.report.page import environment
from exhume.sweep import Record


def render(
    summary: Summary,
    records: Sequence[Record],
    figure: Figure,
    command: str,
    device: str,
    redact: bool = False,
) -> str:
    """The page as text.

    Args:
        summary: of the records.
        records: of the sweep.
        figure: the phase diagram.
        command: that made it.
        device: that the cells ran on, in words.
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
            figure=figures.inline(figure),
            kinds=len({setting.kind for setting in summary.settings}) > 1,
            ranks=any(setting.rank is not None for setting in summary.settings),
            starts=[_start(curve) for curve in summary.attacks],
            rows=[row for curve in summary.attacks for row in _rows(curve)],
            pictures=[] if redact else _pictures(records),
            redact=redact,
            cells=len(records),
            seconds=sum(record.seconds for record in records),
            device=device,
            version=exhume.__version__,
            torch=torch.__version__,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
        )
    )


def _setting(curve: Curve) -> dict[str, Any]:
    setting = curve.setting
    return {
        "model": figures.model(setting),
        "dim": setting.dim,
        "samples": setting.samples,
        "rank": setting.rank,
        "method": curve.name,
    }


def _start(curve: Curve) -> dict[str, Any]:
    """One line of the table of starts."""
    ratio, width, rank = curve.start, curve.starting_width, curve.setting.rank
    inside = ratio and rank and ratio * curve.setting.dim / rank
    return _setting(curve) | {
        "ratio": ratio and float(f"{ratio:.3g}"),
        "inside": inside and float(f"{inside:.3g}"),
        "width": width and round(width),
        "at_or_below": curve.at_or_below,
        "counted": curve.counted,
    }


def _rows(curve: Curve) -> list[dict[str, Any]]:
    """A line for each ratio of a curve."""
    names = ("width", "ratio", "error", "recovered", "exact", "seeds")
    return [_setting(curve) | {k: getattr(point, k) for k in names} for point in curve.points]


def _pictures(records: Sequence[Record]) -> list[tuple[str, float, str]]:
    """Model, ratio and PNG, in base64, of the cells that kept one."""
    return [
        (figures.model(setting_of(record)), record.cell.ratio, str(record.values["picture"]))
        for record in records
        if isinstance(record.cell, Attack) and record.values and record.values.get("picture")
    ]
