"""Ours where the weights themselves are the target: unmixed images, or Levenberg-Marquardt.

Images behind a dense first layer are unmixed from its rows, which needs no premise (`unmixed`).
For other inputs the equation is solved. At the margin that goes on from where the published
first-order steps soon get from several starts: of all their candidates those begin that explain the
weights together. Samples lie on the edges of neurons, where gradients jump, so a softplus that
sharpens from trial to trial takes ReLU's place; after each, the least of the candidates start
again: docs/theory.md.
"""

import math
from dataclasses import dataclass, field, replace
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule
from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Premise, Problem
from exhume.features import Features
from exhume.features.modules import ModuleFeatures
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.exhume import Exhume, softened
from exhume.methods.penalised import Descending
from exhume.methods.progress import Progress, stream
from exhume.methods.unmixed import Unmixed, Unmixing
from exhume.solvers import Outcome
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt

SPREAD = 0.2  # share of the norm that the domain draws, for starts: samples seldom fill their box
PRODUCTS = 15  # at most, a solver step: kinks make exact steps worth little
USUAL = 13.0  # outputs of networks with a logistic loss of 2e-6, of faces, digits and photographs
PROBED = 64  # starts at which outputs are looked at: their size is known to a tenth
POWERS = 20  # of two, at most: beyond a million, weights are no matter of units
# factor and features of `resized`, which a GPU's graphs belong to; None: as they are
_resized: WeakKeyDictionary[Features, tuple[float, Features | None]] = WeakKeyDictionary()
VISIBLE = 1e-3  # share of W₁'s largest singular value below which one is taken for rounding


@dataclass(frozen=True, eq=False, kw_only=True)
class Sharpening(Progress):
    """The progress of this search."""

    state: DampedState
    sharpness: float  # β of the softplus that the trial at hand has in the place of ReLU
    trial: int = 0  # how many trials were begun before this one
    best: Tensor | None = None  # the best candidates at the greatest sharpness, or None before that
    best_cost: float = math.inf  # their cost

    def seen(self, problem: Problem) -> Problem:
        """Return the problem with the softplus of the trial at hand."""
        return softened(problem, self.sharpness)


Seeking = Unmixing | Descending | Sharpening  # the stages of the search


