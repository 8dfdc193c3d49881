"""Sample splitting: a published method that pauses to split candidates that are stuck.

Shen et al., "Data Reconstruction: Identifiability and Optimization with Sample Splitting". Steps of
a base method alternate with splits (`search.split`): haim2022 or buzaglo2023 where the network was
trained to the margin or with weight decay, loo2023 for the change of its weights, or iurada2025,
whose coefficients are eliminated. Published are the first two, and a variant of the third with the
gradients at both ends of training averaged; loo2023 takes its place here. The divisor of the loss
stays that of the start, so that halves with half the multiplier change nothing but by their
distance. The run ends with more candidates than it began with, which alone makes the best of them
better: compare it with a run that has as many from the start (`begun_with`).

The rule `published` has the published thresholds, ε ≤ 0.02, and an optimiser that forgets. The
rule `adaptive` is ours: no thresholds (`search.split.chosen_adaptively`), ε up to the scale of the
candidates, and both halves keep the velocity of their parent. Two equal halves, each with a
multiplier of its own, answer a step together with twice what their parent did. So the step size of
the multipliers goes down with the smallest share, or a run that was tuned to the edge of stability
is thrown off it.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule
from exhume.equation.objective import Fit
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025, Rolling
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import Descending, Penalised
from exhume.methods.progress import stream
from exhume.methods.splitting import Loss, Penalty, Projection, curvatures
from exhume.search.split import (
    EPSILON,
    ITERATIONS,
    Eigenpairs,
    chosen_adaptively,
    chosen_as_published,
    copied,
    halves,
    line_search,
    price_of_a_split,
    upper_epsilon,
)

Base = Penalised | Iurada2025
"""The methods that can be interrupted."""

Choice = Literal["published", "adaptive"]
"""Whom to split, and how: see the top of this file."""

ROUND = 2**20
"""Streams of random numbers from here on are those of splits; the base method's lie below."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Splits:
    """What splitting adds to the progress of the base method.

    Attributes:
        parents: which candidate at the start each one comes from; None before the run is on.
        looks: how often the run was looked at, half-way to a split and then for it.
        loss: at the last look.
    """

    parents: Tensor | None = None
    looks: int = 0
    loss: float = math.inf


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitDescending(Splits, Descending):
    """The progress of a penalty method with splits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitRolling(Splits, Rolling):
    """The progress of iurada2025 with splits."""


Splitting = SplitDescending | SplitRolling
"""The progress of a base method with splits; its own moves keep what splitting added."""


def with_splits(progress: Descending | Rolling) -> Splitting:
    """Return the progress of a base method, to be gone on with by splits."""
    own = {field.name: getattr(progress, field.name) for field in fields(progress)}
    return SplitDescending(**own) if isinstance(progress, Descending) else SplitRolling(**own)


def loss_of(base: Base, problem: Problem, progress: Splitting) -> Loss:
    """Return what a base method minimises, where a run of it is."""
    if isinstance(progress, SplitRolling):
        return Projection(problem, progress)
    assert isinstance(base, Penalised)
    return Penalty.of(base, problem, progress)


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
        """Return the problem as the base method sees it."""
        return self._base(problem).view(problem)

    def init(self, problem: Problem, samples: int | None, seed: int) -> Splitting:
        """Begin as the base method does."""
        base = self._base(problem)
        if isinstance(base, Iurada2025) and problem.rule is not Rule.FREE:
            raise InputError(
                "shen2026 splits candidates of iurada2025 where coefficients are free, but here "
                "they are those of the margin; leave `base` out, or give Haim2022 or Buzaglo2023."
            )
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
            if epsilon is not None:
                moved = halves(loss.candidates, chosen, pairs.vectors, epsilon)
                assert progress.parents is not None
                parents = copied(progress.parents, chosen)
                after = loss.split(moved, chosen, forget=self.rule == "published")
                progress = replace(cast(Splitting, after), parents=parents)
                if self.rule == "adaptive" and isinstance(progress, Descending):
                    progress = paced(progress)
            cost = self.iterations + 1 + used
            progress = replace(progress, products=progress.products + cost)
        return replace(progress, looks=looks, loss=value)

    def _choice(
        self, loss: Loss, pairs: Eigenpairs, before: float
    ) -> tuple[Tensor, float | None, int]:
        """Return whom to split, by what ε if any, and how often the loss was taken to find it."""
        if self.rule == "published":
            chosen = chosen_as_published(pairs.values, loss.unit)
            return chosen, *_best_epsilon(loss, chosen, pairs, EPSILON)
        upper = upper_epsilon(loss.candidates)
        price = price_of_a_split(len(loss.candidates), before - loss.value, loss.noise)
        chosen = chosen_adaptively(pairs, upper, price)
        return chosen, *_best_epsilon(loss, chosen, pairs, upper, price)


D = TypeVar("D", bound=Descending)


def paced(progress: D) -> D:
    """Return the run with a step size of the multipliers that suits the smallest share.

    Copies of one candidate have the same slope, and their sum moves by the sum of their steps.
    Adam has steps that do not grow with the slope, and stays.
    """
    run = progress.state
    if run.moments.square is not None:
        return progress
    return replace(progress, state=replace(run, pace=run.place.shares.min().item()))


def begun_with(
    base: Base, problem: Problem, count: int, seed: int, trial: int = 0
) -> Descending | Rolling:
    """Begin the base method with so many candidates, and nothing to tune: the control for a split.

    Args:
        base: the method.
        problem: as it sees it.
        count: as many candidates as a split run ended with.
        seed: of the run.
        trial: whose hyperparameters it takes where the base leaves some open: those that tuning
            chose for the split run, `Descent.trial`.
    """
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


def _best_epsilon(
    loss: Loss, chosen: Tensor, pairs: Eigenpairs, upper: float, price: float = 0.0
) -> tuple[float | None, int]:
    """Return the ε of least loss, if it is worth the price, and how often the loss was taken."""
    used = 0

    def at(epsilon: float) -> float:
        nonlocal used
        if epsilon == 0:
            return loss.value - price * len(chosen)
        used += 1
        return loss.after(halves(loss.candidates, chosen, pairs.vectors, epsilon), chosen)

    return (line_search(at, upper) if len(chosen) else None), used
