"""Figures of experiments and of a run, and how they become files or part of a page.

A figure is drawn once, in the colours of the light page. As a file it is SVG or PNG; on a page
colours become CSS variables, so that it also serves the dark one. A panel for which nothing was
measured says so.
"""

import base64
import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from exhume.wording import finite, number, power_of_ten

CARD, INK, MUTED, LINE, ACCENT, SECOND, LOW, HIGH = (
    "#fffefb", "#211d18", "#7a7267", "#e6e0d5", "#b04a1e", "#2b7274", "#f3ede2", "#e4f0ee",
)  # fmt: skip
BELOW, BEYOND = "#e9ddcb", "#cfe3df"  # These and the next are of the two plots of a report
PHASES = ("#f4eee3", "#e9f0ec", "#f3e6dd")
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    ACCENT: "var(--accent)",
    SECOND: "var(--second)",
    LOW: "var(--wash)",
    HIGH: "color-mix(in srgb, var(--high) 55%, var(--card))",
    CARD: "var(--card)",
    BELOW: "var(--low)",
    BEYOND: "var(--high)",
    **{colour: f"var(--phase-{i})" for i, colour in enumerate(PHASES)},
}
STYLE: Any = {
    "svg.hashsalt": "exhume",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10.0,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.0,
    "axes.titlepad": 31.0,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.title_fontsize": 9.0,
    "lines.solid_capstyle": "round",
}
DASHES = (0, (4, 2.2))
PAGE_STYLE: Any = {  # Of these two plots
    **STYLE,
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "figure.facecolor": "none",
    "lines.solid_capstyle": "projecting",
}

styled = matplotlib.rc_context(STYLE)  # Decorates what draws in this style
Panel = tuple[str, Callable[[Axes], None]]  # A title, and what fills the axes below it
ENLARGED = 200  # Least pixels across a picture: viewers of SVG blur what they enlarge themselves


@styled
def svg(figure: Figure) -> str:
    """Return a figure as a file of its own; the same figure gives the same bytes."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", facecolor="auto", metadata=nothing)
    return buffer.getvalue()


@styled
def png(figure: Figure) -> bytes:
    """Return a figure as pixels."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="auto", metadata={"Software": None})
    return buffer.getvalue()


def inline(figure: Figure) -> Markup:
    """Return a figure as an element of a page, with its colours as CSS variables."""
    text = svg(figure)
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    for colour, expression in VARIABLES.items():
        text = text.replace(colour, expression)
    return Markup(text)


def shades(count: int) -> list[str]:
    """Return colours from the accent to the second, one for each of so many.

    Example:
        >>> shades(1), shades(3)[1]
        (['#b04a1e'], '#6e5e49')
    """
    first, last = (np.array(to_rgb(colour)) for colour in (ACCENT, SECOND))
    return [to_hex(first + share * (last - first)) for share in np.linspace(0, 1, count)]


@styled
def grid(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """Return an empty figure and its axes, (rows, columns)."""
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor=CARD)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


@styled
def sheet(*panels: Panel) -> Figure:
    """Return a figure of `lines` and `bars` side by side."""
    width = 6.5 if len(panels) == 1 else 4.6 * len(panels)
    figure, axes = grid(1, len(panels), (width, 3.6))
    for own, (title, fill) in zip(axes[0], panels, strict=True):
        own.set_title(title, color=INK, pad=8)
        fill(own)
    return figure


def lines(
    title: str,
    curves: Mapping[str, Mapping[float, float]],
    across: str,
    up: str,
    scales: str = "x",
    mark: float | None = None,
) -> Panel:
    """Return a panel of curves, by their names in the legend.

    `scales` says which of `x` and `y` are logarithmic, `mark` where a vertical line is drawn.
    """
    drawn = {
        name: {x: y for x, y in curve.items() if y > 0 or "y" not in scales}
        for name, curve in curves.items()
    }

    def fill(axes: Axes) -> None:
        axes.set(xlabel=across, ylabel=up)
        if not any(drawn.values()):
            _nothing(axes)
            return
        if mark is not None:
            axes.axvline(mark, color=MUTED, linewidth=1, linestyle=DASHES)
        for (name, shown), colour in zip(drawn.items(), shades(len(drawn)), strict=True):
            axes.plot([*shown], [*shown.values()], "o-", color=colour, label=name, markersize=4)
        for which in scales:
            _logarithmic(axes, which)
        if len(curves) > 1:
            axes.legend(frameon=False)

    return title, fill


