"""Sample splitting: a published method that pauses to split candidates that are stuck.

Shen et al., "Data Reconstruction: Identifiability and Optimization with Sample Splitting". Steps of
a base method alternate with splits (`search.split`): haim2022 or buzaglo2023 where the network was
trained to the margin or with weight decay, loo2023 for the change of its weights, or iurada2025,
whose coefficients are eliminated. Published are the first two, and a variant of the third with the
gradients at both ends of training averaged; loo2023 takes its place here. The divisor of the loss
stays that of the start, so that halves with half the multiplier change nothing but by their
distance. The run ends with more candidates than it began with, which alone makes the best of them
better: compare it with `CountMatched`.

The rule `published` has the published thresholds, ε ≤ 0.02, and an optimiser that forgets. The
rule `adaptive` is ours: no thresholds (`search.split.chosen_adaptively`), ε up to the scale of the
candidates, and both halves keep the velocity of their parent. Two equal halves, each with a
multiplier of its own, answer a step together with twice what their parent did. So the step size of
the multipliers goes down with the smallest share, or a run that was tuned to the edge of stability
is thrown off it.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule
from exhume.equation.objective import Fit, fitted, gradient
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.activations import smoothed_relu
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import (
    Hyperparameters,
    Penalised,
    PenalisedState,
    Terms,
    outputs,
    resting,
    sharpened,
    smoothed,
    terms_of,
)
from exhume.methods.progress import Method, Progress, stream
from exhume.search.split import (
    EPSILON,
    ITERATIONS,
    Eigenpairs,
    Product,
    chosen_adaptively,
    chosen_as_published,
    copied,
    halves,
    kept_to,
    line_search,
    price_of_a_split,
    shared,
    smallest_eigenpairs,
    splitting_product,
    upper_epsilon,
)
from exhume.solvers import State
from exhume.solvers.gradient import MomentumState

SMOOTHING = 50.0
"""Slope of the ReLU surrogate of the splitting matrices where the base method has none, as
published: a ReLU itself bends nowhere, and nothing would be split."""

COPIED = (
    "labels",
    "velocity.candidates",
    "square.candidates",
    "square.multipliers",
)
SHARED = ("multipliers", "shares", "velocity.multipliers")
"""What both halves have from their parent, whole or half of it each.

Half of a multiplier's velocity each, so that their sum goes on as before.
"""

Base = Penalised | Iurada2025
"""What can be interrupted."""

Choice = Literal["published", "adaptive"]
"""Whom to split, and how: see the top of this file."""

ROUND = 2**20
"""Streams of random numbers from here on are those of splits; the base method's lie below."""


class Loss(Protocol):
    """What a split needs to know of the method that it interrupts."""

    @property
    def value(self) -> float:
        """The loss as it stands."""
        ...

    @property
    def noise(self) -> float:
        """What rounding does to it."""
        ...

    @property
    def unit(self) -> float:
        """By what eigenvalues are multiplied before the published thresholds: m."""
        ...

    @property
    def candidates(self) -> Tensor:
        """X, (n, d)."""
        ...

    def admissible(self, direction: Tensor) -> Tensor:
        """The part of a direction (n, d) along which candidates may be moved."""
        ...

    def product(self, direction: Tensor) -> Tensor:
        """S D, (n, d)."""
        ...

    def after(self, candidates: Tensor, chosen: Tensor) -> float:
        """The loss with halves (n + q, d) of the chosen in their place."""
        ...

    def split(self, candidates: Tensor, chosen: Tensor, forget: bool) -> State:
        """The state with them; `forget` what the optimiser carries, or hand it on."""
        ...


