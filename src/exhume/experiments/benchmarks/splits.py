"""Does splitting help? Against the same method without, and with as many candidates as after."""

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from exhume.checks import one_of, whole_number
from exhume.equation.problem import Problem
from exhume.experiments.benchmarks.common import heading, say, show
from exhume.experiments.cells.splitting import ALIKE, ARMS, CASES, RULES, Splitting
from exhume.methods.progress import Method, Progress

COLUMNS = {
    "candidates": ".0f",
    "steps": ".0f",
    "residual": ".1e",
    "cosine": ".3f",
    "alike": ".0%",
    "error": ".2f",
    "recovered": ".0%",
}
HEADINGS = {"residual": "stationarity", "alike": f"over {ALIKE}"}


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
    whole_number("seeds", seeds)
    for name in cases:
        one_of("case", name, CASES)
    heading(f"splitting: n={samples}, width {width}, {limit / len(ARMS):g} s a run")
    for name in cases:
        found = []
        for seed in range(first_seed, first_seed + seeds):
            cell = Splitting(name, samples=samples, width=width, seed=seed)
            found.append(cell.compared(partial(_spent, limit=limit / len(ARMS))))
            cosines = (f"{arm} {found[-1]['runs'][arm]['cosine']:.3f}" for arm in ARMS)
            say(f"  {name} seed {seed}: cosine {', '.join(cosines)}")
        runs = {arm: [one["runs"][arm] for one in found] for arm in ARMS}
        rows = [_row(arm, runs[arm]) for arm in ARMS]
        columns = {HEADINGS.get(word, word): f"{{{word}}}" for word in COLUMNS}
        show({name: "{arm}", **columns}, rows)
        predicted = ", ".join(f"{one['predicted']:.4f}" for one in found)
        say(f"{name}: predicted ΔL / measured ΔL, by seed: {predicted}")
        for rule in RULES:
            for other, words in (
                ("base", "without"),
                (f"count of {rule}", "as many from the start"),
            ):
                pairs = list(zip(runs[f"split, {rule}"], runs[other], strict=True))
                closer = sum(one["cosine"] > two["cosine"] for one, two in pairs)
                lower = sum(one["residual"] < two["residual"] for one, two in pairs)
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


def _row(arm: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Mean ± standard deviation over the seeds."""
    row = {"arm": arm}
    for word, form in COLUMNS.items():
        values = [run[word] for run in runs]
        row[word] = format(statistics.fmean(values), form)
        if len(values) > 1:
            row[word] += f" ± {format(statistics.stdev(values), form)}"
    return row
