"""Sample splitting and identifiability (Shen et al. 2026)."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from exhume import theory
from exhume.experiments.cells.identifiability import EXACT, Rank, Stationary, TensorTerms
from exhume.experiments.cells.splitting import RULES, Splitting
from exhume.experiments.claims.claim import Finding, Scale, claim, judged, seeds, undecided
from exhume.experiments.table import Table
from exhume.report.plots import bars, lines, sheet
from exhume.sweep import Cell, Grid, Record

PAPER = "Shen et al., Data Reconstruction: Identifiability and Optimization with Sample Splitting"

# Objectives with multipliers of their own, for which splitting was proposed.
PUBLISHED = ("margin", "classes", "change")
LOSS, WIN = 1 / 3, 2 / 3  # shares of all runs up to which one is worse, from which on better
SHARP = {3: 4, 4: 5, 5: 8}  # by d, the width from which on the rank condition is said to hold


def _splitting_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    axes = {"case": PUBLISHED, "steps": 2500 if small else 20_000, "seed": seeds(4)}
    sizes = {"samples": 6, "width": 100} if small else {"samples": 12, "width": 200}
    return [*Grid(Splitting, {**axes, **sizes})]


def _splitting_draw(records: Sequence[Record]) -> Figure | None:
    panels = []
    found = Table.of(records, Splitting).whole("runs")
    for case in found.values("case"):
        runs = [row["runs"] for row in found.where(case=case)]
        heights = {
            arm.replace(" ", "\n", 1): statistics.fmean(cosines)
            for arm in runs[0]
            if (cosines := Table(run[arm] for run in runs).present("cosine"))
        }
        panels.append(bars(case, heights, "mean cosine with the samples"))
    return sheet(*panels) if panels else None


def _wins(cells: Table, rule: str, against: str) -> tuple[int, int]:
    """Runs in which splits end closer to the samples, of those that did split and have both."""
    split = []
    for runs in cells.present("runs"):
        one, base, other = (runs[arm] for arm in (f"split, {rule}", "base", against))
        counted = len(Table((one, base)).whole("candidates")) == 2
        measured = len(Table((one, other)).whole("cosine")) == 2
        if counted and measured and one["candidates"] > base["candidates"]:
            split.append(one["cosine"] > other["cosine"])
    return sum(split), len(split)


@claim(
    f"{PAPER}, experiments with and without splits",
    "Splitting candidates at a stall reconstructs better than the same method without.",
    (2, 60),
    _splitting_cells,
    _splitting_draw,
)
def splitting(records: Sequence[Record]) -> Finding:
    """Splits end closer than the base; the rest: also than as many candidates from the start."""
    found = Table.of(records, Splitting)
    without = {rule: _wins(found, rule, "base") for rule in RULES}
    matched = {rule: _wins(found, rule, f"count of {rule}") for rule in RULES}
    totals = [[sum(pair) for pair in zip(*arm.values(), strict=True)] for arm in (without, matched)]
    if not all(total for _, total in totals):
        return undecided("no run split a candidate")
    better, fairly = (won / total for won, total in totals)
    predicted = [f"{x:.4f}" for x in sorted(found.present("predicted"))] or ["unmeasured"]
    return Finding(
        "; ".join(
            "{} rule: closer than without in {} of {} runs that split, closer than with as many "
            "from the start in {} of {}".format(rule, *without[rule], *matched[rule])
            for rule in RULES
        ),
        "not decided" if LOSS < better < WIN else judged(better >= WIN, fairly >= WIN),
        f"{len(found)} victims, all runs of as many steps; closer by mean cosine. Predicted over "
        f"measured decrease of a split: {predicted[0]} to {predicted[-1]}.",
    )


def _rank_cells(scale: Scale) -> list[Cell]:
    drawn = seeds(3 if scale == "small" else 10)
    cells: list[Cell] = []
    for dim in SHARP:
        fewest = theory.fewest_neurons(3, dim)
        cells += Grid(Rank, {"dim": dim, "width": (fewest - 1, fewest, fewest + 2), "seed": drawn})
    terms = Grid(TensorTerms, {"degree": (2, 3, 4), "seed": drawn})
    return [*cells, *terms, *Grid(Stationary, {"seed": drawn})]


def _rank_draw(records: Sequence[Record]) -> Figure:
    ranks = Table.of(records, Rank).whole("rank", "unknowns")
    shares = Table({**row, "share": row["rank"] / row["unknowns"]} for row in ranks)
    curves = {
        f"d = {dim}": shares.where(dim=dim).curve("share", "width") for dim in shares.values("dim")
    }
    errors = Table.of(records, TensorTerms).curve("error", "degree", max)
    worst = {f"degree {degree}": error for degree, error in errors.items()}
    return sheet(
        lines("Rank of the equations over unknowns", curves, "neurons", "rank / unknowns", ""),
        bars("Samples from the tensor", worst, "worst error", least=1e-16),
    )


@claim(
    f"{PAPER}, identifiability of two-layer polynomial networks",
    "At a KKT point of a two-layer network of degree 3 or more the weights determine the active "
    "samples under a rank condition (cubic neurons: from width 4, 5, 8 at d = 3, 4, 5); degree 2 "
    "fails.",
    (1, 1),
    _rank_cells,
    _rank_draw,
)
def identifiability(records: Sequence[Record]) -> Finding:
    """KKT points give their samples back; the rest: the widths, and the degrees of the tensor."""
    ranks = Table.of(records, Rank).whole("holds")
    terms = Table.of(records, TensorTerms).whole("error")
    points = Table.of(records, Stationary)
    flat = terms.where(degree=2).present("error")
    curved = [row["error"] for row in terms if row["degree"] != 2]
    if {*SHARP} != {*ranks.values("dim")} or not flat or not curved or not points:
        return undecided("ranks, decompositions and KKT points are needed")
    first: dict[int, int | None] = {}
    for dim in ranks.values("dim"):
        share = ranks.where(dim=dim).curve("holds", "width")
        holding = [int(width) for width in share if share[width] == 1]
        never = [width for width in share if share[width] == 0]
        sharp = bool(holding) and bool(never) and max(never) == min(holding) - 1
        first[dim] = min(holding) if sharp else None
    missed = [row for row in points if row["error"] is None or row["error"] > EXACT]
    return Finding(
        "the rank condition holds from width "
        + ", ".join(f"{w or 'no sharp one'} (d = {d})" for d, w in first.items())
        + f"; KKT points give their samples back in {len(points) - len(missed)} of {len(points)}; "
        "the tensor alone gives them for degree 3 and 4 (error at most "
        f"{max(*curved, 1e-8):.0e}), not for degree 2 ({min(flat):.1g} and more)",
        judged(not missed, first == SHARP, max(curved) <= 1e-6, min(flat) >= 0.1),
        "Labels of KKT points are chosen so that the condition can hold.",
    )