def divided(memory: dict[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """The memory of a state with the chosen candidates split.

    Example:
        >>> memory = {"shares": torch.ones(2), "labels": torch.tensor([3, 4])}
        >>> after = divided(memory, torch.tensor([0]))
        >>> after["shares"].tolist(), after["labels"].tolist()
        ([0.5, 1.0, 0.5], [3, 4, 3])
    """
    return (
        memory
        | {name: copied(memory[name], chosen) for name in COPIED if name in memory}
        | {name: shared(memory[name], chosen) for name in SHARED if name in memory}
    )


@dataclass(frozen=True, eq=False)
class Penalty:
    """The loss of a recipe with multipliers and penalties (`methods.penalised`).

    Attributes:
        problem: with the surrogate of the step at hand.
        settings: of the recipe.
        state: where it is.
        terms: the loss there.
    """

    problem: Problem
    settings: Hyperparameters
    state: PenalisedState
    terms: Terms

    @classmethod
    def of(cls, base: Penalised, problem: Problem, progress: Progress) -> "Penalty":
        """The loss where a run is."""
        state = progress.state
        settings = base.settings_of(problem, progress.seed, state.memory)
        problem = smoothed(problem, settings, state.steps)
        here = terms_of(problem, settings, state.fit.candidates, state.memory)
        return cls(problem, settings, state, here)

    @property
    def value(self) -> float:
        """Stationarity and penalties."""
        return self.terms.value

    @property
    def noise(self) -> float:
        """Of ‖R‖², where R is rounded as the target is."""
        target = float(self.problem.target.double().norm())
        eps: float = torch.finfo(self.problem.target.dtype).eps
        return 2 * eps * target * math.sqrt(self.value)

    @property
    def unit(self) -> float:
        """The divisor."""
        return self.terms.divisor

    @property
    def candidates(self) -> Tensor:
        """X, (n, d)."""
        return self.terms.candidates

    def admissible(self, direction: Tensor) -> Tensor:
        """All of it: penalties alone keep candidates where they belong."""
        return direction

    def product(self, direction: Tensor) -> Tensor:
        """S D, (n, d), with the second derivatives of the box and of the smoothness."""
        here, settings = self.terms, self.settings
        product = splitting_product(
            here.linearization, here.residual, here.coefficients, direction, here.prior_curvature
        )
        if settings.smoothness:
            shape = self.problem.shape
            rough = sharpened(sharpened(direction, shape), shape)
            product = product + 2 * settings.smoothness * here.shares[:, None].to(rough) * rough
        return product

    def after(self, candidates: Tensor, chosen: Tensor) -> float:
        """The loss with halves of the chosen."""
        memory = divided(self.state.memory, chosen)
        return terms_of(self.problem, self.settings, candidates, memory).value

    def split(self, candidates: Tensor, chosen: Tensor, forget: bool) -> State:
        """The state with them."""
        memory = divided(self.state.memory, chosen)
        if forget:
            memory |= resting(candidates, memory["multipliers"], self.settings.adam)
        here = terms_of(self.problem, self.settings, candidates, memory)
        return replace(self.state, fit=here.fit, memory=memory)


@dataclass(frozen=True, eq=False)
class Projection:
    """The relative residual with the coefficients eliminated, of iurada2025.

    Attributes:
        problem: as the base method sees it.
        state: where it is.
        samples: candidates at the start.
        inside: D ↦ S D for halves that are kept to the domain.
    """

    problem: Problem
    state: MomentumState
    samples: int
    inside: Product

    @classmethod
    def of(cls, problem: Problem, progress: Progress) -> "Projection":
        """The loss where a run is; ReLU has a surrogate for what bends."""
        fit = progress.state.fit
        bent = problem.features.substituted(smoothed_relu(SMOOTHING)).linearize(fit.candidates)
        scale = 1 / float(problem.target.double().square().sum())

        def product(direction: Tensor) -> Tensor:
            return splitting_product(bent, fit.residual, fit.coefficients, direction, scale=scale)

        inside = kept_to(problem.domain, fit.candidates, gradient(problem, fit), product)
        return cls(problem, progress.state, progress.samples or len(fit.candidates), inside)

    @property
    def value(self) -> float:
        """The relative residual."""
        return self.state.fit.value

    @property
    def noise(self) -> float:
        """Of ‖R‖²/‖Δ‖², where R is rounded as the target is."""
        eps: float = torch.finfo(self.problem.target.dtype).eps
        return 2 * eps * math.sqrt(self.value)

    @property
    def unit(self) -> float:
        """As if the loss were ‖R‖² with 1/m beside the coefficients."""
        return self.samples * float(self.problem.target.double().square().sum())

    @property
    def candidates(self) -> Tensor:
        """X, (n, d)."""
        return self.state.fit.candidates

    def admissible(self, direction: Tensor) -> Tensor:
        """What is tangent to the domain."""
        descent = -gradient(self.problem, self.state.fit)
        return self.problem.domain.tangent(self.candidates, direction, descent)

    def product(self, direction: Tensor) -> Tensor:
        """S D, (n, d)."""
        return self.inside(direction)

    def after(self, candidates: Tensor, chosen: Tensor) -> float:
        """The residual with halves of the chosen in the domain, and the best coefficients."""
        return self._evaluated(candidates).value

    def split(self, candidates: Tensor, chosen: Tensor, forget: bool) -> State:
        """The state with them."""
        fit = self._evaluated(candidates)
        velocity = copied(self.state.velocity, chosen)
        if forget:
            velocity = torch.zeros_like(fit.candidates)
        return replace(self.state, fit=fit, velocity=velocity)

    def _evaluated(self, candidates: Tensor) -> Fit:
        return fitted(self.problem, self.problem.domain.project(candidates))


def loss_of(base: Method, problem: Problem, progress: Progress) -> Loss:
    """What a base method minimises, where a run of it is."""
    if isinstance(base, Penalised):
        return Penalty.of(base, problem, progress)
    return Projection.of(problem, progress)


def curvatures(loss: Loss, iterations: int, generator: torch.Generator) -> Eigenpairs:
    """The way to split each candidate, and what it promises."""
    start = torch.randn(loss.candidates.shape, generator=generator, dtype=torch.float64)
    return smallest_eigenpairs(loss.product, loss.admissible(start.to(loss.candidates)), iterations)


@dataclass(frozen=True)
class Shen2026:
    """A base method with splits.

    Attributes:
        base: the method that is interrupted; by the problem if None (see `base_for`).
        every: steps between splits; so that all of them fit in the steps of the base if None.
        rounds: most splits.
        rule: published, or adaptive: see the top of this file.
        iterations: products for the eigenvectors.
    """

    base: Base | None = None
    every: int | None = None
    rounds: int = 3
    rule: Choice = "published"
    iterations: int = ITERATIONS
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
        """As the base method sees it."""
        return self._base(problem).view(problem)

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """As the base method begins."""
        base = self._base(problem)
        if isinstance(base, Iurada2025) and problem.rule is not Rule.FREE:
            raise InputError(
                "shen2026 splits candidates of iurada2025 where coefficients are free, but here "
                "they are those of the margin; leave `base` out, or give Haim2022 or Buzaglo2023."
            )
        return base.init(problem, samples, seed)

    def advance(self, problem: Problem, progress: Progress) -> Progress:
        """A move of the base method, or a look where one is due."""
        base = self._base(problem)
        if progress.phase == "tune":
            return base.advance(problem, progress)
        if "parents" not in progress.memory:
            progress = replace(progress, memory=_begun(progress.state.fit.candidates))
        every = self.every or max(1, base.steps // (self.rounds + 1))
        due = min(2 * progress.state.steps // every, 2 * self.rounds)
        if progress.memory["looks"].item() < due:
            return self._look(base, problem, progress)
        if self.rule == "adaptive":
            base = paced(base, problem, progress)
        return base.advance(problem, progress)

    def finish(self, problem: Problem, progress: Progress) -> Fit:
        """As the base method ends."""
        return self._base(problem).finish(problem, progress)

    def _base(self, problem: Problem) -> Base:
        return self.base or base_for(problem)

    def _look(self, base: Base, problem: Problem, progress: Progress) -> Progress:
        """Note the loss; every other time split what is worth it, if the loss falls by that."""
        loss, state = loss_of(base, problem, progress), progress.state
        parents, looks = progress.memory["parents"], int(progress.memory["looks"].item()) + 1
        if looks % 2 == 0:
            pairs = curvatures(loss, self.iterations, stream(progress.seed, ROUND + looks))
            chosen, epsilon, used = self._choice(loss, pairs, progress.memory["split.loss"].item())
            if epsilon is not None:
                moved = halves(loss.candidates, chosen, pairs.vectors, epsilon)
                state = loss.split(moved, chosen, forget=self.rule == "published")
                parents = copied(parents, chosen)
            state = replace(state, products=state.products + self.iterations + 1 + used)
        own = {"looks": torch.tensor(looks), "split.loss": torch.tensor(loss.value).double()}
        return replace(progress, state=state, memory={"parents": parents} | own)

    def _choice(
        self, loss: Loss, pairs: Eigenpairs, before: float
    ) -> tuple[Tensor, float | None, int]:
        """Whom to split, by what ε if any, and how often the loss was taken to find it."""
        if self.rule == "published":
            chosen = chosen_as_published(pairs.values, loss.unit)
            return chosen, *_least(loss, chosen, pairs, EPSILON)
        upper = upper_epsilon(loss.candidates)
        price = price_of_a_split(len(loss.candidates), before - loss.value, loss.noise)
        chosen = chosen_adaptively(pairs, upper, price)
        epsilon, used = _least(loss, chosen, pairs, upper, price)
        return chosen, epsilon, used


def paced(base: Base, problem: Problem, progress: Progress) -> Base:
    """The base method with a step size of the multipliers that suits the smallest share.

    Copies of one candidate have the same slope, and their sum moves by the sum of their steps.
    Adam, of loo2023, has steps that do not grow with the slope, and stays.
    """
    if not isinstance(base, Haim2022 | Buzaglo2023):
        return base
    memory = progress.state.memory
    rate = base.settings_of(problem, progress.seed, memory).multiplier_rate
    return replace(base, multiplier_rate=rate * memory["shares"].min().item())


@dataclass(frozen=True)
class CountMatched:
    """The base method with as many candidates as a split run ended with: the control for it.

    Attributes:
        base: the method.
        count: its candidates.
        trial: whose hyperparameters it takes where the base leaves some open: those that tuning
            chose for the split run, `memory["trial"]` of its state.
    """

    base: Base
    count: int
    trial: int = 0
    name: str = "count-matched"

    def view(self, problem: Problem) -> Problem:
        """As the base method sees it."""
        return self.base.view(problem)

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """So many candidates at random; nothing is tuned."""
        if isinstance(self.base, Iurada2025):
            return self.base.init(problem, self.count, seed)
        self.base.check(problem)
        state = self.base.begin(problem, self.count, seed, self.trial)
        return Progress(seed, samples, state, phase="run")

    def advance(self, problem: Problem, progress: Progress) -> Progress:
        """A move of the base method."""
        return self.base.advance(problem, progress)

    def finish(self, problem: Problem, progress: Progress) -> Fit:
        """As the base method ends."""
        return self.base.finish(problem, progress)


def base_for(problem: Problem) -> Base:
    """The method to interrupt, by what the problem is."""
    if problem.features.outputs == 0:
        return Iurada2025()
    if problem.premise is Premise.CHANGE:
        return Loo2023()
    if problem.premise is Premise.MARGIN and outputs(problem) == 1:
        return Haim2022()
    return Buzaglo2023()


def _begun(candidates: Tensor) -> dict[str, Tensor]:
    """What splitting remembers beside the state of the base method.

    Which candidate at the start each one comes from; how often the run was looked at, half-way to
    a split and then for it; the loss at the last look.
    """
    return {
        "parents": torch.arange(len(candidates), device=candidates.device),
        "looks": torch.tensor(0),
        "split.loss": torch.tensor(torch.inf, dtype=torch.float64),
    }


def _least(
    loss: Loss, chosen: Tensor, pairs: Eigenpairs, upper: float, price: float = 0.0
) -> tuple[float | None, int]:
    """The ε of least loss, if that is worth the price of each, and how often the loss was taken."""
    used = 0

    def at(epsilon: float) -> float:
        nonlocal used
        if epsilon == 0:
            return loss.value - price * len(chosen)
        used += 1
        return loss.after(halves(loss.candidates, chosen, pairs.vectors, epsilon), chosen)

    return (line_search(at, upper) if len(chosen) else None), used