def bars(title: str, heights: Mapping[str, float], up: str, least: float | None = None) -> Panel:
    """Return a panel of bars, their values above them; on a logarithmic axis from `least` on."""

    def fill(axes: Axes) -> None:
        axes.set(ylabel=up)
        if not heights:
            _nothing(axes)
            return
        shown = [height if least is None else max(height, least) for height in heights.values()]
        drawn = axes.bar(list(heights), shown, color=ACCENT, width=0.6)
        axes.bar_label(drawn, [f"{height:.2g}" for height in heights.values()], fontsize=8)
        axes.tick_params(axis="x", labelsize=10 if len(heights) < 5 else 7)
        if least is None:
            axes.set_ylim(0, 1.1 * (max(shown) or 1))
        else:
            _logarithmic(axes, "y")
            axes.set_ylim(bottom=least / 10)

    return title, fill


@styled
def pictures(shown: Mapping[str, str], above: Panel | None = None) -> Figure | None:
    """Draw pictures (PNG, base64) by title, one below the other; None if there is nothing."""
    if not shown and above is None:
        return None
    heights = [*([3.2] if above else []), *([2.1] * len(shown))]
    figure, axes = grid(len(heights), 1, (7.0, sum(heights)), height_ratios=heights)
    panels = list(axes[:, 0])
    if above:
        above[1](panels.pop(0))
    for panel, (title, encoded) in zip(panels, shown.items(), strict=True):
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
            factor = -(-ENLARGED // image.width)
            size = (factor * image.width, factor * image.height)
            enlarged = image.convert("RGB").resize(size, Image.Resampling.NEAREST)
        panel.imshow(enlarged, interpolation="none")
        panel.set_title(title, color=INK, pad=4)
        panel.set_axis_off()
    return figure


def ticks(axes: Axes, subs: tuple[float, ...], words: Callable[[float], str]) -> None:
    """Mark these multiples of powers of ten on a logarithmic x axis, and write them in words."""
    axes.xaxis.set_major_locator(LogLocator(10, subs=subs, numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))


def _logarithmic(axes: Axes, which: str) -> None:
    """A logarithmic axis: plain numbers across where there are few, else powers of ten."""
    axes.set(**{f"{which}scale": "log"})
    low, high = axes.xaxis.get_view_interval()
    if which == "x" and high < 1000 * low:
        ticks(axes, (1.0, 2.0, 5.0), "{:g}".format)
        return
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(round(math.log10(value)))))


def _nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no result", color=MUTED, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])


