"""Whether the rank condition tells which weights give their samples away."""

from typing import Any

from exhume import theory
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.experiments.benchmarks.common import drawn, heading, say, show, tracked
from exhume.experiments.cells.identifiability import EXACT, Stationary, module_of
from exhume.theory import Identifiability, fewest_neurons
from exhume.victims import Victim

COLUMNS = (
    "seed: {seed} | neurons: {found.neurons} | condition: {condition} | "
    "rank: {found.rank} of {found.unknowns} | smallest: {found.smallest:.1e} | "
    "margin: {found.margin:.1e} | KKT violation: {training[violation]:.1e} | "
    "recovered: {exact} of {count} | worst error: {worst:.1e}"
)


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
    enough = 2 * fewest_neurons(degree, samples)
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
    show(COLUMNS, [row for pair in zip(holding, failing, strict=True) for row in pair])
    good, lucky = (sum(row["exact"] == samples for row in rows) for rows in (holding, failing))
    wrong = sum(row["condition"] == "fails" for row in failing)
    say(
        f"where the condition holds: {good} of {seeds} seeds wholly recovered to {EXACT:g}; with "
        f"too few neurons it fails in {wrong} of {seeds}, of which {lucky} are wholly recovered. "
        "Labels were chosen so that it can hold."
    )
    if good < seeds or wrong < seeds:
        raise SystemExit(1)


def _row(seed: int, victim: Victim, found: Identifiability) -> dict[str, Any]:
    """One KKT point, what the condition says of it, and what its weights give back."""
    samples = found.samples
    if samples is None:
        samples = theory.recover(module_of(victim), victim.trained).samples
    errors = score(samples, victim.truth).errors
    exact, count = int((errors < EXACT).sum()), len(errors)
    condition = "holds" if found.holds else "fails"
    row = {"seed": seed, "found": found, "condition": condition, "training": victim.training}
    return {**row, "exact": exact, "count": count, "worst": float(errors.max())}
