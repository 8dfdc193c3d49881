"""The law of data reconstruction: grids over the ratio, and what comes out of them.

Two thresholds, both counted: from p = n on the labels fit, from p = dn on the weights determine
the data (p = rn where they lie in a known subspace of r dimensions). A sweep measures where fitting
and recovery really start.

Inside: `Law` (what to sweep), `summarise` (records to curves), `sentences` (curves to words).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from exhume.checks import whole_number
from exhume.errors import InputError
from exhume.experiments.cells.attack import SUBSPACE, Attack, subspace_is
from exhume.experiments.cells.fitting import LabelFit
from exhume.experiments.table import start
from exhume.sweep import MOST, Grid, Record
from exhume.theory import counting

FITTED = 1e-6
"""Relative error under which labels count as fitted; it falls from 1e-2 to rounding at p = n."""

FITTED_MODEL = ("random_features", "squared")
"""The model whose labels are fitted: the loss is the one that counting is about."""

OURS, MOMENTUM = "exhume", "iurada2025"

PAIRS = 8
"""Pictures that are kept at each ratio, of the first seed and the first method: one row."""

AXES = (
    "architectures", "activations", "losses", "dims", "samples", "ranks", "methods", "ratios",
)  # fmt: skip
"""What a sweep goes over, beside the seeds."""


@dataclass(frozen=True)
class Law:
    """A law is what to sweep: every combination of the options of `exhume law`.

    A rank of None stands for the whole space. `pictures` says whether some of the samples may be
    kept as pictures.
    """

    data: str = "sphere"
    dims: tuple[int | None, ...] = (60,)
    samples: tuple[int, ...] = (12,)
    ranks: tuple[int | None, ...] = (None,)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0)
    seeds: int = 5
    methods: tuple[str, ...] = (OURS, MOMENTUM)
    activations: tuple[str, ...] = ("relu",)
    architectures: tuple[str, ...] = ("random_features",)
    losses: tuple[str, ...] = ("squared",)
    products: int | None = 30_000
    size: int | None = None
    classes: str | None = None
    pictures: bool = False

    def cells(self) -> list[Attack | LabelFit]:
        """Return all cells, checked.

        Raises:
            InputError: a value that could not be run, data that is not there, or too many cells.
        """
        whole_number("seeds", self.seeds)
        for field in AXES:
            values = getattr(self, field)
            if not values:
                raise InputError(f"{field}: expected one value or more, got none.")
            if len(set(values)) < len(values):
                raise InputError(f"{field}: expected different values, got {values}.")
        count = self.seeds * math.prod(len(getattr(self, field)) for field in AXES)
        if count > MOST:
            raise InputError(
                f"this grid has {count:,} attacks; expected at most {MOST:,}: take fewer ratios or "
                "seeds."
            )
        attacks = self._attacks()
        for cell in attacks:
            cell.check()
        for cell in attacks:
            largest = cell.ratio == max(self.ratios)
            if largest and (cell.seed, cell.method) == (0, self.methods[0]):
                cell.width(cell.known())
        return [*self._fits(), *attacks]

    def _common(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "size": self.size,
            "classes": self.classes,
            "activation": self.activations,
            "dim": self.dims,
            "samples": self.samples,
            "rank": self.ranks,
            "seed": range(self.seeds),
        }

    def _attacks(self) -> list[Attack]:
        """Attacks on victims at each ratio; the first seed and method keep pictures if any may."""
        axes = self._common() | {
            "architecture": self.architectures,
            "loss": self.losses,
            "method": self.methods,
            "products": self.products,
            "ratio": self.ratios,
        }
        cells = [cast(Attack, cell) for cell in Grid(Attack, axes)]
        first = (0, self.methods[0])
        return [
            replace(c, keep=PAIRS) if self.pictures and (c.seed, c.method) == first else c
            for c in cells
        ]

    def _fits(self) -> list[LabelFit]:
        """Label fitting by random features, at widths from n/4 to that of the largest ratio."""
        if "random_features" not in self.architectures or "squared" not in self.losses:
            return []
        cells = [cast(LabelFit, cell) for cell in Grid(LabelFit, self._common())]
        known = cells[0].known()  # images are all of one size
        every = []
        for cell in cells:
            unknowns = (cell.dim or known.dim) * cell.samples
            largest = max(self.ratios) * unknowns / known.outputs
            every += [replace(cell, width=width) for width in widths(cell.samples, largest)]
        return every


def widths(samples: int, largest: float) -> list[int]:
    """Return widths from n/4 to the largest, close together where labels begin to fit.

    Example:
        >>> widths(12, 720)
        [3, 5, 6, 8, 9, 11, 12, 15, 24, 132, 720]
    """
    near = [samples * share / 8 for share in (2, 3, 4, 5, 6, 7, 8, 10, 16)]
    far = np.geomspace(2 * samples, max(largest, 2 * samples), 3).tolist()
    return sorted({max(1, math.ceil(width - 1e-9)) for width in near + far})


@dataclass(frozen=True)
class Setting:
    """A setting is what the places of a curve share, beside the method."""

    architecture: str
    activation: str
    loss: str
    dim: int
    samples: int
    rank: int | None
    outputs: int

    @property
    def kind(self) -> tuple[str, str, str]:
        """Return the model, whatever the data."""
        return self.architecture, self.activation, self.loss

    @property
    def labels_fit(self) -> int:
        """Return the p from which on labels fit, by counting."""
        return counting.label_fitting(self.samples)

    @property
    def determined(self) -> int:
        """Return the p from which on the data are determined, by counting."""
        return counting.reconstruction(self.dim, self.samples, self.outputs)


@dataclass(frozen=True)
class Place:
    """A place is one ratio p·m/(d·n), or one width p, over all seeds.

    The error is a median, of the labels or of the reconstruction, between its quartiles; so is the
    label error of a trained victim. The others are means, and None where nothing was attacked.
    """

    width: float
    ratio: float
    error: float | None
    low: float | None
    high: float | None
    recovered: float | None = None
    exact: float | None = None
    label_error: float | None = None
    chance: float | None = None
    seeds: int = 1


@dataclass(frozen=True)
class LawCurve:
    """A curve shows a method in a setting; or label fitting, where there is no method."""

    setting: Setting
    method: str | None
    places: tuple[Place, ...]

    @property
    def start(self) -> float | None:
        """Return the ratio from which on recovery has started, or the width where labels fit."""
        if self.method is None:
            fitted = [place.error is not None and place.error < FITTED for place in self.places]
            return start([place.width for place in self.places], fitted, between=False)
        shares = [place.recovered or 0.0 for place in self.places]
        return start([place.ratio for place in self.places], shares)

    @property
    def starting_width(self) -> float | None:
        """Return the start as a width, p."""
        if self.start is None or self.method is None:
            return self.start
        return self.start * self.setting.dim * self.setting.samples / self.setting.outputs

    @property
    def inside(self) -> float | None:
        """Return the start in units of rn, where the samples have a rank r."""
        rank = self.setting.rank
        return None if self.start is None or rank is None else self.start * self.setting.dim / rank

    @property
    def at_or_below(self) -> bool:
        """Say whether the start is the smallest place tried, so that it may lie below."""
        if self.start is None:
            return False
        first = self.places[0]
        return first.ratio == self.start if self.method else 1 < first.width == self.start

    @property
    def name(self) -> str:
        """Name the method, with how it came by a subspace, if it did."""
        method = self.method or ""
        subspace = subspace_is(method, self.setting.architecture, self.setting.rank)
        if subspace:
            return f"{method}, subspace {subspace}"
        return "published momentum" if method == MOMENTUM else method

    @property
    def counted(self) -> int:
        """Return the p from which on data can come back, by counting what is to be found."""
        own = self.setting
        rank = own.rank if self.method == SUBSPACE else None
        return counting.reconstruction(own.dim, own.samples, own.outputs, rank)


@dataclass(frozen=True)
class Summary:
    """A summary has all curves of a sweep, and the cells that failed."""

    fits: tuple[LawCurve, ...]
    attacks: tuple[LawCurve, ...]
    failed: tuple[Record, ...] = ()

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Return the settings in the order of the sweep."""
        return tuple(dict.fromkeys(curve.setting for curve in self.attacks))


