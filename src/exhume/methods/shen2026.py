"""Sample splitting: a published method that pauses to split candidates that are stuck.

Shen et al., "Data Reconstruction: Identifiability and Optimization with Sample Splitting";
docs/theory.md. The run ends with more candidates than it began with, which alone makes the best of
them better: compare it with a run that has as many from the start (`begun_with`).
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule
from exhume.equation.objective import Fit, fitted, gradient
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features import Linearization
from exhume.features.activations import smoothed_relu
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.descent import Descent, Moments, smoothed
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025, Rolling
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import Descending, Penalised
from exhume.methods.penalties import Hyperparameters, PenalisedLoss, Place, loss_at, roughness
from exhume.methods.progress import stream
from exhume.search import split

Base = Penalised | Iurada2025  # the methods that can be interrupted
Choice = Literal["published", "adaptive"]  # whom to split, and how: see `Shen2026`
ROUND = 2**20  # random streams from here on are those of splits; the base method's lie below
SMOOTHING = 50.0  # published slope of the surrogate where the base has none: ReLU bends nowhere


@dataclass(frozen=True, eq=False)
class Penalty:
    """The loss of a recipe with multipliers and penalties (`methods.penalties`), where a run is.

    Halves (n + q, d) have half the multiplier and share each: only their distance changes it.
    """

    problem: Problem  # with the surrogate of the step at hand
    settings: Hyperparameters
    progress: Descending

    @cached_property
    def here(self) -> PenalisedLoss:
        """The loss with its parts."""
        return loss_at(self.problem, self.settings, self.progress.state.place)

    @property
    def value(self) -> float:
        """Stationarity and penalties."""
        return self.here.value

    @property
    def size(self) -> float:
        """The root of the loss without any candidate."""
        return float(self.problem.target.double().norm())

    @property
    def unit(self) -> float:
        """By what eigenvalues are multiplied before the published thresholds: the divisor."""
        return self.here.place.divisor

    @property
    def candidates(self) -> Tensor:
        """X, (n, d)."""
        return self.here.place.candidates

    def admissible(self, direction: Tensor) -> Tensor:
        """Return all of it: penalties alone keep candidates where they belong."""
        return direction

    def product(self, direction: Tensor) -> Tensor:
        """Return S D, (n, d), with the second derivatives of the box and of the smoothness."""
        here, shape, smoothness = self.here, self.problem.shape, self.settings.smoothness
        there = cast(Linearization, here.linearization)
        product = split.splitting_product(
            there, here.residual, here.coefficients, direction, here.prior_curvature
        )
        if smoothness:
            rough = roughness(roughness(direction, shape), shape)
            product = product + 2 * smoothness * here.place.shares[:, None].to(rough) * rough
        return product

    def after(self, candidates: Tensor, chosen: Tensor) -> float:
        """Return the loss with halves of the chosen."""
        return loss_at(self.problem, self.settings, self._halved(candidates, chosen)).value

    def split(self, candidates: Tensor, chosen: Tensor, forget: bool) -> Descending:
        """Return the run with them, at rest or with all that it remembers of their parents."""
        run, place = self.progress.state, self._halved(candidates, chosen)
        (x, y), square = run.moments.velocity, run.moments.square
        moments = replace(
            run.moments,
            velocity=(split.copied(x, chosen), split.shared(y, chosen)),
            square=square and (split.copied(square[0], chosen), split.copied(square[1], chosen)),
        )
        if forget:
            moments = Moments.at_rest(place, self.settings)
        residual = loss_at(self.problem, self.settings, place).relative
        state = replace(run, place=place, moments=moments, residual=residual)
        return replace(self.progress, state=state)

    def _halved(self, candidates: Tensor, chosen: Tensor) -> Place:
        place = self.here.place
        return replace(
            place,
            candidates=candidates,
            multipliers=split.shared(place.multipliers, chosen),
            labels=split.copied(place.labels, chosen),
            shares=split.shared(place.shares, chosen),
        )


@dataclass(frozen=True, eq=False)
class Projection:
    """The relative residual of iurada2025, with coefficients eliminated, where a run is."""

    problem: Problem
    progress: Rolling
    size: float = 1.0  # the root of the loss without any candidate

    @cached_property
    def product(self) -> split.Product:
        """D ↦ S D for halves that are kept to the domain; ReLU has a surrogate for what bends."""
        problem, fit = self.problem, self.progress.state.fit
        bent = problem.features.substituted(smoothed_relu(SMOOTHING)).linearize(fit.candidates)
        scale = 1 / float(problem.size)
        own = partial(split.splitting_product, bent, fit.residual, fit.coefficients, scale=scale)
        return split.kept_to(problem.domain, fit.candidates, gradient(problem, fit), own)

    @property
    def value(self) -> float:
        """The relative residual."""
        return self.progress.residual

    @property
    def unit(self) -> float:
        """The number of samples, as if the loss were ‖R‖² with 1/m beside the coefficients."""
        samples = self.progress.samples or len(self.candidates)
        return samples * float(self.problem.size)

    @property
    def candidates(self) -> Tensor:
        """X, (n, d)."""
        return self.progress.candidates

    def admissible(self, direction: Tensor) -> Tensor:
        """Return what is tangent to the domain."""
        descent = -gradient(self.problem, self.progress.state.fit)
        return self.problem.domain.tangent(self.candidates, descent)(direction)

    def after(self, candidates: Tensor, chosen: Tensor) -> float:
        """Return the residual with halves in the domain, and the best coefficients."""
        return self._fitted(candidates).value

    def split(self, candidates: Tensor, chosen: Tensor, forget: bool) -> Rolling:
        """Return the run with them."""
        state, fit = self.progress.state, self._fitted(candidates)
        velocity = split.copied(state.velocity, chosen)
        velocity = torch.zeros_like(velocity) if forget else velocity
        return replace(self.progress, state=replace(state, fit=fit, velocity=velocity))

    def _fitted(self, candidates: Tensor) -> Fit:
        return fitted(self.problem, self.problem.domain.project(candidates))


Loss = Penalty | Projection  # what a base method minimises, where a run of it is


def curvatures(loss: Loss, iterations: int, generator: torch.Generator) -> split.Eigenpairs:
    """Return the way to split each candidate, and what it promises."""
    start = torch.randn(loss.candidates.shape, generator=generator, dtype=torch.float64)
    start = loss.admissible(start.to(loss.candidates))
    return split.smallest_eigenpairs(loss.product, start, iterations)


@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """What splitting adds to the progress of the base method."""

    parents: Tensor | None = None  # each one's candidate at the start; None before the run is on
    looks: int = 0  # how often the run was looked at, half-way to a split and then for it
    loss: float = math.inf  # at the last look


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitDescending(Splits, Descending):
    """The progress of a penalty method with splits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitRolling(Splits, Rolling):
    """The progress of iurada2025 with splits."""


