"""The law of data reconstruction: grids over the ratio, and what comes out of them.

Two thresholds, both counted: from p = n on the labels fit, from p = dn on the weights determine
the data (p = rn where they lie in a known subspace of r dimensions). A sweep measures where fitting
and recovery really start: `Law` is what to sweep, `summarise` turns records into curves, and `draw`
these into the phase diagram: errors and recovery against p, with the counted thresholds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exhume.checks import whole_number
from exhume.errors import InputError
from exhume.experiments.cells.attack import SUBSPACE, Attack, subspace_is
from exhume.experiments.cells.fitting import LabelFit
from exhume.experiments.table import start
from exhume.report.plots import DASHES, HIGH, INK, LOW, MUTED, grid, shades, styled, ticks
from exhume.sweep import MOST, Grid, Record
from exhume.theory import counting
from exhume.wording import number, power_of_ten

FITTED = 1e-6  # relative error of fitted labels; at p = n it falls from 1e-2 to rounding
FITTED_MODEL = ("random_features", "squared")  # whose labels are fitted: what counting is about
OURS, MOMENTUM = "exhume", "iurada2025"
PAIRS = 8  # pictures that are kept at each ratio, of the first seed and the first method: one row

# What a sweep goes over, beside the seeds.
AXES = ("architectures", "activations", "losses", "dims", "samples", "ranks", "methods", "ratios")

WORDS = {
    "relu": "ReLU", "relu+tanh": "ReLU + tanh",
    "random_features": "Random features", "two_layer": "Two layers",
    "resnet": "Residual network", "vit": "Vision transformer",
    "squared": "squared loss", "logistic": "logistic loss", "cross_entropy": "cross-entropy",
}  # fmt: skip

# The columns of `LawCurve.row`.
HEADINGS = ("model", "d", "n", "r", "what", "counted p", "measured p", "p / counted")


@dataclass(frozen=True)
class Law:
    """A law is what to sweep: every combination of the options of `exhume law`."""

    data: str = "sphere"
    dims: tuple[int | None, ...] = (60,)
    samples: tuple[int, ...] = (12,)
    ranks: tuple[int | None, ...] = (None,)  # None is the whole space
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0)
    seeds: int = 5
    methods: tuple[str, ...] = (OURS, MOMENTUM)
    activations: tuple[str, ...] = ("relu",)
    architectures: tuple[str, ...] = ("random_features",)
    losses: tuple[str, ...] = ("squared",)
    products: int | None = 30_000
    size: int | None = None
    classes: str | None = None
    pictures: bool = False  # whether some of the samples may be kept as pictures

    def cells(self) -> list[Attack | LabelFit]:
        """Return all cells; refuse what cannot be run, data that is not there, too many cells."""
        whole_number("seeds", self.seeds)
        for field in AXES:
            values = getattr(self, field)
            if len(set(values)) < len(values):
                raise InputError(f"{field}: expected different values, got {values}.")
        count = self.seeds * math.prod(len(getattr(self, field)) for field in AXES)
        if count > MOST:
            many = f"this grid has {count:,} attacks; expected at most {MOST:,}"
            raise InputError(f"{many}: take fewer ratios or seeds.")
        attacks = self._attacks()
        for cell in attacks:
            cell.check()
        for cell in attacks:
            if cell.ratio == max(self.ratios) and self._first(cell):
                cell.width(cell.known())
        return [*self._fits(), *attacks]

    def _first(self, cell: Attack) -> bool:
        return (cell.seed, cell.method) == (0, self.methods[0])

    def _grid(self, kind: type, **axes: Any) -> Grid:
        images = {"data": self.data, "size": self.size, "classes": self.classes}
        sizes = {"dim": self.dims, "samples": self.samples, "rank": self.ranks}
        own = {"activation": self.activations, **sizes, "seed": range(self.seeds)}
        return Grid(kind, {**images, **own, **axes})

    def _attacks(self) -> list[Attack]:
        """Attacks on victims at each ratio; the first seed and method keep pictures if any may."""
        model = {"architecture": self.architectures, "loss": self.losses}
        attack = {"method": self.methods, "products": self.products, "ratio": self.ratios}
        cells = self._grid(Attack, **model, **attack)
        return [
            replace(cell, keep=PAIRS) if self.pictures and self._first(cell) else cell
            for cell in cast(Iterable[Attack], cells)
        ]

    def _fits(self) -> list[LabelFit]:
        """Label fitting by random features, at widths from n/4 to that of the largest ratio."""
        if "random_features" not in self.architectures or "squared" not in self.losses:
            return []
        cells = [*cast(Iterable[LabelFit], self._grid(LabelFit))]
        known = cells[0].known()  # images are all of one size
        return [
            replace(cell, width=width)
            for cell in cells
            for width in widths(
                cell.samples,
                max(self.ratios) * (cell.dim or known.dim) * cell.samples / known.outputs,
            )
        ]


def widths(samples: int, largest: float) -> list[int]:
    """Return widths from n/4 to the largest, close together where labels begin to fit."""
    near = [samples * share / 8 for share in (2, 3, 4, 5, 6, 7, 8, 10, 16)]
    far = np.geomspace(2 * samples, max(largest, 2 * samples), 3).tolist()
    return sorted({max(1, math.ceil(width - 1e-9)) for width in near + far})


@dataclass(frozen=True)
class Place:
    """A place is one width p over all seeds: medians of errors, means of what was measured."""

    width: float
    error: float | None  # of the reconstruction, or of the labels; None where nothing was attacked
    low: float | None = None  # its quartiles
    high: float | None = None
    recovered: float | None = None
    exact: float | None = None
    label_error: float | None = None  # of the trained victim
    chance: float | None = None  # error of random candidates
    seeds: int = 1


@dataclass(frozen=True)
class LawCurve:
    """A curve shows a method in a setting; or label fitting, where there is no method."""

    architecture: str
    activation: str
    loss: str
    dim: int
    samples: int
    rank: int | None
    outputs: int
    method: str | None
    places: tuple[Place, ...] = ()

    @property
    def model(self) -> str:
        """Return the model in words."""
        own = [] if self.architecture in ("resnet", "vit") else [self.activation]
        words = (self.architecture, *own, self.loss)
        return ", ".join(WORDS.get(word, word) for word in words)

    @property
    def name(self) -> str:
        """Name the method, with how it came by a subspace, if it did."""
        if self.method is None:
            return "labels"
        subspace = subspace_is(self.method, self.architecture, self.rank)
        name = "published momentum" if self.method == MOMENTUM else self.method
        return f"{name}, subspace {subspace}" if subspace else name

    @property
    def counted(self) -> int:
        """Return the p from which on labels can fit, or data come back, by counting."""
        if self.method is None:
            return counting.label_fitting(self.samples)
        rank = self.rank if self.method == SUBSPACE else None
        return counting.reconstruction(self.dim, self.samples, self.outputs, rank)

    @property
    def start(self) -> float | None:
        """Return the p from which on labels fit, or half of the samples come back."""
        widths = [place.width for place in self.places]
        if self.method is not None:
            return start(widths, [place.recovered or 0.0 for place in self.places])
        fitted = [place.error is not None and place.error < FITTED for place in self.places]
        return start(widths, fitted, between=False)

    @property
    def row(self) -> list[str]:
        """Return a line of the table of curves: the setting, and both thresholds.

        A start at the smallest width tried, with one below that was not, is marked by ≤.
        """
        measured, ratio = "never", "–"
        if self.start is not None:
            least = "≤ " if 1 < self.places[0].width == self.start else ""
            measured, ratio = f"{least}{self.start:,.0f}", least + number(self.start / self.counted)
        sizes = (number(size, "–") for size in (self.dim, self.samples, self.rank))
        return [self.model, *sizes, self.name, f"{self.counted:,}", measured, ratio]

    @property
    def sentence(self) -> str:
        """Say what the row says."""
        model, dim, samples, _, name, counted, measured, _ = self.row
        what = "labels fit" if self.method is None else f"with {name} half of the data come back"
        where = "at no p tried" if self.start is None else f"from p = {measured} on"
        return f"{model}, d = {dim}, n = {samples}: {what} {where} (counted: {counted})."


@dataclass(frozen=True)
class Summary:
    """A summary has all curves of a sweep, and the cells that failed."""

    fits: tuple[LawCurve, ...]
    attacks: tuple[LawCurve, ...]
    failed: tuple[Record, ...] = ()


def summarise(records: Iterable[Record]) -> Summary:
    """Return the curves of a sweep; cells that failed are listed and left out of the curves."""
    groups: dict[LawCurve, dict[float, list[dict[str, Any]]]] = {}
    failed = []
    for record in records:
        cell, values = record.cell, record.values
        if values is None:
            failed.append(record)
        elif isinstance(cell, Attack | LabelFit):
            fitted = isinstance(cell, LabelFit) and cell.width
            width = fitted or values["parameters"] / values["outputs"]
            groups.setdefault(curve_of(record), {}).setdefault(width, []).append(values)
    curves = [
        replace(own, places=tuple(_place(p, group[p], own.method) for p in sorted(group)))
        for own, group in groups.items()
    ]
    fits, attacks = (tuple(c for c in curves if (c.method is None) == fit) for fit in (True, False))
    return Summary(fits, attacks, tuple(failed))


def curve_of(record: Record) -> LawCurve:
    """Return the curve that a finished cell belongs to, without its places."""
    cell, values = record.cell, record.values or {}
    assert isinstance(cell, Attack | LabelFit)
    (architecture, loss), method = FITTED_MODEL, None
    if isinstance(cell, Attack):
        architecture, loss, method = cell.architecture, cell.loss, cell.method
    sizes = (values["inputs"], cell.samples, cell.rank, values["outputs"])
    return LawCurve(architecture, cell.activation, loss, *sizes, method)


def _place(width: float, rows: list[dict[str, Any]], method: str | None) -> Place:
    """One place of a curve, from what its cells gave over the seeds."""

    def numbers(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row.get(name) is not None]

    def mean(name: str) -> float | None:
        return float(np.mean(found)) if (found := numbers(name)) else None

    errors, labels = numbers("label_error" if method is None else "error"), numbers("label_error")
    low, median, high = np.quantile(errors, (0.25, 0.5, 0.75)).tolist() if errors else (None,) * 3
    label_error = float(np.median(labels)) if labels else None
    shares = (mean("recovered") or 0.0, mean("exact") or 0.0)
    return Place(width, median, low, high, *shares, label_error, mean("chance"), len(rows))


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
