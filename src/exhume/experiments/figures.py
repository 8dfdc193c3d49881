"""The phase diagram: label fitting and reconstruction against p, with the counted thresholds.

A figure is drawn once, in the colours of the light page. As a file it is SVG or PNG; on a page
colours become CSS variables, so that it also serves the dark one.

Inside: `draw`, `svg`, `png`, `inline`.
"""

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from exhume.experiments.attack import SUBSPACE
from exhume.experiments.law import OURS, Curve, Point, Setting, Summary
from exhume.wording import power_of_ten

CARD, INK, MUTED, LINE, ACCENT, SECOND, LOW, HIGH = (
    "#fffefb", "#211d18", "#7a7267", "#e6e0d5", "#b04a1e", "#2b7274", "#f3ede2", "#e4f0ee",
)  # fmt: skip
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    ACCENT: "var(--accent)",
    SECOND: "var(--second)",
    LOW: "var(--wash)",
    HIGH: "color-mix(in srgb, var(--high) 55%, var(--card))",
    CARD: "var(--card)",
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
WORDS = {
    "relu": "ReLU",
    "relu+tanh": "ReLU + tanh",
    "random_features": "random features",
    "two_layer": "two layers",
    "resnet": "residual network",
    "vit": "vision transformer",
    "squared": "squared loss",
    "logistic": "logistic loss",
    "cross_entropy": "cross-entropy",
}


@matplotlib.rc_context(STYLE)
def draw(summary: Summary) -> Figure:
    """All that a sweep found.

    One setting of the data: a phase diagram for each kind of model. Several d or n: error against
    p, and against p/(dn), where curves fall on one another. Several ranks: recovery against p/(dn)
    and p/(rn).
    """
    kinds = list(dict.fromkeys(setting.kind for setting in summary.settings))
    if any(setting.rank is not None for setting in summary.settings):
        return _side_by_side(summary, kinds, _rank_panels)
    if len({(setting.dim, setting.samples) for setting in summary.settings}) > 1:
        return _side_by_side(summary, kinds, _collapse_panels)
    columns = min(2, len(kinds))
    rows = -(-len(kinds) // columns)
    size = (9.0, 5.0) if columns == 1 else (12.0, 4.4 * rows)
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor=CARD)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, kind in zip(grid, kinds, strict=False):
        _phase(axes, _of(summary.fits, kind), _of(summary.attacks, kind))
    for axes in grid[len(kinds) :]:
        axes.set_visible(False)
    return figure


def svg(figure: Figure) -> str:
    """As a file of its own; the same figure gives the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", facecolor=CARD, metadata=nothing)
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """As pixels."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="png", facecolor=CARD, metadata={"Software": None})
    return buffer.getvalue()


def inline(figure: Figure) -> Markup:
    """As an element of a page, in its colours."""
    text = svg(figure)
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    for colour, expression in VARIABLES.items():
        text = text.replace(colour, expression)
    return Markup(text)


def _of(curves: Iterable[Curve], kind: tuple[str, str, str]) -> list[Curve]:
    return [curve for curve in curves if curve.setting.kind == kind]


def model(setting: Setting) -> str:
    """The model in words."""
    architecture, activation, loss = setting.kind
    own = () if architecture in ("resnet", "vit") else (WORDS.get(activation, activation),)
    words = ", ".join((WORDS[architecture], *own, WORDS[loss]))
    return words[0].upper() + words[1:]


def _title(setting: Setting, alone: bool) -> str:
    """The model, and the sizes of the data if they are the only ones."""
    return model(setting) + (f", d = {setting.dim:,}, n = {setting.samples:,}" if alone else "")


