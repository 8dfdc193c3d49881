"""Ours for a change of weights: Levenberg-Marquardt from an over-complete start, then down.

Explore with more candidates than samples, renewing some where the solver stalls, and arrange the
patches of images whose places hardly show; tidy once the weights are explained (undo flipped signs,
drop what others can stand in for); polish what is left. Where equations are few, trials that begin
afresh see a softplus in the place of ReLU first, and sharpen it: fewer of them end in minima that
are no solution.
Why this works, and what a floor is: docs/theory.md.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Problem
from exhume.features.activations import softplus
from exhume.features.random import RandomFeatures
from exhume.methods.progress import Progress, stream
from exhume.search.moves import dropping, exchanged, exchanges, merged, reseed, unflipped, without
from exhume.solvers import Outcome
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt, Metric

LEAST = 1e-3  # damping that a sharper function begins with: another surface asks for care


@dataclass(frozen=True, eq=False)
class Found:
    """Candidates (n, d) of a trial that ended, and their residual."""

    candidates: Tensor
    residual: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Search(Progress):
    """The progress of this search."""

    state: DampedState
    best: Found | None = None  # where trials begin; residual infinite once some are added
    # the residual to get below: the least since the last fresh start, or since a surplus explained
    # what no cut of it does
    lowest: float = math.inf
    champion: Found | None = None  # the best trial that was left, for a worse one or a fresh start
    misses: int = 0  # rounds in a row that did not get below
    restarts: int = 0  # fresh starts so far
    dropped: int = 0  # candidates beyond the surplus that this trial began by dropping
    returned: int = 0  # dropped candidates that trials found again, at the same residual, in all
    grown: float = math.inf  # the residual before the number of candidates last grew
    floor: float = 0.0  # the residual that was taken for the floor, 0 while there is none
    arranged: Found | None = None  # the best with the patches of its images in these places
    idle: int = 0  # exchanges of patches in a row that did not help
    tidied: int = 0  # how many ways to tidy up were tried since exploring ended
    too_few: int = 0  # the largest number of candidates that is known to be too small
    sharpness: float = 0.0  # β of the softplus that the trial at hand has for ReLU, 0 for ReLU
    sharpened: int = 0  # how often that grew since the trial began

    def seen(self, problem: Problem) -> Problem:
        """Return the problem with the softplus of the trial at hand."""
        return softened(problem, self.sharpness) if self.sharpness > 0 else problem

    @property
    def leader(self) -> Found:
        """The trial that the next begins at, where there must be one."""
        assert self.best is not None
        return self.best

    @property
    def record(self) -> Found:
        """The trial with the least residual, with its surplus if it has one; there must be one."""
        rival = self.champion or self.leader
        return self.leader if self.leader.residual < rival.residual else rival

    @property
    def best_residual(self) -> float:
        """The residual of the leader; infinite before the first trial has ended."""
        return math.inf if self.best is None else self.best.residual

    def led(self, problem: Problem) -> Fit:
        """Return the fit of the leader."""
        return fitted(problem, self.leader.candidates)

    def kept(self) -> "Search":
        """Return the progress with the trial at hand as the best, to get below."""
        return replace(self, best=Found(self.candidates, self.residual), lowest=self.residual)

    def strayed(self) -> "Search":
        """Return the progress with the next trial to begin at the one at hand, though worse."""
        return replace(self, best=Found(self.candidates, self.residual), champion=self.record)


@dataclass(frozen=True)
class Exhume:
    """Over-complete search with Levenberg-Marquardt."""

    tolerance: float = 1e-11  # relative residual at which the weights count as explained
    close: float = 1e-9  # residual at which exploring ends
    least_ratio: float = 1.8  # p·m/(d·n̂) that exploring keeps: else zero residual means nothing
    surplus: float = 1.6  # most candidates at the start, in units of the samples
    patience: int = 60  # rounds without improvement before a fresh start
    restarts: int = 2  # fresh starts before the search gives up
    rounds: int = 1000  # most rounds in all
    trial: int = 80  # most solver steps a round
    accuracy: float = 0.1  # of linear solutions where there is no floor; finer ones cost products
    finer: float = 0.05  # the same where a GPU takes as long for a step as for six products
    twins: tuple[float, ...] = (0.98, 0.99, 0.999)  # cosines to merge above, before a cut
    alike: tuple[float, ...] = (0.9, 0.97, 0.99, 0.999)  # the same where the number is unknown
    cheap: float = 1e-2  # share of the target that a cut may cost before others are solved again
    stray: float = 2.0  # times the lowest residual that the next trial may begin at: 3 finds fewer
    same: float = 1.5  # factor within which two residuals are the same plateau
    again: float = 0.99  # cosine from which a candidate that was dropped has been found again
    above: float = 10.0  # times the floor, which a cut may leave: less cannot be told from it
    creeping: float = 2e-2  # gain under which a step counts for none where there is a floor
    # of the softplus, β times the root mean square of z: from all but quadratic to all but ReLU
    sharpness: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0)
    softly: int = 12  # most solver steps at each: they need not end where the next ones begin
    dense: float = 3.5  # p·m/(d·n) from which trials with ReLU get there, and sooner
    many: int = 20  # samples from which a softplus comes first: ReLU finds fewer as soon without
    metric: Metric | None = field(default=None, compare=False)  # of samples, for the solver
    name: str = "exhume"

    def view(self, problem: Problem) -> Problem:
        """Return the problem unchanged."""
        return problem

    def _fitted_to(self, problem: Problem) -> "Exhume":
        """Return the method with no more asked for than the stored weights' precision allows."""
        close = max(self.tolerance if problem.drift else self.close, problem.resolution)
        return replace(self, tolerance=max(self.tolerance, problem.resolution), close=close)

    def init(self, problem: Problem, samples: int | None, seed: int) -> Search:
        """Begin at random: with a surplus if the number of samples is known, few if not."""
        count = self.afresh(problem, samples)
        start = problem.domain.start(count, problem.dim, stream(seed, 0))
        return self.begin(problem, samples, seed, start)

    def afresh(self, problem: Problem, samples: int | None) -> int:
        """Return how many candidates to begin with: a surplus would fit what a softplus leaves."""
        if samples is None or not self._few(problem, samples):
            return self.count(problem, samples)
        return samples

    def count(self, problem: Problem, samples: int | None) -> int:
        """Return how many candidates to explore with for so many samples."""
        if samples is None:
            return min(8, self._most(problem))
        return max(samples, min(math.ceil(self.surplus * samples), self._most(problem)))

    def begin(self, problem: Problem, samples: int | None, seed: int, start: Tensor) -> Search:
        """Begin the first trial from candidates (count, d) of the caller's."""
        self = self._fitted_to(problem)
        state = self._explorer(problem, samples).init(problem, start)
        return self._softly(problem, Search(seed=seed, samples=samples, state=state))

    def advance(self, problem: Problem, progress: Search) -> Search:
        """Take one solver step, or make the next move when the trial has ended."""
        self, state = self._fitted_to(problem), progress.state
        if progress.phase == "arrange" and (state.steps or state.fit.value > problem.drift):
            return self._arrange(problem, progress)
        most = self.softly if progress.phase == "sharpen" else self.trial
        if state.outcome is None and state.steps < most:
            exploring = progress.phase in ("sharpen", "explore")
            solver = self._explorer(problem, progress.samples) if exploring else self._polisher
            return replace(progress, state=solver.step(progress.seen(problem), state))
        if progress.phase == "sharpen" and state.outcome is not Outcome.DIVERGED:
            return self._sharpened(problem, progress)
        if progress.phase in ("sharpen", "explore"):
            return self._after_explore(problem, progress)
        if progress.phase == "settle":
            return self._arrange(problem, replace(progress, arranged=None))
        if progress.phase == "tidy":
            return self._after_tidy(problem, progress)
        if progress.phase == "cut":
            too_few = replace(progress, too_few=len(progress.candidates))
            return self._cut(problem, progress.kept() if self._holds(progress) else too_few)
        outcome = state.outcome or Outcome.BUDGET
        if state.fit.value <= self.tolerance:
            outcome = Outcome.CONVERGED
        elif state.fit.value <= self.above * progress.floor:
            outcome = Outcome.SETTLED
        return replace(progress, outcome=outcome)

    def finish(self, problem: Problem, progress: Search) -> Fit:
        """Return the best of all trials, each cut down to the number asked for before."""

        def cut(fit: Fit) -> Fit:
            surplus = len(fit.candidates) - (progress.samples or len(fit.candidates))
            return fit if surplus <= 0 else fitted(problem, without(problem, fit, surplus))

        soft = progress.sharpness > 0
        fit = cut(fitted(problem, progress.candidates) if soft else progress.state.fit)
        for rival in (progress.arranged, progress.best, progress.champion):
            if rival is not None:
                other = cut(fitted(problem, rival.candidates))
                fit = fit if fit.value <= other.value else other  # also where it is not a number
        return fit

    def hastened(self, problem: Problem, progress: Search) -> Search:
        """End exploring now: go on to polish the best so far."""
        if progress.residual < progress.best_residual:
            progress = progress.kept()
        return self._polish(problem, replace(progress, best=progress.record))

    def _explorer(self, problem: Problem, samples: int | None) -> LevenbergMarquardt:
        """Return the solver of a trial: where there is a floor, creeping to it is no progress."""
        floor = problem.drift > 0
        solver = LevenbergMarquardt(
            tolerance=self.tolerance if samples is None else self.close,
            progress=self.creeping if floor else 3e-3,
            metric=self.metric,
        )
        alone = problem.whole is None  # else each rank would say it of its own rows
        brief = alone and isinstance(problem.features, RandomFeatures) and problem.features.brief
        accuracy = min(self.accuracy, self.finer) if brief else self.accuracy
        return solver if floor else replace(solver, accuracy=accuracy)

    @property
    def _polisher(self) -> LevenbergMarquardt:
        return LevenbergMarquardt(
            tolerance=self.tolerance / 100, damping=1e-3, patience=3, enough=self.tolerance
        )

    def _most(self, problem: Problem) -> int:
        """Return how many candidates leave enough equations for each unknown."""
        return max(1, int(problem.ratio(1) / self.least_ratio))

    def _after_explore(self, problem: Problem, progress: Search) -> Search:
        fit = progress.state.fit
        if progress.state.outcome is Outcome.DIVERGED:
            return replace(progress, outcome=Outcome.DIVERGED)
        if fit.value <= self.close:
            return self._tidy(problem, replace(progress.kept(), tidied=0))
        before = progress.lowest
        if fit.value < before / self.same:
            progress = replace(progress.kept(), misses=0, returned=0, floor=0.0)
            low = fit.value <= 0.1 * problem.drift
            arrange = low and exchanges(problem, len(fit.candidates)) > 0
            return (self._settle if arrange else self._explore)(problem, progress)
        if fit.value <= before * self.same and progress.dropped > 0 and problem.drift > 0:
            found = progress.returned + self._found_again(problem, progress)
            progress = replace(progress, returned=found)
        if fit.value < before:
            progress = replace(progress.kept(), misses=0)
        else:
            progress = replace(progress, misses=progress.misses + 1)
            # With a floor, or a number to find, the plateau itself says something: it is not left.
            free = problem.drift == 0 and progress.samples is not None
            if free and fit.value < self.stray * before:
                progress = progress.strayed()
        wanted = self._wanted(problem, progress)
        spare = len(progress.leader.candidates) > wanted  # a plateau is no floor without any
        low = progress.best_residual <= 0.1 * problem.drift
        if progress.samples is None:
            low = self._grown(problem, progress)
        if spare and low and progress.returned >= max(1.0, wanted / 2):
            progress = replace(progress, floor=progress.best_residual, returned=0, tidied=0)
            return self._tidy(problem, progress)
        return self._explore(problem, progress)

    def _settle(self, problem: Problem, progress: Search) -> Search:
        """Solve for as many as there are samples, whose patches may then change places."""
        surplus = max(0, len(progress.candidates) - self._wanted(problem, progress))
        start = without(problem, progress.led(problem), surplus)
        return progress.next_round(self._polisher.init(problem, start), phase="settle")

    def _arrange(self, problem: Problem, progress: Search) -> Search:
        """Exchange the next two patches, from the best so far; explore when no exchange helps.

        What the wrong place of a patch leaves is so little that solving makes good for most of it:
        one step shows which is less. Where an exchange leaves more than drift, places are known.
        """
        best = progress.arranged
        if best is None or progress.residual < best.residual:
            best = Found(progress.candidates, progress.residual)
            progress = replace(progress, arranged=best, idle=0)
        else:
            progress = replace(progress, idle=progress.idle + 1)
        ways = exchanges(problem, len(best.candidates))
        if progress.idle >= ways:
            if best.residual >= progress.best_residual:
                return self._explore(problem, progress)
            state = self._explorer(problem, progress.samples).init(problem, best.candidates)
            led = replace(progress, best=best, lowest=best.residual)
            return led.next_round(state, phase="explore")
        start = exchanged(problem, best.candidates, progress.rounds % ways)
        return progress.next_round(self._polisher.init(problem, start), phase="arrange")

    def _wanted(self, problem: Problem, progress: Search) -> int:
        """Return the number of samples, or of candidates that do more than blur a floor; or all."""
        if progress.samples is not None:
            return progress.samples
        if problem.drift == 0:
            return len(progress.leader.candidates)
        best = progress.led(problem)
        return max(1, int((dropping(problem, best)[1] > self.above * best.value).sum()))

    def _found_again(self, problem: Problem, progress: Search) -> int:
        """Count the candidates that this trial began by dropping and that are there again."""
        best = progress.led(problem)
        order, _ = dropping(problem, best)
        surplus = len(order) - self._wanted(problem, progress)
        gone = order[surplus : surplus + progress.dropped].to(best.candidates.device)
        old, new = best.candidates[gone], progress.state.fit.candidates
        cosine = torch.nn.functional.cosine_similarity(old[:, None], new[None], dim=2)
        return int((cosine.amax(1) > self.again).sum())

    def _explore(self, problem: Problem, progress: Search) -> Search:
        """Begin a trial with more candidates if their number may grow, else with new for old."""
        if progress.misses >= self.patience or progress.rounds >= self.rounds:
            return self._restart(problem, progress)
        best, generator = progress.led(problem), stream(progress.seed, progress.rounds + 1)
        before, samples = len(best.candidates), progress.samples
        if samples is None and before < self._most(problem) and not self._grown(problem, progress):
            drop, count = 0, min(math.ceil(1.5 * before), self._most(problem))
            unmatched, grown = replace(progress.leader, residual=math.inf), progress.best_residual
            progress = replace(progress, best=unmatched, lowest=math.inf, grown=grown, dropped=0)
        else:
            count = before if samples is None else self.count(problem, samples)
            keep = self._wanted(problem, progress)
            most = max(2, 3 * keep // 4)
            more = int((most + 1) ** torch.rand(1, generator=generator).item()) - 1
            drop = max(before - keep + more, 1 if before == count else 0)
            progress = replace(progress, dropped=more if 4 * more >= keep else 0)
        start = reseed(problem, best, drop, count, generator)
        state = self._explorer(problem, samples).init(problem, start)
        return progress.next_round(state, phase="explore")

    def _grown(self, problem: Problem, progress: Search) -> bool:
        """Whether more candidates no longer help, at a residual that may be the floor."""
        value = progress.best_residual
        return value <= 1e-2 * problem.drift and value > progress.grown / 3

    def _restart(self, problem: Problem, progress: Search) -> Search:
        """Begin anew from random candidates, or give up with the best of all starts."""
        best, champion = progress.leader, progress.record
        if progress.restarts >= self.restarts or progress.rounds >= self.rounds:
            return self._polish(problem, replace(progress, best=champion, champion=champion))
        soft = self._few(problem, progress.samples)
        count = self.afresh(problem, progress.samples) if soft else len(best.candidates)
        start = problem.domain.start(count, problem.dim, stream(progress.seed, progress.rounds + 1))
        state = self._explorer(problem, progress.samples).init(problem, start)
        kept = {"champion": champion, "restarts": progress.restarts + 1}
        reset = {"best": None, "lowest": math.inf, "misses": 0, "returned": 0, "floor": 0.0}
        begun = progress.next_round(state, phase="explore", dropped=0, **kept, **reset)
        return self._softly(problem, begun)

    def _softly(self, problem: Problem, progress: Search) -> Search:
        """Begin a trial with the softest function, where equations are few and there is a ReLU."""
        if not self._few(problem, progress.samples):
            return progress
        # What ReLU is given, a root mean square: half of it in squares comes out.
        squares = float(progress.state.fit.linearization.gram().diagonal().mean())
        given = math.sqrt(2 * squares / (problem.whole or problem.features.width))
        softest = replace(progress, phase="sharpen", sharpness=self.sharpness[0] / given)
        return self._onward(problem, replace(softest, sharpened=0))

    def _few(self, problem: Problem, samples: int | None) -> bool:
        """Whether many samples have few equations, of random features with kinks and no floor."""
        features = problem.features
        if samples is None or not isinstance(features, RandomFeatures) or problem.drift > 0:
            return False
        kinks = features.activation.name == "relu"
        return kinks and samples >= self.many and problem.ratio(samples) < self.dense

    def _sharpened(self, problem: Problem, progress: Search) -> Search:
        """Go on from where a softplus led, with the next sharper one, or at last with ReLU."""
        before, after = progress.sharpened, progress.sharpened + 1
        if after == len(self.sharpness):
            explored = replace(progress, phase="explore", sharpness=0.0)
            return self._onward(problem, explored)
        sharpness = progress.sharpness * self.sharpness[after] / self.sharpness[before]
        return self._onward(problem, replace(progress, sharpness=sharpness, sharpened=after))

    def _onward(self, problem: Problem, progress: Search) -> Search:
        """Begin a trial at the candidates at hand, as damped as it ended."""
        solver = self._explorer(problem, progress.samples)
        damping = max(LEAST, progress.state.damping)
        state = replace(solver, damping=damping).init(progress.seen(problem), progress.candidates)
        return progress.next_round(state)

    def _tidy(self, problem: Problem, progress: Search) -> Search:
        """Cut to the number at once, or step by step; if unknown, undo signs, merge, bisect."""
        best, samples = progress.led(problem), progress.samples
        x, turned = best.candidates, _turned(best)
        if samples is not None:
            progress = replace(progress, explained=len(x))
            if progress.tidied == 0:
                start = self._cut_to(problem, best, samples)
            elif samples <= len(turned) < len(x):
                start = turned
            else:
                start = self._cut_to(problem, best, (len(x) + samples) // 2)
            return progress.next_round(self._polisher.init(problem, start), phase="tidy")
        while progress.tidied <= len(self.alike):
            i = progress.tidied
            start = turned if i == 0 else merged(x, best.shares, self.alike[i - 1])
            if len(start) < len(x):
                return progress.next_round(self._polisher.init(problem, start), phase="tidy")
            progress = replace(progress, tidied=i + 1)
        too_few = int((dropping(problem, best)[1] >= self.cheap).sum()) - 1
        return self._cut(problem, replace(progress, too_few=too_few))

    def _cut_to(self, problem: Problem, best: Fit, count: int) -> Tensor:
        """Return so many candidates: signs undone, as many merged as may be, cheapest dropped."""
        fit, turned = best, _turned(best)
        if len(turned) >= count:
            fit = fitted(problem, problem.domain.project(turned))
        for cosine in self.twins:
            joined = merged(fit.candidates, fit.shares, cosine)
            if len(joined) >= count:
                fit = fitted(problem, problem.domain.project(joined))
                break
        return without(problem, fit, len(fit.candidates) - count)

    def _after_tidy(self, problem: Problem, progress: Search) -> Search:
        if progress.samples is None:
            progress = progress.kept() if self._holds(progress) else progress
            return self._tidy(problem, replace(progress, tidied=progress.tidied + 1))
        if self._holds(progress):
            done = len(progress.candidates) == progress.samples
            go_on = self._polish if done else self._tidy
            return go_on(problem, progress.kept())
        if progress.tidied == 0:
            return self._tidy(problem, replace(progress, tidied=1))
        # A sample is missing; where, shows in what is left without the surplus.
        misses = progress.misses + self.patience // 5
        return self._explore(problem, replace(progress.kept(), misses=misses, floor=0.0))

    def _cut(self, problem: Problem, progress: Search) -> Search:
        """Bisect on the number of candidates, from one that is known to be too small."""
        count = len(progress.leader.candidates)
        trial = (progress.too_few + count) // 2
        if trial <= progress.too_few:
            return self._polish(problem, progress)
        start = without(problem, progress.led(problem), count - trial)
        return progress.next_round(self._polisher.init(problem, start), phase="cut")

    def _holds(self, progress: Search) -> bool:
        """Whether the weights are still explained with fewer candidates."""
        fit, enough = progress.state.fit, max(self.tolerance, self.above * progress.floor)
        if progress.samples is None:
            return fit.value <= max(enough, 3 * progress.best_residual)
        more = len(fit.candidates) > progress.samples
        return fit.value <= max(enough, progress.best_residual if more else 0.0)

    def _polish(self, problem: Problem, progress: Search) -> Search:
        """Solve once more from the best, with the number of candidates asked for."""
        best = progress.led(problem)
        surplus = len(best.candidates) - (progress.samples or len(best.candidates))
        if surplus <= 0 and best.value <= self.tolerance:
            return replace(progress, outcome=Outcome.CONVERGED)
        state = self._polisher.init(problem, without(problem, best, max(0, surplus)))
        ended = {"best": None, "champion": None, "sharpness": 0.0}
        return progress.next_round(state, phase="polish", **ended)


def softened(problem: Problem, sharpness: float) -> Problem:
    """Return the problem with a softplus of that sharpness in the place of ReLU."""
    return replace(problem, features=problem.features.substituted(softplus(sharpness)))


def _turned(fit: Fit) -> Tensor:
    """Return candidates with flipped signs undone, where one row each makes that possible."""
    return unflipped(fit.candidates, fit.coefficients) if fit.rows == 1 else fit.candidates
