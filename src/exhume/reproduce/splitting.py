"""Sample splitting and identifiability (Shen et al. 2026)."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from matplotlib.figure import Figure

from exhume import data, theory
from exhume.bench.identifiability import identifiable
from exhume.bench.splitting import CASES, compared
from exhume.equation.problem import Problem
from exhume.evaluate import score
from exhume.methods.progress import Method, Progress
from exhume.models.architectures import initialise, two_layer
from exhume.reproduce.curves import Row, chosen, means, present, rows, values, whole
from exhume.reproduce.drawing import bars, lines, sheet
from exhume.reproduce.experiment import Experiment, Finding, Scale, judged, seeds, undecided
from exhume.sweep import Cell, Grid, Record
from exhume.theory.recovery import decompose
from exhume.theory.tensors import matrix, powers

PAPER = "Shen et al., Data Reconstruction: Identifiability and Optimization with Sample Splitting"
PUBLISHED = ("margin", "classes", "change")
"""Objectives with multipliers of their own, for which splitting was proposed."""

RULES = ("published", "adaptive")

LOSS, WIN = 1 / 3, 2 / 3
"""Shares of runs, over both rules, up to which and from which on one thing is worse or better."""


@dataclass(frozen=True)
class Splitting:
    """A tuned method without splits, with them, and with as many candidates from the start.

    Attributes:
        case: margin, classes, change or projection, see `exhume bench splitting`.
        steps: of every run: a budget that, unlike seconds, is the same on every machine.
        samples: n.
        width: of the network.
        seed: of data, network and attack.
    """

    case: str = "margin"
    steps: int = 1000
    samples: int = 12
    width: int = 200
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Run all.

        Returns:
            `runs`, what was measured of each run by its name, and `predicted`, the predicted
            decrease of a split over the measured one. They run on the processor, whatever the
            device.
        """

        def spent(method: Method, problem: Problem, progress: Progress) -> Progress:
            end = progress.total_steps + self.steps
            while progress.outcome is None and progress.total_steps < end:
                progress = method.advance(problem, progress)
            return progress

        case = CASES[self.case](self.samples, self.width, self.seed)
        found, predicted = compared(case, self.seed, spent)
        return {"runs": {arm: asdict(row) for arm, row in found.items()}, "predicted": predicted}


def _splitting_cells(scale: Scale) -> list[Cell]:
    small = scale == "small"
    axes = {"case": PUBLISHED, "steps": 2500 if small else 20_000, "seed": seeds(4)}
    sizes = {"samples": 6, "width": 100} if small else {"samples": 12, "width": 200}
    return [*Grid(Splitting, {**axes, **sizes})]


def _wins(cells: Sequence[Row], rule: str, against: str) -> tuple[int, int]:
    """Runs in which splits end closer to the samples, of those that did split and have both."""
    split = []
    for runs in present(cells, "runs"):
        one, base, other = (runs[arm] for arm in (f"split, {rule}", "base", against))
        counted = len(whole((one, base), "candidates")) == 2
        measured = len(whole((one, other), "cosine")) == 2
        if counted and measured and one["candidates"] > base["candidates"]:
            split.append(one["cosine"] > other["cosine"])
    return sum(split), len(split)


def _splitting_judge(records: Sequence[Record]) -> Finding:
    found = rows(records, Splitting)
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
    predicted = present(found, "predicted")
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
    found = whole(rows(records, Splitting), "runs")
    if not found:
        return None
    cases = values(found, "case")
    figure, grid = sheet(*cases)
    for axes, case in zip(grid, cases, strict=True):
        runs = [row["runs"] for row in chosen(found, case=case)]
        heights = {
            arm.replace(" ", "\n", 1): statistics.fmean(cosines)
            for arm in runs[0]
            if (cosines := present((run[arm] for run in runs), "cosine"))
        }
        bars(axes, heights, "mean cosine with the samples")
        axes.tick_params(axis="x", labelsize=7)
    return figure


# Identifiability.


@dataclass(frozen=True)
class Rank:
    """The rank condition for neurons in general position.

    Attributes:
        dim: d.
        width: neurons.
        degree: of σ(z) = z^α.
        seed: of the neurons.
    """

    dim: int = 3
    width: int = 4
    degree: int = 3
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Check it: `rank`, `unknowns` and `holds`; on the processor, in float64."""
        sigma = "polynomial:" + ",".join(["0"] * self.degree + ["1"])
        network = initialise(two_layer((self.dim,), self.width, activation=sigma), self.seed)
        found = theory.identifiability(network.double())
        return {"rank": found.rank, "unknowns": found.unknowns, "holds": found.holds}


@dataclass(frozen=True)
class Terms:
    """Samples from the tensor Σ_i b_i x_i^{⊗α} alone, where that is known.

    Attributes:
        dim: d.
        samples: n, at most d.
        degree: α; for 2 the terms are eigenvectors, one of many ways to write the matrix.
        seed: of samples and multipliers.
    """

    dim: int = 5
    samples: int = 4
    degree: int = 3
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Decompose.

        Returns:
            `rest`, what of the tensor the terms leave; `error`, the worst angle of a sample to its
            term (the sine).
        """
        known = data.sphere(self.dim, self.samples, self.seed).inputs
        known = known / known.norm(dim=1, keepdim=True)
        generator = torch.Generator().manual_seed(self.seed)
        weights = 1 + torch.rand(self.samples, generator=generator, dtype=torch.float64)
        tensor = weights @ powers(known, self.degree)
        if self.degree == 2:
            square = matrix(tensor, self.dim)
            values, vectors = torch.linalg.eigh(square)
            terms = vectors[:, -self.samples :].T
            rest = float((square - vectors @ torch.diag(values) @ vectors.T).norm() / square.norm())
        else:
            terms, _, rest = decompose(tensor, self.dim, self.degree, 1e-10)
        cosines = score(terms, known).cosines
        return {"rest": rest, "error": float((1 - cosines.square()).clamp_min(0).sqrt().max())}


