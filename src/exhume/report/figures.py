"""Plots as inline SVG in the colours of the page: a run over time, and where it stands."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from exhume.report import plots
from exhume.report.plots import ACCENT, INK, LINE, MUTED, SECOND
from exhume.wording import finite, number, power_of_ten

LOW, HIGH = "#e9ddcb", "#cfe3df"
PHASES = ("#f4eee3", "#e9f0ec", "#f3e6dd")
VARIABLES = {
    **plots.VARIABLES,
    LOW: "var(--low)",
    HIGH: "var(--high)",
    **{colour: f"var(--phase-{i})" for i, colour in enumerate(PHASES)},
}
STYLE: Any = {
    **plots.STYLE,
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


@matplotlib.rc_context(STYLE)
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
    return plots.inline(figure, VARIABLES), legend


@matplotlib.rc_context(STYLE)
def law(ratio: float) -> Markup:
    """Draw where a run stands on the axis of equations for each unknown, the limit at 1."""
    place = math.log10(ratio)
    room = max(1.0, 0.4 * abs(place))  # for the words at either end
    low, high = math.floor(min(0.0, place) - room), math.ceil(max(0.0, place) + room)
    figure = Figure(figsize=(4.6, 1.55), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlim=(10.0**low, 10.0**high), ylim=(0, 1))
    axes.axvspan(10.0**low, 1, 0.0, 0.42, color=LOW, linewidth=0)
    axes.axvspan(1, 10.0**high, 0.0, 0.42, color=HIGH, linewidth=0)
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
    ticks = _decades(low, high)
    names = [f"{10.0**k:g}" if abs(k) < 4 else power_of_ten(k) for k in ticks]
    axes.set_xticks([10.0**k for k in ticks], names)
    axes.set_xlabel("equations for each unknown")
    axes.set_yticks([])
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    return plots.inline(figure, VARIABLES)


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
    axes.set(yscale="log", ylim=(10.0**low / 1.6, 10.0**high * 1.6))
    axes.yaxis.set_minor_locator(NullLocator())
    ticks = _decades(low, high)
    axes.set_yticks([10.0**k for k in ticks], [power_of_ten(k) for k in ticks])
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.set_axisbelow(True)
