"""What benchmarks share: heading and table, an attack as a row, a run watched with a stop-watch."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import exhume
from exhume.checks import one_of, whole_number
from exhume.device import device_name
from exhume.equation.problem import Problem
from exhume.evaluate import score
from exhume.experiments.cells.attack import Attack
from exhume.methods import seen_by, threads_for
from exhume.methods.iurada2025 import Iurada2025
from exhume.methods.progress import Progress
from exhume.victims import Victim

T = TypeVar("T")
console = Console(highlight=False, width=None if Console().is_terminal else 160)


def heading(title: str, device: str = "cpu") -> None:
    """Print what is measured, on what, and when."""
    today = datetime.now(UTC).date().isoformat()
    versions = f"torch {torch.__version__}; exhume {exhume.__version__}"
    say(f"{title}\n{device_name(device)}; {versions}; {today}")


def say(text: str) -> None:
    """Print a line."""
    console.print(text, markup=False)


def show(columns: str, rows: Iterable[Mapping[str, Any]], title: str | None = None) -> None:
    """Print a table whose columns are written as `seed: {seed} | found: {recovered:.0%}`.

    What was not measured is None in a row, and written as a dash.
    """

    def written(form: str, row: Mapping[str, Any]) -> str:
        try:
            return form.format_map(row)
        except (TypeError, AttributeError):  # None has no digits, and no fields
            return "–"

    headings, _, forms = zip(*(part.rpartition(": ") for part in columns.split(" | ")), strict=True)
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*(written(form, row) for form in forms))
    console.print(table)


def tracked(items: Sequence[T], what: str = "Working...") -> Iterable[T]:
    """Go through what takes long, with a bar that says how far."""
    return track(items, what, console=console, transient=True)


def drawn(seeds: int, first: int, cases: Sequence[str] = (), known: Any = ()) -> range:
    """Return so many seeds, where they and the names of cases can be."""
    for name in cases:
        one_of("case", name, known)
    return range(first, first + whole_number("seeds", seeds))


def seeded(cell: Attack, seeds: int, first: int) -> Sequence[Attack]:
    """Return the cell with so many seeds, checked."""
    chosen = drawn(seeds, first)
    cell.check()
    return [replace(cell, seed=seed) for seed in chosen]


def trained(cell: Attack, device: str = "cpu") -> Victim:
    """Train the victim of a cell, and say every five seconds where that is."""
    known = cell.known()
    return cell.victim(known, cell.width(known), device, show=training_shown())


def attacked(
    cell: Attack,
    victim: Victim,
    device: str = "cpu",
    limit: float | None = None,
    watch: "Watch | None" = None,
) -> dict[str, Any]:
    """Attack a victim for `limit` seconds at most, and return the row of a table.

    To the cell and what its `run` gives it adds `seconds` (without those of the watch), `reached`,
    `training` and `equations` for each unknown, in the subspace if there is one.
    """
    problem = victim.posed(cell.block).to(device)
    found = cell.attack(problem, limit, watch)
    unknowns = (found.rank or problem.dim) * victim.truth.samples
    return {
        **asdict(cell),
        **cell.sizes(victim.truth, cell.width(victim.truth)),
        **cell.scored(victim, problem, found),
        "seconds": found.seconds - (watch.spent if watch else 0.0),
        "reached": watch and watch.reached,
        "training": victim.training,
        "equations": problem.target.numel() / unknowns,
    }


def training_shown() -> Callable[[int, float], None]:
    """Return what says every five seconds where a training is."""
    last = time.perf_counter()

    def show(step: int, loss: float) -> None:
        nonlocal last
        if time.perf_counter() - last > 5:
            last = time.perf_counter()
            say(f"  training: step {step}, loss {loss:.1e}")

    return show


def momentum_until(
    victim: Victim,
    share: float,
    limit: float,
    seed: int,
    every: int = 50,
    seen: Problem | None = None,
) -> tuple[float, float, int]:
    """Take steps of the published recipe until `share` is recovered, or `limit` ends.

    Returns seconds, what is recovered then, and the steps. The recipe does not see the truth; this
    stop-watch does, and its own time is not counted.
    """
    method, samples = Iurada2025(), victim.truth.samples
    start = time.perf_counter()
    problem = seen_by(method, victim.problem) if seen is None else seen

    def recovered(progress: Progress) -> float:
        return score(progress.candidates, victim.truth.inputs).recovered

    with threads_for(problem, samples):
        progress, used = method.init(problem, samples, seed), 0.0
        while progress.outcome is None and used < limit:
            progress = method.advance(problem, progress)
            used = time.perf_counter() - start
            if progress.total_steps % every == 0:
                if (found := recovered(progress)) >= share:
                    return used, found, progress.total_steps
                start = time.perf_counter() - used
        return used, recovered(progress), progress.total_steps


class Watch:
    """Says where a run is, and notes when 99 % of the samples are found; the run does not know."""

    def __init__(self, truth: torch.Tensor | None, name: str = "", every: float = 2.0) -> None:
        """Begin with nothing found; without the truth it only says where the run is."""
        self.truth, self.name, self.every = truth, name, every
        self.reached: float | None = None
        self.spent = self.last = 0.0

    def __call__(self, progress: Progress, seconds: float) -> None:
        """Take a look; the time that takes is noted, to be left out."""
        clock = time.perf_counter()
        seconds -= self.spent
        candidates, found = progress.candidates, ""
        if self.truth is not None and candidates.shape[1] == self.truth.shape[1]:
            share = score(candidates, self.truth).recall
            found = f"  found {share:.0%}"
            if self.reached is None and share >= 0.99:
                self.reached = seconds
        if seconds - self.last > self.every:
            self.last = seconds
            say(
                f"  {self.name}{seconds:6.1f} s  {progress.phase:8} round {progress.rounds:3} step "
                f"{progress.total_steps:4}  {len(candidates)} candidates  residual "
                f"{progress.residual:.1e}{found}"
            )
        self.spent += time.perf_counter() - clock
