"""Random features: speed, thresholds, an unknown number of samples, images, and no memory for V."""

import re
import resource
import statistics
import sys
import time
from dataclasses import replace
from itertools import product
from typing import Any, cast

import torch

from exhume import data
from exhume.device import usable_device
from exhume.equation.objective import fitted, gradient
from exhume.errors import InputError
from exhume.experiments.benchmarks import common
from exhume.experiments.benchmarks.common import Watch, attacked, heading, momentum_until, say, show
from exhume.experiments.benchmarks.speed import posed, published_step, stored
from exhume.experiments.cells.attack import Attack
from exhume.features.random import RandomFeatures
from exhume.features.weights import Seeded
from exhume.methods.iurada2025 import Iurada2025
from exhume.victims import Victim


def solvers(
    dim: int = 100,
    samples: int = 20,
    ratio: float = 10.0,
    seeds: int = 10,
    factor: float = 100.0,
    first_seed: int = 0,
) -> None:
    """Time Levenberg-Marquardt with search against momentum, to 95 % recovered, in one process.

    Args:
        dim: d of the sphere data.
        samples: n.
        ratio: p/(d·n).
        seeds: how many seeds, each of data, model and attack alike.
        factor: momentum is stopped at so many times our time if it does not get there.
        first_seed: where the seeds begin.
    """
    sphere = Attack(dim=dim, samples=samples, ratio=ratio, products=None)
    cells = common.seeded(sphere, seeds, first_seed)
    last = cells[-1].seed
    heading(f"solvers: sphere d={dim} n={samples} p={ratio:g}dn, seeds {first_seed} to {last}")
    rows = []
    for cell in common.tracked(cells):
        victim = common.trained(cell)
        row = attacked(cell, victim)
        limit = factor * row["seconds"]
        slow, found, _ = momentum_until(victim, 0.95, limit, cell.seed)
        ended, more = (f", ended at {found:.0%}", "> ") if found < 0.95 else ("", "")
        row |= {"slow": slow, "times": slow / row["seconds"], "stopped": slow >= limit}
        rows.append(row | {"ended": ended, "more": more})
    show(
        "seed: {seed} | ours (s): {seconds:.2f} | exact: {exact:.0%} | error: {error:.1e} | "
        "momentum to 95 % (s): {slow:.1f}{ended} | ratio: {more}{times:.0f}",
        rows,
    )
    times = sorted(row["times"] for row in rows)
    say(
        f"ours: {sum(row['exact'] == 1 for row in rows)} of {seeds} seeds wholly exact. Momentum "
        f"takes {times[0]:.0f} times as long or more (median {times[seeds // 2]:.0f}); "
        f"{sum(row['stopped'] for row in rows)} of {seeds} runs were stopped at {factor:g} times "
        "our time without reaching 95 %."
    )


def threshold(
    dim: int = 60,
    samples: int = 12,
    seeds: int = 10,
    ratios: tuple[float, ...] = (1.2, 1.4, 1.6, 2.0, 3.0, 5.0, 10.0),
    limit: float = 30.0,
    momentum_limit: float = 10.0,
    first_seed: int = 0,
) -> None:
    """Count seeds wholly recovered against p/(d·n), for ours and for momentum.

    Args:
        dim: d of the sphere data.
        samples: n.
        seeds: how many seeds, each of data, model and attack alike.
        ratios: p/(d·n); the counting limit is 1.
        limit: most seconds a run for ours.
        momentum_limit: most seconds a run for momentum; 0 leaves it out.
        first_seed: where the seeds begin.
    """
    sphere = Attack(dim=dim, samples=samples, products=None)
    grid = {r: common.seeded(replace(sphere, ratio=r), seeds, first_seed) for r in ratios}
    last = first_seed + seeds - 1
    heading(f"threshold: sphere d={dim} n={samples}, seeds {first_seed} to {last}")
    rows = []
    for ratio, cells in grid.items():
        ours, slow = [], []
        for cell in common.tracked(cells, f"ratio {ratio:g}"):
            victim = common.trained(cell)
            ours.append(attacked(cell, victim, limit=limit))
            if momentum_limit > 0:
                slow.append(momentum_until(victim, 1.0, momentum_limit, cell.seed)[1])
        seconds, found = ([row[word] for row in ours] for word in ("seconds", "recovered"))
        row = {"ratio": ratio, "seeds": seeds, "exact": sum(row["exact"] == 1 for row in ours)}
        row |= {"whole": found.count(1), "recovered": statistics.fmean(found)}
        row |= {"median": statistics.median_high(seconds), "most": max(seconds)}
        row |= {"slow_whole": slow.count(1) if slow else None}
        rows.append(row | {"slow": statistics.fmean(slow) if slow else None})
    show(
        f"ratio: {{ratio:g}} | ours (≤ {limit:g} s): whole: {{whole}} of {{seeds}} | "
        "exact: {exact} of {seeds} | mean recovered: {recovered:.0%} | median s: {median:.1f} | "
        f"most s: {{most:.1f}} | momentum (≤ {momentum_limit:g} s): whole: {{slow_whole:d}} of "
        "{seeds} | mean recovered: {slow:.0%}",
        rows,
    )


