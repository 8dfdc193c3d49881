"""CIFAR-10 at the published sizes: frogs and trucks out of random features, on a GPU."""

import time

import torch
from rich.table import Table

from exhume import data, victims
from exhume.bench.common import Watch, console, heading
from exhume.device import usable_device
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.features.weights import Seeded, materialise
from exhume.methods import reconstruct


def images(
    cases: tuple[str, ...] = ("10x3.2552", "100x5", "100x10"),
    seed: int = 0,
    limit: float = 240.0,
    device: str = "auto",
    name: str = "cifar10",
) -> None:
    """Recovery of n images at a ratio p/(d·n), with the first layer in memory.

    Args:
        cases: n and ratio of each run, as in 100x5; 10x3.2552 is the published p = 100,000.
        seed: of model and attack.
        limit: most seconds a run.
        device: where to run.
        name: the data set.
    """
    device = usable_device(device)
    heading(f"images: {name}", device)
    table = Table(
        "n", "p", "ratio", "V (s)", "attack (s)", "99 % seen (s)", "recovered", "exact", "error",
        "residual", "steps", "products",
    )  # fmt: skip
    for case in cases:
        count, ratio = _case(case)
        known = data.load(name, count)
        width = round(ratio * known.dim * count)
        start = time.perf_counter()
        weights = materialise(
            Seeded(width, known.dim, seed).to(torch.device(device), torch.float32)
        )
        drawn = time.perf_counter() - start
        victim = victims.random_features(known, width, seed=seed, weights=weights, device=device)
        watch = Watch(known.inputs)
        found = reconstruct(victim.problem, count, seed, time_limit=limit, observe=watch)
        result = score(found.samples, known.inputs)
        table.add_row(
            f"{count}",
            f"{width:,}",
            f"{ratio:g}",
            f"{drawn:.1f}",
            f"{found.seconds - watch.spent:.1f}",
            "–" if watch.reached is None else f"{watch.reached:.1f}",
            f"{result.recovered:.0%}",
            f"{result.exact:.0%}",
            f"{result.error:.1e}",
            f"{found.residual:.1e}",
            f"{found.steps}",
            f"{found.products}",
        )
        del weights, victim
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    console.print(table)


def _case(text: str) -> tuple[int, float]:
    try:
        count, ratio = text.split("x")
        return int(count), float(ratio)
    except ValueError:
        raise InputError(f"case {text!r}: expected samples and ratio, for example 100x5.") from None
