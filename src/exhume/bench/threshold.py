"""How many equations for each unknown recovery takes."""

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
    limit: float = 60.0,
    momentum_limit: float = 10.0,
) -> None:
    """Seeds wholly recovered against p/(d·n), for ours and for momentum.

    Args:
        dim: d of the sphere data.
        samples: n.
        seeds: seeds 0 … seeds − 1, of data, model and attack alike.
        ratios: p/(d·n); the counting limit is 1.
        limit: most seconds a run for ours.
        momentum_limit: most seconds a run for momentum; 0 leaves it out.
    """
    check_count("seeds", seeds)
    heading(f"threshold: sphere d={dim} n={samples}, seeds 0 to {seeds - 1}")
    table = Table(
        "ratio",
        "ours: whole",
        "exact",
        "mean recovered",
        "median s",
        "most s",
        f"momentum ({momentum_limit:g} s): whole",
        "mean recovered",
    )
    for ratio in ratios:
        ours, slow, seconds = [], [], []
        for seed in range(seeds):
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
        console.print(f"ratio {ratio:g} done")
    console.print(table)
