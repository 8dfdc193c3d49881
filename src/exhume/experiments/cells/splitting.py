"""A method with splits, without, and with as many candidates from the start, on one victim."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exhume import data, victims
from exhume.data import Data
from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.evaluate import score
from exhume.features.activations import softplus
from exhume.methods import seen_by, threads_for
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025, Rolling
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import Descending, Penalised
from exhume.methods.penalties import bounds
from exhume.methods.progress import Method, Progress, stream
from exhume.methods.shen2026 import (
    SMOOTHING,
    Choice,
    Loss,
    Penalty,
    Projection,
    Shen2026,
    begun_with,
    curvatures,
    with_splits,
)
from exhume.search.split import halves, shared

RULES: tuple[Choice, ...] = ("published", "adaptive")
ARMS = ("base", *(arm for rule in RULES for arm in (f"split, {rule}", f"count of {rule}")))
EPSILONS = (1e-4, 3e-5, 1e-5)
"""How far the check of the predicted decrease splits, as shares of the candidates' median norm.

The check takes the first at which half of them stay clear of the box's bounds. A smaller one would
drown in rounding.
"""

ALIKE = 0.95
"""Cosine from which a sample counts as found: where the margin leaves no trace of its norm."""

TRIALS, PROBE = 9, 100
"""How many settings are tuned over, and for how many steps: enough for networks of this size."""


@dataclass(frozen=True, eq=False)
class Case:
    """A problem in float64, its samples, the method without splits, and its first candidates."""

    problem: Problem
    truth: Tensor
    base: Penalised | Iurada2025
    count: int


Spent = Callable[[Method, Problem, Progress], Progress]
"""Advances a run until its budget is spent."""


@dataclass(frozen=True)
class Splitting:
    """Run a method without splits, with them, and with as many candidates from the start.

    Cases are those of `exhume bench splitting`. All runs have as many steps: a budget that, unlike
    seconds, is the same on every machine.
    """

    case: str = "margin"
    steps: int = 1000
    samples: int = 12
    width: int = 200
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Run all, on the processor, whatever the device.

        Returns:
            What `compared` has.
        """

        def spent(method: Method, problem: Problem, progress: Progress) -> Progress:
            end = progress.total_steps + self.steps
            while progress.outcome is None and progress.total_steps < end:
                progress = method.advance(problem, progress)
            return progress

        return self.compared(spent)

    def compared(self, spent: Spent) -> dict[str, Any]:
        """Run all, each on the same budget.

        Returns:
            `runs`, what was measured of each run by its name, and `predicted`, the predicted
            decrease of a split over the measured one, where the base ends.
        """
        case = CASES[self.case](self.samples, self.width, self.seed)
        base, samples = case.base, len(case.truth)
        problem = seen_by(base, case.problem)
        tuned = _tuned(base, problem, samples, self.seed)

        def go(method: Method, count: int) -> tuple[dict[str, Any], Progress]:
            started = begun_with(base, problem, count, self.seed, tuned)
            progress: Progress = with_splits(started) if isinstance(method, Shen2026) else started
            with threads_for(problem, samples):
                progress = spent(method, problem, progress)
            point = method.finish(problem, progress)
            return _measured(point, progress.total_steps, case.truth), progress

        alone, at_rest = go(base, case.count)
        found = {"base": alone}
        for rule in RULES:
            method = Shen2026(base, max(1, alone["steps"] // 4), rule=rule)
            split, control = go(method, case.count)[0], alone
            if split["candidates"] > case.count:
                control = go(base, split["candidates"])[0]
            else:
                split = alone  # nothing was split: the same run, but for where its budget ended
            found |= {f"split, {rule}": split, f"count of {rule}": control}
        return {"runs": found, "predicted": predicted_over_measured(base, problem, at_rest)}


def _tuned(base: Penalised | Iurada2025, problem: Problem, samples: int, seed: int) -> int:
    """The trial that tuning chose; nothing is tuned in the projection."""
    if isinstance(base, Iurada2025):
        return 0
    progress = base.init(problem, samples, seed)
    while progress.phase == "tune" and progress.outcome is None:
        progress = base.advance(problem, progress)
    return progress.state.trial


def predicted_over_measured(
    base: Penalised | Iurada2025, problem: Problem, progress: Progress
) -> float:
    """½ε² Σ uᵀSu over what the loss does when candidates are split by a small ε.

    The published surrogate of ReLU has a forward and a backward function that do not belong
    together, so no loss has its second derivative: softplus of the same slope takes its place.
    """
    loss: Loss
    if isinstance(base, Penalised):
        assert isinstance(progress, Descending)
        settings = base.settings_of(problem, progress)
        sigma = settings.surrogate(progress.state.steps)
        slope = 4 * sigma.second(torch.zeros((), dtype=torch.float64)).item()
        smooth = replace(problem, features=problem.features.substituted(softplus(slope)))
        loss = Penalty(smooth, settings, progress)
    else:
        assert isinstance(progress, Rolling)
        smooth = replace(problem, features=problem.features.substituted(softplus(SMOOTHING)))
        fit = progress.state.fit
        fit = fitted_with(smooth, fit.candidates, fit.coefficients)
        loss = Projection(smooth, replace(progress, state=replace(progress.state, fit=fit)))
    pairs = curvatures(loss, problem.dim, stream(progress.seed, 0))
    size = float(loss.candidates.norm(dim=1).median())
    for share in EPSILONS:
        epsilon, chosen = share * size, torch.arange(len(loss.candidates))
        if isinstance(loss, Penalty):
            chosen = _off_the_edge(loss, epsilon * pairs.vectors)
        if 2 * len(chosen) >= len(loss.candidates):
            break
    moved = halves(loss.candidates, chosen, pairs.vectors, epsilon)
    after = loss.after(moved, chosen) if isinstance(loss, Penalty) else _held(loss, moved, chosen)
    return 0.5 * epsilon**2 * float(pairs.values[chosen].sum()) / (after - loss.value)


def _off_the_edge(loss: Penalty, step: Tensor) -> Tensor:
    """Candidates whose halves, at x ± step, are on the same side of every bound of the box as x.

    The second derivative of the penalty jumps at a bound, from 0 to 2.
    """
    low, high = bounds(loss.problem.domain, loss.candidates)
    room = torch.minimum((loss.candidates - low).abs(), (loss.candidates - high).abs())
    return (room > step.abs()).all(1).nonzero()[:, 0]


def _held(loss: Loss, moved: Tensor, chosen: Tensor) -> float:
    """The relative residual of halves with half the coefficients of their parent each."""
    if not isinstance(loss, Projection):
        raise TypeError("only the projection has coefficients to hold")
    point = loss.progress.state.fit
    parts = shared(point.shares, chosen).reshape(-1, point.coefficients.shape[1])
    return fitted_with(loss.problem, loss.problem.domain.project(moved), parts).value


def _measured(point: Fit, steps: int, truth: Tensor) -> dict[str, Any]:
    result = score(point.candidates, truth)
    return {
        "candidates": len(point.candidates),
        "steps": steps,
        "residual": point.value,
        "cosine": result.cosine,
        "alike": float((result.cosines > ALIKE).double().mean()),
        "error": result.error,
        "recovered": result.recovered,
    }


def _at_rest(known: Data, width: int, loss: str, seed: int) -> Problem:
    """The weights of a network that weight decay holds: θ = Σ λ_i y_i ∇f(x_i), as at the margin."""
    victim = victims.two_layer(
        known, width, loss=loss, seed=seed, decay=1e-3, until=0.0, steps=4000
    )
    return victim.posed(premise="margin")


def _margin(samples: int, width: int, seed: int) -> Case:
    known = data.load("digits", samples, seed, classes="parity", centre="pixels")
    base = Haim2022(steps=10**9, trials=TRIALS, probe=PROBE)
    return Case(_at_rest(known, width, "logistic", seed), known.inputs, base, 2 * samples)


def _classes(samples: int, width: int, seed: int) -> Case:
    known = data.load("digits", samples, seed, classes=(0, 1, 2), centre="pixels")
    base = Buzaglo2023(steps=10**9, trials=TRIALS, probe=PROBE)
    return Case(_at_rest(known, width, "cross_entropy", seed), known.inputs, base, 2 * samples)


def _change(samples: int, width: int, seed: int) -> Case:
    known = data.load("digits", samples, seed, classes="parity", centre="pixels")
    victim = victims.two_layer(known, width, seed=seed, until=1e-6, lazy=10.0)
    base = Loo2023(steps=10**9, trials=TRIALS, probe=PROBE)
    return Case(victim.posed("all", "final"), known.inputs, base, 2 * samples)


def _projection(samples: int, width: int, seed: int) -> Case:
    known = data.sphere(20, samples, seed)
    victim = victims.random_features(known, 4 * known.dim * samples, seed=seed)
    return Case(victim.problem.to("cpu", torch.float64), known.inputs, Iurada2025(), samples)


CASES: dict[str, Callable[[int, int, int], Case]] = {
    "margin": _margin,
    "classes": _classes,
    "change": _change,
    "projection": _projection,
}
