"""The engine of the published penalty methods: candidates and multipliers by first-order steps.

haim2022, buzaglo2023 and loo2023 minimise the loss of `methods.penalties`, with a smooth surrogate
for ReLU while steps are taken; residuals of answers and trials are of the network as it is. Where
published hyperparameters were chosen with the training data, `search.tuning` has the problem alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from exhume.checks import whole_number
from exhume.equation.coefficients import Rule
from exhume.equation.objective import Fit, fitted, fitted_with
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.methods.descent import STRIDE, Descent, Moments, advanced, smoothed
from exhume.methods.penalties import Hyperparameters, Place, balanced_labels, loss_at, outputs
from exhume.methods.progress import Progress, stream
from exhume.search.agreement import agreed
from exhume.search.tuning import FACTOR, Range, rungs
from exhume.solvers import Outcome

# Where hyperparameters are looked for, by name, and published ones that are tried first.
Sweep = tuple[Mapping[str, Range], Sequence[Mapping[str, float]]]
TRIALS = 18  # settings that are tried where nothing is published: two rungs down to two of them
# Steps for each candidate after which the first settings are dropped; published runs are 50 long.
# On faces published settings stand in the order of their ends from 2 on (`bench kkt`).
PROBE = 3.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Descending(Progress):
    """The progress of a penalty method: runs side by side."""

    state: Descent  # the first setting that is tried, or the run that the best of them became
    beside: tuple[Descent, ...] = ()  # the other settings of its rung, or the other starts
    rung: int | None = None  # of `tuning.rungs`; None once one is chosen, or where all was given

    @property
    def runs(self) -> tuple[Descent, ...]:
        """All of them."""
        return (self.state, *self.beside)

    @property
    def shown(self) -> tuple[Descent, ...]:
        """Those whose candidates are pooled: all starts, but of settings the best at hand."""
        best = min(self.runs, key=lambda run: (run.diverged, run.residual))
        return self.runs if self.rung is None else (best,)

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
    """What the recipes share: settings tried side by side, of which the best goes on as the run."""

    steps: int = 50_000  # of the run, with those from before it was chosen
    trials: int | None = None  # settings that are tried where some are open; see `tried` if None
    probe: float = PROBE  # steps of the first rung, for each candidate
    surplus: float = 2.0  # candidates in units of the samples, as published
    starts: int = 1  # of the run, side by side; more find more, and all candidates are returned
    agreed: bool = False  # of several starts, return as many as one has: see `search.agreement`
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
        """Begin all settings that are tried; or the run, where nothing is left open."""
        if samples is None:
            raise InputError(f"{self.name} needs the number of samples; give it, or use 'exhume'.")
        whole_number("starts", self.starts)
        self.check(problem)
        phase, rung, pairs = "run", None, [(0, start) for start in range(self.starts)]
        if any(getattr(self, name) is None for name in self.sweep(problem)[0]):
            phase, rung, pairs = "tune", 0, [(trial, 0) for trial in range(self.tried(problem))]
        count = max(1, round(self.surplus * samples))
        first, *others = (self.begin(problem, count, seed, *pair) for pair in pairs)
        begun = Descending(seed=seed, samples=samples, state=first, beside=tuple(others))
        return replace(begun, phase=phase, rung=rung)

    def tried(self, problem: Problem) -> int:
        """Return how many settings are tried: as many as asked for, or those published.

        Settings drawn by chance are hardly better than published ones and take time from the run.
        Where less than two are published, and for a change of weights, `TRIALS` are tried.
        """
        known = len(self.sweep(problem)[1])
        enough = known > 1 and problem.premise is not Premise.CHANGE
        return self.trials or (known if enough else TRIALS)

    def pace(self, problem: Problem, count: int) -> float:
        """Return by what the multipliers' step size is multiplied, for so many candidates."""
        return 1.0

    def begin(
        self, problem: Problem, count: int, seed: int, trial: int = 0, start: int = 0
    ) -> Descent:
        """Place so many candidates at random and at rest, with the hyperparameters of a trial."""
        generator = stream(seed, trial)
        settings = self._settings(problem, trial, generator)
        if start > 0:
            generator = stream(seed, start * max(TRIALS, self.tried(problem)) + trial)
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
            pace=self.pace(problem, count),
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
        """Take a few steps of all runs at hand; drop some when they were the last of a rung."""
        rung, limit = progress.rung, self.steps
        if rung is not None:
            count = len(progress.state.place.candidates)
            limit = min(math.ceil(self.probe * count) * FACTOR**rung, limit)
        live = [run for run in progress.runs if not run.diverged and run.steps < limit]
        if live:
            chosen = {run.trial: self.settings_of(problem, progress, run) for run in live}
            steps = min(STRIDE, *(limit - run.steps for run in live))
            moved = iter(advanced(problem, [chosen[run.trial] for run in live], live, steps))
            first, *others = (next(moved) if run in live else run for run in progress.runs)
            progress = replace(progress, state=first, beside=tuple(others))
        if any(not run.diverged and run.steps < limit for run in progress.runs):
            return progress
        if rung is not None:
            return self._after_rung(problem, progress, rung)
        lost = all(run.diverged for run in progress.runs)
        return replace(progress, outcome=Outcome.DIVERGED if lost else Outcome.BUDGET)

    def finish(self, problem: Problem, progress: Descending) -> Fit:
        """Return candidates and multipliers as they stand, or those of the best setting so far.

        Several starts are pooled, with the mean of what they make of the target; or what they agree
        on is returned, with coefficients that are fitted to it.
        """
        places = [run.place for run in progress.shown]
        sound = [run.place.candidates for run in progress.shown if not run.diverged]
        if self.agreed and len(sound) > 1:
            return fitted(problem, agreed(torch.stack(sound)))
        settings = self.settings_of(problem, progress)
        parts = [loss_at(problem, settings, place).coefficients for place in places]
        candidates = torch.cat([place.candidates for place in places])
        return fitted_with(problem, candidates, torch.cat(parts) / len(parts))

    def _after_rung(self, problem: Problem, progress: Descending, rung: int) -> Descending:
        """Go on with the best settings, from where they are; with the best alone it is the run.

        They have taken as many steps each, and are judged by what the surrogate leaves of the
        target: of the figures that need no truth, the one that came nearest to how they end.
        """
        sizes = [*rungs(self.tried(problem)), 1]
        good = [run for run in progress.runs if not run.diverged and run.residual <= run.began]
        kept = sorted(good, key=lambda run: run.residual)[: sizes[rung + 1]]
        spent = progress.total_steps - sum(run.steps for run in kept)
        products = progress.total_products - sum(run.products for run in kept)
        following: Any = {"phase": "tune", "rung": rung + 1}
        seed, count = progress.seed, len(progress.state.place.candidates)
        if not kept:  # what is left is a start
            following = {"phase": "run", "rung": None, "outcome": Outcome.DIVERGED}
            kept = [self.begin(problem, count, seed)]
        elif len(kept) == 1:
            following = {"phase": "run", "rung": None}
            fresh, trial = range(1, self.starts), kept[0].trial
            kept += [self.begin(problem, count, seed, trial, start) for start in fresh]
        following |= {"steps": spent, "products": products, "rounds": progress.rounds + 1}
        return replace(progress, state=kept[0], beside=tuple(kept[1:]), **following)
