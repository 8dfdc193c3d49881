"""Subspaces and the finite-width guarantee (Tansley et al. 2026)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from matplotlib.figure import Figure

from exhume.experiments.cells.attack import SUBSPACE, Attack
from exhume.experiments.cells.fitting import Failure
from exhume.experiments.claims.claim import Finding, Scale, claim, judged, seeds, undecided
from exhume.experiments.law import OURS
from exhume.experiments.table import Curve, Table, Threshold, near, percent, place, rise
from exhume.report.plots import lines, sheet
from exhume.sweep import Cell, Grid, Record
from exhume.theory.width import WidthBound, width_bound

PAPER = "Tansley et al., Efficient Techniques for Data Reconstruction, with Finite-Width Guarantees"
EQUATIONS = (0.6, 1.0, 1.5, 2.0, 3.0, 5.0)  # for each unknown, p/(rn) or p/(dn)
FEATURES, NETWORK = "random_features", "two_layer"

# Title, method, architecture, and what unknowns are counted in, of what is compared.
ARMS = (
    ("Subspace told", SUBSPACE, FEATURES, "rank", "p / (rn)"),
    ("Full space", OURS, FEATURES, "dim", "p / (dn)"),
    ("Subspace estimated, two layers", SUBSPACE, NETWORK, "rank", "p / (rn)"),
)

# Two samples in the plane, at widths from far below the counting threshold to far above it; and
# sizes at which the certified width can be run.
LADDER = Failure()
GUARANTEED = (
    replace(LADDER, samples=1, tolerance=0.3, separation=0.7, starts=3),
    replace(LADDER, samples=1, dim=3, starts=3),
    replace(LADDER, samples=1, activation="relu", starts=3),
    replace(LADDER, starts=3),
)


def _rank_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    dim, samples, ranks = (40, 8, (4, 8, 16, 40)) if small else (200, 20, (4, 10, 25, 50, 100, 200))
    common: dict[str, Any] = {"dim": dim, "samples": samples, "products": 8000, "seed": seeds(3)}
    cells: list[Cell] = []
    networks: list[Cell] = []
    for rank in ranks:
        ratios = [round(share * rank / dim, 6) for share in EQUATIONS]
        inside = {**common, "rank": rank, "method": SUBSPACE, "ratio": ratios}
        cells += Grid(Attack, inside)
        cells += Grid(Attack, {**common, "rank": rank, "method": OURS, "ratio": EQUATIONS})
        if rank <= samples:
            networks += Grid(Attack, {**inside, "architecture": NETWORK, "lazy": 30.0})
    return cells + networks


def _by_rank(records: Sequence[Record]) -> list[dict[int, Curve]]:
    """By arm and rank, the share recovered against equations for each unknown."""
    arms = []
    for _, method, architecture, unit, _ in ARMS:
        attacks = Table.of(records, Attack).where(method=method, architecture=architecture)
        arms.append(curves := dict[int, Curve]())
        for rank in attacks.values("rank"):
            own = attacks.where(rank=rank)
            factor = own[0]["dim"] / own[0][unit]
            curves[rank] = {ratio * factor: y for ratio, y in own.curve("recovered").items()}
    return arms


def _steady(starts: dict[int, float | None]) -> bool:
    """Whether recovery starts at about the same number of equations for each unknown."""
    found = [start for start in starts.values() if start is not None]
    return len(found) == len(starts) and max(found) <= 2 * min(found)


def _rank_draw(records: Sequence[Record]) -> Figure:
    panels = []
    for (title, *_, across), curves in zip(ARMS, _by_rank(records), strict=True):
        named = {f"r = {rank}": curve for rank, curve in curves.items()}
        panels.append(lines(title, named, across, "share recovered", mark=1.0))
    return sheet(*panels)


@claim(
    f"{PAPER}, synthetic data in a subspace",
    "For data in an r-dimensional subspace that the attack knows or estimates, the width that "
    "recovery needs grows as n·r, and not as n·d.",
    (3, 10),
    _rank_cells,
    _rank_draw,
)
def subspace_synthetic(records: Sequence[Record]) -> Finding:
    """Recovery starts at the same p/(rn) for all ranks r; in the full space at the same p/(dn)."""
    found = [{r: Threshold.of(c) for r, c in curves.items()} for curves in _by_rank(records)]
    arms = [{rank: t.start for rank, t in own.items() if t is not None} for own in found]
    inside, outside, network = arms
    if not all(own and all(own.values()) for own in found) or len(inside) < 2:
        return undecided("several ranks, in the subspace, the full space and a network, are needed")
    told, full, estimated = (
        ", ".join(f"{place(start)} (r = {rank})" for rank, start in arm.items()) for arm in arms
    )
    return Finding(
        f"half recovered from p/(rn) = {told} in a subspace that is told, {estimated} in one "
        f"estimated from a two-layer network; from p/(dn) = {full} in the full space",
        judged(_steady(inside), all(map(near, inside.values())), *map(_steady, (outside, network))),
    )


def _cifar_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    images = {"data": "cifar10", "size": 8 if small else None, "samples": 8 if small else 50}
    network = {"architecture": NETWORK, "lazy": 30.0, "method": (SUBSPACE, OURS)}
    axes: dict[str, Any] = {
        "ratio": (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0) if small else (0.03, 0.1, 0.3, 1.0, 3.0),
        "products": 3000,
        "dtype": "float64" if small else "float32",
        "until": 1e-8 if small else 1e-7,
        "seed": seeds(2) if small else range(1),
    }
    return [*Grid(Attack, {**images, **network, **axes})]


def _cifar_draw(records: Sequence[Record]) -> Figure:
    attacks = Table.of(records, Attack)
    arms = {"in the subspace": SUBSPACE, "in the full space": OURS}
    curves = {name: attacks.where(method=m).curve("recovered") for name, m in arms.items()}
    title = "Two-layer networks on CIFAR-10"
    return sheet(lines(title, curves, "p / (dn)", "share recovered", mark=1.0))


@claim(
    f"{PAPER}, CIFAR-10",
    "Held to the subspace of the first layer's change, the attack on two-layer networks beats the "
    "one in the full space.",
    (1, 15),
    _cifar_cells,
    _cifar_draw,
)
def subspace_cifar10(records: Sequence[Record]) -> Finding:
    """The subspace starts to recover earlier; the rest: it is behind at no width."""
    attacks = Table.of(records, Attack).whole("recovered", "inputs")
    inside, outside = (attacks.where(method=m).curve("recovered") for m in (SUBSPACE, OURS))
    shared = [ratio for ratio in inside if ratio in outside]
    if len(shared) < 3:
        return undecided("both attacks at the same widths are needed")
    ahead = sum(inside[ratio] > outside[ratio] for ratio in shared)
    behind = sum(inside[ratio] < outside[ratio] for ratio in shared)
    first, second = rise(inside), rise(outside)
    earlier = first is not None and (second is None or first < second)
    return Finding(
        f"half recovered from {place(first, ' dn')} in the subspace, from {place(second, ' dn')} "
        f"in the full space; more recovered in the subspace at {ahead} of {len(shared)} widths, "
        f"less at {behind}",
        judged(earlier, behind == 0),
    )


@cache
def bound_of(cell: Failure) -> WidthBound:
    """Return the bound for such cells, whatever their width, starts and seed."""
    options: Any = {"tolerance": cell.tolerance, "separation": cell.separation}
    sizes = (cell.samples, cell.dim, cell.activation)
    return width_bound(*sizes, **options, coefficients=(cell.floor, cell.ceiling))


def _failure_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    widths = [2, 3, 4, 6, 8, 12, 16, 32, int(bound_of(LADDER).numerical), 256]
    sure = [replace(family, width=int(bound_of(family).certified)) for family in GUARANTEED]
    return [
        *(replace(LADDER, width=p, seed=s) for p in widths for s in seeds(30 if small else 200)),
        *(replace(cell, seed=s) for cell in sure for s in seeds(50 if small else 500)),
    ]


def _parted(records: Sequence[Record]) -> tuple[Table, Table]:
    """The rows of widths that are not certified, and of those that are."""
    found = Table.of(records, Failure)
    sure = Table(row for row in found if row["starts"] != LADDER.starts)
    return found.where(starts=LADDER.starts), sure


def _failure_draw(records: Sequence[Record]) -> Figure:
    ladder, sure = _parted(records)
    bound, shares = bound_of(LADDER), ladder.curve("wrong", "width")
    shares |= sure.where(width=int(bound.certified)).curve("wrong", "width")
    curves = {
        "runs with a wrong exact solution": shares,
        "bound, its constant found by a search": {
            width: bound.failure_at(int(width), numerical=True) for width in shares
        },
        "bound, certified": {width: bound.failure_at(int(width)) for width in shares},
    }
    title, counted = "Two samples in the plane: failure against width", LADDER.samples * LADDER.dim
    return sheet(lines(title, curves, "p (dashed: dn)", "probability", mark=counted))


@claim(
    f"{PAPER}, finite-width theorem",
    "Above a width that depends on the allowed probability, exact minimisers miss the training set "
    "with at most that probability.",
    (1, 5),
    _failure_cells,
    _failure_draw,
)
def failure_probability(records: Sequence[Record]) -> Finding:
    """Few failures above the certified width, and wrong data below the counting threshold.

    The width with a constant found by a search is no certificate, and decides nothing.
    """
    ladder, sure = _parted(records)
    wrong = ladder.curve("wrong", "width")
    solved = [row for row in sure.whole("exact", "failed") if row["exact"]]
    counted = LADDER.samples * LADDER.dim
    below = [share for width, share in wrong.items() if width < counted]
    if not below or len(solved) < 0.9 * len(GUARANTEED) * 50:
        return undecided("few exact solutions above the certified width")
    bound = bound_of(LADDER)
    failed = sum(row["failed"] for row in solved)
    last = max((width for width in wrong if wrong[width] > 0), default=None)
    certified = ", ".join(f"{bound_of(family).certified:,.0f}" for family in GUARANTEED)
    return Finding(
        f"above the certified width {failed} of {len(solved)} problems with an exact solution miss "
        f"a sample, where {percent(bound.failure)} may; below the counting threshold p = {counted} "
        f"a residual of zero goes with wrong data in {percent(min(below))} of runs or more"
        + ("" if last is None else f", and the last one is at p = {last:g}"),
        judged(failed <= bound.failure * len(solved), min(below) >= 0.5),
        f"{len(sure) - len(solved)} of {len(sure)} problems had no start that ended at an exact "
        f"solution. The bound, which is ours and not the paper's, is certified from {certified} on "
        "and far from tight where nothing fails.",
    )
