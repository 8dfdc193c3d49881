"""Ours where the training run is known: least squares on the run itself, from many starts.

The lazy equation is solved first: what it finds is near the samples where training moved the
features little. Then each trial begins elsewhere: there, at public samples of the same kind if
there are any, at random, or at the best so far with half of it drawn anew. The residual decides:
only the samples make the run end where it did, so a trial that explains the weights is the last.
Where the recipe leaves numbers open, each start is tried with every choice of them.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import one_hot

from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.replay import Replayed, TrainingRun
from exhume.methods import signs
from exhume.methods.exhume import Exhume, Search
from exhume.methods.progress import Progress, stream
from exhume.recipes import Recipe
from exhume.search.photographs import photographs
from exhume.search.subspace import directions
from exhume.solvers import Outcome
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt

# The residual is far from quadratic at a start: with less damping, steps lead away from the samples
DAMPING = 0.1
# Times the products of a step, at most: those with a Jacobian that is kept cost little; of others,
# what a linear solution found serves the next
EFFORTS, RECYCLED = 16, 2
LEG = 10  # steps with the metric of images, then as many without, and so on: each finds what
# the other hardly sees
LEG_DAMPING = 1e-3  # with which a leg after the first begins: it is near already
GAIN = 0.7  # share of the residual that two legs leave at most, or the trial has ended
# Residual under which a trial that has stalled goes on with slopes of ReLU that jump: softened ones
# are the mean over many units that may turn, and this near there are few
NEAR = 1e-3
NO_MARKS = (math.inf, math.inf)  # what legs are compared with before there were two
DRIFT = 1e-2  # what the lazy equation may leave: its search ends where nothing more is gained
# How far from the middle of the domain random starts are: what the weights hardly show stays as it
# was at the start, so little noise is best where that is much, and all of it where there are traps
SPREADS = (0.1, 1.0)
LABEL_SETS = 12  # of those that the weights allow, so many of the likeliest are tried
OWED = 1e-2  # share of the largest gain of a class that others may owe to weight decay
TURNS = 8  # trials for a number of samples, where it is not known: then there is one more
FEWER = 30  # times fewer products for the lazy solution where it is not the first start
STARTS = {  # what trials begin with, one kind after the other, for each set of labels
    "alone": ("lazy", "random", "renewed", "random"),
    "public": ("lazy", "public", "renewed", "public"),
    "images": ("lazy", "random", "renewed", "public"),  # others of their kind are far from them
    "adam": ("public", "lazy", "renewed", "public"),  # the lazy solution of Adam is far from them
}


@dataclass(frozen=True, eq=False, kw_only=True)
class LazySearch(Search):
    """The progress of the search for the lazy solution."""

    known: int | None  # how many samples there are; None if more than the lazy search has may be

    def seen(self, problem: Problem) -> Problem:
        """Return the problem with the gradients in the place of the run."""
        return lazy_of(problem)


@dataclass(frozen=True, eq=False)
class Best:
    """The best trial that ended."""

    candidates: Tensor  # (n, d)
    labels: Tensor  # (n, c)
    value: float  # the residual that they leave
    choice: int  # of the recipe, by its number

    def beaten(self, value: float) -> bool:
        """Tell whether a residual is better; a run can end nowhere."""
        return math.isnan(self.value) or value < self.value


@dataclass(frozen=True, eq=False, kw_only=True)
class Trials(Progress):
    """The progress of the trials."""

    state: DampedState
    choice: int = 0  # of the recipe, by its number, in the trial at hand
    lazy: Tensor  # the lazy solution, (n, d)
    gains: Tensor  # how much each of it raises each output, (n, c)
    best: Best | None = None
    sharp: bool = False  # whether the trial at hand has come to slopes of ReLU that jump
    legs: int = 0  # of the trial at hand that have ended
    marks: tuple[float, float] = NO_MARKS  # residuals with which the last two of them began

    def seen(self, problem: Problem) -> Problem:
        """Return the problem with the choice of the trial at hand."""
        seen = choices(problem)[self.choice]
        return replace(seen, features=replace(_run(seen), sharp=self.sharp))

    def next_leg(self, fit: Fit) -> "Trials":
        """Go on from a fit of the same candidates."""
        return replace(
            self,
            state=DampedState(fit=fit, damping=LEG_DAMPING, pairs=self.state.pairs),
            steps=self.total_steps,
            products=self.total_products,
            legs=self.legs + 1,
            marks=(self.marks[1], self.residual),
        )


@dataclass(frozen=True)
class Replay:
    """Levenberg-Marquardt through the training run."""

    tolerance: float = 1e-10  # relative residual at which the weights count as explained
    trial: int = 60  # most solver steps a trial, but for images and Adam, which have legs and rungs
    trials: int = 60  # starts before the search gives up
    products: int = 3000  # most, for the lazy solution: it is a start, and need not be good
    name: str = "exhume"

    def view(self, problem: Problem) -> Problem:
        """Return the problem unchanged."""
        return problem

    def init(self, problem: Problem, samples: int | None, seed: int) -> LazySearch:
        """Begin with the lazy equation."""
        if problem.premise is not Premise.REPLAY:
            raise InputError("replay: needs the premise replay, and with it a recipe.")
        labels = _run(problem).labels
        if None not in (labels, samples) and len(labels or ()) != samples:
            raise InputError(f"labels: there are {len(labels or ())} for {samples} samples.")
        samples = samples or len(labels or ()) or span_count(problem)
        count = samples or least_count(problem)
        lazy = lazy_of(problem)
        start = random_start(
            problem, self._search(problem).count(lazy, count), stream(seed, 0), SPREADS[0]
        )
        begun = self._search(problem).begin(lazy, count, seed, start)
        return LazySearch(**vars(begun), known=samples)

    def _search(self, problem: Problem) -> Exhume:
        metric = photographs(problem.shape, problem.target)
        return Exhume(rounds=0, restarts=0, metric=metric)  # more come no nearer

    def advance(self, problem: Problem, progress: LazySearch | Trials) -> LazySearch | Trials:
        """Take one step of either search, or begin the next trial."""
        if isinstance(progress, LazySearch):
            return self._lazily(problem, progress)
        state, adam = progress.state, signs.applies(problem, len(progress.candidates))
        metric = None if adam else photographs(problem.shape, problem.target)
        if state.outcome is None and (adam or state.steps < (LEG if metric else self.trial)):
            solver = self._solver(problem, progress.candidates, progress.legs)
            step = (signs.Signs(solver.tolerance) if adam else solver).step
            state = step(progress.seen(problem), state)
            ended = Outcome.CONVERGED if state.outcome is Outcome.CONVERGED else None
            return replace(progress, state=state, outcome=ended)
        if metric and state.fit.value < GAIN * progress.marks[0]:
            return progress.next_leg(state.fit)
        kinks = _run(problem).kinked and not (adam or progress.sharp)
        if state.fit.value < NEAR and kinks:
            sharp, fit = replace(progress, sharp=True), state.fit
            return sharp.next_leg(fitted_with(sharp.seen(problem), fit.candidates, fit.shares))
        if progress.best is None or progress.best.beaten(state.fit.value):
            fit = state.fit
            best = Best(fit.candidates, fit.shares, fit.value, progress.choice)
            progress = replace(progress, best=best)
        turn, choice = divmod(progress.rounds + 1, len(choices(problem)))
        if turn >= self.trials:
            return replace(progress, outcome=Outcome.STALLED)
        begun = self._begin(problem, progress, turn, choice)
        return progress.next_round(begun, choice=choice, sharp=False, legs=0, marks=NO_MARKS)

    def finish(self, problem: Problem, progress: LazySearch | Trials) -> Fit:
        """Return the best of all trials."""
        if isinstance(progress, LazySearch):
            progress = self._first(problem, progress)
        fit, best = progress.state.fit, progress.best
        if best is not None and not best.beaten(fit.value):
            labels = best.labels.reshape(-1, 1)
            fit = fitted_with(choices(problem)[best.choice], best.candidates, labels)
        return fit

    def _solver(self, problem: Problem, candidates: Tensor, legs: int) -> LevenbergMarquardt:
        metric = photographs(problem.shape, problem.target)
        recycling = not _run(problem).dense(candidates)
        return LevenbergMarquardt(
            tolerance=max(self.tolerance, problem.resolution),
            damping=DAMPING,
            accuracy=1e-3,
            products=120,
            patience=6,
            progress=5e-2,
            metric=None if legs % 2 else metric,
            efforts=RECYCLED if recycling else EFFORTS,
            halting=metric is not None,
            recycling=recycling,
        )

    def _lazily(self, problem: Problem, progress: LazySearch) -> LazySearch | Trials:
        """Take one step of the lazy search, which polishes once its products are spent."""
        search, lazy = self._search(problem), lazy_of(problem)
        progress = cast(LazySearch, search.advance(lazy, progress))
        most = self.products if self._kinds(problem)[0] == "lazy" else self.products // FEWER
        if progress.phase == "explore" and progress.total_products >= most:
            progress = cast(LazySearch, search.hastened(lazy, progress))
        if progress.outcome is None and progress.total_products < 2 * most:
            return progress
        return self._first(problem, progress)

    def _first(self, problem: Problem, search: LazySearch) -> Trials:
        """Begin the first trial, with the lazy solution at hand."""
        fit = self._search(problem).finish(lazy_of(problem), search)
        gains = fit.shares.view(len(fit.candidates), -1, problem.features.outputs).sum(1)
        begun = Trials(
            seed=search.seed,
            samples=search.known,
            state=DampedState(fit=fit, damping=DAMPING),  # of no trial: replaced at once
            phase="replay",
            steps=search.total_steps,
            products=search.total_products,
            lazy=fit.candidates,
            gains=gains,
        )
        return replace(begun, state=self._begin(problem, begun, 0, 0))

    def _begin(self, problem: Problem, progress: Trials, turn: int, choice: int) -> DampedState:
        """Begin a trial: the next set of labels that may be, then the next kind of start."""
        generator = stream(progress.seed, turn + 1)
        count = progress.samples
        if count is None:  # each that may be is given some turns
            more, turn = divmod(turn, TURNS)
            count = least_count(problem) + more
        sets = self._label_sets(problem, progress, count)
        labels, best = sets[turn % len(sets)], progress.best
        kinds = self._kinds(problem)
        kind = kinds[turn // len(sets) % len(kinds)]
        if kind == "renewed" and best is not None:
            labels = best.labels
        elif _run(problem).labels is None and turn >= len(sets):  # batches have them in any order
            labels = labels[torch.randperm(len(labels), generator=generator).to(labels.device)]
        if kind == "random":
            spread = SPREADS[int(torch.randint(len(SPREADS), (1,), generator=generator))]
            start = random_start(problem, len(labels), generator, spread)
        else:
            start = self._drawn(problem, labels, generator)
        kept = torch.zeros(len(labels), dtype=torch.bool)
        if kind == "lazy":
            score = progress.gains.cpu() @ labels.double().cpu().T
            rows, place = linear_sum_assignment(score.numpy(), maximize=True)
            start[place.tolist()] = progress.lazy[rows.tolist()]
        elif kind == "renewed" and best is not None:
            # With another choice all are kept: what they left may be owed to the recipe alone
            drawn = torch.rand(len(labels), generator=generator)
            kept = (drawn < (0.5 if choice == best.choice else 1)).to(start.device)
            start[kept] = best.candidates[kept]
        if signs.applies(problem, len(labels)):
            start = signs.picked(choices(problem)[choice], start, labels, generator, kept)
        start = problem.domain.project(start)
        fit = fitted_with(choices(problem)[choice], start, labels.reshape(-1, 1))
        return DampedState(fit=fit, damping=DAMPING)

    def _kinds(self, problem: Problem) -> tuple[str, ...]:
        if photographs(problem.shape, problem.target):
            return STARTS["images"]
        if _run(problem).public is None:
            return STARTS["alone"]
        return STARTS["public" if _run(problem).recipe.optimizer == "sgd" else "adam"]

    def _drawn(self, problem: Problem, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return public inputs that the network gives these labels; without any, random ones."""
        run = _run(problem)
        if run.public is None:
            return random_start(problem, len(labels), generator, SPREADS[0])
        outputs = run.predict(run.public)
        given = rows_of(outputs.argmax(1) if run.outputs > 1 else outputs[:, 0] > 0, run.outputs)
        scores = (given.double() @ labels.double().T).cpu()  # 1 where it is the label
        scores = scores + torch.rand(scores.shape, generator=generator)
        return run.public[scores.argmax(0).to(labels.device)]

    def _label_sets(self, problem: Problem, progress: Trials, count: int) -> list[Tensor]:
        """Return the labels (n, c) that so many samples may have, the likeliest first."""
        run, like = _run(problem), problem.target
        classes, known = run.outputs, run.labels
        if known is not None:
            return [rows_of(torch.tensor(known), classes).to(like)]
        if classes == 1:
            each = (torch.arange(count) < k for k in range(count + 1))
            return [rows_of(positive, 1).to(like) for positive in each]
        with torch.no_grad():
            outputs = run.network(run.points[0], progress.lazy)
        given = outputs.double().softmax(1).mean(0).cpu()
        likely = likely_counts(class_gains(problem), given, count)
        every, most = torch.arange(classes), LABEL_SETS if progress.samples else TURNS // 2
        return [rows_of(every.repeat_interleave(c), classes).to(like) for c in likely[:most]]


