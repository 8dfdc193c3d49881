"""Speed as ratios in one run: products against the device, the published loop, and training."""

import math
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import joblib
import torch
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from exhume import ranks
from exhume.device import usable_device
from exhume.equation.objective import descent, fitted, gauss_newton
from exhume.equation.problem import Problem
from exhume.experiments.benchmarks.common import heading, say, show
from exhume.features.random import RandomFeatures
from exhume.features.weights import Seeded, materialise
from exhume.methods import seen_by
from exhume.methods.iurada2025 import Iurada2025
from exhume.models import architectures
from exhume.models.folder import NetworkModel, random_features_problem
from exhume.victims.training import state_of

LEAST = 0.3  # seconds that are timed at least, in repetitions of which the fastest counts
PARTS = (0.25, 0.5, 1.0)  # of the sizes: growth is fitted to the times of these
COPIED = {"cpu": 2**28, "cuda": 2**32}  # bytes of a copy, several times what caches hold
RANKS = (1, 2, 4)  # among which rows are spread, as far as there are cores or GPUs for each
TAKEN = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT  # by torch's launcher
SIDE = {"cpu": 2048, "cuda": 8192}  # of square matrices that are multiplied
BEYOND = " (large products may be rounded to bfloat16 on a CPU, which can take less than that)"
OURS = "product: push, project, pull"


