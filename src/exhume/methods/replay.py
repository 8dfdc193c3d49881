"""Ours where the training run is known: least squares on the run itself, from many starts.

The lazy equation is solved first: what it finds is near the samples where training moved the
features little. Then each trial begins elsewhere (see `starts`): there, at public samples of the
same kind if there are any, at random, or at the best so far with half of it drawn anew. A trial may
begin with an easier problem: few long steps of training, or labels that are unknowns, too (see
`labels`). Both end in the run's own before anything is said of it. The residual decides:
only the samples make the run end where it did, so a trial that explains the weights is the last.
Where the recipe leaves numbers open, each start is tried with every choice of them.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from exhume.equation.domain import Span
from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.replay import Replayed
from exhume.methods import signs
from exhume.methods.exhume import Exhume, Search
from exhume.methods.labels import (
    LABEL_SETS,
    Partial,
    fractional,
    label_sets,
    least_count,
    rows_of,
    run_of,
    softened,
    telling,
    unlabelled,
)
from exhume.methods.progress import Progress, stream
from exhume.methods.starts import (
    SPREADS,
    drawn_start,
    kinds_of,
    longer,
    picked,
    random_start,
    stride_of,
)
from exhume.methods.unmixed import Unmixed, start_of
from exhume.recipes import Recipe
from exhume.search.photographs import photographs
from exhume.search.subspace import span
from exhume.solvers import Outcome
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt

# The residual is far from quadratic at a start: with less damping, steps lead away from the samples
# there. From the lazy solution they have so much of the residual that it leaves, as it is near:
# small convolutional networks take a sixth to a half of the products less
DAMPING = 0.1
# Times the products of a step, at most: those with a Jacobian that is kept cost little; of others,
# what a linear solution found serves the next
EFFORTS, RECYCLED = 16, 2
LEG = 10  # steps with the metric of images, then as many without, and so on: each finds what
# the other hardly sees
EASED_DAMPING = 1e-2  # with which the run's own problem begins after an easier one: between the two
LEG_DAMPING = 1e-3  # with which a leg after the first begins: it is near already
GAIN = 0.7  # share of the residual that two legs leave at most, or the trial has ended
# Residual under which a trial that has stalled goes on with slopes of ReLU that jump: softened ones
# are the mean over many units that may turn, and this near there are few
NEAR = 1e-3
NO_MARKS = (math.inf, math.inf)  # what legs are compared with before there were two
DRIFT = 1e-2  # what the lazy equation may leave: its search ends where nothing more is gained
PHASE = "replay"  # of trials; an easier problem, whose residual is another, has a word of its own
TURNS = 8  # trials for a number of samples, where it is not known: then there is one more
FEWER = 30  # times fewer products for the lazy solution where it is not the first start


@dataclass(frozen=True, eq=False, kw_only=True)
class LazySearch(Search):
    """The progress of the search for the lazy solution."""

    known: int | None  # how many samples there are; None if more than the lazy search has may be

    def seen(self, problem: Problem) -> Problem:
        """Return the problem with the gradients in the place of the run, if it has one."""
        return lazy_of(problem) if problem.premise is Premise.REPLAY else problem


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
    lazy: Tensor  # the lazy solution, (n, d), or images that were unmixed
    unmixed: bool = False  # whether it is these
    gains: Tensor  # how much each of it raises each output, (n, c)
    best: Best | None = None
    soft: bool = False  # whether labels are unknowns in the trial at hand: candidates are (x, y)
    stride: int = 1  # how many times longer its steps of training are than the recipe's
    sharp: bool = False  # whether the trial at hand has come to slopes of ReLU that jump
    free: bool = True  # whether it is not, or no longer, in the span that the first layer shows
    legs: int = 0  # of the trial at hand that have ended
    marks: tuple[float, float] = NO_MARKS  # residuals with which the last two of them began

    def seen(self, problem: Problem) -> Problem:
        """Return the problem with the choice of the trial at hand, and as easy as it has it."""
        seen = choices(problem if self.free else spanned(problem))[self.choice]
        seen = longer(seen, self.stride)
        seen = replace(seen, features=replace(run_of(seen), sharp=self.sharp))
        return unlabelled(seen) if self.soft else seen

    @property
    def candidates(self) -> Tensor:
        """Return the samples of the trial at hand, (n, d), without labels."""
        return super().candidates[:, : self.lazy.shape[1]]

    @property
    def eased(self) -> bool:
        """Tell whether the trial at hand solves an easier problem than the run's own."""
        return self.soft or self.stride > 1

    def plain(self, problem: Problem) -> "Trials":
        """Go on with the recipe's own steps, and with the class of which a label has most."""
        fit, own = self.state.fit, replace(self, soft=False, stride=1, legs=0, marks=NO_MARKS)
        own = replace(own, phase=PHASE)
        labels = fit.shares
        if self.soft:
            shares = fit.candidates[:, self.lazy.shape[1] :]
            labels = rows_of(shares.argmax(1), shares.shape[1])
        fit = fitted_with(own.seen(problem), self.candidates, labels.reshape(-1, 1))
        state = DampedState(fit=fit, damping=EASED_DAMPING)
        return replace(own, state=state, steps=self.total_steps, products=self.total_products)

    def next_leg(self, fit: Fit) -> "Trials":
        """Go on from a fit of the same candidates."""
        return replace(
            self,
            state=DampedState(fit=fit, damping=LEG_DAMPING, pairs=self.state.pairs),
            steps=self.total_steps,
            products=self.total_products,
            legs=self.legs + 1,
            marks=self.marks if self.stride > 1 else (self.marks[1], self.residual),
        )


