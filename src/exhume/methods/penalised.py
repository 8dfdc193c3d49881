"""The engine of the published penalty methods: candidates and multipliers by first-order steps.

haim2022, buzaglo2023 and loo2023 minimise one loss over candidates x_j and multipliers λ_j,

    ‖t − (1/s) Σ_j A_jᵀ Φ(x_j)‖² + box · Σ_j ω_j Σ_i [relu(x_ji − high_i)² + relu(low_i − x_ji)²]
        + floor · Σ_j ω_j relu(least − λ_j/ω_j)²
        + smoothness · Σ_j ω_j ‖x_j − blur(x_j)‖² + sparsity · Σ |λ_j|

where Φ(x_j) are the k rows of a candidate and A_j follows from λ_j by the problem's rule: y_j λ_j
for one output trained to the margin, λ_j (e_y − e_k) with k the runner-up for several, and λ_j
itself where coefficients are free. The divisor s stays what it was at the start. The shares ω_j
are 1; where a candidate is replaced by two copies, each with half its multiplier and half its
share, the loss stays as it was.

A ReLU has a smooth surrogate while steps are taken. The residual of the answer, and those by which
trials are compared, are of the network as it is. The published hyperparameters were chosen with
the training data at hand; here they are found by `search.tuning`, from the problem alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box, Domain, Sphere, SphereInBox
from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.features import Linearization
from exhume.features.activations import Activation
from exhume.methods.progress import Progress, stream
from exhume.search.tuning import FACTOR, Range, found_again, merit, next_trial, rungs
from exhume.solvers import Outcome, State

STRIDE = 10
"""Steps between two looks at the residual: a look waits for the device."""

MOMENTUM = 0.9
DECAY = (0.9, 0.999)
EPSILON = 1e-8
"""Of Adam, as published."""

ASSUMED = Box(-1.0, 1.0)
"""Where inputs are taken to lie if nothing is told: pixels of [0, 1] with their mean taken off."""


@dataclass(frozen=True)
class Hyperparameters:
    """One choice of all that a recipe leaves open.

    Attributes:
        rate: step size of the candidates.
        multiplier_rate: step size of the multipliers.
        scale: standard deviation of the candidates at the start.
        surrogate: what takes the place of ReLU at a step.
        least: λ below which a multiplier is pushed up.
        floor: weight of that.
        box: weight of leaving the box.
        smoothness: weight of what a blur takes away; for images.
        sparsity: weight of the multipliers' absolute values.
        adam: steps by Adam; by momentum otherwise.
    """

    rate: float
    multiplier_rate: float
    scale: float
    surrogate: Callable[[int], Activation]
    least: float = 0.0
    floor: float = 0.0
    box: float = 1.0
    smoothness: float = 0.0
    sparsity: float = 0.0
    adam: bool = False


# The coefficients that a rule makes of multipliers


def balanced_labels(count: int, classes: int) -> Tensor:
    """Fixed labels, as many of each: −1 and +1 for one output, else the classes 0 … c−1.

    Example:
        >>> balanced_labels(4, 1).tolist(), balanced_labels(6, 3).tolist()
        ([-1, -1, 1, 1], [0, 0, 1, 1, 2, 2])
    """
    labels = torch.arange(count) * max(classes, 2) // count
    return 2 * labels - 1 if classes == 1 else labels


def margin_pattern(labels: Tensor, values: Tensor) -> Tensor:
    """What a multiplier of 1 stands for: y, (n, 1); or e_y − e_k, (n, c), k the runner-up.

    Args:
        labels: y, (n,), from `balanced_labels`.
        values: f(x_j), (n, c); not looked at for one output.

    Example:
        >>> margin_pattern(torch.tensor([0]), torch.tensor([[3.0, 1.0, 2.0]])).tolist()
        [[1.0, 0.0, -1.0]]
    """
    classes = values.shape[1]
    if classes == 1:
        return labels[:, None].to(values.dtype)
    own = torch.nn.functional.one_hot(labels, classes)
    rival = values.masked_fill(own.bool(), -math.inf).argmax(1)
    return (own - torch.nn.functional.one_hot(rival, classes)).to(values.dtype)


def outputs(problem: Problem) -> int:
    """c, the outputs of the network; 1 where the features are not those of one."""
    return max(1, problem.features.outputs)


def pattern_at(problem: Problem, candidates: Tensor, labels: Tensor) -> Tensor | None:
    """The pattern of the rule MARGIN at the candidates, (n, c); None where coefficients are free.

    Labels of one output are its pattern, so the network is not asked.
    """
    if problem.rule is Rule.FREE:
        return None
    values = problem.features.predict(candidates) if outputs(problem) > 1 else candidates[:, :1]
    assert values is not None
    return margin_pattern(labels, values)


# The loss


def bounds(domain: Domain, like: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of the inputs (n, d): of the domain's box, or those assumed.

    No entry of an input is larger than its norm, so where that alone is known it is the bound.

    Example:
        >>> [bound.item() for bound in bounds(Sphere(), torch.zeros(1, 4))]
        [-2.0, 2.0]
    """
    parts = (domain.sphere, domain.box) if isinstance(domain, SphereInBox) else (domain,)
    boxes = [part for part in parts if isinstance(part, Box)]
    lengths = [part.length(like.shape[1]) for part in parts if isinstance(part, Sphere)]
    if lengths and not boxes:
        length = like.new_tensor(lengths[0])
        return -length, length
    low, high = (*boxes, ASSUMED)[0].bounds.like(like).unbind()
    return low, high