def count(
    dim: int = 100, samples: int = 20, ratio: float = 5.0, seeds: int = 10, first_seed: int = 0
) -> None:
    """Count the candidates that are left when the number of samples is not given.

    Args:
        dim: d of the sphere data.
        samples: n, which the attack is not told.
        ratio: p/(d·n).
        seeds: how many seeds, each of data, model and attack alike.
        first_seed: where the seeds begin.
    """
    cell = Attack(dim=dim, samples=samples, ratio=ratio, told=0, products=None)
    cells = common.seeded(cell, seeds, first_seed)
    heading(f"count: sphere d={dim} n={samples} p={ratio:g}dn, n not given")
    rows = [attacked(cell, common.trained(cell)) for cell in common.tracked(cells)]
    found = "found: {candidates} | recovered: {recovered:.0%} | exact: {exact:.0%}"
    show(f"seed: {{seed}} | {found} | seconds: {{seconds:.1f}}", rows)
    within = sum(abs(row["candidates"] - samples) <= 1 for row in rows)
    say(f"within 1 of {samples}: {within} of {seeds} seeds")


def images(
    cases: tuple[str, ...] = ("10x3.2552", "100x5", "100x10"),
    seeds: int = 1,
    first_seed: int = 0,
    limit: float = 240.0,
    momentum: float = 0.0,
    device: str = "auto",
    name: str = "cifar10",
    size: int | None = None,
) -> None:
    """Recover n images at a ratio p/(d·n), with the first layer in memory.

    Args:
        cases: n and ratio of each run, as in 100x5; 10x3.2552 is the published p = 100,000.
        seeds: how many, each of images, their two classes, model and attack alike; 0 has the first
            images of the published classes.
        first_seed: where the seeds begin.
        limit: most seconds a run.
        momentum: seconds for the published loop beside each, to 90 % recovered, with V in memory
            and products as coarse as ours; 0 leaves it out.
        device: where to run.
        name: the data set.
        size: side that the images are shrunk to; their own if left out.
    """
    device = usable_device(device)
    heading(f"images: {name}", device)
    rows, published = [], []
    for case, seed in product(cases, common.drawn(seeds, first_seed)):
        if (sizes := re.fullmatch(r"(\d+)x(\d+\.?\d*)", case)) is None:
            raise InputError(f"case {case!r}: expected samples and ratio, for example 100x5.")
        count, ratio = int(sizes[1]), float(sizes[2])
        cell = Attack(data=name, size=size, samples=count, ratio=ratio, seed=seed, products=None)
        cell.check()
        known = data.load(name, count, seed, classes=pair(name, seed), size=size)
        width = cell.width(known)
        start = time.perf_counter()
        weights = cell.drawn(known, width, device)
        drawn = time.perf_counter() - start
        victim = cell.victim(known, width, device, weights)
        row = attacked(cell, victim, device, limit, Watch(known.inputs)) | {"drawn": drawn}
        rows.append(row)
        if momentum > 0:
            published.append(row | beside(victim, momentum, seed, drawn + row["seconds"], device))
        del weights, victim
    show(
        "n: {samples} | p: {width:,} | ratio: {ratio:g} | seed: {seed} | V (s): {drawn:.1f} | "
        "attack (s): {seconds:.2f} | 99 % seen (s): {reached:.1f} | recovered: {recovered:.0%} | "
        "exact: {exact:.0%} | error: {error:.1e} | residual: {residual:.1e} | steps: {steps} | "
        "products: {products_used}",
        rows,
    )
    if published:
        show(
            "n: {samples} | ratio: {ratio:g} | seed: {seed} | steps of the published loop: {slow:,}"
            " | recovered then: {found:.0%} | a step, V made again (ms): {step:.1f} | "
            "would take (s): {whole:.0f} | times ours with V drawn: {more}{times:.0f}",
            published,
        )