def likely_counts(gains: Tensor, given: Tensor, count: int) -> list[Tensor]:
    """Return how many samples each class may have, (c,), the likeliest first.

    While the network goes from the shares p (c,) that it gave the classes at first to the samples'
    own, y, each class gains in proportion to y − p. So counts are ranked by the angle of
    counts/n − p to the gains: from all in one class, moving one at a time while that helps. Counts
    without a class that must have samples come after all with it.
    """
    needed = must_have(gains)

    def fitness(counts: Tensor) -> float:
        missing = int((needed & (counts == 0)).sum())
        return float(torch.cosine_similarity(counts / count - given, gains, dim=0)) - 2 * missing

    here = count * (torch.arange(len(gains)) == gains.argmax()).long()
    seen = {tuple(here.tolist()): fitness(here)}
    while True:
        steps = torch.eye(len(gains), dtype=torch.long)
        moves = (here - steps[a] + steps[b] for a in here.nonzero() for b in range(len(gains)))
        near = {tuple(move.flatten().tolist()): fitness(move.flatten()) for move in moves}
        best = max(near, key=near.__getitem__)
        better = near[best] > seen[tuple(here.tolist())]
        seen |= near
        if not better:
            return [torch.tensor(counts) for counts in sorted(seen, key=lambda c: -seen[c])]
        here = torch.tensor(best)


