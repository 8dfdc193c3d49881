"""Ours where the training run is known: least squares on the run itself, from many starts.

Each trial begins elsewhere: at the solution of the lazy equation, at public samples of the same
kind if there are any, or at random. The residual decides: only the samples make the run end where
it did, so a trial that explains the weights ends the search.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import one_hot

from exhume.equation.objective import Fit, fitted_with
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.features.replay import TrainingRun
from exhume.methods.progress import Progress, stream
from exhume.solvers import Outcome, solve
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt


@dataclass(frozen=True, eq=False, kw_only=True)
class Trials(Progress):
    """The progress of this search."""

    state: DampedState
    best: Fit | None = None  # of the best trial that ended


@dataclass(frozen=True, eq=False)
class Replay:
    """Levenberg-Marquardt through the training run."""

    labels: tuple[int, ...] | None = None  # classes of the samples, in any order; tried if None
    public: Tensor | None = None  # inputs of the same kind, (N, d), as starts
    tolerance: float = 1e-10  # relative residual at which the weights count as explained
    trial: int = 60  # most solver steps a trial
    trials: int = 40  # starts before the search gives up
    name: str = "exhume"

    def view(self, problem: Problem) -> Problem:
        """Return the problem unchanged."""
        return problem

    def init(self, problem: Problem, samples: int | None, seed: int) -> Trials:
        """Begin the first trial."""
        if problem.premise is not Premise.REPLAY:
            raise InputError("replay: needs the premise replay, and with it a recipe.")
        if self.labels is not None and samples not in (None, len(self.labels)):
            raise InputError(f"labels: there are {len(self.labels)} for {samples} samples.")
        samples = len(self.labels) if self.labels is not None else samples
        return Trials(seed=seed, samples=samples, state=self._begin(problem, samples, seed, 0))

    def advance(self, problem: Problem, progress: Trials) -> Trials:
        """Take one solver step, or begin the next trial."""
        state = progress.state
        if state.outcome is None and state.steps < self.trial:
            return replace(progress, state=self._solver(problem).step(problem, state))
        if state.outcome is Outcome.CONVERGED:
            return replace(progress, outcome=state.outcome)
        progress = replace(progress, best=self.finish(problem, progress))
        if progress.rounds + 1 >= self.trials:
            return replace(progress, outcome=Outcome.STALLED)
        begun = self._begin(problem, progress.samples, progress.seed, progress.rounds + 1)
        return progress.next_round(begun)

    def finish(self, problem: Problem, progress: Trials) -> Fit:
        """Return the best of all trials."""
        fit, best = progress.state.fit, progress.best
        return fit if best is None or fit.value < best.value else best

    def _solver(self, problem: Problem) -> LevenbergMarquardt:
        tolerance = max(self.tolerance, problem.resolution)
        return LevenbergMarquardt(
            tolerance, damping=0.1, accuracy=1e-3, products=120, patience=6, progress=5e-2
        )

    def _begin(self, problem: Problem, samples: int | None, seed: int, trial: int) -> DampedState:
        """Begin a trial: the next of the label sets that may be, the next kind of start."""
        generator, run = stream(seed, trial), problem.features
        assert isinstance(run, TrainingRun)
        shares = label_shares(problem, self._samples_like(problem, generator))
        sets = self._label_sets(problem, samples, shares, trial)
        labels = sets[trial % len(sets)]
        kinds = ("public", "lazy", "public", "random")
        if self.public is None:
            kinds = ("lazy", "random", "random", "random")
        kind = kinds[(trial // len(sets)) % len(kinds)]
        start = self._start(problem, kind, labels, generator)
        fit = fitted_with(problem, problem.domain.project(start), labels.view(-1, 1))
        return DampedState(fit=fit, damping=0.1)

    def _samples_like(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return inputs at which the network may be looked at: public ones, or random ones."""
        if self.public is not None:
            return self.public.to(problem.target)
        return problem.domain.start(64, problem.dim, generator).to(problem.target)

    def _label_sets(
        self, problem: Problem, samples: int | None, shares: Tensor, trial: int
    ) -> list[Tensor]:
        """Return the labels (n, c) that the samples may have, the likeliest first."""
        classes = len(shares)
        if self.labels is not None:
            return [one_hot(torch.tensor(self.labels), classes).to(problem.target)]
        present = [c for c in shares.argsort(descending=True).tolist() if shares[c] > 0]
        count = samples or len(present) + trial // 8
        present = present[:count]
        splits = itertools.combinations(range(1, count), len(present) - 1)
        counts = [
            [b - a for a, b in itertools.pairwise((0, *cut, count))]
            for cut in itertools.islice(splits, 5000)
        ]
        aim = count * shares[present] / shares[present].sum()
        counts.sort(key=lambda each: float((torch.tensor(each).to(aim) - aim).square().sum()))
        return [
            one_hot(torch.tensor(present).repeat_interleave(torch.tensor(each)), classes).to(
                problem.target
            )
            for each in counts[:12]
        ]

    def _start(
        self, problem: Problem, kind: str, labels: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return candidates (n, d) to begin with."""
        drawn = problem.domain.start(len(labels), problem.dim, generator).to(problem.target)
        if kind == "random":
            return drawn
        if kind == "public":
            assert self.public is not None
            public = self.public.to(problem.target)
            outputs = problem.features.predict(public)
            assert outputs is not None
            chosen = []
            for label in labels:
                fitting = (outputs.argmax(1) == label.argmax()).nonzero()[:, 0].cpu()
                pool = fitting if len(fitting) else torch.arange(len(public))
                chosen.append(int(pool[torch.randint(len(pool), (1,), generator=generator)]))
            return public[chosen]
        run = problem.features
        assert isinstance(run, TrainingRun)
        lazy = replace(problem, features=run.lazy, premise=Premise.CHANGE)
        fit = solve(LevenbergMarquardt(), lazy, drawn, 40).fit
        score = fit.shares.view(len(labels), -1, labels.shape[1]).sum(1) @ labels.double().T
        order = linear_sum_assignment(score.T.cpu().numpy(), maximize=True)[1]
        return fit.candidates[order.tolist()]


def label_shares(problem: Problem, inputs: Tensor) -> Tensor:
    """Return how much each class gained, (c,): Σ_i Σ_t (y_i − p_i) if the last layer has a bias.

    A class that no sample has loses in every step of a cross-entropy, so its share is negative.
    Without a bias it is the last layer's change at the mean of what it is given.
    """
    run = problem.features
    assert isinstance(run, TrainingRun)
    head = run.network.head_weight
    bias = head.removesuffix("weight") + "bias"
    if bias in run.block:
        return (run.trained[bias] - run.initial[bias]).double().cpu()
    with torch.no_grad():
        hidden = run.network.hidden(run.initial, inputs).mean(0)
    return ((run.trained[head] - run.initial[head]) @ hidden).double().cpu()
