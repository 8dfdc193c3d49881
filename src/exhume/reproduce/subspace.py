"""Subspaces and the finite-width guarantee (Tansley et al. 2026)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from matplotlib.figure import Figure

from exhume.experiments import Attack
from exhume.experiments.failure import Failure
from exhume.reproduce.curves import (
    NEAR,
    Curve,
    Row,
    chosen,
    means,
    onset,
    percent,
    rows,
    values,
)
from exhume.reproduce.drawing import lines, sheet
from exhume.reproduce.experiment import Experiment, Finding, Scale, judged, undecided
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
    common: dict[str, Any] = {"dim": dim, "samples": samples, "products": 8000, "seed": range(3)}
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
    """By rank, where recovery starts, in units of n·`unit`."""
    found: dict[int, float | None] = {}
    for rank in values(attacks, "rank"):
        own = chosen(attacks, rank=rank)
        curve = means(own, "recovered")
        factor = own[0]["dim"] / own[0][unit]
        found[rank] = onset({ratio * factor: share for ratio, share in curve.items()})
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
    if len(values(told, "rank")) < 2 or not full or not estimated:
        return undecided("several ranks, in the subspace, the full space and a network, are needed")
    inside, outside, network = (
        _starts(told, "rank"),
        _starts(full, "dim"),
        _starts(estimated, "rank"),
    )
    near = [start is not None and NEAR[0] <= start <= NEAR[1] for start in inside.values()]
    return Finding(
        f"half recovered from p/(rn) = {_words(inside)} in a subspace that is told, "
        f"{_words(network)} in one estimated from a two-layer network; from p/(dn) = "
        f"{_words(outside)} in the full space",
        judged(_steady(inside), all(near), _steady(outside), _steady(network)),
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
        "seed": range(2 if small else 1),
    }
    return [*Grid(Attack, axes)]


def _cifar_judge(records: Sequence[Record]) -> Finding:
    attacks = rows(records, Attack)
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


def _failure_cells(scale: Scale) -> list[Cell]:
    """Widths from far below the counting threshold to far above it, and at the bound."""
    few = scale == "small"
    widths = [2, 3, 4, 6, 8, 12, 16, 32, 64, 256]
    bound = _bound(Failure())
    above = [int(bound.numerical)] if few else [int(bound.numerical), int(bound.certified)]
    return [*Grid(Failure, {"width": [*widths, *above], "seed": range(30 if few else 200)})]


def _bound(cell: Failure) -> WidthBound:
    """The bound for such cells, whatever their width and seed."""
    return _bound_of(replace(cell, width=1, seed=0))


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


def _failure_judge(records: Sequence[Record]) -> Finding:
    found = rows(records, Failure)
    cells = [record.cell for record in records if isinstance(record.cell, Failure)]
    if not found:
        return undecided("no cell ended")
    bound = _bound(cells[0])
    shares, wrong = means(found, "failed", "width"), means(found, "wrong", "width")
    allowed = {width: bound.failure_at(int(width), numerical=True) for width in shares}
    informative = [width for width in shares if allowed[width] < 1]
    if not informative:
        return undecided("no width at which the bound is below 1")
    under = all(shares[width] <= allowed[width] for width in shares)
    narrow, first = min(wrong), min(informative)
    steps = list(shares.values())
    return Finding(
        f"exact solutions that miss a sample: in {percent(wrong[narrow])} of runs at p = "
        f"{narrow:g}, in {percent(shares[first])} at p = {first:g}, where the bound allows "
        f"{percent(allowed[first])}; the last failure is at p = "
        f"{max((w for w in wrong if wrong[w] > 0), default=0):g}",
        judged(under, wrong[narrow] > 0, steps[-1] <= steps[0]),
        f"Counting puts the threshold at p = {cells[0].samples * cells[0].dim}. The bound is our "
        "derivation, not the paper's theorem, and with a hit probability found by search; with a "
        f"certified one it asks for p = {bound.certified:,.0f}. {len(found) // len(shares)} runs a "
        "width.",
    )


def _failure_draw(records: Sequence[Record]) -> Figure:
    found = rows(records, Failure)
    cells = [record.cell for record in records if isinstance(record.cell, Failure)]
    bound = _bound(cells[0])
    shares = means(found, "wrong", "width")
    figure, (axes,) = sheet("Failure against width")
    curves = {
        "runs with a wrong exact solution": shares,
        "bound": {width: bound.failure_at(int(width), numerical=True) for width in shares},
    }
    lines(axes, curves, "p", "probability", mark=cells[0].samples * cells[0].dim)
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