def speed(
    samples: int = 32,
    dim: int = 256,
    width: int = 65536,
    channels: int = 64,
    neurons: int = 1000,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Time products against the device's limit, the published loop, and steps of training.

    Args:
        samples: candidates, n.
        dim: d of random features.
        width: p of random features; growth is fitted to a quarter, a half and all of each size.
        channels: of the residual network whose last layer is attacked.
        neurons: of the two hidden layers of the network of which all parameters are attacked.
        seed: of V, weights and candidates.
        device: where to run.
    """
    device = usable_device(device)
    heading(f"speed: random features n={samples} d={dim} p={width:,}", device)
    problem, candidates = posed(samples, dim, width, seed, device)
    rows = steps(problem, candidates) + published(problem, samples, seed)
    whole = next(row["seconds"] for row in rows if row["what"] == OURS)
    show(
        "what: {what} | ms: {ms:.2f} | in products: {ratio:.2f}",
        [row | {"ms": 1e3 * row["seconds"], "ratio": row["seconds"] / whole} for row in rows],
    )
    coarse = device.startswith("cuda")
    copied, multiplied = limits(device, torch.float16 if coarse else torch.float32)
    moved, flops = 2 * width * dim * (2 if coarse else 4), 4 * samples * dim * width
    least = max(moved / copied, flops / multiplied)
    say(
        f"a copy moves {copied / 1e9:.0f} GB/s, matrices are multiplied at "
        f"{multiplied / 1e12:.2f} TFLOP/s: a product, which reads V twice ({moved / 1e9:.2f} GB, "
        f"{flops / 1e12:.3f} TFLOP), takes {1e3 * least:.2f} ms at least; ours reaches "
        f"{least / whole:.0%} of that limit" + ("" if coarse else BEYOND)
    )
    columns = (
        "exponent of time in: {size} | of a product: {product:.2f} | "
        "of linearise, Gram matrix, curvature: {point:.2f}"
    )
    rows = growth(samples, dim, width, seed, device)
    show(columns, rows + growth_in_ranks(samples, dim, width, seed, device))
    residual = {"shape": [3, 32, 32], "width": channels}
    dense = {"shape": [dim], "widths": [neurons, neurons]}
    show(
        "network: {network} | p: {p:,} | n: {n} | product (ms): {product:.2f} | "
        "step of training (ms): {training:.2f} | in steps: {ratio:.2f}",
        [
            network("resnet", "last", residual, samples, seed, device),
            network("mlp", "all", dense, samples, seed, device),
        ],
    )


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Return seconds of the fastest of a few repetitions, after one that is not counted.

    It is what the device can do: others may use it at the same time, which only adds.
    """
    seconds: list[float] = []
    while len(seconds) < 4 or ranks.agreed(sum(seconds[1:])) < LEAST:
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def limits(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return bytes that a copy reads and writes a second, and operations of matrix products."""
    on = torch.device(device)
    source = torch.randn(COPIED.get(on.type, COPIED["cpu"]) // 4, device=on)
    target = torch.empty_like(source)
    copied = timed(lambda: target.copy_(source), on)
    side = SIDE.get(on.type, SIDE["cpu"])
    left, right = (torch.randn(side, side, device=on).to(dtype) for _ in range(2))
    return 8 * len(source) / copied, 2 * side**3 / timed(lambda: left @ right, on)


def posed(samples: int, dim: int, width: int, seed: int, device: str) -> tuple[Problem, Tensor]:
    """Return a problem of random features with V from a seed, and candidates (n, d) for it."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(width, 1, generator=generator)
    problem = random_features_problem(Seeded(width, dim, seed), "relu", target, (dim,)).to(device)
    return problem, problem.domain.start(samples, dim, generator)


def stored(problem: Problem) -> Problem:
    """Return the problem with V in memory."""
    return replace(problem, features=problem.features.resident())


def point(problem: Problem, candidates: Tensor) -> Tensor:
    """Linearise, with Gram matrix and curvature, as a step begins; return the latter, (n, n)."""
    _, linear = problem.linearize(candidates)
    linear.gram()
    return linear.curvature(torch.ones(len(candidates), 1, device=problem.features.device))


def steps(seeded: Problem, candidates: Tensor) -> list[dict[str, Any]]:
    """Time what a step is made of."""
    problem, on = stored(seeded), seeded.features.device
    fit = fitted(problem, candidates)
    linear, a, direction = fit.linearization, fit.coefficients, torch.randn_like(fit.candidates)
    pushed = linear.push(direction, a)
    assert isinstance(seeded.features, RandomFeatures)
    weights = seeded.features.weights
    actions: dict[str, Callable[[], object]] = {
        "V drawn": lambda: materialise(weights),
        "push": lambda: linear.push(direction, a),
        "pull": lambda: linear.pull(pushed, a),
        "apply and combine": lambda: linear.combine(linear.apply(pushed)),
        OURS: lambda: gauss_newton(fit, direction),
        "linearise": lambda: problem.linearize(candidates),
        "linearise, Gram matrix, curvature": lambda: point(problem, candidates),
        "objective and gradient": lambda: descent(fitted(problem, candidates)),
        "the same, V drawn on the way": lambda: descent(fitted(seeded, candidates)),
    }
    return [{"what": what, "seconds": timed(action, on)} for what, action in actions.items()]


def published(problem: Problem, samples: int, seed: int) -> list[dict[str, Any]]:
    """Time a step of the published loop, with V made again block by block and with V in memory."""
    method, rows = Iurada2025(), []
    for where, seen in (
        ("V made again", method.view(problem)),
        ("V in memory", seen_by(method, problem)),
    ):
        seconds = published_step(seen, samples, seed)
        rows.append({"what": f"a step of iurada2025, {where}", "seconds": seconds})
    return rows


def published_step(seen: Problem, samples: int, seed: int) -> float:
    """Time a step of the published loop on a problem as it sees it."""
    method = Iurada2025()
    progress = method.init(seen, samples, seed)
    return timed(partial(method.advance, seen, progress), seen.features.device)


def growth(samples: int, dim: int, width: int, seed: int, device: str) -> list[dict[str, Any]]:
    """Fit exponents of the times of a product and of a point in each size."""
    sizes, rows = {"samples": samples, "dim": dim, "width": width}, []
    for name in sizes:
        scaled = [max(1, int(part * sizes[name])) for part in PARTS]
        times = [grown(*posed(**(sizes | {name: x}), seed=seed, device=device)) for x in scaled]
        product, begun = (exponent(scaled, seconds) for seconds in zip(*times, strict=True))
        size = f"{name}, {scaled[0]:,} to {scaled[-1]:,}"
        rows.append({"size": size, "product": product, "point": begun})
    return rows


def grown(seeded: Problem, candidates: Tensor) -> tuple[float, float]:
    """Time a product and a point, with V in memory until this returns."""
    problem, on = stored(seeded), seeded.features.device
    fit = fitted(problem, candidates)
    product = timed(lambda: gauss_newton(fit, fit.candidates), on)
    return product, timed(lambda: point(problem, candidates), on)


def growth_in_ranks(
    samples: int, dim: int, width: int, seed: int, device: str
) -> list[dict[str, Any]]:
    """Fit exponents of the same times in the number of ranks, −1 at best; none where one has all.

    A rank has a GPU or one thread to itself, so that more of them are more of the machine.
    """
    room = torch.cuda.device_count() if device.startswith("cuda") else joblib.cpu_count()
    counts = [count for count in RANKS if count <= room]
    if len(counts) == 1:
        return []
    times = []
    for count in counts:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id="bench",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
        )
        handlers = [(number, signal.getsignal(number)) for number in TAKEN]
        try:
            times.append(elastic_launch(config, on_rank)(samples, dim, width, seed, device)[0])
        finally:  # else Ctrl-C would be its own from now on
            for number, handler in handlers:
                signal.signal(number, handler)
    product, begun = (exponent(counts, seconds) for seconds in zip(*times, strict=True))
    return [{"size": f"ranks, 1 to {counts[-1]}", "product": product, "point": begun}]


def on_rank(samples: int, dim: int, width: int, seed: int, device: str) -> tuple[float, float]:
    """Time a product and a point together with the other ranks."""
    torch.set_num_threads(1)
    with ranks.joined():
        problem, candidates = posed(samples, dim, width, seed, device.partition(":")[0])
        return grown(problem.spread(), candidates)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log seconds in log size, by least squares.

    Example:
        >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
        2.0
    """
    return statistics.linear_regression(*(list(map(math.log, x)) for x in (sizes, seconds))).slope


def network(
    name: str, block: str, sizes: dict[str, Any], samples: int, seed: int, device: str
) -> dict[str, Any]:
    """Time a product with the features of a network, and a step of its training on as many."""
    arguments = {**sizes, "outputs": 1}
    module = architectures.initialise(architectures.build(name, arguments), seed)
    initial = state_of(module)
    trained = {key: value * 1.01 for key, value in initial.items()}  # any change will do
    problem = NetworkModel(name, arguments, initial, trained, None).problem(block).to(device)
    problem = stored(problem)
    start = problem.domain.start(samples, problem.dim, torch.Generator().manual_seed(seed))
    fit = fitted(problem, start)
    on = fit.candidates.device
    module = module.to(on)
    optimizer, labels = torch.optim.SGD(module.parameters(), 1e-9), torch.ones(samples, 1).to(on)
    inputs = fit.candidates.reshape(samples, *sizes["shape"])

    def training() -> None:
        optimizer.zero_grad()
        (module(inputs) - labels).square().mean().backward()
        optimizer.step()

    row = {"network": f"{name}, {block}", "p": problem.features.width, "n": samples}
    one, other = timed(lambda: gauss_newton(fit, fit.candidates), on), timed(training, on)
    return row | {"product": one * 1e3, "training": other * 1e3, "ratio": one / other}
