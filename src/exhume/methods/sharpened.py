"""Ours where the weights themselves are the target: Levenberg-Marquardt, with ReLU sharpened.

Gradients of a ReLU network jump where a candidate crosses the edge of a neuron, and training leaves
samples on such edges, with a slope between 0 and 1. So ReLU is replaced by a softplus whose
sharpness grows from trial to trial: at first candidates see the edges from afar, at last only
those they lie on. Coefficients are eliminated by the problem's rule, and at the margin candidates
are held to it (`objective.Slack`). Candidates start in the row space of the first layer, which is
that of the samples, in the proportions of its singular values. After each trial those that the
rule left without a multiplier, and the least of the others, start again.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Problem
from exhume.features.activations import softplus
from exhume.methods.progress import Progress, stream
from exhume.solvers import Outcome
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt

SPREAD = 0.2
"""Norm of the starts in units of those that the domain draws: samples seldom fill their box."""

PRODUCTS = 15
"""Most products a step: kinks make exact steps worth little."""

VISIBLE = 1e-3
"""Relative size of a singular value of the first layer below which its direction is not used."""


@dataclass(frozen=True)
class Sharpened:
    """A search for problems whose target is the weights.

    Attributes:
        surplus: candidates in units of the samples.
        sharpness: of ReLU in one trial after the other, in units of what the first neurons are
            given; the last for all that follow.
        trials: how many in all.
        steps: most solver steps a trial.
        renewed: share of the candidates that start again after a trial, at least.
        tolerance: relative residual at which the weights count as explained.
    """

    surplus: float = 2.0
    sharpness: tuple[float, ...] = (25.0, 50.0, 125.0, 250.0)
    trials: int = 60
    steps: int = 30
    renewed: float = 0.1
    tolerance: float = 1e-9

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """Random candidates in the row space of the first layer."""
        count = math.ceil(self.surplus * (samples or _visible(problem)))
        start = starts(problem, count, stream(seed, 0))
        state = self._begin(problem, start, 0)
        return Progress(seed, samples, state, _noted(state), phase="sharpen")

    def advance(self, problem: Problem, progress: Progress) -> Progress:
        """One solver step, or the next trial."""
        state, trial = progress.state, progress.attempt
        view = self._sharpened(problem, trial)
        if state.fit.cost != progress.memory["cost"].item():  # read from a file
            state = replace(state, fit=fitted(view, state.fit.candidates))
        if state.outcome is None and state.steps < self.steps:
            state = self._solver.step(view, state)
            return replace(progress, state=state, memory=_noted(state))
        fit, last = state.fit, len(self.sharpness) - 1
        if state.outcome is Outcome.DIVERGED or (
            state.outcome is Outcome.CONVERGED and trial >= last
        ):
            return replace(progress, outcome=state.outcome)
        if trial >= last and fit.cost < progress.best_value:
            progress = replace(progress, best=fit.candidates, best_value=fit.cost)
        if trial + 1 >= self.trials:
            return replace(progress, outcome=Outcome.STALLED)
        generator = stream(progress.seed, progress.rounds + 1)
        begin = fit if progress.best is None else fitted(view, progress.best)
        start = self._renewed(view, begin, generator)
        begun = self._begin(problem, start, trial + 1)
        return progress.next_round(begun, memory=_noted(begun), attempt=trial + 1)

    def finish(self, problem: Problem, progress: Progress) -> Fit:
        """The best at the greatest sharpness, without candidates that have no multiplier."""
        view = self._sharpened(problem, progress.attempt)
        fit = fitted(view, progress.state.fit.candidates)
        if progress.best is not None and not fit.cost < progress.best_value:
            fit = fitted(view, progress.best)
        used = traces(fit) > 0
        return fitted(problem, fit.candidates[used] if used.any() else fit.candidates)

    @property
    def _solver(self) -> LevenbergMarquardt:
        return LevenbergMarquardt(tolerance=self.tolerance, products=PRODUCTS)

    def _sharpened(self, problem: Problem, trial: int) -> Problem:
        sharpness = self.sharpness[min(trial, len(self.sharpness) - 1)] / _unit(problem)
        return replace(problem, features=problem.features.substituted(softplus(sharpness)))

    def _begin(self, problem: Problem, start: Tensor, trial: int) -> DampedState:
        return self._solver.init(self._sharpened(problem, trial), start)

    def _renewed(self, problem: Problem, fit: Fit, generator: torch.Generator) -> Tensor:
        """The candidates, with those of the smallest trace in the weights started again."""
        trace = traces(fit)
        unused = max(int((trace == 0).sum()), math.ceil(self.renewed * len(trace)))
        candidates = fit.candidates.clone()
        gone = trace.argsort()[:unused]
        candidates[gone] = starts(problem, unused, generator).to(candidates)
        return candidates


def starts(problem: Problem, count: int, generator: torch.Generator) -> Tensor:
    """Random candidates (count, d) with the second moment W₁ᵀW₁ has, to the power of a half.

    Drawn by the domain itself where there is no dense first layer.
    """
    drawn = problem.domain.start(count, problem.dim, generator)
    if problem.first_layer is None:
        return drawn
    sizes, directions = _spectrum(problem)
    inside = torch.randn(count, len(sizes), generator=generator, dtype=torch.float64)
    inside = (inside * sizes.sqrt()) @ directions
    norms = SPREAD * drawn.norm(dim=1, keepdim=True) / inside.norm(dim=1, keepdim=True)
    return problem.domain.project(norms * inside)


def traces(fit: Fit) -> Tensor:
    """‖Φ_iᵀA_i‖², what each candidate alone leaves in the weights, (n,) on the CPU."""
    n, k = len(fit.candidates), fit.rows
    gram = fit.linearization.gram().view(n, k, n, k).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    parts = fit.coefficients.view(n, k, -1)
    return (parts * (gram @ parts)).sum((1, 2)).cpu()


def _visible(problem: Problem) -> int:
    return problem.dim if problem.first_layer is None else len(_spectrum(problem)[0])


def _spectrum(problem: Problem) -> tuple[Tensor, Tensor]:
    """Visible singular values of W₁ over the largest, (r,), and their directions (r, d)."""
    assert problem.first_layer is not None
    sizes, directions = problem.first_layer.spectrum
    rank = max(1, int((sizes > VISIBLE * sizes[0]).sum()))
    return sizes[:rank] / sizes[0], directions[:rank]


def _unit(problem: Problem) -> float:
    """The size of W₁x at the starts, which neurons are given; 1 without a dense first layer.

    A network of ReLU that is scaled has the same samples, and should meet the same sharpness. With
    x in the directions of the singular values s, in proportion to √s, |W₁x|²/|x|² is Σ s³/Σ s.
    """
    if problem.first_layer is None:
        return 1.0
    sizes = problem.first_layer.spectrum[0]
    norm = SPREAD * problem.domain.start(8, problem.dim, stream(0, 0)).norm(dim=1).mean()
    rows = len(problem.first_layer.trained)
    given = norm * (sizes.pow(3).sum() / sizes.sum() / rows).sqrt()
    return max(float(given), torch.finfo(given.dtype).tiny)


def _noted(state: DampedState) -> dict[str, Tensor]:
    return {"cost": torch.tensor(state.fit.cost, dtype=torch.float64)}