@dataclass(frozen=True)
class Stationary:
    """A search for problems whose target is the weights: stationary points of their training."""

    surplus: float = 2.0  # candidates in units of the samples
    unmixed: Unmixed | None = field(default_factory=Unmixed)  # tried first, if images; None: never
    recipe: Buzaglo2023 = field(default_factory=Buzaglo2023)  # the published steps
    leads: int = 6  # at the margin, starts of published steps side by side, with finds of their own
    lead: float = 18.0  # their number for each candidate: a third of the published 50,000 for 1,000
    # of ReLU in trial after trial, in units of what the first neurons are given; the last stays
    sharpness: tuple[float, ...] = (25.0, 50.0, 125.0, 250.0)
    trials: int = 60  # how many in all
    steps: int = 30  # most solver steps a trial
    renewed: float = 0.1  # share of the candidates that start again after a trial, at least
    tolerance: float = 1e-9  # relative residual at which the weights count as explained
    name: str = "exhume"

    def view(self, problem: Problem) -> Problem:
        """Return the problem unchanged; each trial has a view of its own."""
        return problem

    def init(self, problem: Problem, samples: int | None, seed: int) -> Seeking:
        """Begin by unmixing images; else with the published steps at the margin, else at random.

        Multipliers of either sign serve candidates that are no samples as well: published steps
        then lead to minima that second-order steps from random candidates go well below.
        """
        if self.unmixed is not None and self.unmixed.applies(problem, samples):
            return self.unmixed.init(problem, samples, seed)
        visible = problem.dim if problem.first_layer is None else len(_spectrum(problem)[0])
        count = math.ceil(self.surplus * (samples or visible))
        if self.leads == 0 or problem.rule is not Rule.MARGIN:
            return self._begin(problem, samples, seed, starts(problem, count, stream(seed, 0)))
        usual = resized(problem)
        first, *beside = (self.recipe.begin(usual, count, seed, start=k) for k in range(self.leads))
        begun = Descending(seed=seed, samples=samples, state=first, beside=tuple(beside))
        return replace(begun, phase="lead")

    def _begin(self, problem: Problem, samples: int | None, seed: int, start: Tensor) -> Sharpening:
        """Begin the first trial with candidates."""
        beta = self._sharpness(problem, 0)
        state = self._solver.init(softened(problem, beta), start)
        return Sharpening(seed=seed, samples=samples, state=state, sharpness=beta, phase="sharpen")

    def _led(self, problem: Problem, progress: Descending) -> Descending | Sharpening:
        """Take published steps; begin the first trial where they led, if that beats random."""
        usual, count = resized(problem), len(progress.state.place.candidates)
        moved = replace(self.recipe, steps=math.ceil(self.lead * count)).advance(usual, progress)
        if moved.outcome is None:
            return moved
        chosen = self._chosen(problem, moved)
        random = starts(problem, count, stream(progress.seed, 0)).to(chosen)
        begun = [self._begin(problem, moved.samples, moved.seed, x) for x in (chosen, random)]
        best = min(begun, key=lambda one: one.state.fit.cost)
        return replace(best, steps=moved.total_steps, products=moved.total_products)

    def _chosen(self, problem: Problem, progress: Descending) -> Tensor:
        """Return as many candidates of all starts as one has: those that explain the weights.

        They have the largest traces in the fit of all candidates together, where one that is no
        sample is worth little beside one that is.
        """
        view = softened(problem, self._sharpness(problem, 0))
        pool = problem.domain.project(progress.candidates)
        most = traces(fitted(view, pool)).argsort(descending=True)
        return pool[most[: len(progress.state.place.candidates)].to(pool.device)]

    def advance(self, problem: Problem, progress: Seeking) -> Seeking:
        """Unmix on, take some published steps or one of ours, or begin the next trial."""
        if isinstance(progress, Unmixing):
            return (self.unmixed or Unmixed()).advance(problem, progress)
        if isinstance(progress, Descending):
            return self._led(problem, progress)
        state, view = progress.state, progress.seen(problem)
        if state.outcome is None and state.steps < self.steps:
            return replace(progress, state=self._solver.step(view, state))
        fit, sharpest = state.fit, progress.trial >= len(self.sharpness) - 1
        explained = state.outcome is Outcome.CONVERGED and sharpest
        if explained or state.outcome is Outcome.DIVERGED:
            return replace(progress, outcome=state.outcome)
        if sharpest and fit.cost < progress.best_cost:
            progress = replace(progress, best=fit.candidates, best_cost=fit.cost)
        if progress.trial + 1 >= self.trials:
            return replace(progress, outcome=Outcome.STALLED)
        begin = fit if progress.best is None else fitted(view, progress.best)
        start = self._renewed(view, begin, stream(progress.seed, progress.rounds + 1))
        sharpness = self._sharpness(problem, progress.trial + 1)
        begun = self._solver.init(softened(problem, sharpness), start)
        return progress.next_round(begun, sharpness=sharpness, trial=progress.trial + 1)

    def finish(self, problem: Problem, progress: Seeking) -> Fit:
        """Return the best at the greatest sharpness, without candidates of no multiplier.

        What was unmixed stays as it is: the samples themselves leave a sixth of the first layer, so
        that solving the equation from there leads away from them.
        """
        if isinstance(progress, Unmixing):
            return (self.unmixed or Unmixed()).finish(problem, progress)
        if isinstance(progress, Descending):
            return fitted(problem, self._chosen(problem, progress))
        view = progress.seen(problem)
        fit = fitted(view, progress.candidates)
        if progress.best is not None and not fit.cost < progress.best_cost:
            fit = fitted(view, progress.best)
        used = traces(fit) > 0
        return fitted(problem, fit.candidates[used] if used.any() else fit.candidates)

    @property
    def _solver(self) -> LevenbergMarquardt:
        return LevenbergMarquardt(tolerance=self.tolerance, products=PRODUCTS)

    def _sharpness(self, problem: Problem, trial: int) -> float:
        """Return the sharpness of a trial, for neurons that are given W₁x at the starts.

        So a network that is scaled meets the same: for x along the singular values s of W₁, in
        proportion to √s, |W₁x|²/|x|² is Σ s³/Σ s.
        """
        asked = self.sharpness[min(trial, len(self.sharpness) - 1)]
        if problem.first_layer is None:
            return asked
        sizes, neurons = problem.first_layer.spectrum[0], len(problem.first_layer.trained)
        norm = SPREAD * problem.domain.start(8, problem.dim, stream(0, 0)).norm(dim=1).mean()
        given = norm * (sizes.pow(3).sum() / sizes.sum() / neurons).sqrt()
        return asked / max(float(given), torch.finfo(given.dtype).tiny)

    def _renewed(self, problem: Problem, fit: Fit, generator: torch.Generator) -> Tensor:
        """Return the candidates, with those of the smallest trace in the weights started again."""
        trace = traces(fit)
        unused = max(int((trace == 0).sum()), math.ceil(self.renewed * len(trace)))
        candidates = fit.candidates.clone()
        candidates[trace.argsort()[:unused]] = starts(problem, unused, generator).to(candidates)
        return candidates


