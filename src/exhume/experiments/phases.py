"""The phase diagram: label fitting and reconstruction against p, with the counted thresholds."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exhume.experiments.cells.attack import SUBSPACE
from exhume.experiments.law import OURS, LawCurve, Place, Setting, Summary, summarise
from exhume.report.plots import (
    ACCENT,
    DASHES,
    HIGH,
    INK,
    LOW,
    MUTED,
    SECOND,
    grid,
    shades,
    styled,
    ticks,
)
from exhume.sweep import Record
from exhume.wording import power_of_ten

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

Pair = tuple[float, float]

SIZES = ("inputs", "outputs", "parameters", "actual_ratio")
"""What places a cell in a phase diagram."""


@styled
def draw(summary: Summary) -> Figure:
    """Draw all that a sweep found.

    One setting of the data: a phase diagram for each kind of model. Several d or n: error against
    p, and against p/(dn), where curves fall on one another. Several ranks: recovery against p/(dn)
    and p/(rn).
    """
    kinds = list(dict.fromkeys(setting.kind for setting in summary.settings))
    ranks = any(setting.rank is not None for setting in summary.settings)
    if ranks or len({(setting.dim, setting.samples) for setting in summary.settings}) > 1:
        panels = _rank_panels if ranks else _collapse_panels
        figure, axes = grid(len(kinds), 2, (12.0, 4.6 * len(kinds)), sharey=True)
        for row, kind in zip(axes, kinds, strict=True):
            panels(row[0], row[1], _of(summary.fits, kind), _of(summary.attacks, kind))
        return figure
    columns = min(2, len(kinds))
    rows = -(-len(kinds) // columns)
    figure, axes = grid(rows, columns, (9.0, 5.0) if columns == 1 else (12.0, 4.4 * rows))
    flat = axes.flatten()
    for panel, kind in zip(flat, kinds, strict=False):
        _phase(panel, _of(summary.fits, kind), _of(summary.attacks, kind))
    for panel in flat[len(kinds) :]:
        panel.set_visible(False)
    return figure


def phases(records: Sequence[Record]) -> Figure | None:
    """Draw records, of which some may lack what places them.

    Label fitting is drawn for sizes that have an attack with an error to draw.

    Returns:
        The figure; None if there is no such attack.
    """
    summary = summarise(
        record
        for record in records
        if record.values is not None and all(record.values.get(w, 0) is not None for w in SIZES)
    )
    attacks = [c for c in summary.attacks if any(place.error is not None for place in c.places)]
    if not attacks:
        return None
    sizes = {(curve.setting.dim, curve.setting.samples) for curve in attacks}
    fits = [c for c in summary.fits if (c.setting.dim, c.setting.samples) in sizes]
    return draw(replace(summary, fits=tuple(fits), attacks=tuple(attacks)))


def _of(curves: Iterable[LawCurve], kind: tuple[str, str, str]) -> list[LawCurve]:
    return [curve for curve in curves if curve.setting.kind == kind]


def model(setting: Setting) -> str:
    """Return the model in words."""
    architecture, activation, loss = setting.kind
    own = () if architecture in ("resnet", "vit") else (WORDS.get(activation, activation),)
    words = ", ".join((WORDS[architecture], *own, WORDS[loss]))
    return words[0].upper() + words[1:]


def _title(axes: Axes, setting: Setting, alone: bool) -> None:
    """The model, and the sizes of the data if they are the only ones."""
    sizes = f", d = {setting.dim:,}, n = {setting.samples:,}" if alone else ""
    axes.set_title(model(setting) + sizes, color=INK)


def _phase(axes: Axes, fits: Sequence[LawCurve], attacks: Sequence[LawCurve]) -> None:
    """Errors against p in one setting; ours solid, every other dashed."""
    setting = attacks[0].setting
    places = [place.width for curve in (*fits, *attacks) for place in curve.places]
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
        _line(axes, curve, INK, "-", lambda place: place.width)
        _words(axes, max(first, _crossing(curve, 0.3) or first), 0.3, "label error", INK, True)
    if not fits:
        _trained(axes, attacks[0])
    colours = [ACCENT if curve.method == attacks[0].method else SECOND for curve in attacks]
    for curve, colour in zip(attacks, colours, strict=True):
        dashes = "-" if curve.method in (OURS, SUBSPACE) else DASHES
        _line(axes, curve, colour, dashes, lambda place: place.width)
    _name_methods(axes, attacks, colours, second)
    _title(axes, setting, alone=True)
    axes.set(xlabel="p, features of the last layer", ylabel="relative error")
    ticks(axes, (1.0, 3.0), _whole)


def _note(axes: Axes, words: str, at: Pair, by: Pair, **look: Any) -> None:
    """Words beside a place, so many points away from it."""
    axes.annotate(words, at, xytext=by, textcoords="offset points", **look)


def _small(axes: Axes, words: str, at: Pair, by: Pair, across: str, **look: Any) -> None:
    """Small words; along the axis that `across` names, the place is a share of the panel."""
    coordinates = ("axes fraction", "data") if across == "x" else ("data", "axes fraction")
    _note(axes, words, at, by, **{"color": MUTED, "fontsize": 9, "xycoords": coordinates, **look})


def _threshold(axes: Axes, place: float, upper: str, lower: str) -> None:
    """A vertical line with two words above the axes."""
    low, high = axes.get_xlim()
    if low <= place <= high:
        axes.axvline(place, color=MUTED, linewidth=1.0)
        _small(axes, lower, (place, 1), (0, 14), across="y", ha="center", color=INK)
        _small(axes, upper, (place, 1), (0, 3), across="y", ha="center")


def _chance(axes: Axes, attacks: Sequence[LawCurve]) -> None:
    levels = [place.chance for curve in attacks for place in curve.places if place.chance]
    if levels:
        level = sum(levels) / len(levels)
        axes.axhline(level, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        _small(axes, "random guess", (1, level), (-4, 3), across="x", ha="right")


def _line(
    axes: Axes,
    curve: LawCurve,
    colour: str,
    dashes: Any,
    at: Callable[[Place], float],
    bold: bool = True,
) -> None:
    """The median over the seeds, with the quartiles as a band; thin and alone if not bold."""
    places = [place for place in curve.places if place.error is not None]
    x, errors = [at(place) for place in places], [place.error or 0.0 for place in places]
    if not bold:
        axes.plot(x, errors, color=colour, linestyle=dashes, linewidth=1.2, clip_on=False)
        return
    if any(place.seeds > 1 for place in places):
        low, high = ([getattr(place, word) for place in places] for word in ("low", "high"))
        axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(x, errors, color=colour, linestyle=dashes, linewidth=2.0, clip_on=False)
    axes.plot(x, errors, "o", color=colour, markersize=3.6, clip_on=False)


def _crossing(curve: LawCurve, level: float) -> float | None:
    """Where the error falls below a level for good, interpolated."""
    places = [place for place in curve.places if place.error is not None]
    for before, after in reversed(list(itertools.pairwise(places))):
        high, low = before.error or 0.0, after.error or 0.0
        if high >= level > low:
            share = (high - level) / (high - low)
            return float(before.width * (after.width / before.width) ** share)
    return None


def _words(axes: Axes, place: float, level: float, words: str, colour: str, right: bool) -> None:
    """Words beside a place, in the colour of their curve."""
    side = {"ha": "left" if right else "right", "va": "center"}
    by = (8 if right else -8, 0)
    _note(axes, words, (place, level), by, color=colour, fontweight="bold", **side)


def _name_methods(
    axes: Axes, attacks: Sequence[LawCurve], colours: Sequence[str], threshold: float
) -> None:
    """The curve that falls first is named on the left of the threshold, the others on their right.

    A curve that never falls is named above its end.
    """
    order = sorted(
        zip(attacks, colours, strict=True), key=lambda pair: _crossing(pair[0], 0.45) or math.inf
    )
    for index, (curve, colour) in enumerate(order):
        level = 0.45 if index == 0 else min(1.05, 0.42 + 0.3 * index)
        place = _crossing(curve, level)
        ends = [place for place in curve.places if place.error is not None]
        if place is not None and index == 0:
            words = f"reconstruction error,\n{curve.name}"
            _words(axes, min(place, threshold), level, words, colour, False)
        elif place is not None:
            _words(axes, place, level, curve.name, colour, True)
        elif ends:
            highest = max(place.error or 0.0 for place in ends[-4:])
            _words(axes, ends[-1].width, highest + 0.07, curve.name, colour, False)


def _trained(axes: Axes, curve: LawCurve) -> None:
    """The training loss of the victims themselves, relative to that of answering zero."""
    shown = {p.width: p.label_error for p in curve.places if p.label_error is not None}
    if not shown:
        return
    axes.plot(list(shown), list(shown.values()), color=INK, linewidth=2.0, clip_on=False)
    first = next(iter(shown.items()))
    _note(axes, "training loss", first, (4, 6), color=INK, fontweight="bold")


def _whole(value: float) -> str:
    """A whole number on an axis."""
    return f"{value:,.0f}" if value < 1e6 else power_of_ten(round(math.log10(value)))


def _collapse_panels(
    left: Axes, right: Axes, fits: list[LawCurve], attacks: list[LawCurve]
) -> None:
    """Errors against p, and against p/(dn)."""
    sizes = list(dict.fromkeys((c.setting.dim, c.setting.samples) for c in attacks))
    colours = dict(zip(sizes, shades(len(sizes)), strict=True))
    first = attacks[0].method
    for curve in (*fits, *attacks):
        size, ours = (curve.setting.dim, curve.setting.samples), curve.method == first
        dashes = "-" if curve.method in (first, None) else DASHES
        _line(left, curve, colours[size], dashes, lambda place: place.width, bold=ours)
        if curve.method:
            _line(right, curve, colours[size], dashes, lambda place: place.ratio, bold=ours)
        if ours:
            left.plot([curve.setting.determined], [1.36], "v", color=colours[size], markersize=6)
    for axes in (left, right):
        axes.set(xscale="log", ylim=(-0.03, 1.42))
        _chance(axes, attacks)
    _beyond(right, "p = dn")
    _small(left, "▼ p = dn", (0, 1.36), (6, 0), across="x", va="center")
    for curve in fits[-1:]:
        _words(left, curve.setting.samples, 0.3, "label errors", MUTED, True)
    _title(left, attacks[0].setting, alone=False)
    left.set(xlabel="p, features of the last layer", ylabel="relative error")
    right.set(xlabel="p / (dn)")
    ticks(left, (1.0, 3.0), _whole)
    ticks(right, (1.0, 2.0, 5.0), "{:g}".format)
    entries = [(f"d = {d:,}, n = {n:,}", colours[d, n], "-") for d, n in sizes]
    _legend(right, entries, attacks)


def _rank_panels(left: Axes, right: Axes, fits: list[LawCurve], attacks: list[LawCurve]) -> None:
    """Recovery against p/(dn), and against p/(rn)."""
    ranks = sorted({c.setting.rank or c.setting.dim for c in attacks})
    colours = dict(zip(ranks, shades(len(ranks)), strict=True))
    first = _solid(attacks)
    for curve in attacks:
        rank = curve.setting.rank or curve.setting.dim
        look: dict[str, Any] = {"linestyle": DASHES, "linewidth": 1.2, "marker": ""}
        if curve.method == first:
            look = {"linestyle": "-", "linewidth": 2.0, "marker": "o"}
        shares = [place.recovered or 0.0 for place in curve.places]
        for axes, unit in ((left, 1.0), (right, curve.setting.dim / rank)):
            x = [place.ratio * unit for place in curve.places]
            axes.plot(x, shares, color=colours[rank], markersize=3.4, clip_on=False, **look)
    for axes, word in ((left, "p = dn"), (right, "p = rn")):
        axes.set(xscale="log", ylim=(-0.02, 1.03))
        _beyond(axes, word)
        ticks(axes, (1.0, 2.0, 5.0), "{:g}".format)
    sizes = {(c.setting.dim, c.setting.samples) for c in attacks}
    _title(left, attacks[0].setting, alone=len(sizes) == 1)
    left.set(xlabel="p / (dn)", ylabel="share of the samples recovered")
    right.set(xlabel="p / (rn)")
    _legend(right, [(f"r = {rank:,}", colours[rank], "-") for rank in ranks], attacks)


def _beyond(axes: Axes, words: str) -> None:
    """The threshold at 1, and what lies beyond it."""
    low, high = axes.get_xlim()
    axes.set_xlim(low, high)
    if high > 1:
        axes.axvspan(max(1.0, low), high, color=HIGH, linewidth=0, zorder=0)
    _threshold(axes, 1.0, words, "data determined")


def _solid(attacks: Sequence[LawCurve]) -> str | None:
    """The method that is drawn with solid lines: the one of the subspace, or the first."""
    aware = any(curve.method == SUBSPACE for curve in attacks)
    return SUBSPACE if aware else attacks[0].method


def _legend(axes: Axes, entries: list[tuple[str, str, Any]], curves: Sequence[LawCurve]) -> None:
    """Colours, and what solid and dashed lines mean where that is not plain."""
    methods = {curve.name: curve.method for curve in curves}
    if len(methods) > 1 or SUBSPACE in methods.values():
        first = _solid(curves)
        entries += [(name, MUTED, "-" if m == first else DASHES) for name, m in methods.items()]
    handles = [
        axes.plot([], [], color=colour, linestyle=dashes, linewidth=2.0, label=words)[0]
        for words, colour, dashes in entries
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), handlelength=1.9)
