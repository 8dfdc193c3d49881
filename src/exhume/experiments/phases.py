"""The phase diagram: label fitting and reconstruction against p, with the counted thresholds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exhume.experiments.law import LawCurve, Place, Summary, summarise
from exhume.report.plots import DASHES, HIGH, INK, LOW, MUTED, grid, shades, styled, ticks
from exhume.sweep import Record
from exhume.wording import power_of_ten

SIZES = ("inputs", "outputs", "parameters", "actual_ratio")  # what places a cell in the diagram


@styled
def draw(summary: Summary) -> Figure:
    """Draw errors against p, and recovery against p over the counted one, a row for each model.

    Colours are sizes of the data. The first method is drawn solid, others dashed.
    """
    models = list(dict.fromkeys(curve.model for curve in summary.attacks))
    figure, axes = grid(len(models), 2, (13.0, 4.6 * len(models)))
    for (left, right), model in zip(axes, models, strict=True):
        fits, attacks = (
            [curve for curve in curves if curve.model == model]
            for curves in (summary.fits, summary.attacks)
        )
        sizes = list(dict.fromkeys(_size(curve) for curve in attacks))
        colours = dict(zip(sizes, shades(len(sizes)), strict=True))
        looks: dict[str, Any] = {attacks[0].name: "-"}
        looks |= {curve.name: DASHES for curve in attacks if curve.name not in looks}
        _errors(left, fits, attacks, colours, looks)
        for curve in attacks:
            x = [place.width / curve.counted for place in curve.places]
            shares = [place.recovered or 0.0 for place in curve.places]
            look = {"color": colours[_size(curve)], "linestyle": looks[curve.name]}
            right.plot(x, shares, marker="o", markersize=3.4, clip_on=False, **look)
        left.set_title(model + (f", {sizes[0]}" if len(sizes) == 1 else ""), color=INK)
        right.set(xscale="log", ylim=(-0.02, 1.03), xlabel="p / counted p: dn, or rn if r is known")
        right.set(ylabel="share of the samples recovered")
        low, high = right.get_xlim()
        right.axvspan(max(1.0, low), max(1.0, low, high), color=HIGH, linewidth=0, zorder=0)
        right.set_xlim(low, high)
        _threshold(right, 1.0, "as many equations as unknowns", "data determined")
        ticks(right, (1.0, 2.0, 5.0), "{:g}".format)
        several = len(sizes) > 1
        entries = [(size, colours[size], "-") for size in sizes if several]
        entries += [(n, MUTED if several else colours[sizes[0]], look) for n, look in looks.items()]
        entries.append(("label error" if fits else "training loss", INK, "-"))
        handles = [
            right.plot([], [], color=colour, linestyle=look, linewidth=2.0, label=words)[0]
            for words, colour, look in entries
        ]
        right.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), handlelength=1.9)
    return figure


def phases(records: Sequence[Record]) -> Figure | None:
    """Draw records, of which some may lack what places them; None if no attack has an error.

    Label fitting is drawn for sizes that have an attack with an error to draw.
    """
    summary = summarise(
        r for r in records if r.values and all(r.values.get(w, 0) is not None for w in SIZES)
    )
    attacks = [c for c in summary.attacks if any(place.error is not None for place in c.places)]
    sizes = {_size(curve) for curve in attacks}
    fits = tuple(curve for curve in summary.fits if _size(curve) in sizes)
    return draw(replace(summary, fits=fits, attacks=tuple(attacks))) if attacks else None


def _size(curve: LawCurve) -> str:
    rank = "" if curve.rank is None else f", r = {curve.rank:,}"
    return f"d = {curve.dim:,}, n = {curve.samples:,}{rank}"


def _errors(
    axes: Axes,
    fits: Sequence[LawCurve],
    attacks: Sequence[LawCurve],
    colours: dict[str, str],
    looks: dict[str, Any],
) -> None:
    """Errors of labels and samples against p, with both thresholds where there is one of each."""
    axes.set(xscale="log", ylim=(-0.03, 1.42), ylabel="relative error")
    axes.set(xlabel="p, features of the last layer")
    alone = len(colours) == 1
    for curve in fits:
        _line(axes, curve.places, INK if alone else MUTED, "-")
    for curve in attacks:
        _line(axes, curve.places, colours[_size(curve)], looks[curve.name])
        axes.plot([curve.counted], [1.36], "v", color=colours[_size(curve)], markersize=6)
    if not fits:  # the training loss of the victims, relative to that of answering zero
        shown = {p.width: p.label_error for p in attacks[0].places if p.label_error is not None}
        axes.plot(list(shown), list(shown.values()), color=INK, linewidth=2.0, clip_on=False)
    levels = [place.chance for curve in attacks for place in curve.places if place.chance]
    if levels:
        level = sum(levels) / len(levels)
        axes.axhline(level, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        where: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate("random guess", (0, level), (4, 3), color=MUTED, fontsize=9, **where)
    if alone:
        (left, right), first = axes.get_xlim(), attacks[0].samples
        second = max(curve.counted for curve in attacks)
        axes.axvspan(left, max(left, min(first, right)), color=LOW, linewidth=0, zorder=0)
        axes.axvspan(min(max(left, second), right), right, color=HIGH, linewidth=0, zorder=0)
        axes.set_xlim(left, right)
        _threshold(axes, first, f"p = n = {first:,}", "labels fit")
        word = "dn" if attacks[0].outputs == 1 else "counted"
        _threshold(axes, second, f"p = {word} = {second:,}", "data determined")
    ticks(axes, (1.0, 3.0), _whole)


def _line(axes: Axes, places: Sequence[Place], colour: str, dashes: Any) -> None:
    """The median over the seeds, with the quartiles as a band."""
    shown = [place for place in places if place.error is not None]
    x = [place.width for place in shown]
    low, middle, high = ([getattr(p, word) for p in shown] for word in ("low", "error", "high"))
    axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0)
    look = {"linestyle": dashes, "linewidth": 1.8, "marker": "o", "markersize": 3.6}
    axes.plot(x, middle, color=colour, clip_on=False, **look)


def _threshold(axes: Axes, place: float, upper: str, lower: str) -> None:
    """A vertical line with two words above the axes."""
    low, high = axes.get_xlim()
    if low <= place <= high:
        axes.axvline(place, color=MUTED, linewidth=1.0)
        at: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        for words, by, colour in ((lower, 14, INK), (upper, 3, MUTED)):
            axes.annotate(words, (place, 1), (0, by), color=colour, ha="center", fontsize=9, **at)


def _whole(value: float) -> str:
    """A whole number on an axis."""
    return f"{value:,.0f}" if value < 1e6 else power_of_ten(round(math.log10(value)))
