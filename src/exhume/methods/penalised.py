"""The engine of the published penalty methods: candidates and multipliers by first-order steps.

haim2022, buzaglo2023 and loo2023 minimise the loss of `methods.penalties`, with a smooth surrogate
for ReLU while steps are taken; residuals of answers and trials are of the network as it is. Where
published hyperparameters were chosen with the training data, `search.tuning` has the problem alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.optim.adam import adam

from exhume.equation.coefficients import Rule
from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods.penalties import Hyperparameters, Place, balanced_labels, loss_at, outputs
from exhume.methods.progress import Progress, stream
from exhume.search.tuning import FACTOR, Range, Table, found_again, merit
from exhume.solvers import Outcome

STRIDE = 10  # steps between looks at the residual: a look waits for the device
MOMENTUM = 0.9  # as published

adam_step = partial(  # in place, with the published settings, which are torch's defaults
    adam, beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=False, weight_decay=0.0, maximize=False
)
Pair = tuple[Tensor, Tensor]  # of candidates, (n, d), and of their multipliers, (n, q)


@dataclass(frozen=True, eq=False)
class Moments:
    """What the optimiser remembers from step to step."""

    velocity: Pair  # of momentum, or the first moments of Adam
    square: Pair | None  # the second moments of Adam; None for momentum
    clock: int = 0  # how many steps it remembers

    @classmethod
    def at_rest(cls, place: Place, settings: Hyperparameters) -> "Moments":
        """Return the memory before the first step."""
        zeros = torch.zeros_like(place.candidates), torch.zeros_like(place.multipliers)
        return cls(zeros, zeros if settings.adam else None)


@dataclass(frozen=True, eq=False)
class Descent:
    """Where one run of the optimiser stands."""

    place: Place  # candidates and multipliers
    moments: Moments  # what the optimiser remembers
    trial: int  # whose hyperparameters it has
    began: float  # its residual at the start, of the network as it is
    residual: float  # the last that was looked at, with the surrogate
    steps: int = 0  # how many it has taken
    pace: float = 1.0  # factor of the multipliers' step size

    @property
    def products(self) -> int:
        """Each step takes the features' derivative once."""
        return self.steps


def stepped(
    problem: Problem, settings: Hyperparameters, place: Place, moments: Moments
) -> tuple[Place, Moments]:
    """Take one step of candidates and multipliers: momentum, v ← βv + g, z ← z − ηv, or Adam."""
    here = loss_at(problem, settings, place)
    slopes = here.slope, here.multiplier_slope
    rates = settings.rate, settings.multiplier_rate
    if moments.square is None:
        v, w = (MOMENTUM * v + g for v, g in zip(moments.velocity, slopes, strict=True))
        x, y = place.candidates - rates[0] * v, place.multipliers - rates[1] * w
        square = None
    else:
        x, y = place.candidates.clone(), place.multipliers.clone()
        (v, w), square = ((a.clone(), b.clone()) for a, b in (moments.velocity, moments.square))
        for z, g, first, second, rate in zip((x, y), slopes, (v, w), square, rates, strict=True):
            clock = torch.tensor(float(moments.clock))
            adam_step([z], [g], [first], [second], [], [clock], lr=rate)
    after = replace(place, candidates=x, multipliers=y)
    return after, Moments((v, w), square, moments.clock + 1)


def smoothed(problem: Problem, settings: Hyperparameters, step: int) -> Problem:
    """Return the problem with that step's surrogate for ReLU; it changes from stride to stride."""
    surrogate = settings.surrogate(step - step % STRIDE)
    return replace(problem, features=problem.features.substituted(surrogate))


