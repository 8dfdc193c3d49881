"""The engine of the published penalty methods: candidates and multipliers by first-order steps.

haim2022, buzaglo2023 and loo2023 minimise the loss of `methods.penalties`, with a smooth surrogate
for ReLU while steps are taken; residuals of answers and trials are of the network as it is. Where
published hyperparameters were chosen with the training data, `search.tuning` has the problem alone.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.checks import whole_number
from exhume.equation.coefficients import Rule
from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods.descent import STRIDE, Descent, Moments, advanced, smoothed
from exhume.methods.penalties import Hyperparameters, Place, balanced_labels, loss_at, outputs
from exhume.methods.progress import Progress, stream
from exhume.search.tuning import FACTOR, Range, Table, found_again, merit
from exhume.solvers import Outcome

# Where hyperparameters are looked for, by name, and published ones that are tried first.
Sweep = tuple[Mapping[str, Range], Sequence[Mapping[str, float]]]


@dataclass(frozen=True, eq=False)
class Tuning:
    """Where the choice of hyperparameters stands."""

    table: Table  # what is known of every trial
    best: Descent | None = None  # the best trial so far, or None
    best_merit: float = math.inf  # its merit, the less the better


@dataclass(frozen=True, eq=False, kw_only=True)
class Descending(Progress):
    """The progress of a penalty method: runs side by side."""

    state: Descent  # the first trial at hand, or the run that goes on from the best of them
    beside: tuple[Descent, ...] = ()  # the other trials of its rung, or the other starts
    tuning: Tuning | None = None  # None once hyperparameters are chosen, or where all were given

    @property
    def runs(self) -> tuple[Descent, ...]:
        """All of them."""
        return (self.state, *self.beside)

    @property
    def shown(self) -> tuple[Descent, ...]:
        """Those whose candidates are pooled: all starts, but of trials the best at hand."""
        best = min(self.runs, key=lambda run: (run.diverged, run.residual))
        return self.runs if self.tuning is None else (best,)

    @property
    def candidates(self) -> Tensor:
        """Their candidates, (n, d)."""
        return torch.cat([run.place.candidates for run in self.shown])

    @property
    def origins(self) -> Tensor:
        """Which of them each candidate comes from, (n,)."""
        counts = torch.tensor([len(run.place.candidates) for run in self.shown])
        return torch.arange(len(counts)).repeat_interleave(counts)

    @property
    def residual(self) -> float:
        """The mean of their relative residuals, with the surrogate."""
        return sum(run.residual for run in self.shown) / len(self.shown)

    @property
    def total_steps(self) -> int:
        """How many steps were taken so far, those of all runs added up."""
        return self.steps + sum(run.steps for run in self.runs)

    @property
    def total_products(self) -> int:
        """How many products were taken so far, likewise."""
        return self.products + sum(run.products for run in self.runs)


@dataclass(frozen=True)
class Penalised:
    """What the recipes share: trials to find hyperparameters, then the run."""

    steps: int = 50_000  # of the run, with those of the trial that it goes on from
    trials: int = 18  # how many hyperparameters are tried where some are left open
    probe: int = 300  # steps of a first trial
    starts: int = 1  # of the run, side by side; more find more, and all candidates are returned
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
        whole_number("starts", self.starts)
        self.check(problem)
        tuning, pairs = None, [(0, start) for start in range(self.starts)]
        if any(getattr(self, name) is None for name in self.sweep(problem)[0]):
            tuning = Tuning(Table.empty(self.trials))
            pairs = [(trial.setting, trial.start) for trial in tuning.table.next_trials()]
        first, *others = (self.begin(problem, 2 * samples, seed, *pair) for pair in pairs)
        begun = Descending(seed=seed, samples=samples, state=first, beside=tuple(others))
        return replace(begun, phase="tune" if tuning else "run", tuning=tuning)

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

    def settings_of(
        self, problem: Problem, progress: Descending, run: Descent | None = None
    ) -> Hyperparameters:
        """Return the hyperparameters of a run at hand, the first if none is named."""
        trial = (run or progress.state).trial
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
        """Take a few steps of all runs at hand, and begin the next when they were the last."""
        tuning, limit = progress.tuning, self.steps
        if tuning is not None:
            rung = tuning.table.next_trials()[0].rung
            limit = min(self.probe * FACTOR**rung, limit)
        live = [run for run in progress.runs if not run.diverged and run.steps < limit]
        if live:
            chosen = {run.trial: self.settings_of(problem, progress, run) for run in live}
            steps = min(STRIDE, *(limit - run.steps for run in live))
            moved = iter(advanced(problem, [chosen[run.trial] for run in live], live, steps))
            first, *others = (next(moved) if run in live else run for run in progress.runs)
            progress = replace(progress, state=first, beside=tuple(others))
        if any(not run.diverged and run.steps < limit for run in progress.runs):
            return progress
        if tuning is not None:
            return self._after_rung(problem, progress, tuning)
        lost = all(run.diverged for run in progress.runs)
        return replace(progress, outcome=Outcome.DIVERGED if lost else Outcome.BUDGET)

    def finish(self, problem: Problem, progress: Descending) -> Fit:
        """Return candidates and multipliers as they stand, or those of the best trial so far.

        Several starts are pooled, with the mean of what they make of the target.
        """
        best = progress.tuning and progress.tuning.best
        places = [run.place for run in ((best,) if best else progress.shown)]
        settings = self.settings_of(problem, progress)
        parts = [loss_at(problem, settings, place).coefficients for place in places]
        candidates = torch.cat([place.candidates for place in places])
        return fitted_with(problem, candidates, torch.cat(parts) / len(parts))

    def _after_rung(self, problem: Problem, progress: Descending, tuning: Tuning) -> Descending:
        """Note how the trials at hand went, keep the best, and begin the next ones, or the run."""
        table, best, best_merit = tuning.table, tuning.best, tuning.best_merit
        seed, count = progress.seed, len(progress.state.place.candidates)
        pairs = zip(table.next_trials(), progress.runs, strict=True)
        for _, group in itertools.groupby(pairs, lambda pair: pair[0].setting):
            trials, runs = zip(*group, strict=True)
            ends = [self._judged(problem, progress, run) for run in runs]
            table, again = table.entered(trials[0], ends[0]), 0.0
            if len(ends) > 1 and max(ends) < math.inf:
                again = found_again(*(run.place.candidates for run in runs))
            if (rank := merit(min(ends), again, count)) < best_merit:
                best, best_merit = runs[ends.index(min(ends))], rank
        if following := table.next_trials():
            first, *others = (self.begin(problem, count, seed, *trial[1:]) for trial in following)
            after = Tuning(table, best, best_merit)
            return progress.next_round(first, beside=tuple(others), tuning=after)
        if best is None:  # no trial was any good: what is kept is a start
            begun = self.begin(problem, count, seed)
            ended = progress.next_round(begun, beside=(), phase="run", tuning=None)
            return replace(ended, outcome=Outcome.DIVERGED)
        fresh = range(2, self.starts + 1)  # starts 0 and 1 were the trials'
        others = [self.begin(problem, count, seed, best.trial, start) for start in fresh]
        chosen = progress.next_round(best, beside=tuple(others), phase="run", tuning=None)
        steps, products = chosen.steps - best.steps, chosen.products - best.steps
        return replace(chosen, steps=steps, products=products)  # they were counted in their trial

    def _judged(self, problem: Problem, progress: Descending, run: Descent) -> float:
        """The residual of the network as it is; infinite if it is not below that of the start."""
        settings = self.settings_of(problem, progress, run)
        residual = loss_at(problem, settings, run.place).relative
        return residual if residual <= run.began and not run.diverged else math.inf
