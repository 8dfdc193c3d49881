"""First-order baselines: momentum as published, and Adam."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.objective import fitted, gradient
from exhume.equation.problem import Problem
from exhume.solvers import Outcome, State


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

    def init(self, problem: Problem, candidates: Tensor) -> State:
        """At rest at the candidates, which are not projected before the first step."""
        fit = fitted(problem, candidates)
        return _judged(State(fit, {"velocity": torch.zeros_like(fit.candidates)}), self)

    def step(self, problem: Problem, state: State) -> State:
        """One step."""
        velocity = self.momentum * state.memory["velocity"] + gradient(problem, state.fit)
        moved = state.fit.candidates - self.rate * velocity
        return _next(problem, state, moved, {"velocity": velocity}, self)


@dataclass(frozen=True)
class Adam:
    """Adam on L(X), projected after each step.

    Attributes:
        rate: step size.
        decay: of the two moments.
        tolerance: relative residual at which the run has converged.
    """

    rate: float = 0.02
    decay: tuple[float, float] = (0.9, 0.999)
    tolerance: float = 1e-7

    def init(self, problem: Problem, candidates: Tensor) -> State:
        """Both moments zero at the projected candidates."""
        fit = fitted(problem, problem.domain.project(candidates))
        zero = torch.zeros_like(fit.candidates)
        return _judged(State(fit, {"first": zero, "second": zero}), self)

    def step(self, problem: Problem, state: State) -> State:
        """One step."""
        slope = gradient(problem, state.fit)
        a, b = self.decay
        first = a * state.memory["first"] + (1 - a) * slope
        second = b * state.memory["second"] + (1 - b) * slope.square()
        t = state.steps + 1
        size = (second / (1 - b**t)).sqrt() + torch.finfo(slope.dtype).tiny ** 0.5
        moved = state.fit.candidates - self.rate * (first / (1 - a**t)) / size
        return _next(problem, state, moved, {"first": first, "second": second}, self)


def _next(
    problem: Problem,
    state: State,
    moved: Tensor,
    memory: dict[str, Tensor],
    solver: Momentum | Adam,
) -> State:
    fit = fitted(problem, problem.domain.project(moved))
    steps, products = state.steps + 1, state.products + 1
    return _judged(replace(state, fit=fit, memory=memory, steps=steps, products=products), solver)


def _judged(state: State, solver: Momentum | Adam) -> State:
    if not math.isfinite(state.fit.value):
        return replace(state, outcome=Outcome.DIVERGED)
    if state.fit.value <= solver.tolerance:
        return replace(state, outcome=Outcome.CONVERGED)
    return state