def advanced(problem: Problem, settings: Hyperparameters, run: Descent, steps: int) -> Descent:
    """Take so many steps, and look at the residual after them."""
    place, moments, end = run.place, run.moments, run.steps + steps
    settings = replace(settings, multiplier_rate=run.pace * settings.multiplier_rate)
    for step in range(run.steps, end):
        if step == run.steps or step % STRIDE == 0:
            seen = smoothed(problem, settings, step)
        place, moments = stepped(seen, settings, place, moments)
    residual = loss_at(smoothed(problem, settings, end), settings, place).relative
    return replace(run, place=place, moments=moments, residual=residual, steps=end)


# Where hyperparameters are looked for, by name, and published ones that are tried first.
Sweep = tuple[Mapping[str, Range], Sequence[Mapping[str, float]]]


@dataclass(frozen=True, eq=False)
class Tuning:
    """Where the choice of hyperparameters stands."""

    table: Table  # what is known of every trial
    best: Descent | None = None  # the best trial so far, or None
    best_merit: float = math.inf  # its merit, the less the better
    twin: Descent | None = None  # the first start of the trial at hand, where that is a second one


@dataclass(frozen=True, eq=False, kw_only=True)
class Descending(Progress):
    """The progress of a penalty method."""

    state: Descent  # the trial at hand, or the run that goes on from the best of them
    tuning: Tuning | None = None  # None once hyperparameters are chosen, or where all were given

    @property
    def candidates(self) -> Tensor:
        """The candidates of the trial at hand, (n, d)."""
        return self.state.place.candidates

    @property
    def residual(self) -> float:
        """Their relative residual, with the surrogate."""
        return self.state.residual


