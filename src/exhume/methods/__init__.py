"""Methods: named recipes on top of search and solvers; a new one is a file and a line here."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume import ranks
from exhume.checks import whole_number
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.exhume import Exhume
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025
from exhume.methods.loo2023 import Loo2023
from exhume.methods.progress import Checkpoint, Method, Progress, unpack
from exhume.methods.published import preset as preset
from exhume.methods.published import presets as presets
from exhume.methods.replay import Replay, recipe_of
from exhume.methods.shen2026 import Shen2026
from exhume.methods.simudy2025 import SimuDy2025
from exhume.methods.stationary import default_for
from exhume.methods.tansley2026 import Tansley2026, confined
from exhume.methods.unmixed import Unmixed
from exhume.recipes import Recipe
from exhume.search.subspace import directions
from exhume.solvers import Outcome
from exhume.solvers.budget import until

# Where the weights are the target, `exhume` is `Stationary`.
METHODS: dict[str, Callable[[], Method]] = {
    "exhume": Exhume,
    "iurada2025": Iurada2025,
    "tansley2026": Tansley2026,
    "haim2022": Haim2022,
    "buzaglo2023": Buzaglo2023,
    "loo2023": Loo2023,
    "shen2026": Shen2026,
    "simudy2025": SimuDy2025,
    "unmixed": Unmixed,
}
REPLAYING = ("exhume", "simudy2025")  # methods that simulate the training run
SPREADING = Exhume, Iurada2025  # methods whose every sum over rows is the problem's
SMALL = 2e7  # multiplications of a product (n·p·d) below which one thread is enough
BLOWN_UP = 1e3  # relative residual from which a run has diverged; without any candidate it is 1
Observer = Callable[[Progress, float], None]  # called after every move, with the seconds used


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack found."""

    samples: Tensor  # candidates (n, d), float64 on the CPU
    coefficients: Tensor  # A, (n·k, m), float64 on the CPU
    residual: float  # ‖Δ − ΦᵀA‖²/‖Δ‖²
    outcome: Outcome  # how the run ended
    method: str  # its name
    seed: int  # of the run
    steps: int  # of the solver
    products: int  # passes over the features' derivative
    seconds: float  # wall time, with that of earlier sittings if it was resumed
    explained: int | None = None  # candidates that explained the weights, where more were tried
    rank: int | None = None  # dimension of the subspace that confined candidates; None for all
    recipe: Recipe | None = None  # of a simulated run, with what was found of it
    counted: int | None = None  # directions of the first layer, in the place of a number not told


def method_named(method: str | Method, problem: Problem | None = None) -> Method:
    """Return the method of that name (the premise picks one of three for `exhume`), or itself."""
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}; known are {', '.join(METHODS)}.")
    replayed = problem is not None and problem.premise is Premise.REPLAY
    if replayed and method not in REPLAYING:
        raise InputError(f"{method}: does not simulate training; use {' or '.join(REPLAYING)}.")
    factory = METHODS[method]
    if factory is not Exhume or problem is None:
        return factory()
    return Replay() if replayed else default_for(problem)


def check_numbers(
    samples: int | None, seed: int, time_limit: float | None, product_limit: int | None = None
) -> None:
    """Refuse numbers that no run could use."""
    for name, number in (("product_limit", product_limit), ("samples", samples)):
        if number is not None:
            whole_number(name, number)
    whole_number("seed", seed, least=0)
    if time_limit is not None and not time_limit >= 0:
        raise InputError(f"time_limit: expected seconds, at least 0, got {time_limit}.")


def seen_by(method: Method, problem: Problem) -> Problem:
    """Return the problem as a method works on it, with its features in memory if they fit.

    On one of several ranks it has some of the rows.
    """
    if ranks.count() > 1 and not isinstance(method, SPREADING):
        what = f"{method.name} with premise {problem.premise.value}"
        raise InputError(f"ranks: {what} runs on one only; leave torchrun out.")
    problem = problem.spread()
    return method.view(replace(problem, features=problem.features.resident()))


@contextmanager
def threads_for(problem: Problem, samples: int | None) -> Iterator[None]:
    """Use one thread for a small problem: threads that wait for each other cost more than that."""
    before = torch.get_num_threads()
    width = ranks.agreed(problem.features.width)  # other threads add up in another order
    if width * problem.dim * (samples or 8) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reconstruct(
    problem: Problem,
    samples: int | None = None,
    seed: int = 0,
    method: str | Method = "exhume",
    time_limit: float | None = None,
    observe: Observer | None = None,
    resume: Checkpoint | None = None,
    product_limit: int | None = None,
) -> Reconstruction:
    """Recover the inputs that explain the weights.

    Args:
        problem: what the auditor may see.
        samples: how many training samples there are; found if None.
        seed: the same seed on the same device gives the same result.
        method: a name, or a method with settings of your own.
        time_limit: seconds after which the best so far is returned.
        observe: called after every move.
        resume: of an interrupted run, from `progress.pack`.
        product_limit: the same in passes over the features' derivative, equal on every machine.
    """
    start = time.perf_counter() - (resume.seconds if resume else 0.0)
    check_numbers(samples, seed, time_limit, product_limit)
    recipe, width = method_named(method, problem), problem.features.width
    if samples is not None and samples > width:
        raise InputError(f"samples: {samples} are more than the {width} features; all would fit.")
    counted = None
    if samples is None and problem.premise is Premise.CHANGE:
        counted = directions(problem.first_layer)
        counted = counted if (counted or 0) <= width else None  # more than could be told apart
    samples = counted if samples is None else samples
    products = math.inf if product_limit is None else product_limit

    def late() -> bool:
        return time_limit is not None and ranks.agreed(time.perf_counter() - start) >= time_limit

    problem = seen_by(recipe, problem)
    with threads_for(problem, samples):
        progress = unpack(problem, resume) if resume else recipe.init(problem, samples, seed)
        while progress.outcome is None and progress.total_products < products and not late():
            with until(late):
                progress = recipe.advance(problem, progress)
            if observe is not None:
                observe(progress, time.perf_counter() - start)
        fit = recipe.finish(problem, progress)
    outcome = progress.outcome or Outcome.BUDGET
    return Reconstruction(
        samples=fit.candidates.double().cpu(),
        coefficients=fit.coefficients.cpu(),
        residual=fit.value,
        outcome=outcome if fit.value <= BLOWN_UP else Outcome.DIVERGED,
        method=recipe.name,
        seed=progress.seed,
        steps=progress.total_steps,
        products=progress.total_products,
        seconds=time.perf_counter() - start,
        explained=progress.explained,
        rank=confined(problem, fit.candidates),
        recipe=recipe_of(fit),
        counted=counted,
    )
