"""Momentum, the first-order method of published attacks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equation.objective import fitted, gradient
from exhume.equation.problem import Problem
from exhume.solvers import State, judged


@dataclass(frozen=True, eq=False, kw_only=True)
class MomentumState(State):
    """A state of `Momentum`, which carries the velocity v, (n, d)."""

    velocity: Tensor


@dataclass(frozen=True)
class Momentum:
    """Heavy-ball descent on L(X): v ← βv + ∂L/∂X, X ← project(X − ηv)."""

    rate: float  # η, the step size
    momentum: float = 0.9  # β
    tolerance: float = 1e-7  # relative residual at which the run has converged

    def init(self, problem: Problem, candidates: Tensor) -> MomentumState:
        """Start at rest at the candidates, which are not projected before the first step."""
        fit = fitted(problem, candidates)
        state = MomentumState(fit=fit, velocity=torch.zeros_like(fit.candidates))
        return judged(state, self.tolerance)

    def step(self, problem: Problem, state: MomentumState) -> MomentumState:
        """Take one step."""
        velocity = self.momentum * state.velocity + gradient(problem, state.fit)
        moved = state.fit.candidates - self.rate * velocity
        state = MomentumState(
            fit=fitted(problem, problem.domain.project(moved)),
            velocity=velocity,
            steps=state.steps + 1,
            products=state.products + 1,
        )
        return judged(state, self.tolerance)
