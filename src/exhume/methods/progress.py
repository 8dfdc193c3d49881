"""Progress of a method: everything it needs to go on, in a form that fits in one file."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exhume.equation.objective import Fit
from exhume.equation.problem import Problem
from exhume.solvers import Outcome, State


@dataclass(frozen=True, eq=False)
class Progress:
    """Where a method is.

    Attributes:
        seed: of the whole run; each round draws from its own stream.
        samples: the number asked for, or None if it is to be found.
        state: the solver's, on the trial at hand; its type is the method's business.
        memory: tensors that the method itself carries along, by name.
        phase: what the trial is for.
        rounds: trials begun before this one.
        best: candidates of the best trial that this one is measured against, or None.
        best_value: their residual.
        misses: rounds in a row that did not improve on the best.
        restarts: fresh starts so far.
        dropped: candidates beyond the surplus that this trial began by dropping.
        returned: dropped candidates that trials found again, at the same residual, in all.
        grown: the residual before the number of candidates last grew.
        floor: the residual that was taken for the floor, 0 while there is none.
        champion: the best before the last fresh start, or None.
        champion_value: its residual.
        attempt: which merge this trial stands for, or the largest number known to be too small.
        explained: how many candidates explained the weights, if that was more than asked for.
        steps: solver steps in earlier rounds.
        products: products in earlier rounds.
        outcome: None while there is more to do.
    """

    seed: int
    samples: int | None
    state: Any
    memory: dict[str, Tensor] = field(default_factory=dict)
    phase: str = "explore"
    rounds: int = 0
    best: Tensor | None = None
    best_value: float = float("inf")
    misses: int = 0
    restarts: int = 0
    dropped: int = 0
    returned: int = 0
    floor: float = 0.0
    grown: float = float("inf")
    champion: Tensor | None = None
    champion_value: float = float("inf")
    attempt: int = 0
    explained: int | None = None
    steps: int = 0
    products: int = 0
    outcome: Outcome | None = None

    @property
    def total_steps(self) -> int:
        """Solver steps so far."""
        return self.steps + int(self.state.steps)

    @property
    def total_products(self) -> int:
        """Products so far."""
        return self.products + int(self.state.products)

    def next_round(self, state: State, **changes: object) -> "Progress":
        """Begin another trial; the steps of this one are added to the total."""
        return replace(
            self,
            state=state,
            rounds=self.rounds + 1,
            steps=self.total_steps,
            products=self.total_products,
            **changes,  # type: ignore[arg-type]
        )


class Method(Protocol):
    """A named recipe: how to begin, and what to do next."""

    @property
    def name(self) -> str:
        """As the user writes it."""
        ...

    def view(self, problem: Problem) -> Problem:
        """The problem as this method sees it; the others are given what this returns."""
        ...

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """The first trial."""
        ...

    def advance(self, problem: Problem, progress: Progress) -> Progress:
        """One solver step, or one move of the search."""
        ...

    def finish(self, problem: Problem, progress: Progress) -> Fit:
        """The answer as it stands, also when there was more to do."""
        ...


def stream(seed: int, round_: int) -> torch.Generator:
    """Random numbers of one round: the same whether or not the run was interrupted before it."""
    state = np.random.SeedSequence([seed, round_]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
