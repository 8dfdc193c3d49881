"""Subspaces and the finite-width guarantee (Tansley et al. 2026)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from matplotlib.figure import Figure

from exhume.experiments import Attack
from exhume.experiments.failure import Failure
from exhume.reproduce.curves import (
    Curve,
    Row,
    Threshold,
    chosen,
    means,
    near,
    onset,
    percent,
    rows,
    values,
    whole,
)
from exhume.reproduce.drawing import lines, sheet
from exhume.reproduce.experiment import Experiment, Finding, Scale, judged, seeds, undecided
from exhume.sweep import Cell, Grid, Record
from exhume.theory.width import WidthBound, width_bound

PAPER = "Tansley et al., Efficient Techniques for Data Reconstruction, with Finite-Width Guarantees"
OURS, INSIDE = "exhume", "tansley2026"
EQUATIONS = (0.6, 1.0, 1.5, 2.0, 3.0, 5.0)
"""For each unknown: p/(rn) in the subspace, p/(dn) in the full space."""

FEATURES, NETWORK = "random_features", "two_layer"


# Synthetic data of several intrinsic dimensions.


def _rank_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    dim, samples, ranks = (40, 8, (4, 8, 16, 40)) if small else (200, 20, (4, 10, 25, 50, 100, 200))
    common: dict[str, Any] = {"dim": dim, "samples": samples, "products": 8000, "seed": seeds(3)}
    cells: list[Cell] = []
    for rank in ranks:
        inside = [round(share * rank / dim, 6) for share in EQUATIONS]
        cells += Grid(Attack, {**common, "rank": rank, "method": INSIDE, "ratio": inside})
        cells += Grid(Attack, {**common, "rank": rank, "method": OURS, "ratio": EQUATIONS})
    for rank in [rank for rank in ranks if rank <= samples]:
        inside = [round(share * rank / dim, 6) for share in EQUATIONS]
        network = {**common, "rank": rank, "architecture": NETWORK, "lazy": 30.0}
        cells += Grid(Attack, {**network, "method": INSIDE, "ratio": inside})
    return cells


def _starts(attacks: Sequence[Row], unit: str) -> dict[int, float | None]:
    """By rank, where recovery starts, in units of n·`unit`; no rank without both sides of it."""
    found: dict[int, float | None] = {}
    for rank in values(attacks, "rank"):
        own = chosen(attacks, rank=rank)
        curve = means(own, "recovered")
        factor = own[0]["dim"] / own[0][unit]
        threshold = Threshold.of({ratio * factor: share for ratio, share in curve.items()})
        if threshold is not None:
            found[rank] = threshold.start
    return found


def _words(starts: dict[int, float | None]) -> str:
    return ", ".join(
        f"{'nowhere' if start is None else f'{start:.2g}'} (r = {rank})"
        for rank, start in starts.items()
    )


def _steady(starts: dict[int, float | None]) -> bool:
    """Whether recovery starts at about the same number of equations for each unknown."""
    found = [start for start in starts.values() if start is not None]
    return len(found) == len(starts) and max(found) <= 2 * min(found)


def _rank_judge(records: Sequence[Record]) -> Finding:
    attacks = rows(records, Attack)
    told = chosen(attacks, method=INSIDE, architecture=FEATURES)
    full = chosen(attacks, method=OURS, architecture=FEATURES)
    estimated = chosen(attacks, method=INSIDE, architecture=NETWORK)
    inside, outside, network = (
        _starts(told, "rank"),
        _starts(full, "dim"),
        _starts(estimated, "rank"),
    )
    ranks = [len(values(own, "rank")) for own in (told, full, estimated)]
    measured = ranks == [len(inside), len(outside), len(network)]
    if not measured or len(inside) < 2 or not outside or not network:
        return undecided("several ranks, in the subspace, the full space and a network, are needed")
    return Finding(
        f"half recovered from p/(rn) = {_words(inside)} in a subspace that is told, "
        f"{_words(network)} in one estimated from a two-layer network; from p/(dn) = "
        f"{_words(outside)} in the full space",
        judged(
            _steady(inside),
            all(near(start) for start in inside.values()),
            _steady(outside),
            _steady(network),
        ),
        "The ratio at which recovery starts should not depend on r: in units of n·r in the "
        "subspace, of n·d in the full space.",
    )


def _rank_draw(records: Sequence[Record]) -> Figure:
    attacks = rows(records, Attack)
    panels = (
        ("Subspace told", INSIDE, FEATURES, "rank", "p / (rn)"),
        ("Full space", OURS, FEATURES, "dim", "p / (dn)"),
        ("Subspace estimated, two layers", INSIDE, NETWORK, "rank", "p / (rn)"),
    )
    figure, grid = sheet(*(panel[0] for panel in panels))
    for axes, (_, method, architecture, unit, across) in zip(grid, panels, strict=True):
        curves: dict[str, Curve] = {}
        for rank in values(attacks, "rank"):
            own = chosen(attacks, method=method, architecture=architecture, rank=rank)
            if own:
                factor = own[0]["dim"] / own[0][unit]
                shares = means(own, "recovered")
                curves[f"r = {rank}"] = {ratio * factor: y for ratio, y in shares.items()}
        lines(axes, curves, across, "share recovered", mark=1.0)
    return figure


# CIFAR-10.


def _cifar_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    axes: dict[str, Any] = {
        "data": "cifar10",
        "size": 8 if small else None,
        "samples": 8 if small else 50,
        "architecture": NETWORK,
        "lazy": 30.0,
        "method": (INSIDE, OURS),
        "ratio": (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0) if small else (0.03, 0.1, 0.3, 1.0, 3.0),
        "products": 3000,
        "dtype": "float64" if small else "float32",
        "until": 1e-8 if small else 1e-7,
        "seed": seeds(2) if small else range(1),
    }
    return [*Grid(Attack, axes)]


def _cifar_judge(records: Sequence[Record]) -> Finding:
    attacks = whole(rows(records, Attack), "recovered", "inputs")
    inside = means(chosen(attacks, method=INSIDE), "recovered")
    outside = means(chosen(attacks, method=OURS), "recovered")
    shared = [ratio for ratio in inside if ratio in outside]
    if len(shared) < 3:
        return undecided("both attacks at the same widths are needed")
    ahead = sum(inside[ratio] > outside[ratio] for ratio in shared)
    behind = sum(inside[ratio] < outside[ratio] for ratio in shared)
    first, second = onset(inside), onset(outside)
    earlier = first is not None and (second is None or first < second)
    words = ["nowhere" if at is None else f"{at:.2g} dn" for at in (first, second)]
    return Finding(
        f"half recovered from {words[0]} in the subspace, from {words[1]} in the full space; more "
        f"recovered in the subspace at {ahead} of {len(shared)} widths, less at {behind}",
        judged(earlier, behind == 0),
        f"The subspace has at most n = {attacks[0]['samples']} of {attacks[0]['inputs']:,} "
        "dimensions: it is that of the first layer's change.",
    )


def _cifar_draw(records: Sequence[Record]) -> Figure:
    attacks = rows(records, Attack)
    figure, (axes,) = sheet("Two-layer networks on CIFAR-10")
    curves = {
        "in the subspace": means(chosen(attacks, method=INSIDE), "recovered"),
        "in the full space": means(chosen(attacks, method=OURS), "recovered"),
    }
    lines(axes, curves, "p / (dn)", "share recovered", mark=1.0)
    return figure


# The probability of failure.

LADDER = Failure()
"""Two samples in the plane; their widths go from far below the counting threshold to far above."""

GUARANTEED = (
    replace(LADDER, samples=1, tolerance=0.3, separation=0.7, starts=3),
    replace(LADDER, samples=1, dim=3, starts=3),
    replace(LADDER, samples=1, activation="relu", starts=3),
    replace(LADDER, starts=3),
)
"""Sizes at which the certified width can be run."""


def _failure_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    widths = [2, 3, 4, 6, 8, 12, 16, 32, int(_bound(LADDER).numerical), 256]
    cells: list[Cell] = [
        replace(LADDER, width=width, seed=seed)
        for width in widths
        for seed in seeds(30 if small else 200)
    ]
    for family in GUARANTEED:
        width = int(_bound(family).certified)
        cells += [replace(family, width=width, seed=s) for s in seeds(50 if small else 500)]
    return cells


def _bound(cell: Failure) -> WidthBound:
    """The bound for such cells, whatever their width, starts and seed."""
    return _bound_of(replace(cell, width=1, starts=1, seed=0))


@cache
def _bound_of(cell: Failure) -> WidthBound:
    return width_bound(
        cell.samples,
        cell.dim,
        cell.activation,
        tolerance=cell.tolerance,
        separation=cell.separation,
        floor=cell.floor,
        ceiling=cell.ceiling,
    )


def _ladder(records: Sequence[Record]) -> list[Row]:
    """The rows of widths that are not certified."""
    return [row for row in rows(records, Failure) if row["starts"] == LADDER.starts]


def _failure_judge(records: Sequence[Record]) -> Finding:
    """Few failures above the certified width, and wrong data below the counting threshold.

    The width with a constant found by a search is no certificate, and decides nothing.
    """
    wrong = means(_ladder(records), "wrong", "width")
    sure = [row for row in rows(records, Failure) if row["starts"] != LADDER.starts]
    solved = [row for row in whole(sure, "exact", "failed") if row["exact"]]
    counted = LADDER.samples * LADDER.dim
    below = [share for width, share in wrong.items() if width < counted]
    if not below or len(solved) < 0.9 * len(GUARANTEED) * 50:
        return undecided("few exact solutions above the certified width")
    bound = _bound(LADDER)
    failed = sum(row["failed"] for row in solved)
    last = max((width for width in wrong if wrong[width] > 0), default=None)
    return Finding(
        f"above the certified width {failed} of {len(solved)} problems with an exact solution miss "
        f"a sample, where {percent(bound.failure)} may; below the counting threshold p = {counted} "
        f"a residual of zero goes with wrong data in {percent(min(below))} of runs at every width"
        + ("" if last is None else f", and the last one is at p = {last:g}"),
        judged(failed <= bound.failure * len(solved), min(below) >= 0.5),
        ("" if failed or last is None else _loose(last, bound))
        + "Certified widths: "
        + ", ".join(
            f"{_bound(f).certified:,.0f} ({f.activation}, n = {f.samples}, d = {f.dim}, tolerance "
            f"{f.tolerance:g})"
            for f in GUARANTEED
        )
        + f". With a constant that is found by a search, {bound.numerical:g} would do for the last "
        "of them; that is no certificate, and not part of the verdict. The bound is our "
        "derivation, not the paper's theorem, whose constants are not public. "
        f"{len(sure) - len(solved)} of {len(sure)} problems had no "
        "start that ended at an exact solution.",
    )


def _loose(last: float, bound: WidthBound) -> str:
    """How far the certified width is from where failures end, in a sentence."""
    return (
        "The certified bound is far from tight, and so hard to violate: the last failure is at "
        f"p = {last:g}, the certified width is {bound.certified:,.0f}. "
    )


def _failure_draw(records: Sequence[Record]) -> Figure:
    bound, shares = _bound(LADDER), means(_ladder(records), "wrong", "width")
    sure = [
        row
        for row in rows(records, Failure)
        if row["starts"] != LADDER.starts and row["width"] == int(bound.certified)
    ]
    shares |= means(sure, "wrong", "width")
    figure, (axes,) = sheet("Two samples in the plane: failure against width")
    curves = {
        "runs with a wrong exact solution": shares,
        "bound, its constant found by a search": {
            width: bound.failure_at(int(width), numerical=True) for width in shares
        },
        "bound, certified": {width: bound.failure_at(int(width)) for width in shares},
    }
    lines(axes, curves, "p (dashed: dn)", "probability", mark=LADDER.samples * LADDER.dim)
    return figure


SUBSPACE_EXPERIMENTS = (
    Experiment(
        "subspace-synthetic",
        f"{PAPER}, synthetic data in a subspace",
        "For data in an r-dimensional subspace that the attack knows or estimates, the width that "
        "recovery needs grows as n·r, and not as n·d.",
        _rank_cells,
        _rank_judge,
        _rank_draw,
        (3, 10),
    ),
    Experiment(
        "subspace-cifar10",
        f"{PAPER}, CIFAR-10",
        "Held to the subspace of the first layer's change, the attack on two-layer networks beats "
        "the one in the full space.",
        _cifar_cells,
        _cifar_judge,
        _cifar_draw,
        (1, 15),
    ),
    Experiment(
        "failure-probability",
        f"{PAPER}, finite-width theorem",
        "Above a width that depends on the allowed probability, exact minimisers miss the training "
        "set with at most that probability.",
        _failure_cells,
        _failure_judge,
        _failure_draw,
        (1, 5),
    ),
)
