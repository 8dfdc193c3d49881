"""Solvers move the candidates: Levenberg-Marquardt is ours; `methods.iurada2025` has momentum."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol, TypeVar

from torch import Tensor

from exhume.equation.objective import Fit
from exhume.equation.problem import Problem


class Outcome(Enum):
    """The outcome says how a run ended, and nothing about being right: that is evaluation's."""

    CONVERGED = "converged"
    SETTLED = "settled"
    STALLED = "stalled"
    DIVERGED = "diverged"
    BUDGET = "budget"

    @property
    def sentence(self) -> str:
        """Say what it means, for a reader of the report."""
        return {
            "converged": "The candidates explain the weights to the tolerance asked for.",
            "settled": "Trials that dropped many candidates came back to the same residual and "
            "found them again, with candidates to spare: it is taken for the floor that moving "
            "features leave.",
            "stalled": "Steps hardly lower the residual any more, and it is above the tolerance.",
            "diverged": "The residual became infinite or undefined.",
            "budget": "The budget of steps or time ran out before the residual settled.",
        }[self.value]


PASSING = {"saved": False}  # the metadata of a field that no checkpoint holds


@dataclass(frozen=True, eq=False, kw_only=True)
class State:
    """Everything a solver needs to go on; each solver adds what it carries from step to step."""

    fit: Fit  # the objective at the candidates
    steps: int = 0  # how many were taken
    products: int = 0  # how often the features' derivative was applied, the unit of cost
    outcome: Outcome | None = None  # None while there is more to do


StateT = TypeVar("StateT", bound=State)


def judged(state: StateT, tolerance: float) -> StateT:
    """Return the state with its outcome, if the residual is undefined or at the tolerance."""
    if not math.isfinite(state.fit.value):
        return replace(state, outcome=Outcome.DIVERGED)
    return replace(state, outcome=Outcome.CONVERGED) if state.fit.value <= tolerance else state


class Solver(Protocol[StateT]):
    """A solver is frozen hyperparameters with two pure functions."""

    def init(self, problem: Problem, candidates: Tensor) -> StateT:
        """Return the state at the start."""

    def step(self, problem: Problem, state: StateT) -> StateT:
        """Return the state one step on; its `outcome` is set when nothing is left to do."""


def solve(solver: Solver[StateT], problem: Problem, candidates: Tensor, steps: int) -> StateT:
    """Take at most so many steps from the candidates (n, d)."""
    state = solver.init(problem, candidates)
    while state.outcome is None and state.steps < steps:
        state = solver.step(problem, state)
    return state