@matplotlib.rc_context(PAGE_STYLE)
def progress(
    events: Iterable[Mapping[str, Any]], floor: float | None = None
) -> tuple[Markup, list[str]] | None:
    """Draw the residual over time, phases tinted, and the number of candidates if it changes.

    Events without a time and a positive residual are left out; the floor is the residual at the
    truth. Returned are the plot and the phases of its tints, or None where nothing can be drawn.
    """
    drawn = [
        (seconds, residual, finite(event.get("candidates")) or 0.0, event.get("phase", "search"))
        for event in events
        if (seconds := finite(event.get("seconds"))) is not None
        and (residual := finite(event.get("residual"))) is not None
        and residual > 0
    ]
    if not drawn:
        return None
    moments, residuals, counts, phases = zip(*drawn, strict=True)
    unit, name = (60.0, "minutes") if moments[-1] > 300 else (1.0, "seconds")
    times = [seconds / unit for seconds in moments]
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.add_subplot()

    legend = list(dict.fromkeys(map(str, phases)))
    start = 0
    for phase, group in itertools.groupby(map(str, phases)):  # each up to the start of the next
        end = start + len(list(group))
        span = times[start], times[min(end, len(times) - 1)]
        axes.axvspan(*span, color=PHASES[legend.index(phase) % 3], linewidth=0)
        start = end
    if floor:
        axes.axhline(floor, color=SECOND, linewidth=1, linestyle=(0, (4, 3)))
        place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate("at the truth", (1, floor), xytext=(-4, 3), ha="right", color=SECOND, **place)
    axes.plot(times, residuals, color=ACCENT, linewidth=1.8, solid_joinstyle="round")
    axes.plot(times[-1:], residuals[-1:], "o", color=ACCENT, markersize=5)
    axes.margins(x=0.02)
    axes.set(xlabel=name, ylabel="residual")
    _log_axis(axes, [*residuals, *([floor] if floor else [])])
    if len(set(counts)) > 1:
        twin = axes.twinx()
        twin.step(times, counts, where="post", color=INK, linewidth=1, alpha=0.55)
        twin.set(ylabel="candidates (thin line)", ylim=(0, 1.15 * max(counts)))
        twin.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        twin.tick_params(length=0)
        twin.spines[:].set_visible(False)
    return inline(figure), legend


@matplotlib.rc_context(PAGE_STYLE)
def law(ratio: float) -> Markup:
    """Draw where a run stands on the axis of equations for each unknown, the limit at 1."""
    place = math.log10(ratio)
    room = max(1.0, 0.4 * abs(place))  # for the words at either end
    low, high = math.floor(min(0.0, place) - room), math.ceil(max(0.0, place) + room)
    figure = Figure(figsize=(4.6, 1.55), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlim=(10.0**low, 10.0**high), ylim=(0, 1))
    axes.axvspan(10.0**low, 1, 0.0, 0.42, color=BELOW, linewidth=0)
    axes.axvspan(1, 10.0**high, 0.0, 0.42, color=BEYOND, linewidth=0)
    for x, region in ((0.02, "fitting"), (0.98, "reconstruction")):
        side = "left" if x < 0.5 else "right"
        axes.text(x, 0.2, region, transform=axes.transAxes, ha=side, va="center", color=MUTED)
    axes.plot([1, 1], [0, 0.88], color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
    axes.plot([ratio, ratio], [0.21, 0.88], color=ACCENT, linewidth=1.5)
    axes.plot([ratio], [0.21], "o", color=ACCENT, markersize=10)
    label: Any = {"textcoords": "offset points", "va": "top", "linespacing": 1.35}
    # The two labels stand back to back, so that they cannot meet however close the ratio is to 1.
    for x, text, right, colour in (
        (ratio, f"this run\n{number(ratio)}", ratio >= 1, ACCENT),
        (1.0, "counting\nlimit", ratio < 1, MUTED),
    ):
        side, offset = ("left", 5) if right else ("right", -5)
        axes.annotate(text, (x, 0.92), xytext=(offset, 0), ha=side, color=colour, **label)
    axes.xaxis.set_minor_locator(NullLocator())
    places = _decades(low, high)
    names = [f"{10.0**k:g}" if abs(k) < 4 else power_of_ten(k) for k in places]
    axes.set_xticks([10.0**k for k in places], names)
    axes.set_xlabel("equations for each unknown")
    axes.set_yticks([])
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    return inline(figure)


def _decades(low: int, high: int) -> list[int]:
    """List exponents between two others, evenly thinned, 0 among them if it is between.

    Example:
        >>> _decades(-1, 2), _decades(-3, 9)
        ([-1, 0, 1, 2], [-2, 0, 2, 4, 6, 8])
    """
    step = -(-(high - low + 1) // 7)  # seven labels at most
    return [k for k in range(low, high + 1) if k % step == 0]


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Mark whole powers of ten around the values, written as such."""
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    axes.set_ylim(10.0**low / 1.6, 10.0**high * 1.6)
    _logarithmic(axes, "y")
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
