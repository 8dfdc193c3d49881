"""Reconstruction through simulated training dynamics, as published.

Tian et al., "Simulating Training Dynamics to Reconstruct Training Data from Deep Neural Networks"
(ICLR 2025). A few steps of training are simulated, and the images descend on 1 − cos between the
simulated and the true change of the weights, with total variation: Adam (0.8, 0.9) at a rate of
1e-2 with cosine restarts every 100 of 30,000 iterations, from 0.5·N(0, 1), labels balanced.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.optim.adam import adam

from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.replay import TrainingRun
from exhume.methods.labels import rows_of
from exhume.methods.progress import Progress, stream
from exhume.methods.replay import choices
from exhume.solvers import Outcome, State

BETAS = 0.8, 0.9  # of Adam, as published
RESTART = 100  # iterations between restarts of the rate, as published


@dataclass(frozen=True, eq=False, kw_only=True)
class Simulated(State):
    """A state has the moments of Adam, (n, d) each, beside the fit."""

    mean: Tensor
    square: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Simulating(Progress):
    """The progress is that of one descent, without rounds."""

    state: Simulated


@dataclass(frozen=True)
class SimuDy2025:
    """The published method simulates a few long steps, and descends on the angle to the change."""

    simulated: int = 8  # steps that are simulated; the rate makes up for those left out
    smoothness: float = 1e-3  # weight of total variation
    rate: float = 1e-2  # of Adam
    steps: int = 30_000  # iterations
    name: str = "simudy2025"

    def view(self, problem: Problem) -> Problem:
        """Return the problem with a run of fewer and longer steps, of the first choice."""
        if problem.premise is not Premise.REPLAY:
            raise InputError(f"{self.name}: needs the premise replay, and with it a recipe.")
        problem = choices(problem)[0]
        run = cast(TrainingRun, problem.features)
        length = run.recipe.length(len(run.labels or (0,)))
        if length <= self.simulated:
            return problem
        short = run.recipe.in_steps(self.simulated, length)
        return replace(problem, features=replace(run, recipe=short))

    def init(self, problem: Problem, samples: int | None, seed: int) -> Simulating:
        """Begin at 0.5·N(0, 1)."""
        known, classes = cast(TrainingRun, problem.features).labels, problem.features.outputs
        count = samples or len(known or ())
        if count == 0:
            raise InputError(f"{self.name}: needs the number of samples: give it.")
        labels = torch.tensor(known) if known else torch.arange(count) % max(2, classes)
        start = 0.5 * torch.randn(count, problem.dim, generator=stream(seed, 0))
        shares = rows_of(labels, classes).to(problem.target).view(-1, 1)
        fit = fitted_with(problem, start, shares)
        zero = torch.zeros_like(fit.candidates)
        state = Simulated(fit=fit, mean=zero, square=zero)
        return Simulating(seed=seed, samples=count, state=state)

    def advance(self, problem: Problem, progress: Simulating) -> Simulating:
        """Take one step of Adam down the slope of 1 − cos(F, Δ) + smoothness · TV."""
        state, fit = progress.state, progress.state.fit
        change = problem.target - fit.residual
        size, aim = change.norm(), problem.target / problem.target.norm()
        slope = -(aim - (aim * change).sum() * change / size**2) / size
        pulled = fit.linearization.pull(slope, fit.coefficients)
        pulled = pulled + self.smoothness * variation_slope(fit.candidates, problem.shape)
        moved, mean, square = fit.candidates.clone(), state.mean.clone(), state.square.clone()
        rate = self.rate * (1 + math.cos(math.pi * (state.steps % RESTART) / RESTART)) / 2
        clock = torch.tensor(float(state.steps))
        adam(
            [moved], [pulled], [mean], [square], [], [clock],
            lr=rate, beta1=BETAS[0], beta2=BETAS[1], eps=1e-8,
            amsgrad=False, weight_decay=0.0, maximize=False,
        )  # fmt: skip
        fit = fitted_with(problem, problem.domain.project(moved), fit.coefficients)
        steps, products = state.steps + 1, state.products + 1
        state = Simulated(fit=fit, mean=mean, square=square, steps=steps, products=products)
        outcome = Outcome.BUDGET if steps >= self.steps else None
        return replace(progress, state=state, outcome=outcome)

    def finish(self, problem: Problem, progress: Simulating) -> Fit:
        """Return the candidates as they stand."""
        return progress.state.fit


def variation_slope(candidates: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the slope, (n, d), of the mean |difference| of neighbours in images; 0 for vectors."""
    if len(shape) < 2:
        return torch.zeros_like(candidates)
    with torch.enable_grad():
        images = candidates.detach().reshape(-1, *shape).requires_grad_()
        total = images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()
        (slope,) = torch.autograd.grad(total, images)
    return slope.reshape(candidates.shape)
