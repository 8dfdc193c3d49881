"""Does splitting help? Against the same method without, and with as many candidates as after."""

import operator
import statistics
import time
from functools import partial

from exhume.equation.problem import Problem
from exhume.experiments.benchmarks.common import drawn, heading, say, show
from exhume.experiments.cells.splitting import ALIKE, ARMS, CASES, RULES, Splitting
from exhume.methods.progress import Method, Progress

COLUMNS = (
    "candidates: {candidates:.0f} | steps: {steps:.0f} | stationarity: {residual:.1e} | "
    f"cosine: {{cosine:.3f}} | over {ALIKE}: {{alike:.0%}} | "
    "error: {error:.2f} | recovered: {recovered:.0%}"
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