def _phase(axes: Axes, fits: Sequence[Curve], attacks: Sequence[Curve]) -> None:
    """Errors against p in one setting."""
    setting = attacks[0].setting
    places = [point.width for curve in (*fits, *attacks) for point in curve.points]
    first, second = setting.labels_fit, setting.determined
    left, right = min(min(places) / 1.08, second / 8), max(places) * 1.08
    axes.set(xscale="log", xlim=(left, right), ylim=(-0.03, 1.42))
    axes.axvspan(left, min(first, right), color=LOW, linewidth=0)
    axes.axvspan(max(left, min(second, right)), right, color=HIGH, linewidth=0)
    _threshold(axes, first, f"p = n = {first:,}", "labels fit")
    word = "dn" if setting.outputs == 1 else "counted"
    _threshold(axes, second, f"p = {word} = {second:,}", "data determined")
    _chance(axes, attacks)
    for curve in fits:
        _line(axes, curve, INK, "-", lambda point: point.width)
        _words(axes, max(first, _crossing(curve, 0.3) or first), 0.3, "label error", INK, True)
    if not fits:
        _trained(axes, attacks[0])
    for curve, colour, dashes in _styled(attacks):
        _line(axes, curve, colour, dashes, lambda point: point.width)
    _name_methods(axes, attacks, second)
    axes.set_title(_title(setting, alone=True), color=INK)
    axes.set(xlabel="p, features of the last layer", ylabel="relative error")
    _whole_numbers(axes)


def _styled(attacks: Sequence[Curve]) -> list[tuple[Curve, str, Any]]:
    """Ours solid, every other dashed."""
    styles: list[tuple[Curve, str, Any]] = []
    for curve in attacks:
        ours = curve.method in (OURS, SUBSPACE)
        colour = ACCENT if curve.method == attacks[0].method else SECOND
        styles.append((curve, colour, "-" if ours else DASHES))
    return styles


def _threshold(axes: Axes, place: float, upper: str, lower: str) -> None:
    """A vertical line with two words above the axes."""
    low, high = axes.get_xlim()
    if not low <= place <= high:
        return
    axes.axvline(place, color=MUTED, linewidth=1.0)
    for words, offset, colour in ((lower, 14, INK), (upper, 3, MUTED)):
        axes.annotate(
            words, (place, 1), xycoords=("data", "axes fraction"), xytext=(0, offset),
            textcoords="offset points", ha="center", color=colour, fontsize=9,
        )  # fmt: skip


