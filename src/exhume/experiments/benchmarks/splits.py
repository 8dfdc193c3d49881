"""Sample splitting and identifiability (Shen et al. 2026).

Does splitting help, against the same method without, and with as many candidates as after? Does the
rank condition tell which weights give their samples away?
"""

import operator
import statistics
import time
from functools import partial
from typing import Any

from exhume import theory
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.experiments.benchmarks.common import drawn, heading, say, show, tracked
from exhume.experiments.cells.identifiability import EXACT, Stationary, module_of
from exhume.experiments.cells.splitting import ALIKE, ARMS, CASES, RULES, Splitting
from exhume.methods.progress import Method, Progress
from exhume.victims import Victim

COLUMNS = (
    "candidates: {candidates:.0f} | steps: {steps:.0f} | stationarity: {residual:.1e} | "
    f"cosine: {{cosine:.3f}} | over {ALIKE}: {{alike:.0%}} | "
    "error: {error:.2f} | recovered: {recovered:.0%}"
)
POINTS = (
    "seed: {seed} | neurons: {found.neurons} | condition: {condition} | "
    "rank: {found.rank} of {found.unknowns} | smallest: {found.smallest:.1e} | "
    "margin: {found.margin:.1e} | KKT violation: {training[violation]:.1e} | "
    "recovered: {exact} of {count} | worst error: {worst:.1e}"
)


class Spread(list[float]):
    """A number for each seed, written as mean ± standard deviation."""

    def __format__(self, form: str) -> str:
        """Write both in the same form; one seed has no deviation."""
        both = [statistics.fmean(self), *([statistics.stdev(self)] if len(self) > 1 else [])]
        return " ± ".join(format(value, form) for value in both)


def splitting(
    cases: tuple[str, ...] = ("margin", "classes", "change", "projection"),
    seeds: int = 3,
    first_seed: int = 0,
    limit: float = 30.0,
    samples: int = 12,
    width: int = 200,
) -> None:
    """Compare splitting with tuned baselines, at equal time and equal numbers of candidates.

    Hyperparameters are tuned once, for the base, without the truth; all runs of a seed take them.

    Args:
        cases: margin (one output, haim2022) and classes (three, buzaglo2023), where weight decay
            holds what the margin would; change (loo2023); projection (coefficients eliminated,
            iurada2025, on random features of points of a sphere).
        seeds: how many, each of data, network and attack alike.
        first_seed: where they begin.
        limit: seconds of the processor for the runs of one seed and case, in equal parts.
        samples: n, of the training set: digits, but for the projection.
        width: of the networks' hidden layer.
    """
    chosen = drawn(seeds, first_seed, cases, CASES)
    heading(f"splitting: n={samples}, width {width}, {limit / len(ARMS):g} s a run")
    for name in cases:
        found = []
        for seed in chosen:
            cell = Splitting(name, samples=samples, width=width, seed=seed)
            found.append(cell.compared(partial(_spent, limit=limit / len(ARMS))))
            cosines = (f"{arm} {found[-1]['runs'][arm]['cosine']:.3f}" for arm in ARMS)
            say(f"  {name} seed {seed}: cosine {', '.join(cosines)}")
        runs = {
            arm: {
                word: Spread(one["runs"][arm][word] for one in found)
                for word in found[0]["runs"][arm]
            }
            for arm in ARMS
        }
        show(f"{name}: {{arm}} | {COLUMNS}", [{"arm": arm, **row} for arm, row in runs.items()])
        predicted = ", ".join(f"{one['predicted']:.4f}" for one in found)
        say(f"{name}: predicted ΔL / measured ΔL, by seed: {predicted}")
        for rule in RULES:
            split, control = runs[f"split, {rule}"], runs[f"count of {rule}"]
            for other, words in ((runs["base"], "without"), (control, "as many from the start")):
                closer = sum(map(operator.gt, split["cosine"], other["cosine"]))
                lower = sum(map(operator.lt, split["residual"], other["residual"]))
                say(
                    f"{name}: split, {rule}, of {seeds} seeds, against {words}: closer to the "
                    f"truth in {closer}, lower residual in {lower}"
                )


def _spent(method: Method, problem: Problem, progress: Progress, limit: float) -> Progress:
    """The run after so many seconds of the processor, whatever else that was busy with."""
    start = time.process_time()
    while progress.outcome is None and time.process_time() - start < limit:
        progress = method.advance(problem, progress)
    return progress


def identifiability(
    dim: int = 10, samples: int = 5, degree: int = 3, seeds: int = 10, first_seed: int = 0
) -> None:
    """Recover samples from exact KKT points, with neurons enough for the condition and too few.

    Samples are random on the sphere. Labels are the first, in the order of
    `exhume.victims.labellings`, for which a KKT point with enough neurons fulfils the condition.
    With too few neurons samples are those of the tensor of least norm that fits. Ends with exit
    code 1 unless every sample is recovered wherever the condition holds.

    Args:
        dim: d of the sphere data.
        samples: n, at most d.
        degree: α of the activation z^α.
        seeds: how many seeds, each of data and model alike.
        first_seed: where the seeds begin.
    """
    chosen = drawn(seeds, first_seed)
    if not 3 <= samples <= dim or degree < 3:
        given = f"samples {samples}, dim {dim}, degree {degree}"
        raise InputError(f"{given}: expected 3 samples or more, at most dim, and degree 3 or more.")
    enough = 2 * theory.fewest_neurons(degree, samples)
    heading(
        f"identifiability: sphere d={dim} n={samples}, activation z^{degree}, {enough} neurons and "
        f"{samples}, seeds {chosen[0]} to {chosen[-1]}"
    )
    holding, failing = [], []
    for seed in tracked(chosen):
        cell = Stationary(dim, samples, degree, seed)
        victim, found = cell.victim()
        holding.append(_row(seed, victim, found))
        failing.append(_row(seed, *cell.judged(victim.truth, samples)))
    show(POINTS, [row for pair in zip(holding, failing, strict=True) for row in pair])
    good, lucky = (sum(row["exact"] == samples for row in rows) for rows in (holding, failing))
    wrong = sum(row["condition"] == "fails" for row in failing)
    say(
        f"where the condition holds: {good} of {seeds} seeds wholly recovered to {EXACT:g}; with "
        f"too few neurons it fails in {wrong} of {seeds}, of which {lucky} are wholly recovered. "
        "Labels were chosen so that it can hold."
    )
    if good < seeds or wrong < seeds:
        raise SystemExit(1)


def _row(seed: int, victim: Victim, found: theory.Identifiability) -> dict[str, Any]:
    """One KKT point, what the condition says of it, and what its weights give back."""
    samples = found.samples
    if samples is None:
        samples = theory.recover(module_of(victim), victim.trained).samples
    errors = score(samples, victim.truth).errors
    exact, count = int((errors < EXACT).sum()), len(errors)
    condition = "holds" if found.holds else "fails"
    row = {"seed": seed, "found": found, "condition": condition, "training": victim.training}
    return {**row, "exact": exact, "count": count, "worst": float(errors.max())}
