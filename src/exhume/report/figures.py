"""Plots as inline SVG in the colours of the page.

`progress` draws the residual over time, `law` where a run stands.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Plot(NamedTuple):
    """A plot is an inline SVG, and the names that its tints stand for, in order."""

    svg: Markup
    legend: list[str]


class Moment(NamedTuple):
    """A moment is one event that can be drawn."""

    seconds: float
    residual: float
    candidates: float
    phase: str


@matplotlib.rc_context(STYLE)
def progress(events: Iterable[Mapping[str, Any]], floor: float | None = None) -> Plot | None:
    """Draw the residual over time, phases tinted, and the number of candidates if it changes.

    Args:
        events: what the run recorded.
        floor: the residual at the truth, where known.

    Returns:
        The plot, None where nothing can be drawn.
    """
    moments = list(_moments(events))
    if not moments:
        return None
    unit, name = (60.0, "minutes") if moments[-1].seconds > 300 else (1.0, "seconds")
    times = [moment.seconds / unit for moment in moments]
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.add_subplot()

    legend: list[str] = []
    for phase, start, end in _spans(times, [moment.phase for moment in moments]):
        if phase not in legend:
            legend.append(phase)
        axes.axvspan(start, end, color=PHASES[legend.index(phase) % 3], linewidth=0)
    if floor:
        axes.axhline(floor, color=SECOND, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "at the truth",
            (1, floor),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            color=SECOND,
        )
    residuals = [moment.residual for moment in moments]
    axes.plot(times, residuals, color=ACCENT, linewidth=1.8, solid_joinstyle="round")
    axes.plot(times[-1:], residuals[-1:], "o", color=ACCENT, markersize=5)
    axes.margins(x=0.02)
    axes.set(xlabel=name, ylabel="residual")
    _log_axis(axes, [*residuals, *([floor] if floor else [])])

    counts = [moment.candidates for moment in moments]
    if len(set(counts)) > 1:
        twin = axes.twinx()
        twin.step(times, counts, where="post", color=INK, linewidth=1, alpha=0.55)
        twin.set(ylabel="candidates (thin line)", ylim=(0, 1.15 * max(counts)))
        twin.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        twin.tick_params(length=0)
        twin.spines[:].set_visible(False)
    return Plot(plots.inline(figure, VARIABLES), legend)


@matplotlib.rc_context(STYLE)
def law(ratio: float) -> Markup:
    """Draw where a run stands on the axis of p·m/(d·n), the counting limit at 1."""
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
    # The two labels stand back to back, so that they cannot meet however close the ratio is to 1.
    _label(axes, ratio, f"this run\n{number(ratio)}", ratio >= 1, ACCENT)
    _label(axes, 1.0, "counting\nlimit", ratio < 1, MUTED)
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = _decades(low, high)
    names = [f"{10.0**k:g}" if abs(k) < 4 else power_of_ten(k) for k in ticks]
    axes.set_xticks([10.0**k for k in ticks], names)
    axes.set_xlabel("numbers for each unknown, p·m / (d·n)")
    axes.set_yticks([])
    axes.spines[["left", "right", "bottom"]].set_visible(False)
    return plots.inline(figure, VARIABLES)


def _label(axes: Axes, x: float, text: str, right: bool, colour: str) -> None:
    """Write two lines beside the upper end of a mark."""
    axes.annotate(
        text,
        (x, 0.92),
        xytext=(5 if right else -5, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="top",
        color=colour,
        linespacing=1.35,
    )


def _moments(events: Iterable[Mapping[str, Any]]) -> Iterable[Moment]:
    """Yield the events with a time and a positive residual."""
    for event in events:
        seconds, residual = finite(event.get("seconds")), finite(event.get("residual"))
        if seconds is not None and residual is not None and residual > 0:
            count = finite(event.get("candidates")) or 0.0
            yield Moment(seconds, residual, count, str(event.get("phase", "search")))


def _spans(times: Sequence[float], phases: Sequence[str]) -> Iterable[tuple[str, float, float]]:
    """Yield stretches of equal phase, each up to the start of the next.

    Example:
        >>> list(_spans([0.0, 1.0, 2.0], ["explore", "explore", "polish"]))
        [('explore', 0.0, 2.0), ('polish', 2.0, 2.0)]
    """
    start = 0
    for phase, group in itertools.groupby(phases):
        end = start + len(list(group))
        yield phase, times[start], times[min(end, len(times) - 1)]
        start = end


def _decades(low: int, high: int, most: int = 7) -> list[int]:
    """List exponents between two others, evenly thinned, 0 among them if it is between.

    Example:
        >>> _decades(-1, 2), _decades(-3, 9)
        ([-1, 0, 1, 2], [-2, 0, 2, 4, 6, 8])
    """
    step = -(-(high - low + 1) // most)
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
