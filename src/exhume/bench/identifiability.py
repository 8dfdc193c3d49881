"""Whether the rank condition tells which weights give their samples away."""

from typing import cast

from rich.progress import track
from rich.table import Table
from torch import nn

from exhume import data, theory, victims
from exhume.bench.common import check_count, console, heading
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.models.folder import NetworkModel
from exhume.theory import Identifiability, fewest_neurons
from exhume.victims import Victim

EXACT = 1e-4
"""Most relative error, up to the sign, of a sample that counts as recovered."""

COLUMNS = (
    "seed", "neurons", "condition", "rank", "smallest", "margin", "KKT violation", "recovered",
    "worst error",
)  # fmt: skip


def identifiability(
    dim: int = 10, samples: int = 5, degree: int = 3, seeds: int = 10, first_seed: int = 0
) -> None:
    """Recovery from exact KKT points, with neurons enough for the rank condition and with too few.

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
    check_count("seeds", seeds)
    if not 3 <= samples <= dim or degree < 3:
        raise InputError(
            f"samples {samples}, dim {dim}, degree {degree}: expected 3 samples or more, no more "
            "than dimensions, and degree 3 or more."
        )
    enough = 2 * fewest_neurons(degree, samples)
    heading(
        f"identifiability: sphere d={dim} n={samples}, activation z^{degree}, {enough} neurons and "
        f"{samples}, seeds {first_seed} to {first_seed + seeds - 1}"
    )
    table = Table(*COLUMNS)
    good = wrong = lucky = 0
    each = range(first_seed, first_seed + seeds)
    for seed in track(each, "seeds", console=console, transient=True):
        victim, found = identifiable(data.sphere(dim, samples, seed), enough, degree, seed)
        good += _add(table, seed, victim, found) == samples
        few = victims.polynomial(victim.truth, samples, degree, seed)
        judged = _judged(few)
        wrong += not judged.holds
        lucky += _add(table, seed, few, judged) == samples
    console.print(table)
    console.print(
        f"where the condition holds: {good} of {seeds} seeds wholly recovered to {EXACT:g}; with "
        f"too few neurons it fails in {wrong} of {seeds}, of which {lucky} are wholly recovered. "
        "Labels were chosen so that it can hold."
    )
    if good < seeds or wrong < seeds:
        raise SystemExit(1)


def identifiable(known: Data, width: int, degree: int, seed: int) -> tuple[Victim, Identifiability]:
    """A victim that fulfils the condition, under the first labels that allow it."""
    for labelled in victims.labellings(known, degree, seed):
        try:
            victim = victims.polynomial(labelled, width, degree, seed)
        except InputError:
            continue
        found = _judged(victim)
        if found.holds:
            return victim, found
    raise InputError(
        f"seed {seed}: under no labels of these samples a KKT point with {width} neurons fulfils "
        "the condition; take a larger --dim, where samples are nearer to orthogonal."
    )


def _module(victim: Victim) -> nn.Module:
    return cast(NetworkModel, victim.model).network.module


def _judged(victim: Victim) -> Identifiability:
    return theory.identifiability(_module(victim), victim.trained)


def _add(table: Table, seed: int, victim: Victim, found: Identifiability) -> int:
    """One row; returns how many samples were recovered."""
    samples = found.samples
    if samples is None:
        samples = theory.recover(_module(victim), victim.trained).samples
    errors = score(samples, victim.truth).errors
    exact = int((errors < EXACT).sum())
    table.add_row(
        str(seed),
        str(found.neurons),
        "holds" if found.holds else "fails",
        f"{found.rank} of {found.unknowns}",
        f"{found.smallest:.1e}",
        f"{found.margin:.1e}",
        f"{victim.training['violation']:.1e}",
        f"{exact} of {len(errors)}",
        f"{errors.max():.1e}",
    )
    return exact