def summarise(records: Iterable[Record]) -> Summary:
    """Return the curves of a sweep; cells that failed are listed and left out of the curves."""
    groups: dict[tuple[Setting, str | None], dict[float, list[Record]]] = {}
    failed = []
    for record in records:
        cell, values = record.cell, record.values
        if values is None:
            failed.append(record)
            continue
        if isinstance(cell, LabelFit):
            group = groups.setdefault((setting_of(record), None), {})
            group.setdefault(cell.width, []).append(record)
        elif isinstance(cell, Attack):
            group = groups.setdefault((setting_of(record), cell.method), {})
            group.setdefault(values["actual_ratio"], []).append(record)
    curves = [
        LawCurve(own, method, tuple(_place(group[at]) for at in sorted(group)))
        for (own, method), group in groups.items()
    ]
    return Summary(
        tuple(curve for curve in curves if curve.method is None),
        tuple(curve for curve in curves if curve.method is not None),
        tuple(failed),
    )


def setting_of(record: Record) -> Setting:
    """Return what a finished cell shares with the others of its curve."""
    cell, values = record.cell, record.values or {}
    if not isinstance(cell, Attack | LabelFit):
        raise TypeError(f"{cell!r} is not part of the law")
    model = (cell.architecture, cell.loss) if isinstance(cell, Attack) else FITTED_MODEL
    return Setting(
        architecture=model[0],
        activation=cell.activation,
        loss=model[1],
        dim=values["inputs"],
        samples=cell.samples,
        rank=cell.rank,
        outputs=values["outputs"],
    )


