"""Before the run: what it has to go by, what would do better, and about how long it takes."""

import time
from dataclasses import dataclass

from exhume.auditing.settings import Settings
from exhume.equation.domain import Sphere
from exhume.equation.problem import Premise, Problem
from exhume.features.modules import ModuleFeatures
from exhume.methods import seen_by, threads_for
from exhume.methods.exhume import Exhume
from exhume.methods.labels import run_of
from exhume.methods.progress import Method, Progress
from exhume.methods.replay import LazySearch, Replay
from exhume.methods.tansley2026 import Tansley2026
from exhume.models.opening import Opened
from exhume.search.subspace import directions
from exhume.solvers.budget import until
from exhume.theory import counting
from exhume.theory.support import ENOUGH
from exhume.wording import NO_BREAK, duration, plural

PRODUCTS = 300, 3000  # of a search of ours that succeeds: fewer where equations are many
REPLAYED = 10, 300  # steps of one that simulates training: labels and the rate are fitted, too
STEP = 120  # products of such a step, where its Jacobian is not kept
PUBLISHED = (50_000,)  # of the others: 30,000 to 80,000 as published
WIDEST = 10**9  # more samples than these are in no weights
UNITS = ((3600, "h"), (60, "min"), (1, "s"))
PATIENCE = 0.5  # seconds after which the step that is timed ends: nobody waits for an estimate


@dataclass(frozen=True)
class Forecast:
    """A forecast says what an attack has to go by, before time is spent on it."""

    said: list[str]  # a sentence each
    hopeless: str | None  # why no attack of this kind can succeed; None where one may


def forecast(settings: Settings, opened: Opened) -> Forecast:
    """Count equations and unknowns of an audit, and name what has more of the first."""
    method = settings.attack(opened.problem)
    problem, samples = method.view(opened.problem), settings.samples
    most = counting.largest(
        lambda n: _equations(problem, n) >= max(1, n * (problem.dim - 1)), WIDEST
    )
    holds = f"the weights that are attacked could give up {plural(most, 'sample')} at most"
    lazy = opened.problem.premise is Premise.CHANGE
    rank = directions(opened.problem.first_layer) if lazy else None
    samples = rank if samples is None else samples
    if (samples or 0) > opened.problem.features.width:
        return Forecast([], None)  # which the attack refuses
    if samples is None:
        return Forecast([holds], None if most else f"{holds}.")
    count, unknowns = _equations(problem, samples), samples * problem.dim
    asked = f"{plural(samples, 'sample')} of {problem.dim:,} entries are {unknowns:,} unknowns"
    said = [
        f"{asked}, for which there are {count:,} equations at most: {count / unknowns:.2f} for "
        f"each; {holds}"
    ]
    if (rank or 0) > samples:
        said.append(f"the first layer changed in {rank} directions, which takes as many samples")
    better = _better(opened, samples, rank) if count < ENOUGH * unknowns else []
    if samples <= most:
        return Forecast([*said, *(f"better: {way}" for way in better)], None)
    ways = better or ["see what each block could give up: exhume bound MODEL"]
    few = (
        f"{count / unknowns:.2f} equations for each unknown are too few: whatever is found, other "
        "samples explain the weights as well, and the verdict will be that nobody can tell"
    )
    return Forecast(said, f"{few}. Instead: {', or '.join(ways)}.")


def _equations(problem: Problem, samples: int) -> int:
    """Return how many equations test so many samples, at most."""
    width, outputs = problem.target.shape
    if problem.premise is Premise.REPLAY:
        return width
    # at the margin, one multiplier will do for a sample, however many outputs there are
    margin = problem.premise is Premise.MARGIN
    rows = 1 if margin else max(1, problem.features.outputs)
    return counting.equations(width, outputs, samples, rows)


def _better(opened: Opened, samples: int, rank: int | None) -> list[str]:
    """Name the block and the method that have equations enough for so many samples."""
    problem = opened.problem
    features, layer = problem.features, problem.first_layer
    found: list[str] = []
    if problem.premise is not Premise.CHANGE:
        return found
    if problem.drift and opened.parameters != "all":
        every, rows = problem.target.shape if layer is None else (layer.trained.numel(), 1)
        if isinstance(features, ModuleFeatures):
            every = sum(weight.numel() for weight in features.network.module.parameters())
            rows = features.network.outputs
        each = counting.equations(every, 1, samples, rows) / (samples * problem.dim)
        if each >= ENOUGH:
            found.append(f"--parameters all has {each:.2f} for each unknown, if all were trained")
    if rank is not None and rank <= samples and isinstance(problem.domain, Sphere):
        each = _equations(problem, samples) / (samples * rank)
        if each >= ENOUGH:
            found.append(f"in the samples' span, --method tansley2026, there are {each:.2f}")
    return found


def hours(settings: Settings, problem: Problem) -> str | None:
    """Say how long an audit of a problem in its place may take; None where that cannot be told."""
    method, limit = settings.attack(problem), settings.time_limit
    typical = PRODUCTS if isinstance(method, Exhume | Tansley2026) else PUBLISHED
    typical = REPLAYED if isinstance(method, Replay) else typical
    try:
        pace = _pace(method, problem, settings)
    except (RuntimeError, MemoryError, ValueError):  # the run itself says what is wrong
        return None
    seconds = [pace * min(products, settings.product_limit or WIDEST) for products in typical]
    about = " to ".join(dict.fromkeys(map(_rounded, seconds)))
    about = about if " to " in about else f"about {about}"
    if limit is None:
        return f"takes {about}, several times as long with controls, and longer where it fails"
    if seconds[-1] > limit:
        return f"would take {about}, and ends after {duration(limit)} (--time-limit)"
    return f"takes {about}, {duration(limit)} at most (--time-limit)"


def _rounded(seconds: float) -> str:
    """Say a time with one digit."""
    size, unit = next((x for x in UNITS if seconds >= 1.5 * x[0]), UNITS[-1])
    return f"{max(1.0, float(f'{seconds / size:.1g}')):g}{NO_BREAK}{unit}"


def _pace(method: Method, problem: Problem, settings: Settings) -> float:
    """Return the seconds that a product takes, or a step of replay, where they cost unlike much.

    It is the second step that is timed, as the first one warms up.
    """
    view, spent, products = seen_by(method, problem), 0.0, 0
    with threads_for(view, settings.samples):
        progress: Progress = method.init(view, settings.samples, settings.seed)
        if isinstance(method, Replay) and isinstance(progress, LazySearch):
            progress = method.first(view, progress)  # a run costs far more than gradients
        for _ in range(2):
            before, start = progress.total_products, time.perf_counter()
            with until(lambda: time.perf_counter() - start > PATIENCE):  # noqa: B023
                progress = method.advance(view, progress)
            spent, products = time.perf_counter() - start, progress.total_products - before
    if not products:
        raise ValueError("there is no product whose time would tell")
    if isinstance(method, Replay):
        whole = spent < PATIENCE or run_of(view).dense(progress.candidates)  # not cut short
        return spent if whole else spent * max(1.0, STEP / products)
    return spent / products