def _chance(axes: Axes, attacks: Sequence[Curve]) -> None:
    levels = [point.chance for curve in attacks for point in curve.points if point.chance]
    if not levels:
        return
    level = sum(levels) / len(levels)
    axes.axhline(level, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.annotate(
        "random guess", (1, level), xycoords=("axes fraction", "data"), xytext=(-4, 3),
        textcoords="offset points", ha="right", color=MUTED, fontsize=9,
    )  # fmt: skip


def _line(
    axes: Axes,
    curve: Curve,
    colour: str,
    dashes: Any,
    place: Callable[[Point], float],
    bold: bool = True,
) -> None:
    """The median over the seeds, with the quartiles as a band; thin and alone if not bold."""
    points = [point for point in curve.points if point.error is not None]
    x = [place(point) for point in points]
    errors = [point.error or 0.0 for point in points]
    if not bold:
        axes.plot(x, errors, color=colour, linestyle=dashes, linewidth=1.2, clip_on=False)
        return
    if any(point.seeds > 1 for point in points):
        low, high = ([getattr(point, word) for point in points] for word in ("low", "high"))
        axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(x, errors, color=colour, linestyle=dashes, linewidth=2.0, clip_on=False)
    axes.plot(x, errors, "o", color=colour, markersize=3.6, clip_on=False)


def _crossing(curve: Curve, level: float) -> float | None:
    """Where the error falls below a level for good, interpolated."""
    points = [point for point in curve.points if point.error is not None]
    for before, after in reversed(list(itertools.pairwise(points))):
        high, low = before.error or 0.0, after.error or 0.0
        if high >= level > low:
            share = (high - level) / (high - low)
            return float(before.width * (after.width / before.width) ** share)
    return None


def _words(axes: Axes, place: float, level: float, words: str, colour: str, right: bool) -> None:
    """Words beside a place, in the colour of their curve."""
    axes.annotate(
        words, (place, level), xytext=(8 if right else -8, 0), textcoords="offset points",
        ha="left" if right else "right", va="center", color=colour, fontweight="bold",
    )  # fmt: skip


def _name_methods(axes: Axes, attacks: Sequence[Curve], threshold: float) -> None:
    """The curve that falls first is named on the left of the threshold, the others on their right.

    A curve that never falls is named above its end.
    """
    order = sorted(attacks, key=lambda curve: _crossing(curve, 0.45) or math.inf)
    colours = {id(curve): colour for curve, colour, _ in _styled(attacks)}
    for index, curve in enumerate(order):
        words = curve.name
        level = 0.45 if index == 0 else min(1.05, 0.42 + 0.3 * index)
        place = _crossing(curve, level)
        colour = colours[id(curve)]
        ends = [point for point in curve.points if point.error is not None]
        if place is not None and index == 0:
            words = f"reconstruction error,\n{words}"
            _words(axes, min(place, threshold), level, words, colour, False)
        elif place is not None:
            _words(axes, place, level, words, colour, True)
        elif ends:
            highest = max(point.error or 0.0 for point in ends[-4:])
            _words(axes, ends[-1].width, highest + 0.07, words, colour, False)


def _trained(axes: Axes, curve: Curve) -> None:
    """The training loss of the victims themselves, relative to that of answering zero."""
    points = [point for point in curve.points if point.label_error is not None]
    x, y = [point.width for point in points], [point.label_error or 0.0 for point in points]
    if not x:
        return
    axes.plot(x, y, color=INK, linewidth=2.0, clip_on=False)
    axes.annotate(
        "training loss", (x[0], y[0]), xytext=(4, 6), textcoords="offset points", color=INK,
        fontweight="bold",
    )  # fmt: skip


def _whole_numbers(axes: Axes) -> None:
    """A few whole numbers on a logarithmic axis."""
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0), numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())

    def words(value: float, _: object) -> str:
        return f"{value:,.0f}" if value < 1e6 else power_of_ten(round(math.log10(value)))

    axes.xaxis.set_major_formatter(FuncFormatter(words))


def _ratios(axes: Axes) -> None:
    """Ratios on a logarithmic axis."""
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0), numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _side_by_side(
    summary: Summary,
    kinds: Sequence[tuple[str, str, str]],
    panels: Callable[[Axes, Axes, list[Curve], list[Curve]], None],
) -> Figure:
    """Two panels for each kind of model."""
    size = (12.0, 4.6 * len(kinds))
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor=CARD)
    grid = figure.subplots(len(kinds), 2, squeeze=False, sharey=True)
    for row, kind in zip(grid, kinds, strict=True):
        panels(row[0], row[1], _of(summary.fits, kind), _of(summary.attacks, kind))
    return figure