def pair(name: str, seed: int) -> tuple[int, int] | None:
    """Return two of ten classes by chance, or None, those of the set, for seed 0."""
    if seed == 0 or name not in ("cifar10", "mnist", "fashion_mnist", "digits"):
        return None
    one, other = torch.randperm(10, generator=torch.Generator().manual_seed(seed))[:2].tolist()
    return one, other


def beside(victim: Victim, limit: float, seed: int, ours: float, device: str) -> dict[str, Any]:
    """Count the steps of the published loop to 90 % recovered, and say what they would take.

    They are taken with V in memory, in products as coarse as ours; their time is that of the loop
    as published, which makes V again in every step.
    """
    posed = victim.posed().to(device)
    features = cast(RandomFeatures, posed.features)
    in_memory = replace(posed, features=features.resident().leaky())
    _, found, steps = momentum_until(victim, 0.9, limit, seed, seen=in_memory)
    seeded = Seeded(features.width, features.dim, seed, features.device)
    again = replace(posed, features=replace(features, weights=seeded))
    step = published_step(Iurada2025().view(again), victim.truth.samples, seed)
    row: dict[str, Any] = {"slow": steps, "found": found, "step": 1e3 * step, "whole": steps * step}
    return row | {"times": steps * step / ours, "more": "" if found >= 0.9 else "> "}


def streaming(
    samples: int = 100,
    dim: int = 3072,
    width: int = 3_072_000,
    beside: int = 0,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Time one objective and gradient with V regenerated block by block, and its peak memory.

    Args:
        samples: candidates.
        dim: d.
        width: p; V would take 4·p·d bytes.
        beside: p of another problem, with V in memory, whose time a parameter is compared; 0 for
            none.
        seed: of V.
        device: where to run; a GPU does it twice, and the second time counts.
    """
    device = usable_device(device)
    size = f"V would take {4e-9 * width * dim:.1f} GB"
    heading(f"streaming: n={samples} d={dim} p={width:,}; {size}", device)

    def measured(width: int, resident: bool) -> float:
        problem, candidates = posed(samples, dim, width, seed, device)
        problem = stored(problem) if resident else problem
        for _ in range(2 if gpu else 1):
            start = time.perf_counter()
            with common.console.status("objective"):
                point = fitted(problem, candidates)
            middle = time.perf_counter()
            with common.console.status("gradient"):
                norm = gradient(problem, point).norm().item()
            end = time.perf_counter()
        spent = f"in {middle - start:.3g} s, gradient of norm {norm:.3e} in {end - middle:.3g} s"
        say(f"p={width:,}: objective {point.value:.6f} {spent}")
        return (end - start) / width

    gpu, unit = device.startswith("cuda"), 1 if sys.platform == "darwin" else 1024
    each = measured(width, resident=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peak = torch.cuda.max_memory_allocated(device) if gpu else peak
    say(f"peak memory of the {'device' if gpu else 'process'} {peak / 2**30:.2f} GiB")
    if beside > 0:
        ratio = each / measured(beside, resident=True)
        say(f"{1e9 * each:.1f} ns a parameter, {ratio:.2f} times that with V in memory")