def _place(records: list[Record]) -> Place:
    """The records of one curve at one place, over the seeds."""
    rows = [record.values or {} for record in records]
    cell, first = records[0].cell, rows[0]

    def numbers(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row.get(name) is not None]

    def mean(name: str) -> float | None:
        return float(np.mean(found)) if (found := numbers(name)) else None

    fit = isinstance(cell, LabelFit)
    errors, labels = numbers("label_error" if fit else "error"), numbers("label_error")
    low, median, high = np.quantile(errors, (0.25, 0.5, 0.75)).tolist() if errors else (None,) * 3
    width = cell.width if isinstance(cell, LabelFit) else first["parameters"] / first["outputs"]
    return Place(
        width=width,
        ratio=width * first["outputs"] / (first["inputs"] * getattr(cell, "samples", 1)),
        error=median,
        low=low,
        high=high,
        recovered=None if fit else mean("recovered") or 0.0,
        exact=None if fit else mean("exact") or 0.0,
        label_error=float(np.median(labels)) if labels else None,
        chance=mean("chance"),
        seeds=len(rows),
    )


def sentences(summary: Summary) -> list[str]:
    """Say what a sweep shows: labels and the best attack first, then the others."""
    by_name: dict[str, list[LawCurve]] = {}
    for curve in sorted(summary.attacks, key=lambda curve: curve.method != SUBSPACE):
        by_name.setdefault(curve.name, []).append(curve)
    said = []
    for name, curves in by_name.items():
        comma = "," if "," in name else ""
        said.append(f"with {name}{comma} the data {_on_data(curves)}.")
    if summary.fits:
        said[0] = f"labels {_on_labels(summary.fits)}; {said[0]}"
    return [sentence[0].upper() + sentence[1:] for sentence in said]


def _on_data(curves: Sequence[LawCurve]) -> str:
    """Where data come back: a width, or several in units of dn; of rn for who knows the rank."""
    found = [curve for curve in curves if curve.start is not None]
    if not found:
        return "do not come back"
    starts = [curve.start or 0.0 for curve in found]
    if len(curves) == 1:
        width = float(f"{found[0].starting_width or 0.0:.3g}")
        equals = " =" if found[0].setting.outputs == 1 else ", p·m ="
        return f"come back {_from(found, f'≈ {width:,.0f}{equals} {_short(starts[0])} dn')}"
    place = f"{_span(starts)} dn"
    if found[0].method == SUBSPACE and all(curve.setting.rank for curve in found):
        place = f"{_span([curve.inside or 0.0 for curve in found])} rn ({place})"
    missing = len(curves) - len(found)
    never = f", and not at all in {missing} of {len(curves)} settings" if missing else ""
    return f"come back {_from(found, f'≈ {place}')}{never}"


def _from(curves: Sequence[LawCurve], place: str) -> str:
    """From a place on; at or below it where that is the smallest that was tried."""
    below = sum(curve.at_or_below for curve in curves)
    if below == len(curves):
        return f"at or below p {place}, the smallest tried"
    some = f", in {below} of {len(curves)} settings at or below the smallest tried" if below else ""
    return f"from p {place}{some}"


def _on_labels(fits: Sequence[LawCurve]) -> str:
    """Where labels fit: a width, or several in units of n."""
    fitted = [curve for curve in fits if curve.start is not None]
    if not fitted:
        return "do not fit at any width"
    exactly = _span([(curve.start or 0.0) / curve.setting.samples for curve in fitted])
    unit = "n" if exactly == "1.0" else f"{exactly} n"
    width = f"{fits[0].start:,.0f} = " if len(fits) == 1 else ""
    return f"fit {_from(fitted, f'= {width}{unit}')}"


def _span(values: Sequence[float]) -> str:
    """The least and the largest.

    Example:
        >>> _span([1.62, 1.4, 1.5]), _span([1.61, 1.62])
        ('1.4 to 1.6', '1.6')
    """
    low, high = _short(min(values)), _short(max(values))
    return low if low == high else f"{low} to {high}"


def _short(value: float) -> str:
    """Two digits, or a whole number.

    Example:
        >>> _short(1.0), _short(0.1468), _short(13.0), _short(131.4)
        ('1.0', '0.15', '13', '131')
    """
    return f"{value:.0f}" if value >= 99.5 else f"{value:#.2g}".rstrip(".")
