"""Losses whose candidates can be split: what a split needs to know of the run it interrupts.

`Penalty` is the loss of the recipes with multipliers, `Projection` the residual of iurada2025,
whose coefficients are eliminated. Either one says what the splitting matrices S do
(`search.split`), what the loss is with halves (n + q, d) of the chosen candidates in their place,
and how the run goes on with them. Its `unit` is by what eigenvalues are multiplied before the
published thresholds: m.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted, gradient
from exhume.equation.problem import Problem
from exhume.features.activations import smoothed_relu
from exhume.methods.iurada2025 import Rolling
from exhume.methods.penalised import Descending, Moments, Pair, Penalised, smoothed
from exhume.methods.penalties import (
    Hyperparameters,
    PenalisedLoss,
    Place,
    loss_at,
    roughness,
)
from exhume.search.split import (
    Eigenpairs,
    Product,
    copied,
    kept_to,
    shared,
    smallest_eigenpairs,
    splitting_product,
)

SMOOTHING = 50.0
"""Slope of the ReLU surrogate of the splitting matrices where the base method has none, as
published: a ReLU itself bends nowhere, and nothing would be split."""


def split_place(place: Place, candidates: Tensor, chosen: Tensor) -> Place:
    """Return the place with halves of the chosen: each has half the multiplier and half the share.

    Example:
        >>> row = torch.ones(2, 1)
        >>> place = Place(row, row, torch.tensor([3, 4]), torch.ones(2), 2.0)
        >>> after = split_place(place, torch.ones(3, 1), torch.tensor([0]))
        >>> after.shares.tolist(), after.labels.tolist()
        ([0.5, 1.0, 0.5], [3, 4, 3])
    """
    return replace(
        place,
        candidates=candidates,
        multipliers=shared(place.multipliers, chosen),
        labels=copied(place.labels, chosen),
        shares=shared(place.shares, chosen),
    )


def split_moments(moments: Moments, chosen: Tensor) -> Moments:
    """Return what the optimiser remembers of halves: all that it did of their parent.

    Each half has half of a multiplier's velocity, so that their sum goes on as before.
    """

    def handed_on(pair: Pair) -> Pair:
        return copied(pair[0], chosen), copied(pair[1], chosen)

    candidates, multipliers = moments.velocity
    velocity = copied(candidates, chosen), shared(multipliers, chosen)
    square = None if moments.square is None else handed_on(moments.square)
    return replace(moments, velocity=velocity, square=square)


@dataclass(frozen=True, eq=False)
class Penalty:
    """The loss of a recipe with multipliers and penalties (`methods.penalties`).

    Attributes:
        problem: with the surrogate of the step at hand.
        settings: of the recipe.
        progress: where it is.
    """

    problem: Problem
    settings: Hyperparameters
    progress: Descending

    @classmethod
    def of(cls, base: Penalised, problem: Problem, progress: Descending) -> "Penalty":
        """Return the loss where a run is."""
        settings = base.settings_of(problem, progress)
        return cls(smoothed(problem, settings, progress.state.steps), settings, progress)

    @cached_property
    def here(self) -> PenalisedLoss:
        """The loss with its parts."""
        return loss_at(self.problem, self.settings, self.progress.state.place)

    @property
    def value(self) -> float:
        """Stationarity and penalties."""
        return self.here.value

    @property
    def noise(self) -> float:
        """The rounding of ‖R‖², where R is rounded as the target is."""
        target = float(self.problem.target.double().norm())
        eps: float = torch.finfo(self.problem.target.dtype).eps
        return 2 * eps * target * math.sqrt(self.value)

    @property
    def unit(self) -> float:
        """The divisor."""
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
        here, smoothness = self.here, self.settings.smoothness
        product = splitting_product(
            here.linearization, here.residual, here.coefficients, direction, here.prior_curvature
        )
        if smoothness:
            shape = self.problem.shape
            rough = roughness(roughness(direction, shape), shape)
            product = product + 2 * smoothness * here.place.shares[:, None].to(rough) * rough
        return product

    def after(self, candidates: Tensor, chosen: Tensor) -> float:
        """Return the loss with halves of the chosen."""
        place = split_place(self.here.place, candidates, chosen)
        return loss_at(self.problem, self.settings, place).value

    def split(self, candidates: Tensor, chosen: Tensor, forget: bool) -> Descending:
        """Return the run with them."""
        run, settings = self.progress.state, self.settings
        place = split_place(run.place, candidates, chosen)
        moments = split_moments(run.moments, chosen)
        if forget:
            moments = Moments.at_rest(place, settings)
        residual = loss_at(self.problem, settings, place).relative
        run = replace(run, place=place, moments=moments, residual=residual)
        return replace(self.progress, state=run)


@dataclass(frozen=True, eq=False)
class Projection:
    """The relative residual with the coefficients eliminated, of iurada2025.

    Attributes:
        problem: as the base method sees it.
        progress: where it is.
    """

    problem: Problem
    progress: Rolling

    @cached_property
    def _inside(self) -> Product:
        """D ↦ S D for halves that are kept to the domain; ReLU has a surrogate for what bends."""
        problem, fit = self.problem, self.progress.state.fit
        bent = problem.features.substituted(smoothed_relu(SMOOTHING)).linearize(fit.candidates)
        scale = 1 / float(problem.target.double().square().sum())

        def product(direction: Tensor) -> Tensor:
            return splitting_product(bent, fit.residual, fit.coefficients, direction, scale=scale)

        return kept_to(problem.domain, fit.candidates, gradient(problem, fit), product)

    @property
    def value(self) -> float:
        """The relative residual."""
        return self.progress.residual

    @property
    def noise(self) -> float:
        """The rounding of ‖R‖²/‖Δ‖², where R is rounded as the target is."""
        eps: float = torch.finfo(self.problem.target.dtype).eps
        return 2 * eps * math.sqrt(self.value)

    @property
    def unit(self) -> float:
        """The number of samples, as if the loss were ‖R‖² with 1/m beside the coefficients."""
        samples = self.progress.samples or len(self.candidates)
        return samples * float(self.problem.target.double().square().sum())

    @property
    def candidates(self) -> Tensor:
        """X, (n, d)."""
        return self.progress.candidates

    def admissible(self, direction: Tensor) -> Tensor:
        """Return what is tangent to the domain."""
        descent = -gradient(self.problem, self.progress.state.fit)
        return self.problem.domain.tangent(self.candidates, direction, descent)

    def product(self, direction: Tensor) -> Tensor:
        """Return S D, (n, d)."""
        return self._inside(direction)

    def after(self, candidates: Tensor, chosen: Tensor) -> float:
        """Return the residual with halves in the domain, and the best coefficients."""
        return self._fitted(candidates).value

    def split(self, candidates: Tensor, chosen: Tensor, forget: bool) -> Rolling:
        """Return the run with them."""
        state, fit = self.progress.state, self._fitted(candidates)
        velocity = torch.zeros_like(fit.candidates) if forget else copied(state.velocity, chosen)
        return replace(self.progress, state=replace(state, fit=fit, velocity=velocity))

    def _fitted(self, candidates: Tensor) -> Fit:
        return fitted(self.problem, self.problem.domain.project(candidates))


Loss = Penalty | Projection
"""What a base method minimises, where a run of it is."""


def curvatures(loss: Loss, iterations: int, generator: torch.Generator) -> Eigenpairs:
    """Return the way to split each candidate, and what it promises."""
    start = torch.randn(loss.candidates.shape, generator=generator, dtype=torch.float64)
    return smallest_eigenpairs(loss.product, loss.admissible(start.to(loss.candidates)), iterations)
