"""What the measurements share: the heading, tables, and momentum timed against the truth."""

import time
from datetime import UTC, datetime

import torch
from rich.console import Console

from exhume.device import device_name
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.methods import seen_by, threads_for
from exhume.methods.iurada2025 import Iurada2025
from exhume.problem import Problem
from exhume.victims import Victim

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=160)


def heading(title: str, device: str = "cpu") -> None:
    """What is measured, on what, and when."""
    import exhume

    where = device_name(device)
    today = datetime.now(UTC).date().isoformat()
    console.print(f"[bold]{title}[/]")
    console.print(f"{where}; torch {torch.__version__}; exhume {exhume.__version__}; {today}")


def check_count(name: str, value: int) -> None:
    """Refuse a measurement of nothing."""
    if value < 1:
        raise InputError(f"{name}: expected a number of at least 1, got {value}.")


def momentum_until(
    victim: Victim, share: float, limit: float, seed: int, every: int = 50
) -> tuple[float, float]:
    """Run the published recipe until so large a share is recovered, or for `limit` seconds.

    The recipe itself does not see the truth; this stop-watch does, and its own time is not counted.

    Returns:
        Seconds used, and the share recovered at the end.
    """
    method = Iurada2025()
    start = time.perf_counter()
    problem = seen_by(method, victim.problem)
    with threads_for(problem, victim.truth.samples):
        return _momentum_until(method, problem, victim, share, limit, seed, every, start)


def _momentum_until(
    method: Iurada2025,
    problem: Problem,
    victim: Victim,
    share: float,
    limit: float,
    seed: int,
    every: int,
    start: float,
) -> tuple[float, float]:
    progress = method.init(problem, victim.truth.samples, seed)
    recovered, used = 0.0, 0.0
    while progress.outcome is None and used < limit:
        progress = method.advance(problem, progress)
        used = time.perf_counter() - start
        if progress.total_steps % every == 0:
            recovered = score(progress.state.point.candidates, victim.truth.inputs).recovered
            if recovered >= share:
                return used, recovered
            start = time.perf_counter() - used
    recovered = score(progress.state.point.candidates, victim.truth.inputs).recovered
    return used, recovered