def resized(problem: Problem) -> Problem:
    """Return the problem with its weights multiplied by the power of two that makes outputs usual.

    The size of a homogeneous network makes it no other problem, but published settings are for
    networks whose logistic loss had become small: their outputs are about `USUAL` at our starts.
    """
    features = problem.features
    if features not in _resized:
        x = starts(problem, PROBED, stream(0, 0))
        once, twice = (_outputs(features, x, factor) for factor in (1.0, 2.0))
        grows = (
            0 < 1.5 * once < twice < math.inf
        )  # else it is not homogeneous, and no size is like another
        power = round(math.log(USUAL / once) / math.log(twice / once)) if grows else 0
        factor = 2.0**power if abs(power) <= POWERS else 1.0
        _resized[features] = factor, None if factor == 1 else _multiplied(features, factor)
    factor, other = _resized[features]
    if other is None:
        return problem
    return replace(problem, features=other, target=factor * problem.target)


def _multiplied(features: Features, factor: float) -> Features:
    """Return the features of a network whose parameters are multiplied."""
    made = cast(ModuleFeatures, features)
    own = {name for name, _ in made.network.module.named_parameters()}
    points = ({k: factor * w if k in own else w for k, w in at.items()} for at in made.points)
    return replace(made, points=tuple(points))


def _outputs(features: Features, x: Tensor, factor: float) -> float:
    """Return the root of the mean square of f(x; factor · θ); 0 where there is no whole network."""
    values = features.predict(x, factor)
    return 0.0 if values is None else float(values.double().square().mean().sqrt())


def starts(problem: Problem, count: int, generator: torch.Generator) -> Tensor:
    """Draw candidates (count, d) with second moment (W₁ᵀW₁)^½; as the domain does without W₁."""
    drawn = problem.domain.start(count, problem.dim, generator)
    if problem.first_layer is None:
        return drawn
    sizes, directions = _spectrum(problem)
    inside = torch.randn(count, len(sizes), generator=generator, dtype=torch.float64)
    inside = (inside * sizes.sqrt()) @ directions
    norms = SPREAD * drawn.norm(dim=1, keepdim=True) / inside.norm(dim=1, keepdim=True)
    return problem.domain.project(norms * inside)


def traces(fit: Fit) -> Tensor:
    """Return ‖Φ_iᵀA_i‖², what each candidate alone leaves in the weights, (n,) on the CPU."""
    n, k = len(fit.candidates), fit.rows
    gram = fit.linearization.gram().view(n, k, n, k).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    parts = fit.coefficients.view(n, k, -1)
    return (parts * (gram @ parts)).sum((1, 2)).cpu()


def _spectrum(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return visible singular values of W₁ over the largest, (r,), and their directions (r, d)."""
    assert problem.first_layer is not None
    sizes, directions = problem.first_layer.spectrum
    rank = max(1, int((sizes > VISIBLE * sizes[0]).sum()))
    return sizes[:rank] / sizes[0], directions[:rank]


def default_for(problem: Problem) -> Exhume | Stationary:
    """Return our search for a change of weights, or for weights that are the target themselves."""
    return Exhume() if problem.premise is Premise.CHANGE else Stationary()
