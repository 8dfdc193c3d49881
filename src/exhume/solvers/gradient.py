"""Momentum, the first-order method of published attacks."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.objective import fitted, gradient
from exhume.equation.problem import Problem
from exhume.solvers import Outcome, State


@dataclass(frozen=True, eq=False, kw_only=True)
class MomentumState(State):
    """A state of `Momentum`, which carries the velocity v, (n, d)."""

    velocity: Tensor


@dataclass(frozen=True)
class Momentum:
    """Heavy-ball descent on L(X), projected after each step.

    v ← βv + ∂L/∂X,  X ← project(X − ηv).

    Attributes:
        rate: η, the step size.
        momentum: β.
        tolerance: relative residual at which the run has converged.
    """

    rate: float
    momentum: float = 0.9
    tolerance: float = 1e-7

    def init(self, problem: Problem, candidates: Tensor) -> MomentumState:
        """Start at rest at the candidates, which are not projected before the first step."""
        fit = fitted(problem, candidates)
        return self._judged(MomentumState(fit=fit, velocity=torch.zeros_like(fit.candidates)))

    def step(self, problem: Problem, state: MomentumState) -> MomentumState:
        """Take one step."""
        velocity = self.momentum * state.velocity + gradient(problem, state.fit)
        moved = state.fit.candidates - self.rate * velocity
        return self._judged(
            MomentumState(
                fit=fitted(problem, problem.domain.project(moved)),
                velocity=velocity,
                steps=state.steps + 1,
                products=state.products + 1,
            )
        )

    def _judged(self, state: MomentumState) -> MomentumState:
        if not math.isfinite(state.fit.value):
            return replace(state, outcome=Outcome.DIVERGED)
        if state.fit.value <= self.tolerance:
            return replace(state, outcome=Outcome.CONVERGED)
        return state
