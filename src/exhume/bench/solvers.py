"""Ours against the published recipe on the law's synthetic set-up."""

from rich.progress import track
from rich.table import Table

from exhume import data, victims
from exhume.bench.common import check_count, console, heading, momentum_until
from exhume.evaluate import score
from exhume.methods import reconstruct


def solvers(
    dim: int = 100,
    samples: int = 20,
    ratio: float = 10.0,
    seeds: int = 10,
    factor: float = 100.0,
    first_seed: int = 0,
) -> None:
    """Levenberg-Marquardt with search against momentum, to 95 % recovered, in one process.

    Args:
        dim: d of the sphere data.
        samples: n.
        ratio: p/(d·n).
        seeds: how many seeds, each of data, model and attack alike.
        factor: momentum is stopped at so many times our time if it does not get there.
        first_seed: where the seeds begin.
    """
    check_count("seeds", seeds)
    last = first_seed + seeds - 1
    heading(f"solvers: sphere d={dim} n={samples} p={ratio:g}dn, seeds {first_seed} to {last}")
    table = Table("seed", "ours (s)", "exact", "error", "momentum to 95 % (s)", "ratio")
    ratios, exact, stopped = [], 0, 0
    each = range(first_seed, first_seed + seeds)
    for seed in track(each, "seeds", console=console, transient=True):
        known = data.sphere(dim, samples, seed)
        victim = victims.random_features(known, round(ratio * dim * samples), seed=seed)
        found = reconstruct(victim.problem, samples, seed)
        result = score(found.samples, known)
        seconds, recovered = momentum_until(victim, 0.95, factor * found.seconds, seed)
        late = recovered < 0.95
        stopped += seconds >= factor * found.seconds
        exact += result.exact == 1
        ratios.append(seconds / found.seconds)
        slow = f"{seconds:.1f}" + (f", ended at {recovered:.0%}" if late else "")
        table.add_row(
            f"{seed}",
            f"{found.seconds:.2f}",
            f"{result.exact:.0%}",
            f"{result.error:.1e}",
            slow,
            f"{'> ' if late else ''}{ratios[-1]:.0f}",
        )
    console.print(table)
    middle = sorted(ratios)[len(ratios) // 2]
    console.print(
        f"ours: {exact} of {seeds} seeds wholly exact. Momentum takes {min(ratios):.0f} times as "
        f"long or more (median {middle:.0f}); {stopped} of {seeds} runs were stopped at "
        f"{factor:g} times our time without reaching 95 %."
    )
