"""How many equations for each unknown recovery takes."""

from rich.progress import track
from rich.table import Table

from exhume import data, victims
from exhume.bench.common import check_count, console, heading, momentum_until
from exhume.evaluate import score
from exhume.methods import reconstruct


def threshold(
    dim: int = 60,
    samples: int = 12,
    seeds: int = 10,
    ratios: tuple[float, ...] = (1.2, 1.4, 1.6, 2.0, 3.0, 5.0, 10.0),
    limit: float = 30.0,
    momentum_limit: float = 10.0,
    first_seed: int = 0,
) -> None:
    """Seeds wholly recovered against p/(d·n), for ours and for momentum.

    Args:
        dim: d of the sphere data.
        samples: n.
        seeds: how many seeds, each of data, model and attack alike.
        ratios: p/(d·n); the counting limit is 1.
        limit: most seconds a run for ours.
        momentum_limit: most seconds a run for momentum; 0 leaves it out.
        first_seed: where the seeds begin.
    """
    check_count("seeds", seeds)
    heading(
        f"threshold: sphere d={dim} n={samples}, seeds {first_seed} to {first_seed + seeds - 1}"
    )
    table = Table(
        "ratio",
        f"ours (≤ {limit:g} s): whole",
        "exact",
        "mean recovered",
        "median s",
        "most s",
        f"momentum (≤ {momentum_limit:g} s): whole",
        "mean recovered",
    )
    for ratio in ratios:
        ours, slow, seconds = [], [], []
        each = range(first_seed, first_seed + seeds)
        for seed in track(each, f"ratio {ratio:g}", console=console, transient=True):
            known = data.sphere(dim, samples, seed)
            victim = victims.random_features(known, round(ratio * dim * samples), seed=seed)
            found = reconstruct(victim.problem, samples, seed, time_limit=limit)
            ours.append(score(found.samples, known))
            seconds.append(found.seconds)
            if momentum_limit > 0:
                slow.append(momentum_until(victim, 1.0, momentum_limit, seed)[1])
        table.add_row(
            f"{ratio:g}",
            f"{sum(s.recovered == 1 for s in ours)} of {seeds}",
            f"{sum(s.exact == 1 for s in ours)} of {seeds}",
            f"{sum(s.recovered for s in ours) / seeds:.0%}",
            f"{sorted(seconds)[seeds // 2]:.1f}",
            f"{max(seconds):.1f}",
            f"{sum(s == 1 for s in slow)} of {seeds}" if slow else "–",
            f"{sum(slow) / seeds:.0%}" if slow else "–",
        )
    console.print(table)
