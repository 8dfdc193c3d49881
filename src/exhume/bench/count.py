"""The number of samples, found."""

from rich.progress import track
from rich.table import Table

from exhume import data, victims
from exhume.bench.common import check_count, console, heading
from exhume.evaluate import score
from exhume.methods import reconstruct


def count(
    dim: int = 100, samples: int = 20, ratio: float = 5.0, seeds: int = 10, first_seed: int = 0
) -> None:
    """How many candidates are left when the number of samples is not given.

    Args:
        dim: d of the sphere data.
        samples: n, which the attack is not told.
        ratio: p/(d·n).
        seeds: how many seeds, each of data, model and attack alike.
        first_seed: where the seeds begin.
    """
    check_count("seeds", seeds)
    heading(f"count: sphere d={dim} n={samples} p={ratio:g}dn, n not given")
    table = Table("seed", "found", "recovered", "exact", "seconds")
    within = 0
    each = range(first_seed, first_seed + seeds)
    for seed in track(each, "seeds", console=console, transient=True):
        known = data.sphere(dim, samples, seed)
        victim = victims.random_features(known, round(ratio * dim * samples), seed=seed)
        found = reconstruct(victim.problem, seed=seed)
        result = score(found.samples, known)
        within += abs(len(found.samples) - samples) <= 1
        table.add_row(
            f"{seed}",
            f"{len(found.samples)}",
            f"{result.recovered:.0%}",
            f"{result.exact:.0%}",
            f"{found.seconds:.1f}",
        )
    console.print(table)
    console.print(f"within 1 of {samples}: {within} of {seeds} seeds")
