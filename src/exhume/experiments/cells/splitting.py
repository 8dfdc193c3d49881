"""A method with splits, without, and with as many candidates from the start, on one victim."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from exhume import data, victims
from exhume.data import Data
from exhume.equation.objective import fitted_with
from exhume.equation.problem import Problem
from exhume.evaluate import score
from exhume.features.activations import softplus
from exhume.methods import seen_by, shen2026, threads_for
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.haim2022 import Haim2022
from exhume.methods.iurada2025 import Iurada2025, Rolling
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import Descending, Penalised
from exhume.methods.penalties import bounds
from exhume.methods.progress import Method, Progress, stream
from exhume.methods.shen2026 import Choice, Penalty, Projection, Shen2026
from exhume.search.split import halves, shared

RULES: tuple[Choice, ...] = ("published", "adaptive")
ARMS = ("base", *(arm for rule in RULES for arm in (f"split, {rule}", f"count of {rule}")))
ALIKE = 0.95  # cosine of a sample that is found: the margin leaves no trace of its norm
TRIALS, PROBE = 9, 4.0  # settings to tune over, and steps of each for a candidate

# How far the check of the predicted decrease splits, as shares of the candidates' median norm: the
# first at which half of them stay clear of the box's bounds. A smaller one would drown in rounding.
EPSILONS = (1e-4, 3e-5, 1e-5)

# Training until weight decay holds the network: θ = Σ λ_i y_i ∇f(x_i), as at the margin.
REST = {"decay": 1e-3, "until": 0.0, "steps": 4000}

# The method without splits, and how its victim is trained: on digits, but for the projection.
CASES: dict[str, tuple[type[Penalised] | type[Iurada2025], dict[str, Any]]] = {
    "margin": (Haim2022, {**REST, "loss": "logistic"}),
    "classes": (Buzaglo2023, {**REST, "loss": "cross_entropy"}),
    "change": (Loo2023, {"until": 1e-6, "lazy": 10.0}),
    "projection": (Iurada2025, {}),
}

Spent = Callable[[Method, Problem, Progress], Progress]  # advances a run until its budget is spent


@dataclass(frozen=True)
class Splitting:
    """Run a method of `CASES` in all `ARMS`, on a budget that is the same on every machine."""

    case: str = "margin"
    steps: int = 1000
    samples: int = 12
    width: int = 200
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Run all, on the processor, whatever the device."""

        def spent(method: Method, problem: Problem, progress: Progress) -> Progress:
            end = progress.total_steps + self.steps
            while progress.outcome is None and progress.total_steps < end:
                progress = method.advance(problem, progress)
            return progress

        return self.compared(spent)

    def posed(self) -> tuple[Problem, Data, int]:
        """Return the problem in float64, its samples, and how many candidates it starts with."""
        if self.case == "projection":
            known = data.sphere(20, self.samples, self.seed)
            width = 4 * known.dim * self.samples
            victim = victims.random_features(known, width, seed=self.seed)
            return victim.problem.to("cpu", torch.float64), known, self.samples
        words: Any = (0, 1, 2) if self.case == "classes" else "parity"
        known = data.load("digits", self.samples, self.seed, classes=words, centre="pixels")
        victim = victims.two_layer(known, self.width, seed=self.seed, **CASES[self.case][1])
        change = self.case == "change"
        problem = victim.posed("all", "final") if change else victim.posed(premise="margin")
        return problem, known, 2 * self.samples

    def compared(self, spent: Spent) -> dict[str, Any]:
        """Return `runs` by arm, and the `predicted` decrease over the measured where base ends."""
        problem, known, count = self.posed()
        kind, tuned = CASES[self.case][0], 0
        options: Any = {"steps": 10**9, "trials": TRIALS, "probe": PROBE}
        base = kind(**options if issubclass(kind, Penalised) else {})  # no tuning in the projection
        problem = seen_by(base, problem)
        if isinstance(base, Penalised):
            trying = base.init(problem, self.samples, self.seed)
            while trying.phase == "tune" and trying.outcome is None:
                trying = base.advance(problem, trying)
            tuned = trying.state.trial

        def go(method: Method, count: int) -> tuple[dict[str, Any], Progress]:
            started = shen2026.begun_with(base, problem, count, self.seed, tuned)
            splits = isinstance(method, Shen2026)
            progress: Progress = shen2026.with_splits(started) if splits else started
            with threads_for(problem, self.samples):
                progress = spent(method, problem, progress)
            fit = method.finish(problem, progress)
            result = score(fit.candidates, known.inputs)
            return {
                "candidates": len(fit.candidates),
                "steps": progress.total_steps,
                "residual": fit.value,
                "cosine": result.cosine,
                "alike": float((result.cosines > ALIKE).double().mean()),
                "error": result.error,
                "recovered": result.recovered,
            }, progress

        alone, at_rest = go(base, count)
        found = {"base": alone}
        for rule in RULES:
            method = Shen2026(base, max(1, alone["steps"] // 4), rule=rule)
            split, control = go(method, count)[0], alone
            if split["candidates"] > count:
                control = go(base, split["candidates"])[0]
            else:
                split = alone  # nothing was split: the same run, but for where its budget ended
            found |= {f"split, {rule}": split, f"count of {rule}": control}
        return {"runs": found, "predicted": predicted_over_measured(base, problem, at_rest)}


def predicted_over_measured(base: Method, problem: Problem, progress: Progress) -> float:
    """½ε² Σ uᵀSu over what the loss does when candidates are split by a small ε.

    The published surrogate of ReLU has a forward and a backward function that do not belong
    together, so no loss has its second derivative: softplus of the same slope takes its place.
    """
    loss: Penalty | Projection
    if isinstance(base, Penalised):
        assert isinstance(progress, Descending)
        settings = base.settings_of(problem, progress)
        slope = settings.sharpness(progress.state.steps)
        smooth = replace(problem, features=problem.features.substituted(softplus(slope)))
        loss = Penalty(smooth, settings, progress)
    else:
        assert isinstance(progress, Rolling)
        sigma = softplus(shen2026.SMOOTHING)
        smooth = replace(problem, features=problem.features.substituted(sigma))
        fit = progress.state.fit
        fit = fitted_with(smooth, fit.candidates, fit.coefficients)
        loss = Projection(smooth, replace(progress, state=replace(progress.state, fit=fit)))
    pairs = shen2026.curvatures(loss, problem.dim, stream(progress.seed, 0))
    size = float(loss.candidates.norm(dim=1).median())
    for share in EPSILONS:
        epsilon, chosen = share * size, torch.arange(len(loss.candidates))
        if isinstance(loss, Penalty):  # its second derivative jumps at the bounds of the box
            low, high = bounds(loss.problem.domain, loss.candidates)
            room = torch.minimum((loss.candidates - low).abs(), (loss.candidates - high).abs())
            chosen = (room > epsilon * pairs.vectors.abs()).all(1).nonzero()[:, 0]
        if 2 * len(chosen) >= len(loss.candidates):
            break
    moved = halves(loss.candidates, chosen, pairs.vectors, epsilon)
    if isinstance(loss, Penalty):
        after = loss.after(moved, chosen)
    else:  # each half keeps half the coefficients of its parent
        parts = shared(fit.shares, chosen).reshape(-1, fit.coefficients.shape[1])
        after = fitted_with(smooth, smooth.domain.project(moved), parts).value
    return 0.5 * epsilon**2 * float(pairs.values[chosen].sum()) / (after - loss.value)