@dataclass(frozen=True)
class Replay:
    """Levenberg-Marquardt through the training run."""

    tolerance: float = 1e-10  # relative residual at which the weights count as explained
    # most solver steps of a trial, and of an easier problem before it, but for images and Adam,
    # which have legs and rungs
    trial: int = 60
    trials: int = 60  # starts before the search gives up
    products: int = 3000  # most, for the lazy solution: it is a start, and need not be good
    name: str = "exhume"

    def view(self, problem: Problem) -> Problem:
        """Return the problem unchanged."""
        return problem

    def init(self, problem: Problem, samples: int | None, seed: int) -> LazySearch | Trials:
        """Begin with images unmixed from a dense layer if there is one, else the lazy equation."""
        if problem.premise is not Premise.REPLAY:
            raise InputError("replay: needs the premise replay, and with it a recipe.")
        labels = run_of(problem).labels
        if None not in (labels, samples) and len(labels or ()) != samples:
            raise InputError(f"labels: there are {len(labels or ())} for {samples} samples.")
        samples = samples or len(labels or ()) or span_count(problem)
        count = samples or least_count(problem)
        lazy, adds = lazy_of(problem), run_of(problem).recipe.optimizer == "sgd"
        start = start_of(spanned(problem), samples, seed) if adds else None  # Adam mixes nothing
        search = self._search(problem)
        if start is not None:  # nearer than the lazy equation leads where features have moved
            begun = LazySearch(**vars(search.begin(lazy, count, seed, start)), known=samples)
            return self.first(problem, begun, unmixed=True)
        start = random_start(problem, search.count(lazy, count), stream(seed, 0), SPREADS[0])
        return LazySearch(**vars(search.begin(lazy, count, seed, start)), known=samples)

    def _search(self, problem: Problem) -> Exhume:
        metric = photographs(problem.shape, problem.target)
        # More come no nearer, and nor does creeping to a floor, which took half of all products
        return Exhume(rounds=0, restarts=0, creeping=0.1, metric=metric)

    def advance(self, problem: Problem, progress: LazySearch | Trials) -> LazySearch | Trials:
        """Take one step of either search, or begin the next trial."""
        if isinstance(progress, LazySearch):
            return self._lazily(problem, progress)
        state, adam = progress.state, signs.applies(problem, len(progress.candidates))
        metric = None if adam else photographs(problem.shape, problem.target)
        if state.outcome is None and (adam or state.steps < (LEG if metric else self.trial)):
            solver = self._solver(problem, progress)
            step = (signs.Signs(solver.tolerance) if adam else solver).step
            return self._stepped(problem, progress, step(progress.seen(problem), state))
        if metric and state.fit.value < GAIN * progress.marks[0]:
            return progress.next_leg(state.fit)
        if progress.eased:
            return progress.plain(problem)
        kinks = run_of(problem).kinked and not (adam or progress.sharp)
        if state.fit.value < NEAR and kinks:
            sharp, fit = replace(progress, sharp=True), state.fit
            return sharp.next_leg(fitted_with(sharp.seen(problem), fit.candidates, fit.shares))
        if not progress.free:  # near, rounding has turned the span; far, there are ways past traps
            freed, fit = replace(progress, free=True), state.fit
            fit = fitted_with(freed.seen(problem), fit.candidates, fit.shares)
            return replace(freed.next_leg(fit), marks=(math.inf, fit.value))
        if progress.best is None or progress.best.beaten(state.fit.value):
            fit = state.fit
            best = Best(fit.candidates, fit.shares, fit.value, progress.choice)
            progress = replace(progress, best=best)
        turn, choice = divmod(progress.rounds + 1, len(choices(problem)))
        if turn >= self.trials:
            return replace(progress, outcome=Outcome.STALLED)
        begun = self._begin(problem, progress, turn, choice)
        return progress.next_round(**begun, choice=choice, sharp=False, legs=0, marks=NO_MARKS)

    def _stepped(self, problem: Problem, progress: Trials, state: DampedState) -> Trials:
        """Return the progress after a step; long steps end where the recipe's own say they may.

        They do once they lower what the recipe's own leave by little: the rest is their difference.
        """
        converged = state.outcome is Outcome.CONVERGED and not progress.eased
        if converged and not progress.free:
            whole = self._of_all(problem, state.fit, progress.choice).value
            converged = whole <= max(self.tolerance, problem.resolution)
        after = replace(progress, state=state, outcome=Outcome.CONVERGED if converged else None)
        if progress.stride == 1:
            return after
        own = after.plain(problem)
        marks = (progress.marks[1], own.residual)
        return replace(after, marks=marks) if marks[1] < GAIN * marks[0] else own

    def finish(self, problem: Problem, progress: LazySearch | Trials) -> Fit:
        """Return the best of all trials."""
        if isinstance(progress, LazySearch):
            progress = self.first(problem, progress)
        progress = progress.plain(problem) if progress.eased else progress
        fit, best = progress.state.fit, progress.best
        if not progress.free:  # a span has no bounds, and the first layer was seen along it alone
            fit = self._of_all(problem, fit, progress.choice)
            inside = replace(fit, candidates=problem.domain.project(fit.candidates))
            other = self._of_all(problem, inside, progress.choice)
            fit = other if other.value <= 2 * fit.value else fit
        if best is not None and not best.beaten(fit.value):
            labels = best.labels.reshape(-1, 1)
            fit = fitted_with(choices(problem)[best.choice], best.candidates, labels)
        return fit

    def _of_all(self, problem: Problem, fit: Fit, choice: int) -> Fit:
        """Return the fit of all weights: in a span the first layer is seen along it alone."""
        return fitted_with(choices(problem)[choice], fit.candidates, fit.coefficients)

    def _solver(self, problem: Problem, progress: Trials) -> LevenbergMarquardt:
        images = photographs(problem.shape, problem.target)
        metric = Partial(images, problem.dim) if images and progress.soft else images
        run = run_of(progress.seen(problem))
        recycling = not run.dense(progress.state.fit.candidates)
        inside = run.span is not None and not recycling  # there products cost next to nothing
        return LevenbergMarquardt(
            tolerance=max(self.tolerance, problem.resolution),
            damping=DAMPING,
            accuracy=1e-6 if inside else 1e-3,
            products=120,
            patience=6,
            progress=5e-2,
            metric=None if progress.legs % 2 else metric,
            efforts=RECYCLED if recycling else EFFORTS,
            halting=metric is not None,
            recycling=recycling,
            chords=inside,
        )

    def _lazily(self, problem: Problem, progress: LazySearch) -> LazySearch | Trials:
        """Take one step of the lazy search, which polishes once its products are spent."""
        search, lazy = self._search(problem), lazy_of(problem)
        progress = cast(LazySearch, search.advance(lazy, progress))
        most = self.products if kinds_of(problem)[0] == "lazy" else self.products // FEWER
        if progress.phase == "explore" and progress.total_products >= most:
            progress = cast(LazySearch, search.hastened(lazy, progress))
        if progress.outcome is None and progress.total_products < 2 * most:
            return progress
        return self.first(problem, progress)

    def first(self, problem: Problem, search: LazySearch, unmixed: bool = False) -> Trials:
        """Begin the first trial, with the lazy solution at hand."""
        fit = self._search(problem).finish(lazy_of(problem), search)
        gains = fit.shares.view(len(fit.candidates), -1, problem.features.outputs).sum(1)
        begun = Trials(
            seed=search.seed,
            samples=search.known,
            state=DampedState(fit=fit, damping=DAMPING),  # of no trial: replaced at once
            phase=PHASE,
            steps=search.total_steps,
            products=search.total_products,
            lazy=fit.candidates,
            unmixed=unmixed,
            gains=gains,
        )
        return replace(begun, **self._begin(problem, begun, 0, 0))

    def _begin(self, problem: Problem, progress: Trials, turn: int, choice: int) -> dict[str, Any]:
        """Begin a trial: the next set of labels that may be, then the next kind of start."""
        run, generator = run_of(problem), stream(progress.seed, turn + 1)
        count, most = progress.samples, LABEL_SETS
        if count is None:  # each that may be is given some turns
            more, turn = divmod(turn, TURNS)
            count, most = least_count(problem) + more, TURNS // 2
        sets = label_sets(problem, progress.lazy, progress.gains, count, most)
        adam = signs.applies(problem, count)
        if adam:  # its steps are for samples alone
            sets = [each for each in sets if not fractional(each)]
        sure = run.labels is not None or telling(problem)
        alone = not sure and run.public is None
        if alone and run.dense(progress.lazy):  # each would end at the same labels
            sets = [sets[0], *sets[1:][-1:]]
        labels, best = sets[turn % len(sets)], progress.best
        best = best if best is not None and len(best.labels) == count else None  # of as many
        soft = fractional(labels)
        kinds = kinds_of(problem)
        kind, shown = kinds[turn // len(sets) % len(kinds)], 0.5  # share of the best that is kept
        if best is not None and (soft or kind == "renewed"):
            shares, kind = labels.mean(0), "renewed"
            labels = softened(best.labels, shares) if soft else best.labels
            # With another choice all are kept: what they left may be owed to the recipe alone
            shown = 1.0 if choice != best.choice or (soft and turn < len(sets)) else shown
        elif run.labels is None and turn >= len(sets):  # batches have them in any order
            labels = labels[torch.randperm(len(labels), generator=generator).to(labels.device)]
        # Far from the samples there are fewer ways past a trap in their span
        near = kind == "lazy" and progress.unmixed
        problem = spanned(problem) if near else problem
        free = not isinstance(problem.domain, Span)
        start = drawn_start(problem, labels, kind, generator)
        kept = torch.zeros(len(labels), dtype=torch.bool)
        if kind == "lazy":
            score = progress.gains.cpu() @ labels.double().cpu().T
            rows, place = linear_sum_assignment(score.numpy(), maximize=True)
            start[place.tolist()] = progress.lazy[rows.tolist()]
        elif kind == "renewed" and best is not None:
            kept = (torch.rand(len(labels), generator=generator) < shown).to(start.device)
            start[kept] = best.candidates[kept]
        seen = choices(problem)[choice]
        if adam:
            start = signs.prior_of(problem).held(start)
        if adam or (run.dense(start) and (kind in ("public", "renewed") or alone)):
            eased = signs.eased(seen) if adam else seen
            for known in (True,) if soft or sure else (False, True):
                start, labels = picked(eased, start, labels, generator, kept, known)
        start, given = problem.domain.project(start), labels.reshape(-1, 1)
        if soft:
            seen, start = unlabelled(seen), torch.cat([start, labels.to(start)], 1)
        fit = fitted_with(seen, start, given)
        stride = 1 if soft or adam else stride_of(seen, fit)
        if stride > 1:
            fit = fitted_with(longer(seen, stride), start, given)
        phase = "soft labels" if soft else "long steps" if stride > 1 else PHASE
        lazy = kind == "lazy" and not (adam or near)  # of unmixed tiles, to begin so gains nothing
        far = min(1.0, fit.value) if lazy else 1.0
        state = DampedState(fit=fit, damping=DAMPING * far)
        return {"state": state, "soft": soft, "stride": stride, "phase": phase, "free": free}


def choices(problem: Problem) -> list[Problem]:
    """Return the problem with each choice of what its recipe leaves open."""
    run = run_of(problem)
    each = run.recipe.choices()
    return [replace(problem, features=replace(run, recipe=recipe)) for recipe in each]


def recipe_of(fit: Fit) -> Recipe | None:
    """Return the recipe of a fit, with what was found of it; None where no run is simulated."""
    at = fit.linearization
    return at.recipe if isinstance(at, Replayed) else None


def lazy_of(problem: Problem) -> Problem:
    """Return the lazy equation of the same change of weights."""
    lazy = run_of(problem).lazy
    return replace(problem, features=lazy, premise=Premise.CHANGE, drift=DRIFT)


def spanned(problem: Problem) -> Problem:
    """Return the problem with candidates in the span that the first layer's change shows.

    Each step of SGD moves the layer in the span of the samples, or of their tiles, and no other
    optimiser does: n samples have n coordinates each and not d, and so has the target, where that
    is all that the first layer is given. Where no span shows, it is itself.
    """
    layer = problem.first_layer or problem.tiled
    sgd = run_of(problem).recipe.optimizer == "sgd"
    known = span(layer) if sgd and not isinstance(problem.domain, Span) else None
    if layer is None or known is None:
        return problem
    domain = Span(known.basis.T, problem.domain, layer.tiles)
    run = run_of(problem).within(domain.every)
    return replace(problem, domain=domain, features=run, target=run.change[:, None])


def span_count(problem: Problem) -> int | None:
    """Return how many samples span the change of a first layer; None where that is not seen.

    Batch norms that take the statistics of a batch take one direction off it.
    """
    domain = spanned(problem).domain
    if not isinstance(domain, Span) or run_of(problem).network.batch_statistics:
        return None
    if domain.tiles is None:
        return len(domain.basis)
    whole = Unmixed().applies(problem, None)  # tiles that depend on each other hide some
    return len(domain.basis) // domain.tiles.places if whole else None