Splitting = SplitDescending | SplitRolling  # moves of the base method keep what splitting added


def with_splits(progress: Descending | Rolling) -> Splitting:
    """Return the progress of a base method, to be gone on with by splits."""
    own = {field.name: getattr(progress, field.name) for field in fields(progress)}
    return SplitDescending(**own) if isinstance(progress, Descending) else SplitRolling(**own)


def loss_of(base: Base, problem: Problem, progress: Splitting) -> Loss:
    """Return what a base method minimises, where a run of it is."""
    if isinstance(progress, SplitRolling):
        return Projection(problem, progress)
    settings = cast(Penalised, base).settings_of(problem, progress)
    return Penalty(smoothed(problem, settings, progress.state.steps), settings, progress)


@dataclass(frozen=True)
class Shen2026:
    """A base method with splits.

    The rule `published` has the published thresholds, ε ≤ 0.02, and an optimiser that forgets. The
    rule `adaptive` is ours: no thresholds, ε up to the scale of the candidates, and halves keep the
    velocity of their parent.
    """

    base: Base | None = None  # the method that is interrupted; that of `base_for` if None
    every: int | None = None  # steps between splits; spread over the steps of the base if None
    rounds: int = 3  # most splits
    rule: Choice = "published"  # published or adaptive
    iterations: int = split.ITERATIONS  # products for the eigenvectors
    name: str = "shen2026"

    def __post_init__(self) -> None:
        """Refuse settings that no run could use."""
        if self.rule not in get_args(Choice):
            raise InputError(f"rule: expected published or adaptive, got {self.rule!r}.")
        if self.rounds < 0 or self.iterations < 1 or (self.every is not None and self.every < 1):
            raise InputError(
                "splitting: expected `every` and `iterations` of at least 1 and `rounds` of at "
                f"least 0, got {self.every}, {self.iterations} and {self.rounds}."
            )

    def view(self, problem: Problem) -> Problem:
        """Return the problem as the base method sees it."""
        return self._base(problem).view(problem)

    def init(self, problem: Problem, samples: int | None, seed: int) -> Splitting:
        """Begin as the base method does."""
        base = self._base(problem)
        if isinstance(base, Iurada2025) and problem.rule is not Rule.FREE:
            raise InputError(
                "shen2026 splits candidates of iurada2025 where coefficients are free, not at the "
                "margin; leave `base` out, or give Haim2022 or Buzaglo2023."
            )
        if isinstance(base, Penalised) and base.starts > 1:
            raise InputError("shen2026 splits the candidates of one run; give its base starts=1.")
        return with_splits(base.init(problem, samples, seed))

    def advance(self, problem: Problem, progress: Splitting) -> Splitting:
        """Make a move of the base method, or take a look where one is due."""
        base: Any = self._base(problem)
        if progress.phase == "tune":
            return cast(Splitting, base.advance(problem, progress))
        if progress.parents is None:
            whole = torch.arange(len(progress.candidates), device=progress.candidates.device)
            progress = replace(progress, parents=whole)
        every = self.every or max(1, base.steps // (self.rounds + 1))
        due = min(2 * progress.state.steps // every, 2 * self.rounds)
        if progress.looks < due:
            return self._look(problem, progress)
        return cast(Splitting, base.advance(problem, progress))

    def finish(self, problem: Problem, progress: Splitting) -> Fit:
        """Return the answer of the base method."""
        base: Any = self._base(problem)
        return cast(Fit, base.finish(problem, progress))

    def _base(self, problem: Problem) -> Base:
        return self.base or base_for(problem)

    def _look(self, problem: Problem, progress: Splitting) -> Splitting:
        """Note the loss; every other time split what is worth it, if the loss falls by that."""
        loss = loss_of(self._base(problem), problem, progress)
        looks, value = progress.looks + 1, loss.value
        if looks % 2 == 0:
            pairs = curvatures(loss, self.iterations, stream(progress.seed, ROUND + looks))
            chosen, epsilon, used = self._choice(loss, pairs, progress.loss)
            if epsilon is not None and progress.parents is not None:
                moved = split.halves(loss.candidates, chosen, pairs.vectors, epsilon)
                parents = split.copied(progress.parents, chosen)
                after = loss.split(moved, chosen, forget=self.rule == "published")
                progress = replace(cast(Splitting, after), parents=parents)
                if self.rule == "adaptive" and isinstance(progress, Descending):
                    progress = replace(progress, state=paced(progress.state))
            cost = self.iterations + 1 + used
            progress = replace(progress, products=progress.products + cost)
        return replace(progress, looks=looks, loss=value)

    def _choice(
        self, loss: Loss, pairs: split.Eigenpairs, before: float
    ) -> tuple[Tensor, float | None, int]:
        """Return whom to split, by what ε if any, and how often the loss was taken to find it."""
        if self.rule == "published":
            upper, price = split.EPSILON, 0.0
            chosen = split.chosen_as_published(pairs.values, loss.unit)
        else:
            upper = float(loss.candidates.double().norm(dim=1).median()) / 2
            # A candidate more makes a run shorter by 1/n of what it would have gained: as much as
            # of late. What rounding R as the target is does to the loss is no decrease.
            eps = torch.finfo(loss.problem.target.dtype).eps
            noise = 2 * eps * loss.size * math.sqrt(loss.value)
            price = max((before - loss.value) / len(loss.candidates), noise)
            chosen = split.chosen_adaptively(pairs, upper, price)
        used = 0

        def at(epsilon: float) -> float:
            nonlocal used
            if epsilon == 0:
                return loss.value - price * len(chosen)
            used += 1
            return loss.after(split.halves(loss.candidates, chosen, pairs.vectors, epsilon), chosen)

        epsilon = split.line_search(at, upper) if len(chosen) else None
        return chosen, epsilon, used


def paced(run: Descent) -> Descent:
    """Return the run with a step size of the multipliers that suits the smallest share.

    Halves have the same slope, and their sum moves by the sum of their steps: a run tuned to the
    edge of stability would be thrown off it. Adam's steps do not grow with the slope.
    """
    adam = run.moments.square is not None
    least = run.place.shares.min().item()
    return run if adam else replace(run, pace=run.pace * least)


def begun_with(
    base: Base, problem: Problem, count: int, seed: int, trial: int = 0
) -> Descending | Rolling:
    """Begin the base with so many candidates and a trial's hyperparameters: a split's control."""
    if isinstance(base, Iurada2025):
        return base.init(problem, count, seed)
    base.check(problem)
    state = base.begin(problem, count, seed, trial)
    return Descending(seed=seed, samples=None, state=state, phase="run")


def base_for(problem: Problem) -> Base:
    """Return the method to interrupt, by what the problem is."""
    if problem.features.outputs == 0:
        return Iurada2025()
    if problem.premise is Premise.CHANGE:
        return Loo2023()
    if problem.premise is Premise.MARGIN and problem.features.outputs == 1:
        return Haim2022()
    return Buzaglo2023()