def random_start(problem: Problem, count: int, generator: torch.Generator, spread: float) -> Tensor:
    """Draw candidates (count, d) of the domain, that far from its middle; a share of 1 is all.

    Those of images are as smooth as photographs.
    """
    drawn = problem.domain.start(max(count, 64), problem.dim, generator).to(problem.target)
    middle, metric = drawn.mean(0), photographs(problem.shape, problem.target)
    noise = drawn[:count] - middle
    if metric is not None:
        noise = metric.power(noise, 0.5)
    return problem.domain.project(middle + spread * noise)


def rows_of(classes: Tensor, outputs: int) -> Tensor:
    """Return the labels (n, c) of classes (n,): one-hot rows, or ±1 for one output."""
    return one_hot(classes.long(), outputs) if outputs > 1 else 2 * classes.long()[:, None] - 1


def _run(problem: Problem) -> TrainingRun:
    """Return the training run that a problem of the premise replay has for features."""
    return cast(TrainingRun, problem.features)


def choices(problem: Problem) -> list[Problem]:
    """Return the problem with each choice of what its recipe leaves open."""
    run = _run(problem)
    each = run.recipe.choices()
    return [replace(problem, features=replace(run, recipe=recipe)) for recipe in each]


def recipe_of(fit: Fit) -> Recipe | None:
    """Return the recipe of a fit, with what was found of it; None where no run is simulated."""
    at = fit.linearization
    return at.recipe if isinstance(at, Replayed) else None