def sharpened(candidates: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a 3×3 binomial blur takes away, x − blur(x), (n, d); edges are repeated. Symmetric.

    Example:
        >>> sharpened(torch.ones(1, 6), (2, 3)).abs().max().item()
        0.0
    """
    height, width = shape[-2:]
    images = candidates.reshape(-1, 1, height, width)
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="replicate")
    tall = (padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]) / 4
    blurred = (tall[..., :-2] + 2 * tall[..., 1:-1] + tall[..., 2:]) / 4
    return (images - blurred).reshape(candidates.shape)


@dataclass(frozen=True, eq=False)
class Terms:
    """The loss at one place, with its parts and slopes, each taken when it is asked for.

    Attributes:
        problem: with the surrogate in place.
        settings: the weights of the penalties.
        candidates: X, (n, d).
        multipliers: λ, (n, q), with q = 1 for the rule MARGIN, else one for each entry of A_j.
        shares: ω, (n,).
        divisor: s.
        pattern: see `pattern_at`.
        linearization: features and derivatives at X.
        coefficients: A, (n·k, m), with 1/s inside.
        residual: R = t − ΦᵀA, (p, m).
    """

    problem: Problem
    settings: Hyperparameters
    candidates: Tensor
    multipliers: Tensor
    shares: Tensor
    divisor: float
    pattern: Tensor | None
    linearization: Linearization
    coefficients: Tensor
    residual: Tensor

    @property
    def value(self) -> float:
        """The loss."""
        return (self.stationarity + self.prior).item()

    @property
    def relative(self) -> float:
        """‖R‖²/‖t‖²."""
        return (self.stationarity / self.problem.target.double().square().sum()).item()

    @cached_property
    def stationarity(self) -> Tensor:
        """‖R‖²."""
        return self.residual.double().square().sum()

    @property
    def prior(self) -> Tensor:
        """All penalties."""
        total = self.outside + self.below
        settings = self.settings
        if settings.smoothness:
            rough = sharpened(self.candidates, self.problem.shape).double().square().sum(1)
            total = total + settings.smoothness * (self.shares * rough).sum()
        if settings.sparsity:
            total = total + settings.sparsity * self.multipliers.double().abs().sum()
        return total

    @property
    def outside(self) -> Tensor:
        """What leaving the box costs."""
        each = self._excess.double().square().sum(1)
        return self.settings.box * (self.shares * each).sum()

    @property
    def below(self) -> Tensor:
        """What multipliers below the least cost."""
        each = self._shortfall.double().square().sum(1)
        return self.settings.floor * (self.shares * each).sum()

    @cached_property
    def slope(self) -> Tensor:
        """∂L/∂X = −2 pull(R, A) + …, (n, d)."""
        pulled = self.linearization.pull(self.residual, self.coefficients)
        slope = -2 * pulled.to(self.candidates.dtype)
        weight = 2 * self.shares[:, None]
        slope = slope + self.settings.box * weight * self._excess
        if self.settings.smoothness:
            shape = self.problem.shape
            rough = sharpened(sharpened(self.candidates, shape), shape)
            slope = slope + self.settings.smoothness * weight * rough
        return slope

    @cached_property
    def multiplier_slope(self) -> Tensor:
        """∂L/∂λ = −(2/s) (Φ R, along the pattern) + …, (n, q)."""
        slope = self.linearization.apply(self.residual).reshape(len(self.candidates), -1)
        if self.pattern is not None:
            slope = (slope * self.pattern).sum(1, keepdim=True)
        slope = -2 / self.divisor * slope
        if self.settings.floor:
            slope = slope - 2 * self.settings.floor * self._shortfall
        if self.settings.sparsity:
            slope = slope + self.settings.sparsity * self.multipliers.sign()
        return slope.to(self.multipliers.dtype)

    @property
    def prior_curvature(self) -> Tensor:
        """∂²/∂x_ji² of the box penalty, (n, d), which is all of its Hessian."""
        return 2 * self.settings.box * self.shares[:, None] * (self._excess != 0)

    @cached_property
    def _excess(self) -> Tensor:
        """By how much entries are above the box, or below it (negative), (n, d)."""
        low, high = bounds(self.problem.domain, self.candidates)
        return torch.relu(self.candidates - high) - torch.relu(low - self.candidates)

    @cached_property
    def _shortfall(self) -> Tensor:
        """relu(least − λ/ω), (n, q)."""
        return torch.relu(self.settings.least - self.multipliers / self.shares[:, None])

    @property
    def fit(self) -> Fit:
        """The same as a point of the objective, its value the relative residual."""
        return Fit(
            self.candidates,
            self.linearization,
            self.coefficients.double(),
            self.coefficients.new_empty(0, 0),
            self.residual,
            self.relative,
        )


def terms(
    problem: Problem,
    settings: Hyperparameters,
    candidates: Tensor,
    multipliers: Tensor,
    labels: Tensor,
    shares: Tensor,
    divisor: float,
) -> Terms:
    """The loss at candidates (n, d) and multipliers (n, q).

    Args:
        problem: with the surrogate in place (`smoothed`), or as it is.
        settings: the weights of the penalties.
        candidates: X.
        multipliers: λ.
        labels: (n,), see `balanced_labels`; not looked at where coefficients are free.
        shares: ω, (n,).
        divisor: s.
    """
    linearization = problem.features.linearize(candidates)
    pattern = pattern_at(problem, candidates, labels)
    weighed = multipliers if pattern is None else multipliers * pattern
    coefficients = (weighed / divisor).reshape(-1, problem.target.shape[1])
    residual = problem.target - linearization.combine(coefficients)
    return Terms(
        problem,
        settings,
        candidates,
        multipliers,
        shares,
        divisor,
        pattern,
        linearization,
        coefficients,
        residual,
    )


def smoothed(problem: Problem, settings: Hyperparameters, step: int) -> Problem:
    """The problem with the surrogate of that step in the place of ReLU; it changes each stride."""
    surrogate = settings.surrogate(step - step % STRIDE)
    return replace(problem, features=problem.features.substituted(surrogate))


# Steps


@dataclass(frozen=True, eq=False, kw_only=True)
class PenalisedState(State):
    """A state of the recipes, which carries multipliers, labels and moments by name."""

    memory: dict[str, Tensor]


def terms_of(
    problem: Problem, settings: Hyperparameters, candidates: Tensor, memory: dict[str, Tensor]
) -> Terms:
    """The loss where a state with that memory is."""
    return terms(
        problem,
        settings,
        candidates,
        memory["multipliers"],
        memory["labels"],
        memory["shares"],
        memory["divisor"].item(),
    )


def resting(candidates: Tensor, multipliers: Tensor, adam: bool) -> dict[str, Tensor]:
    """The optimiser's memory before its first step; rows belong to candidates.

    Momentum: v. Adam: the two moments, and the number of its steps (`clock`).
    """
    moments = ("velocity", "square") if adam else ("velocity",)
    clock = {"clock": torch.tensor(0)}
    return clock | {
        f"{moment}.{name}": torch.zeros_like(value)
        for moment in moments
        for name, value in (("candidates", candidates), ("multipliers", multipliers))
    }


def stepped(
    problem: Problem, settings: Hyperparameters, candidates: Tensor, memory: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One step of candidates and multipliers.

    Momentum: v ← βv + g, z ← z − ηv. Adam: v ← av + (1−a)g, w ← bw + (1−b)g²,
    z ← z − η v̂/(√ŵ + ε), with v̂ = v/(1−aᵗ) and ŵ = w/(1−bᵗ).
    """
    here = terms_of(problem, settings, candidates, memory)
    after = {**memory, "clock": memory["clock"] + 1}
    clock = after["clock"].item()
    moved = {}
    for name, value, slope, rate in (
        ("candidates", candidates, here.slope, settings.rate),
        ("multipliers", memory["multipliers"], here.multiplier_slope, settings.multiplier_rate),
    ):
        velocity, square = f"velocity.{name}", f"square.{name}"
        if not settings.adam:
            after[velocity] = MOMENTUM * memory[velocity] + slope
            moved[name] = value - rate * after[velocity]
            continue
        a, b = DECAY
        after[velocity] = a * memory[velocity] + (1 - a) * slope
        after[square] = b * memory[square] + (1 - b) * slope.square()
        size = (after[square] / (1 - b**clock)).sqrt() + EPSILON
        moved[name] = value - rate * (after[velocity] / (1 - a**clock)) / size
    after["multipliers"] = moved["multipliers"]
    return moved["candidates"], after


def advanced(
    problem: Problem, settings: Hyperparameters, state: PenalisedState, steps: int
) -> PenalisedState:
    """The state so many steps on."""
    candidates, memory = state.fit.candidates, state.memory
    for step in range(state.steps, state.steps + steps):
        if step == state.steps or step % STRIDE == 0:
            seen = smoothed(problem, settings, step)
        candidates, memory = stepped(seen, settings, candidates, memory)
    moved = state_at(problem, settings, candidates, memory, state.steps + steps)
    return replace(moved, products=state.products + steps)


def state_at(
    problem: Problem,
    settings: Hyperparameters,
    candidates: Tensor,
    memory: dict[str, Tensor],
    steps: int,
) -> PenalisedState:
    """The state after so many steps, at those candidates."""
    here = terms_of(smoothed(problem, settings, steps), settings, candidates, memory)
    return PenalisedState(fit=here.fit, memory=memory, steps=steps)


# The method


def rows(problem: Problem) -> int:
    """k, the rows of Φ that belong to one candidate."""
    one = problem.target.new_zeros(1, problem.dim)
    return len(problem.features.linearize(one).apply(problem.target))


def entries(problem: Problem) -> int:
    """q, the multipliers of one candidate."""
    return 1 if problem.rule is Rule.MARGIN else rows(problem) * problem.target.shape[1]


@dataclass(frozen=True)
class Penalised:
    """What the recipes share: trials to find hyperparameters, then the run.

    Attributes:
        steps: of the run, with those of the trial that it goes on from.
        trials: how many hyperparameters are tried where some are left open.
        probe: steps of a first trial.
    """

    steps: int = 50_000
    trials: int = 18
    probe: int = 300
    name: str = ""

    def check(self, problem: Problem) -> None:
        """Refuse a problem that the recipe is not for."""
        raise NotImplementedError

    def ranges(self, problem: Problem) -> Mapping[str, Range]:
        """Where each hyperparameter is looked for that may be left open (None)."""
        raise NotImplementedError

    def published(self, problem: Problem) -> Sequence[Mapping[str, float]]:
        """Hyperparameters that are tried first."""
        raise NotImplementedError

    def hyperparameters(self, problem: Problem, values: Mapping[str, float]) -> Hyperparameters:
        """All of them, from the values of those that have a range."""
        raise NotImplementedError

    def multipliers(
        self, problem: Problem, shape: tuple[int, int], generator: torch.Generator
    ) -> Tensor:
        """λ at the start, float64 on the CPU."""
        raise NotImplementedError

    def divisor(self, problem: Problem, count: int) -> float:
        """The divisor s for so many candidates at the start."""
        return count

    def view(self, problem: Problem) -> Problem:
        """As it is."""
        return problem

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """The first trial; or the run, where nothing is left open."""
        if samples is None:
            raise InputError(
                f"{self.name} needs the number of samples, and takes twice as many candidates: "
                "pass samples=, or use the method 'exhume', which finds it."
            )
        self.check(problem)
        state = self.begin(problem, 2 * samples, seed)
        if all(getattr(self, name) is not None for name in self.ranges(problem)):
            return Progress(seed, samples, state, phase="run")
        untried = torch.full((len(rungs(self.trials)), self.trials), math.nan, dtype=torch.float64)
        tuning = {"tune.scores": untried, "tune.replicated": untried[0]}
        return Progress(seed, samples, replace(state, memory=state.memory | tuning), phase="tune")

    def begin(
        self, problem: Problem, count: int, seed: int, trial: int = 0, start: int = 0
    ) -> PenalisedState:
        """So many candidates at random and at rest, with the hyperparameters of a trial."""
        generator = stream(seed, trial)
        settings = self._settings(problem, trial, generator)
        if start > 0:
            generator = stream(seed, start * self.trials + trial)
        like = problem.target
        candidates = torch.randn(count, problem.dim, generator=generator, dtype=torch.float64)
        candidates = (settings.scale * candidates).to(like)
        multipliers = self.multipliers(problem, (count, entries(problem)), generator).to(like)
        memory = {
            "multipliers": multipliers,
            "labels": balanced_labels(count, outputs(problem)).to(like.device),
            "shares": like.new_ones(count),
            "divisor": torch.tensor(self.divisor(problem, count), dtype=torch.float64),
            "trial": torch.tensor(trial),
            **resting(candidates, multipliers, settings.adam),
        }
        plain = terms_of(problem, settings, candidates, memory).relative
        memory["start"] = torch.tensor(plain, dtype=torch.float64)
        return state_at(problem, settings, candidates, memory, 0)

    def settings_of(
        self, problem: Problem, seed: int, memory: dict[str, Tensor]
    ) -> Hyperparameters:
        """The hyperparameters with which a state of that memory goes on."""
        trial = int(memory["trial"].item())
        return self._settings(problem, trial, stream(seed, trial))

    def _settings(
        self, problem: Problem, trial: int, generator: torch.Generator
    ) -> Hyperparameters:
        """Those given; for the others, those of the trial: as published at first, then random."""
        ranges, published = self.ranges(problem), self.published(problem)
        draws = torch.rand(len(ranges), generator=generator, dtype=torch.float64).tolist()
        values = {name: r.at(draw) for (name, r), draw in zip(ranges.items(), draws, strict=True)}
        if trial < len(published):
            values |= published[trial]
        given = {name: getattr(self, name) for name in ranges}
        values |= {name: value for name, value in given.items() if value is not None}
        return self.hyperparameters(problem, values)

    def advance(self, problem: Problem, progress: Progress) -> Progress:
        """A few steps, and the next trial when they were the last of one."""
        state, tuning = progress.state, progress.phase == "tune"
        settings = self.settings_of(problem, progress.seed, state.memory)
        limit = self._limit(state.memory) if tuning else self.steps
        moved = advanced(problem, settings, state, max(0, min(STRIDE, limit - state.steps)))
        finite = math.isfinite(moved.fit.value)
        if tuning and (moved.steps >= limit or not finite):
            return self._after_trial(problem, settings, replace(progress, state=moved))
        if not finite:  # what is kept is the last that was finite
            return replace(progress, outcome=Outcome.DIVERGED)
        over = not tuning and moved.steps >= limit
        return replace(progress, state=moved, outcome=Outcome.BUDGET if over else None)

    def finish(self, problem: Problem, progress: Progress) -> Fit:
        """Candidates and multipliers as they stand, or those of the best trial so far."""
        memory, candidates = progress.state.memory, progress.state.fit.candidates
        if best := _part(memory, BEST):
            memory, candidates = best, best["candidates"]
        settings = self.settings_of(problem, progress.seed, memory)
        here = terms_of(problem, settings, candidates, memory)
        return fitted_with(problem, candidates, here.coefficients)

    def _limit(self, memory: dict[str, Tensor]) -> int:
        """Steps of the trial at hand."""
        rung, _, _ = _at_hand(memory)
        limit: int = min(self.probe * FACTOR**rung, self.steps)
        return limit

    def _after_trial(
        self, problem: Problem, settings: Hyperparameters, progress: Progress
    ) -> Progress:
        """Note how the trial at hand went, keep it if it is the best, and begin the next."""
        state = progress.state
        memory, candidates = dict(state.memory), state.fit.candidates
        rung, trial, start = _at_hand(memory)
        place = _own(memory) | {"candidates": candidates, "steps": torch.tensor(state.steps)}
        value = terms_of(problem, settings, candidates, memory).relative
        if not value <= memory["start"].item():
            value = math.inf
        if start == 0:
            again = 0.0
            memory["tune.scores"] = _entered(memory["tune.scores"], (rung, trial), value)
        else:
            twin, first = _part(memory, TWIN), memory["tune.scores"][rung, trial].item()
            again = found_again(twin["candidates"], candidates) if value < math.inf else 0.0
            memory["tune.replicated"] = _entered(memory["tune.replicated"], (trial,), again)
            if first <= value:
                place, value = twin, first
        rank = merit(value, again, len(candidates))
        if rank < memory.get("tune.merit", torch.tensor(math.inf)).item():
            memory |= _put(place, BEST)
            memory["tune.merit"] = torch.tensor(rank, dtype=torch.float64)
        following = next_trial(memory["tune.scores"].tolist(), memory["tune.replicated"].tolist())
        if following is None:
            return self._run(problem, progress, _part(memory, BEST))
        tuning = {k: v for k, v in memory.items() if k.startswith(TUNE) and not k.startswith(TWIN)}
        if following[2] == 1:
            tuning |= _put(place, TWIN)
        begun = self.begin(problem, len(candidates), progress.seed, *following[1:])
        return progress.next_round(replace(begun, memory=begun.memory | tuning))

    def _run(self, problem: Problem, progress: Progress, best: dict[str, Tensor]) -> Progress:
        """Go on from the best trial; where none was any good, what is kept is a start."""
        if not best:
            count = len(progress.state.fit.candidates)
            start = self.begin(problem, count, progress.seed)
            return progress.next_round(start, outcome=Outcome.DIVERGED)
        memory = dict(best)
        candidates, steps = memory.pop("candidates"), int(memory.pop("steps").item())
        settings = self.settings_of(problem, progress.seed, memory)
        state = state_at(problem, settings, candidates, memory, steps)
        begun = progress.next_round(state, phase="run")
        return replace(begun, steps=begun.steps - steps)  # they were counted in their trial


TUNE, BEST, TWIN = "tune.", "tune.best.", "tune.twin."
"""In a state's memory: what is for tuning; the best trial; the first start of the one at hand."""


def _own(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in memory.items() if not name.startswith(TUNE)}


def _part(memory: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}


def _put(place: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in place.items()}


def _entered(table: Tensor, where: tuple[int, ...], value: float) -> Tensor:
    table = table.clone()
    table[where] = value
    return table


def _at_hand(memory: dict[str, Tensor]) -> tuple[int, int, int]:
    """Rung, setting and start of the trial at hand: the first that is not noted yet."""
    trial = next_trial(memory["tune.scores"].tolist(), memory["tune.replicated"].tolist())
    if trial is None:
        raise RuntimeError("there is no trial at hand")
    return trial