def shades(count: int) -> list[str]:
    """Colours from the accent to the second, one for each of so many.

    Example:
        >>> shades(1), shades(3)[1]
        (['#b04a1e'], '#6e5e49')
    """
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (ACCENT, SECOND)]
    mixed = []
    for index in range(count):
        share = index / max(1, count - 1)
        mixed.append("#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(*ends)))  # noqa: B905
    return mixed


def _collapse_panels(left: Axes, right: Axes, fits: list[Curve], attacks: list[Curve]) -> None:
    """Errors against p, and against p/(dn)."""
    sizes = list(dict.fromkeys((c.setting.dim, c.setting.samples) for c in attacks))
    colours = dict(zip(sizes, shades(len(sizes)), strict=True))
    first = attacks[0].method
    for curve in (*fits, *attacks):
        size, ours = (curve.setting.dim, curve.setting.samples), curve.method == first
        dashes = "-" if curve.method in (first, None) else DASHES
        _line(left, curve, colours[size], dashes, lambda point: point.width, bold=ours)
        if curve.method:
            _line(right, curve, colours[size], dashes, lambda point: point.ratio, bold=ours)
        if ours:
            left.plot([curve.setting.determined], [1.36], "v", color=colours[size], markersize=6)
    for axes in (left, right):
        axes.set(xscale="log", ylim=(-0.03, 1.42))
        _chance(axes, attacks)
    _beyond(right, "p = dn")
    left.annotate(
        "▼ p = dn", (0, 1.36), xycoords=("axes fraction", "data"), xytext=(6, 0),
        textcoords="offset points", va="center", color=MUTED, fontsize=9,
    )  # fmt: skip
    for curve in fits[-1:]:
        _words(left, curve.setting.samples, 0.3, "label errors", MUTED, True)
    left.set_title(_title(attacks[0].setting, alone=False), color=INK)
    left.set(xlabel="p, features of the last layer", ylabel="relative error")
    right.set(xlabel="p / (dn)")
    _whole_numbers(left)
    _ratios(right)
    entries = [(f"d = {d:,}, n = {n:,}", colours[d, n], "-") for d, n in sizes]
    _legend(right, entries + _method_entries(attacks))


def _beyond(axes: Axes, words: str) -> None:
    """The threshold at 1, and what lies beyond it."""
    low, high = axes.get_xlim()
    axes.set_xlim(low, high)
    if high > 1:
        axes.axvspan(max(1.0, low), high, color=HIGH, linewidth=0, zorder=0)
    _threshold(axes, 1.0, words, "data determined")


def _rank_panels(left: Axes, right: Axes, fits: list[Curve], attacks: list[Curve]) -> None:
    """Recovery against p/(dn), and against p/(rn)."""
    ranks = sorted({c.setting.rank or c.setting.dim for c in attacks})
    colours = dict(zip(ranks, shades(len(ranks)), strict=True))
    first = _solid(attacks)
    for curve in attacks:
        rank = curve.setting.rank or curve.setting.dim
        solid = curve.method == first
        shares = [point.recovered or 0.0 for point in curve.points]
        for axes, unit in ((left, 1.0), (right, curve.setting.dim / rank)):
            x = [point.ratio * unit for point in curve.points]
            axes.plot(
                x, shares, color=colours[rank], linestyle="-" if solid else DASHES,
                linewidth=2.0 if solid else 1.2, marker="o" if solid else "", markersize=3.4,
                clip_on=False,
            )  # fmt: skip
    for axes, word in ((left, "p = dn"), (right, "p = rn")):
        axes.set(xscale="log", ylim=(-0.02, 1.03))
        _beyond(axes, word)
        _ratios(axes)
    sizes = {(c.setting.dim, c.setting.samples) for c in attacks}
    left.set_title(_title(attacks[0].setting, alone=len(sizes) == 1), color=INK)
    left.set(xlabel="p / (dn)", ylabel="share of the samples recovered")
    right.set(xlabel="p / (rn)")
    entries = [(f"r = {rank:,}", colours[rank], "-") for rank in ranks]
    _legend(right, entries + _method_entries(attacks))


def _solid(attacks: Sequence[Curve]) -> str | None:
    """The method that is drawn with solid lines: the one of the subspace, or the first."""
    aware = any(curve.method == SUBSPACE for curve in attacks)
    return SUBSPACE if aware else attacks[0].method


def _method_entries(curves: Sequence[Curve]) -> list[tuple[str, str, Any]]:
    """What solid and dashed lines mean, where there are both or a subspace was looked for."""
    methods = {curve.name: curve.method for curve in curves}
    if len(methods) < 2 and SUBSPACE not in methods.values():
        return []
    first = _solid(curves)
    return [(name, MUTED, "-" if m == first else DASHES) for name, m in methods.items()]


def _legend(axes: Axes, entries: Sequence[tuple[str, str, Any]]) -> None:
    handles = [
        axes.plot([], [], color=colour, linestyle=dashes, linewidth=2.0, label=words)[0]
        for words, colour, dashes in entries
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), handlelength=1.9)