@dataclass(frozen=True)
class Stationary:
    """A network at an exact KKT point that fulfils the rank condition, and its samples from it.

    Attributes:
        dim: d.
        samples: n.
        degree: of σ(z) = z^α.
        seed: of samples and network.
    """

    dim: int = 10
    samples: int = 4
    degree: int = 3
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Solve for it, and recover: `error`, the worst relative one; on the processor."""
        width = 2 * theory.fewest_neurons(self.degree, self.samples)
        known = data.sphere(self.dim, self.samples, self.seed)
        victim, found = identifiable(known, width, self.degree, self.seed)
        if found.samples is None:
            return {"error": None}
        return {"error": float(score(found.samples, victim.truth).errors.max())}


def _rank_cells(scale: Scale) -> list[Cell]:
    drawn = seeds(3 if scale == "small" else 10)
    cells: list[Cell] = []
    for dim in (3, 4, 5):
        fewest = theory.fewest_neurons(3, dim)
        cells += Grid(Rank, {"dim": dim, "width": (fewest - 1, fewest, fewest + 2), "seed": drawn})
    cells += Grid(Terms, {"degree": (2, 3, 4), "seed": drawn})
    cells += Grid(Stationary, {"seed": drawn})
    return cells


SHARP = {3: 4, 4: 5, 5: 8}
"""By d, the width from which on the rank condition holds for cubic neurons, as claimed."""


def _rank_judge(records: Sequence[Record]) -> Finding:
    ranks, terms = whole(rows(records, Rank), "holds"), whole(rows(records, Terms), "error")
    points = rows(records, Stationary)
    flat, curved = (
        present((row for row in terms if (row["degree"] == 2) == low), "error")
        for low in (True, False)
    )
    if {*SHARP} != {*values(ranks, "dim")} or not flat or not curved or not points:
        return undecided("ranks, decompositions and KKT points are needed")
    first: dict[int, int | None] = {}
    for dim in values(ranks, "dim"):
        own = chosen(ranks, dim=dim)
        holding = [w for w in values(own, "width") if all(r["holds"] for r in chosen(own, width=w))]
        never = [
            w for w in values(own, "width") if not any(r["holds"] for r in chosen(own, width=w))
        ]
        sharp = bool(holding) and bool(never) and max(never) == min(holding) - 1
        first[dim] = min(holding) if sharp else None
    missed = [row for row in points if row["error"] is None or row["error"] > 1e-4]
    return Finding(
        "the rank condition holds from width "
        + ", ".join(f"{w or 'no sharp one'} (d = {d})" for d, w in first.items())
        + f"; KKT points give their samples back in {len(points) - len(missed)} of {len(points)}; "
        "the tensor alone gives them for degree 3 and 4 (error at most "
        f"{max(*curved, 1e-8):.0e}), not for degree 2 ({min(flat):.1g} and more)",
        judged(
            not missed,
            first == SHARP,
            max(curved) <= 1e-6,
            min(flat) >= 0.1,
        ),
        "The condition is for neurons in general position; those of a KKT point are not, so labels "
        "are chosen under which it can hold.",
    )


def _rank_draw(records: Sequence[Record]) -> Figure:
    ranks, terms = whole(rows(records, Rank), "rank", "unknowns"), rows(records, Terms)
    shares: list[Row] = [{**row, "share": row["rank"] / row["unknowns"]} for row in ranks]
    figure, (left, right) = sheet("Rank of the equations over unknowns", "Samples from the tensor")
    curves = {
        f"d = {dim}": means(chosen(shares, dim=dim), "share", "width")
        for dim in values(shares, "dim")
    }
    lines(left, curves, "neurons", "rank / unknowns", "")
    errors = {
        f"degree {degree}": max(found)
        for degree in values(terms, "degree")
        if (found := present(chosen(terms, degree=degree), "error"))
    }
    bars(right, errors, "worst error", least=1e-16)
    return figure


SPLITTING_EXPERIMENTS = (
    Experiment(
        "splitting",
        f"{PAPER}, experiments with and without splits",
        "Splitting candidates at a stall reconstructs better than the same method without.",
        _splitting_cells,
        _splitting_judge,
        _splitting_draw,
        (2, 60),
    ),
    Experiment(
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
