"""Solvers move the candidates: momentum and Adam as baselines, Levenberg-Marquardt as ours."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from exhume.equation.objective import Fit
from exhume.equation.problem import Problem


class Outcome(Enum):
    """How a run ended. It says nothing about being right: that is the evaluation's business."""

    CONVERGED = "converged"
    SETTLED = "settled"
    STALLED = "stalled"
    DIVERGED = "diverged"
    BUDGET = "budget"

    @property
    def sentence(self) -> str:
        """What it means, for a reader of the report."""
        return _SENTENCES[self]


_SENTENCES = {
    Outcome.CONVERGED: "The candidates explain the weights to the tolerance asked for.",
    Outcome.SETTLED: (
        "Trials that dropped many candidates came back to the same residual and found them again, "
        "with candidates to spare: it is taken for the floor that moving features leave."
    ),
    Outcome.STALLED: "Steps hardly lower the residual any more, and it is above the tolerance.",
    Outcome.DIVERGED: "The residual became infinite or undefined.",
    Outcome.BUDGET: "The budget of steps or time ran out before the residual settled.",
}


@dataclass(frozen=True, eq=False)
class State:
    """Where a solver is: enough to go on from, and to be written to a file.

    Attributes:
        fit: the objective at the candidates.
        memory: what the solver carries from step to step, by name.
        steps: steps taken.
        products: passes over the features' derivative, the unit of cost.
        stalled: consecutive steps without worthwhile progress.
        outcome: None while there is more to do.
    """

    fit: Fit
    memory: dict[str, Tensor]
    steps: int = 0
    products: int = 0
    stalled: int = 0
    outcome: Outcome | None = None


class Solver(Protocol):
    """Frozen hyperparameters with two pure functions."""

    def init(self, problem: Problem, candidates: Tensor) -> State:
        """The state at the start."""
        ...

    def step(self, problem: Problem, state: State) -> State:
        """The state one step on; `outcome` is set when there is nothing left to do."""
        ...


def run(solver: Solver, problem: Problem, candidates: Tensor, steps: int) -> State:
    """At most so many steps from the candidates (n, d)."""
    state = solver.init(problem, candidates)
    while state.outcome is None and state.steps < steps:
        state = solver.step(problem, state)
    return state