def lazy_of(problem: Problem) -> Problem:
    """Return the lazy equation of the same change of weights."""
    lazy = _run(problem).lazy
    return replace(problem, features=lazy, premise=Premise.CHANGE, drift=DRIFT)


def least_count(problem: Problem) -> int:
    """Return how many samples there are at least: one of each class that must have some."""
    return max(1, int(must_have(class_gains(problem)).sum()))


def must_have(gains: Tensor) -> Tensor:
    """Tell of each class whether it has samples, (c,): the last bias of others does not grow."""
    return gains > OWED * gains.max()


def span_count(problem: Problem) -> int | None:
    """Return how many samples span the change of a dense first layer; None where that is not seen.

    Each step of SGD moves the layer in their span; no other optimiser does.
    """
    return directions(problem.first_layer) if _run(problem).recipe.optimizer == "sgd" else None


def class_gains(problem: Problem) -> Tensor:
    """Return how much each class gained in training, (c,): the change of the last bias.

    Without one, it is the change of the last layer's outputs for what inputs of the same kind, or
    random ones, give it on average.
    """
    run = _run(problem)
    (before, after), head = run.points, run.network.head_weight
    if (bias := run.network.head_bias) in run.block:
        return (after[bias] - before[bias]).double().cpu()
    drawn = problem.domain.start(64, problem.dim, stream(0, 0))
    inputs = (drawn if run.public is None else run.public).to(problem.target)
    with torch.no_grad():
        hidden = run.network.hidden(before, inputs).mean(0)
    return ((after[head] - before[head]) @ hidden).double().cpu()
