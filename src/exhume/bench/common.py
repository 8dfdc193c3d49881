"""What the measurements share: the heading, tables, and momentum timed against the truth."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch
from rich.console import Console

from exhume.device import device_name
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import score
from exhume.methods import seen_by, threads_for
from exhume.methods.iurada2025 import Iurada2025
from exhume.methods.progress import Progress
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


def training_shown() -> Callable[[int, float], None]:
    """Says every five seconds where a training is; called with the step and the loss."""
    last = time.perf_counter()

    def show(step: int, loss: float) -> None:
        nonlocal last
        if time.perf_counter() - last > 5:
            last = time.perf_counter()
            console.print(f"  training: step {step}, loss {loss:.1e}")

    return show


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
            recovered = score(progress.candidates, victim.truth.inputs).recovered
            if recovered >= share:
                return used, recovered
            start = time.perf_counter() - used
    recovered = score(progress.candidates, victim.truth.inputs).recovered
    return used, recovered


class Watch:
    """Says where a run is, and notes when 99 % of the samples are found; the run does not know."""

    def __init__(self, truth: torch.Tensor) -> None:
        """Begin with nothing found."""
        self.truth = truth
        self.reached: float | None = None
        self.spent = self.last = 0.0

    def __call__(self, progress: Progress, seconds: float) -> None:
        """Take a look; the time that takes is noted, to be left out."""
        clock = time.perf_counter()
        seconds -= self.spent
        share = self._share(progress.candidates)
        if self.reached is None and share is not None and share >= 0.99:
            self.reached = seconds
        if seconds - self.last > 2:
            self.last = seconds
            console.print(
                f"  {seconds:6.1f} s  {progress.phase:8} round {progress.rounds:3} step "
                f"{progress.total_steps:4}  {len(progress.candidates)} candidates  residual "
                f"{progress.residual:.1e}" + ("" if share is None else f"  found {share:.0%}")
            )
        self.spent += time.perf_counter() - clock

    def _share(self, candidates: torch.Tensor) -> float | None:
        """None where candidates are coordinates in a subspace."""
        if candidates.shape[1] != self.truth.shape[1]:
            return None
        return score(candidates, self.truth).recall
