"""Sample splitting and identifiability (Shen et al. 2026)."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from exhume import theory
from exhume.experiments.cells.identifiability import EXACT, Rank, Stationary, TensorTerms
from exhume.experiments.cells.splitting import RULES, Splitting
from exhume.experiments.claims.claim import Claim, Finding, Scale, judged, seeds, undecided
from exhume.experiments.table import Table
from exhume.report.plots import bars, lines, sheet
from exhume.sweep import Cell, Grid, Record

PAPER = "Shen et al., Data Reconstruction: Identifiability and Optimization with Sample Splitting"
PUBLISHED = ("margin", "classes", "change")
"""Objectives with multipliers of their own, for which splitting was proposed."""

LOSS, WIN = 1 / 3, 2 / 3
"""Shares of runs, over both rules, up to which and from which on one thing is worse or better."""


def _splitting_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    axes = {"case": PUBLISHED, "steps": 2500 if small else 20_000, "seed": seeds(4)}
    sizes = {"samples": 6, "width": 100} if small else {"samples": 12, "width": 200}
    return [*Grid(Splitting, {**axes, **sizes})]


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


def _splitting_judge(records: Sequence[Record]) -> Finding:
    found = Table.of(records, Splitting)
    counts = {
        rule: (_wins(found, rule, "base"), _wins(found, rule, f"count of {rule}")) for rule in RULES
    }
    without, matched = zip(*counts.values(), strict=True)
    if not all(sum(total for _, total in arm) for arm in (without, matched)):
        return undecided("no run split a candidate")
    words = "; ".join(
        f"{rule} rule: closer than without in {won} of {total} runs that split, closer than with "
        f"as many from the start in {fair}" + (f" of {both}" if both != total else "")
        for rule, ((won, total), (fair, both)) in counts.items()
    )
    better, fairly = (
        sum(won for won, _ in arm) / sum(total for _, total in arm) for arm in (without, matched)
    )
    tie = LOSS < better < WIN
    predicted = found.present("predicted")
    decrease = (
        f" The predicted decrease of a split is {min(predicted):.4f} to {max(predicted):.4f} of "
        "the measured one."
        if predicted
        else ""
    )
    return Finding(
        words,
        "not decided" if tie else judged(better >= WIN, fairly >= WIN),
        f"{len(found)} victims, all runs of as many steps; closer by mean cosine.{decrease} "
        "`exhume bench splitting` has longer runs, of equal time.",
    )


def _splitting_draw(records: Sequence[Record]) -> Figure | None:
    found = Table.of(records, Splitting).whole("runs")
    if not found:
        return None
    cases = found.values("case")
    figure, grid = sheet(*cases)
    for axes, case in zip(grid, cases, strict=True):
        runs = [row["runs"] for row in found.where(case=case)]
        heights = {
            arm.replace(" ", "\n", 1): statistics.fmean(cosines)
            for arm in runs[0]
            if (cosines := Table(run[arm] for run in runs).present("cosine"))
        }
        bars(axes, heights, "mean cosine with the samples")
        axes.tick_params(axis="x", labelsize=7)
    return figure


# Identifiability.


def _rank_cells(scale: Scale) -> list[Cell]:
    drawn = seeds(3 if scale == "small" else 10)
    cells: list[Cell] = []
    for dim in (3, 4, 5):
        fewest = theory.fewest_neurons(3, dim)
        cells += Grid(Rank, {"dim": dim, "width": (fewest - 1, fewest, fewest + 2), "seed": drawn})
    cells += Grid(TensorTerms, {"degree": (2, 3, 4), "seed": drawn})
    cells += Grid(Stationary, {"seed": drawn})
    return cells


SHARP = {3: 4, 4: 5, 5: 8}
"""By d, the width from which on the rank condition holds for cubic neurons, as claimed."""


def _rank_judge(records: Sequence[Record]) -> Finding:
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
        "The condition is for neurons in general position; those of a KKT point are not, so labels "
        "are chosen under which it can hold.",
    )


def _rank_draw(records: Sequence[Record]) -> Figure:
    ranks = Table.of(records, Rank).whole("rank", "unknowns")
    shares = Table({**row, "share": row["rank"] / row["unknowns"]} for row in ranks)
    figure, (left, right) = sheet("Rank of the equations over unknowns", "Samples from the tensor")
    curves = {
        f"d = {dim}": shares.where(dim=dim).curve("share", "width") for dim in shares.values("dim")
    }
    lines(left, curves, "neurons", "rank / unknowns", "")
    errors = Table.of(records, TensorTerms).curve("error", "degree", max)
    bars(right, {f"degree {d}": error for d, error in errors.items()}, "worst error", least=1e-16)
    return figure


SPLITTING_CLAIMS = (
    Claim(
        "splitting",
        f"{PAPER}, experiments with and without splits",
        "Splitting candidates at a stall reconstructs better than the same method without.",
        _splitting_cells,
        _splitting_judge,
        _splitting_draw,
        (2, 60),
    ),
    Claim(
        "identifiability",
        f"{PAPER}, identifiability of two-layer polynomial networks",
        "At a KKT point of a two-layer network of degree 3 or more the weights determine the "
        "active samples under a rank condition (cubic neurons: from width 4, 5, 8 at d = 3, 4, 5); "
        "degree 2 fails.",
        _rank_cells,
        _rank_judge,
        _rank_draw,
        (1, 1),
    ),
)