@dataclass(frozen=True)
class Penalised:
    """What the recipes share: trials to find hyperparameters, then the run."""

    steps: int = 50_000  # of the run, with those of the trial that it goes on from
    trials: int = 18  # how many hyperparameters are tried where some are left open
    probe: int = 300  # steps of a first trial
    name: str = ""

    def check(self, problem: Problem) -> None:
        """Refuse a problem that the recipe is not for."""
        raise NotImplementedError

    def sweep(self, problem: Problem) -> Sweep:
        """Return where what is left open (None) is looked for, and what is tried first."""
        raise NotImplementedError

    def hyperparameters(self, problem: Problem, values: Mapping[str, float]) -> Hyperparameters:
        """Return all of them, from the values of those that have a range."""
        raise NotImplementedError

    def view(self, problem: Problem) -> Problem:
        """Return the problem unchanged."""
        return problem

    def init(self, problem: Problem, samples: int | None, seed: int) -> Descending:
        """Begin the first trial; or the run, where nothing is left open."""
        if samples is None:
            raise InputError(f"{self.name} needs the number of samples; give it, or use 'exhume'.")
        self.check(problem)
        state = self.begin(problem, 2 * samples, seed)
        begun = Descending(seed=seed, samples=samples, state=state, phase="run")
        if all(getattr(self, name) is not None for name in self.sweep(problem)[0]):
            return begun
        return replace(begun, phase="tune", tuning=Tuning(Table.empty(self.trials)))

    def begin(
        self, problem: Problem, count: int, seed: int, trial: int = 0, start: int = 0
    ) -> Descent:
        """Place so many candidates at random and at rest, with the hyperparameters of a trial."""
        generator = stream(seed, trial)
        settings = self._settings(problem, trial, generator)
        if start > 0:
            generator = stream(seed, start * self.trials + trial)
        like, entries = problem.target, 1
        if problem.rule is Rule.FREE:  # a multiplier for each entry of a candidate's coefficients
            one = problem.features.linearize(like.new_zeros(1, problem.dim))
            entries = one.apply(like).numel()
        candidates = torch.randn(count, problem.dim, generator=generator, dtype=torch.float64)
        multipliers = settings.draw(count, entries, generator=generator, dtype=torch.float64)
        place = Place(
            (settings.scale * candidates).to(like),
            (multipliers + settings.shift).to(like),
            balanced_labels(count, outputs(problem)).to(like.device),
            like.new_ones(count),
            float(count * settings.divisor),
        )
        return Descent(
            place,
            Moments.at_rest(place, settings),
            trial,
            began=loss_at(problem, settings, place).relative,
            residual=loss_at(smoothed(problem, settings, 0), settings, place).relative,
        )

    def settings_of(self, problem: Problem, progress: Descending) -> Hyperparameters:
        """Return the hyperparameters of the run at hand."""
        trial = progress.state.trial
        return self._settings(problem, trial, stream(progress.seed, trial))

    def _settings(
        self, problem: Problem, trial: int, generator: torch.Generator
    ) -> Hyperparameters:
        """Take those given; for the others, those of the trial: published at first, then random."""
        ranges, published = self.sweep(problem)
        draws = torch.rand(len(ranges), generator=generator, dtype=torch.float64).tolist()
        values = {name: r.at(draw) for (name, r), draw in zip(ranges.items(), draws, strict=True)}
        if trial < len(published):
            values |= published[trial]
        values |= {name: getattr(self, name) for name in ranges if getattr(self, name) is not None}
        return self.hyperparameters(problem, values)

    def advance(self, problem: Problem, progress: Descending) -> Descending:
        """Take a few steps, and begin the next trial when they were the last of one."""
        run, tuning = progress.state, progress.tuning
        settings, limit = self.settings_of(problem, progress), self.steps
        if tuning is not None and (trial := tuning.table.next_trial()):
            limit = min(self.probe * FACTOR**trial.rung, self.steps)
        moved = advanced(problem, settings, run, max(0, min(STRIDE, limit - run.steps)))
        finite, over = math.isfinite(moved.residual), moved.steps >= limit
        if tuning is None and not finite:  # what is kept is the last that was finite
            return replace(progress, outcome=Outcome.DIVERGED)
        after = replace(progress, state=moved)
        if finite and not over:
            return after
        if tuning is None:
            return replace(after, outcome=Outcome.BUDGET)
        value = loss_at(problem, settings, moved.place).relative
        return self._after_trial(problem, after, tuning, value)

    def finish(self, problem: Problem, progress: Descending) -> Fit:
        """Return candidates and multipliers as they stand, or those of the best trial so far."""
        best = progress.tuning and progress.tuning.best
        place = (best or progress.state).place
        here = loss_at(problem, self.settings_of(problem, progress), place)
        return fitted_with(problem, place.candidates, here.coefficients)

    def _after_trial(
        self, problem: Problem, progress: Descending, tuning: Tuning, residual: float
    ) -> Descending:
        """Note how the trial at hand went, keep it if it is the best, and begin the next."""
        run, table, twin = progress.state, tuning.table, tuning.twin
        trial, again, kept = table.next_trial(), 0.0, run
        assert trial is not None
        if not residual <= run.began:
            residual = math.inf
        if twin is None:
            table = table.entered(trial, residual)
        else:
            if residual < math.inf:
                again = found_again(twin.place.candidates, run.place.candidates)
            first = table.residuals[trial.rung][trial.setting]
            table = table.entered(trial, again)
            if first <= residual:
                kept, residual = twin, first
        rank = merit(residual, again, len(run.place.candidates))
        best, best_merit = tuning.best, tuning.best_merit
        if rank < best_merit:
            best, best_merit = kept, rank
        if following := table.next_trial():
            count, (_, setting, start) = len(run.place.candidates), following
            begun = self.begin(problem, count, progress.seed, setting, start)
            after = Tuning(table, best, best_merit, twin=kept if start else None)
            return progress.next_round(begun, tuning=after)
        if best is None:  # no trial was any good: what is kept is a start
            begun = self.begin(problem, len(progress.candidates), progress.seed)
            return progress.next_round(begun, phase="run", tuning=None, outcome=Outcome.DIVERGED)
        chosen = progress.next_round(best, phase="run", tuning=None)
        steps, products = chosen.steps - best.steps, chosen.products - best.steps
        return replace(chosen, steps=steps, products=products)  # they were counted in their trial
