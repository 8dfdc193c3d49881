"""What ranks do in tests: processes that meet on this machine through gloo, as torchrun's do."""

import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from commands import exhume_
from exhume import ranks
from exhume.auditing import run as auditing
from exhume.equation.domain import Sphere
from exhume.equation.problem import Problem
from exhume.features.weights import Seeded
from exhume.methods import Reconstruction, reconstruct
from nets import make
from problems import case, gaussian, on_sphere

# Problems that a search solves to the last digit, so that only rounding can tell results apart


def exact(problem: Problem, outputs: int) -> Problem:
    """The problem whose target is what two samples on a sphere leave."""
    here = problem.features.linearize(on_sphere(2, problem.dim, seed=5))
    target = here.combine(gaussian(len(here.gram()), outputs, seed=6))
    solved = replace(problem, target=target, domain=Sphere(), drift=0.0, first_layer=None)
    return solved.to("cpu")


def random_features() -> Problem:
    return case(20, 4, 20.0, dtype=torch.float32).problem


def last_layer() -> Problem:
    return exact(make("mlp", shape=[4], widths=[20, 120]).problem("last"), 2)


def dense_gradients() -> Problem:
    return exact(make("mlp", shape=[5], widths=[12, 8]).problem("all"), 1)


PROBLEMS: dict[str, tuple[Callable[[], Problem], int, dict[str, Any]]] = {
    "random features": (random_features, 4, {}),
    "last layer": (last_layer, 2, {}),
    "dense gradients": (dense_gradients, 2, {}),
    "iurada2025": (random_features, 4, {"method": "iurada2025", "product_limit": 20}),
}


def attacked(name: str) -> Reconstruction:
    problem, samples, options = PROBLEMS[name]
    return reconstruct(problem(), samples, **options)


def solved(folder: Path) -> None:
    """Attack each problem on the ranks at hand; keep the candidates of every rank."""
    with ranks.joined():
        for name in PROBLEMS:
            torch.save(attacked(name).samples, folder / f"{name}-{ranks.rank()}")


def child(numbers: dict[str, int], folder: Path, task: Callable[..., None], *words: str) -> None:
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "XDG_STATE_HOME": str(folder)}
    if sys.platform == "linux":  # wherever the name of the host leads
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sys.stderr = (folder / f"said-{numbers['RANK']}").open("w")
    task(folder, *words)


def on_ranks(count: int, folder: Path, task: Callable[..., None], *words: str) -> list[int | None]:
    """Run a task on so many ranks, and return how each ended."""
    context = get_context("forkserver")  # which imports everything once
    context.set_forkserver_preload(["rank_imports"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    same, started = {"MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}, []
    for rank in range(count):
        given = {**same, "RANK": rank, "LOCAL_RANK": rank}, folder, task, *words
        started.append(context.Process(target=child, args=given))
        started[-1].start()
    for process in started:
        process.join()
    return [process.exitcode for process in started]


# An audit from the command line, whose ranks are sent signals

MODEL, RUN = "model", "run"


def audited(folder: Path, *words: object) -> None:
    exhume_("audit", folder / MODEL, *("--samples", 4, "--device", "cpu"), *words)


def signalled(folder: Path, name: str, *whom: str) -> None:
    """Audit, or go on with it, until some ranks are sent a signal at their 60th sum, in the search.

    A checkpoint is written at the end alone, unless the first rank does not live to do so.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    reduce, calls = distributed.all_reduce, iter(range(60))

    def last(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None and os.environ["RANK"] in whom:
            signal.raise_signal(signal.Signals[name])
        return reduce(*arguments, **options)

    distributed.all_reduce = last
    auditing.CHECKPOINT_SECONDS = 0.0 if (name, *whom) == ("SIGKILL", "0") else math.inf
    audited(folder, "--out", folder / RUN, *(["--resume"] if (folder / RUN).exists() else []))


def resumed(folder: Path) -> None:
    """Go on to the end; keep which rows of V this rank has drawn."""
    drawn, rows = [], Seeded.rows

    def noted(self: Seeded, start: int, stop: int) -> Tensor:
        drawn.append((start, stop))
        return rows(self, start, stop)

    Seeded.rows = noted  # type: ignore[method-assign]
    audited(folder, "--out", folder / RUN, "--resume")
    torch.save(drawn, folder / f"drawn-{os.environ['RANK']}")


def refused(folder: Path) -> None:
    """Rank 1 does not find the model."""
    os.chdir("/" if os.environ["RANK"] == "1" else folder)
    audited(Path(), "--out", folder / RUN)
