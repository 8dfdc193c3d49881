"""Figures of results in the look of the phase diagram: lines, bars, pictures.

A panel for which nothing was measured says so.

Inside: `sheet`, `lines`, `bars`, `pictures`, `phases`.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from exhume.experiments import figures, law
from exhume.experiments.figures import CARD, DASHES, INK, MUTED, STYLE, shades
from exhume.reproduce.curves import Curve
from exhume.sweep import Record
from exhume.wording import power_of_ten

ENLARGED = 200
"""Least pixels across a picture: viewers of SVG blur what they enlarge themselves."""


def sheet(*panels: str, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels of these titles side by side."""
    with matplotlib.rc_context(STYLE):
        width = 6.5 if len(panels) == 1 else 4.6 * len(panels)
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor=CARD)
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, title in zip(grid, panels, strict=True):
            axes.set_title(title, color=INK, pad=8)
        return figure, list(grid)


def lines(
    axes: Axes,
    curves: Mapping[str, Curve],
    across: str,
    up: str,
    scales: str = "x",
    mark: float | None = None,
) -> None:
    """Curves with a legend.

    Args:
        axes: where to draw.
        curves: by the name in the legend.
        across: what is on the x axis.
        up: what is on the y axis.
        scales: which of `x` and `y` are logarithmic.
        mark: where a vertical line is drawn.
    """
    drawn = {
        name: {x: y for x, y in curve.items() if y > 0 or "y" not in scales}
        for name, curve in curves.items()
    }
    axes.set(xlabel=across, ylabel=up)
    if not any(drawn.values()):
        _nothing(axes)
        return
    if mark is not None:
        axes.axvline(mark, color=MUTED, linewidth=1, linestyle=DASHES)
    for (name, shown), colour in zip(drawn.items(), shades(len(drawn)), strict=True):
        axes.plot(list(shown), list(shown.values()), "o-", color=colour, label=name, markersize=4)
    if "x" in scales:
        _logarithmic(axes, "x")
    if "y" in scales:
        _logarithmic(axes, "y")
    if len(curves) > 1:
        axes.legend(frameon=False)


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no result", color=MUTED, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


def _logarithmic(axes: Axes, which: str) -> None:
    """A logarithmic axis: plain numbers across where there are few, else powers of ten."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_minor_locator(NullLocator())
    low, high = axis.get_view_interval()
    if which == "x" and high < 1000 * low:
        axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: power_of_ten(round(math.log10(value))))
        )


def bars(axes: Axes, heights: Mapping[str, float], up: str, least: float | None = None) -> None:
    """One bar for each name, its value above it.

    Args:
        axes: where to draw.
        heights: by name.
        up: what is on the y axis.
        least: where a logarithmic axis begins; a linear one if None.
    """
    axes.set(ylabel=up)
    if not heights:
        _nothing(axes)
        return
    shown = [height if least is None else max(height, least) for height in heights.values()]
    drawn = axes.bar(list(heights), shown, color=shades(1)[0], width=0.6)
    axes.bar_label(drawn, [f"{height:.2g}" for height in heights.values()], fontsize=8)
    if least is None:
        axes.set_ylim(0, 1.1 * (max(shown) or 1))
    else:
        _logarithmic(axes, "y")
        axes.set_ylim(bottom=least / 10)


def pictures(
    shown: Mapping[str, str], above: Callable[[Axes], None] | None = None
) -> Figure | None:
    """Pictures (PNG, base64), one below the other, each under its title.

    Args:
        shown: pictures by title.
        above: draws a panel above them.

    Returns:
        The figure; None if there is nothing to draw.
    """
    if not shown and above is None:
        return None
    with matplotlib.rc_context(STYLE):
        heights = [*([3.2] if above else []), *([2.1] * len(shown))]
        size = (7.0, sum(heights))
        figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor=CARD)
        grid = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        if above:
            above(grid[0])
        for axes, (title, encoded) in zip(
            grid[len(heights) - len(shown) :], shown.items(), strict=True
        ):
            axes.imshow(_enlarged(encoded), interpolation="none")
            axes.set_title(title, color=INK, pad=4)
            axes.set_axis_off()
    return figure


def _enlarged(encoded: str) -> Any:
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        factor = -(-ENLARGED // image.width)
        size = (factor * image.width, factor * image.height)
        return image.convert("RGB").resize(size, Image.Resampling.NEAREST)


SIZES = ("inputs", "outputs", "parameters", "actual_ratio")
"""What places a cell in a phase diagram."""


def phases(records: Sequence[Record]) -> Figure | None:
    """Label fitting and reconstruction against p, with the counted thresholds.

    Label fitting is drawn for sizes that have an attack with an error to draw.

    Returns:
        The figure; None if there is no such attack.
    """
    summary = law.summarise(
        record
        for record in records
        if record.values is not None and all(record.values.get(w, 0) is not None for w in SIZES)
    )
    attacks = [c for c in summary.attacks if any(point.error is not None for point in c.points)]
    if not attacks:
        return None
    sizes = {(curve.setting.dim, curve.setting.samples) for curve in attacks}
    fits = [c for c in summary.fits if (c.setting.dim, c.setting.samples) in sizes]
    return figures.draw(replace(summary, fits=tuple(fits), attacks=tuple(attacks)))
