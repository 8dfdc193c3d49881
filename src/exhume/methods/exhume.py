"""Our best: Levenberg-Marquardt from an over-complete start, then down to the samples.

1. Explore. Start with more candidates than samples, as long as the equations outnumber the
   unknowns by `margin`: bad minima become rare. If the solver stalls all the same, replace
   some of the candidates that matter least (`search.reseed`) and try again.
2. Merge candidates that have become the same sample, and cut those that the others can stand
   in for; solve again, and take it back if the residual does not return.
3. Polish what is left.

If the number of samples is not given, exploring begins with few candidates and adds more where
the residual points until the weights are explained; merging and cutting end at the number.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.methods.progress import Progress, stream
from exhume.objective import Point, evaluate
from exhume.problem import Problem
from exhume.search.merge import merged
from exhume.search.prune import greedy_order
from exhume.search.reseed import grow, reseed
from exhume.search.signs import unflipped
from exhume.solvers import Outcome, State
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt


@dataclass(frozen=True)
class Exhume:
    """Over-complete search with Levenberg-Marquardt.

    Attributes:
        tolerance: relative residual at which the weights count as explained.
        close: residual at which exploring ends if the number of samples is known.
        margin: p·m/(d·n̂) that exploring keeps, so that zero residual still means something.
        surplus: most candidates at the start, in units of the samples.
        patience: rounds without improvement before the search gives up.
        trial: most solver steps a round.
        alike: cosines above which candidates are merged, tried in turn.
        cheap: share of the target that a cut may cost before the others are solved again.
    """

    tolerance: float = 1e-11
    close: float = 1e-7
    margin: float = 1.8
    surplus: float = 1.6
    patience: int = 150
    trial: int = 80
    alike: tuple[float, ...] = (0.9, 0.99, 0.999)
    cheap: float = 1e-2
    name: str = "exhume"

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """Random candidates: a surplus if the number of samples is known, a few if not."""
        if samples is None:
            count = min(8, self._most(problem))
        else:
            count = max(samples, min(math.ceil(self.surplus * samples), self._most(problem)))
        start = problem.domain.start(count, problem.dim, stream(seed, 0))
        return Progress(seed, samples, self._explorer(samples).init(problem, start))

    def advance(self, problem: Problem, progress: Progress) -> Progress:
        """One solver step, or the next move when the trial has ended."""
        state = progress.state
        if state.outcome is None and state.steps < self.trial:
            solver = self._explorer(progress.samples) if progress.phase == "explore" else self._polisher
            return replace(progress, state=solver.step(problem, state))
        if progress.phase == "explore":
            return self._after_explore(problem, progress)
        if progress.phase == "merge":
            return self._after_merge(problem, progress)
        if progress.phase == "cut":
            return self._after_cut(problem, progress)
        converged = state.point.value <= self.tolerance
        outcome = Outcome.CONVERGED if converged else state.outcome or Outcome.BUDGET
        return replace(progress, outcome=outcome)

    def finish(self, problem: Problem, progress: Progress) -> Point:
        """The better of the best and the trial at hand, cut down to the number asked for."""
        point = progress.state.point
        if progress.best is not None and not point.value < progress.best_value:
            point = evaluate(problem, progress.best)
        surplus = len(point.candidates) - (progress.samples or len(point.candidates))
        if surplus > 0:
            point = evaluate(problem, _without(problem, point, surplus))
        return point

    def _explorer(self, samples: int | None) -> LevenbergMarquardt:
        return LevenbergMarquardt(tolerance=self.tolerance if samples is None else self.close)

    @property
    def _polisher(self) -> LevenbergMarquardt:
        return LevenbergMarquardt(tolerance=self.tolerance / 100, damping=1e-3, patience=3)

    def _most(self, problem: Problem) -> int:
        return max(1, int(problem.ratio(1) / self.margin))

    def _after_explore(self, problem: Problem, progress: Progress) -> Progress:
        point, seed = progress.state.point, progress.seed
        if point.value <= self.close:
            return self._merge(problem, replace(_keep(progress), attempt=0))
        if progress.state.outcome is Outcome.DIVERGED:
            return replace(progress, outcome=Outcome.DIVERGED)
        improved = point.value < progress.best_value
        if improved:
            progress = replace(progress, best=point.candidates, best_value=point.value, misses=0)
        else:
            progress = replace(progress, misses=progress.misses + 1)
        if progress.misses >= self.patience or progress.best is None:
            return self._polish(problem, progress)
        generator = stream(seed, progress.rounds + 1)
        count = len(progress.best)
        if progress.samples is None and count < self._most(problem):
            more = min(math.ceil(count / 2), self._most(problem) - count)
            start = grow(problem, evaluate(problem, progress.best), more, generator)
            progress = replace(progress, best_value=math.inf)
        else:
            most = max(1, 3 * count // 4)
            draw = torch.rand(1, generator=generator).item()
            drop = min(most, int((most + 1) ** draw))
            start = reseed(problem, evaluate(problem, progress.best), drop, generator)
        return progress.next_round(self._explorer(progress.samples).init(problem, start))

    def _merge(self, problem: Problem, progress: Progress) -> Progress:
        """Try with pairs of opposite signs undone, then with ever more alike ones merged."""
        best = evaluate(problem, _best(progress))
        while progress.attempt <= len(self.alike):
            if progress.attempt == 0:
                start = unflipped(best.candidates, best.coefficients)
            else:
                cosine = self.alike[progress.attempt - 1]
                start = merged(best.candidates, best.coefficients, cosine)
            if (progress.samples or 1) <= len(start) < len(best.candidates):
                state = self._polisher.init(problem, start)
                return progress.next_round(state, phase="merge")
            progress = replace(progress, attempt=progress.attempt + 1)
        return self._cut(problem, replace(progress, attempt=self._too_few(problem, progress)))

    def _after_merge(self, problem: Problem, progress: Progress) -> Progress:
        if self._holds(progress):
            progress = _keep(progress)
        return self._merge(problem, replace(progress, attempt=progress.attempt + 1))

    def _too_few(self, problem: Problem, progress: Progress) -> int:
        """A count under which there is no need to look: the rest could not make good for it."""
        if progress.samples is not None:
            return progress.samples - 1
        best = evaluate(problem, _best(progress))
        total = problem.target.double().square().sum().item()
        return int((_dropping(problem, best)[1] >= self.cheap * total).sum())

    def _cut(self, problem: Problem, progress: Progress) -> Progress:
        """Try without the candidates that are cheapest to drop; the count is found by bisection.

        Here `attempt` is the largest count that is known to be too small.
        """
        best = evaluate(problem, _best(progress))
        count = len(best.candidates)
        low = progress.attempt
        trial = progress.samples or (low + count) // 2
        if not low < trial < count:
            return self._polish(problem, progress)
        state = self._polisher.init(problem, _without(problem, best, count - trial))
        return progress.next_round(state, phase="cut")

    def _after_cut(self, problem: Problem, progress: Progress) -> Progress:
        if self._holds(progress):
            return self._cut(problem, replace(_keep(progress), attempt=progress.attempt))
        tried = len(progress.state.point.candidates)
        if progress.samples is not None:
            return replace(progress, phase="polish", best=None, best_value=math.inf)
        return self._cut(problem, replace(progress, attempt=tried))

    def _holds(self, progress: Progress) -> bool:
        """Whether the weights are still explained after a merge or a cut."""
        return progress.state.point.value <= max(self.tolerance, 3 * progress.best_value)

    def _polish(self, problem: Problem, progress: Progress) -> Progress:
        """Solve once more from the best, with the number of candidates asked for."""
        best = evaluate(problem, _best(progress))
        surplus = len(best.candidates) - (progress.samples or len(best.candidates))
        start = _without(problem, best, surplus) if surplus > 0 else best.candidates
        state: State = self._polisher.init(problem, start)
        return progress.next_round(state, phase="polish", best=None, best_value=math.inf)


def _keep(progress: Progress) -> Progress:
    """Progress with the trial at hand as the best."""
    point = progress.state.point
    return replace(progress, best=point.candidates, best_value=point.value, misses=0)


def _best(progress: Progress) -> Tensor:
    if progress.best is None:
        raise RuntimeError("there is no best trial yet")
    return progress.best


def _dropping(problem: Problem, point: Point) -> tuple[Tensor, Tensor]:
    products = point.linearization.apply(problem.target.double())
    return greedy_order(point.linearization.gram(), products)


def _without(problem: Problem, point: Point, count: int) -> Tensor:
    """The candidates without the `count` that are cheapest to drop."""
    order, _ = _dropping(problem, point)
    return point.candidates[order[count:].sort().values.to(point.candidates.device)]
