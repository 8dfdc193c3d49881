"""The law of data reconstruction, as published: momentum on the relative residual.

Iurada et al., "A Law of Data Reconstruction for Random Features (and Beyond)". N(0, 1) candidates,
as many as samples, momentum 0.9, rows rescaled to the sphere after each step, until the residual
is under 1e-7 or 10⁶ steps are done. ReLU has a backward slope of 0.02 where it is off in random
features. The n×n solve is in float64, where the published code has float32.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted, gradient
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.methods.progress import Progress, stream
from exhume.solvers import Outcome, State, judged


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


RATE_VECTORS, RATE_IMAGES = 20.0, 2000.0  # the published step sizes


@dataclass(frozen=True, eq=False, kw_only=True)
class Rolling(Progress):
    """The progress of this method: that of its solver, in one trial."""

    state: MomentumState


@dataclass(frozen=True)
class Iurada2025:
    """The published recipe."""

    rate: float | None = None  # step size; the published one for vectors or images if None
    steps: int = 1_000_000  # the most steps
    name: str = "iurada2025"

    def _solver(self, problem: Problem) -> Momentum:
        default = RATE_VECTORS if len(problem.shape) == 1 else RATE_IMAGES
        return Momentum(rate=self.rate or default)

    def view(self, problem: Problem) -> Problem:
        """Return the problem in full precision, with the published slope if nothing drifted."""
        exact = problem.features.exact()
        return replace(problem, features=exact if problem.drift else exact.leaky())

    def init(self, problem: Problem, samples: int | None, seed: int) -> Rolling:
        """Begin with N(0, 1) candidates, as many as samples."""
        if problem.premise is not Premise.CHANGE:
            raise InputError(
                "iurada2025 is for a change of weights, but this is premise "
                f"{problem.premise.value}; use exhume, haim2022 or buzaglo2023."
            )
        if samples is None:
            raise InputError("iurada2025 needs the number of samples; give it, or use 'exhume'.")
        start = torch.randn(samples, problem.dim, generator=stream(seed, 0), dtype=torch.float64)
        state = self._solver(problem).init(problem, start)
        return Rolling(seed=seed, samples=samples, state=state)

    def advance(self, problem: Problem, progress: Rolling) -> Rolling:
        """Take one step."""
        state = self._solver(problem).step(problem, progress.state)
        over = Outcome.BUDGET if state.steps >= self.steps else None
        return replace(progress, state=state, outcome=state.outcome or over)

    def finish(self, problem: Problem, progress: Rolling) -> Fit:
        """Return the candidates on the sphere."""
        return fitted(problem, problem.domain.project(progress.candidates))
