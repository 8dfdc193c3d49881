"""A method with splits, without, and with as many candidates from the start, on one victim."""

from dataclasses import dataclass
from typing import Any

import torch

from exhume import data, victims
from exhume.data import Data
from exhume.equation.problem import Problem
from exhume.evaluate import score
from exhume.methods import seen_by, shen2026, threads_for
from exhume.methods.buzaglo2023 import Buzaglo2023
from exhume.methods.exhume import softened
from exhume.methods.haim2022 import Haim2022
from exhume.methods.loo2023 import Loo2023
from exhume.methods.penalised import Descending, Penalised
from exhume.methods.penalties import bounds
from exhume.methods.progress import Method, Progress, stream
from exhume.methods.shen2026 import Choice, Penalty, Shen2026
from exhume.search.split import halves

RULES: tuple[Choice, ...] = ("published", "adaptive")
ARMS = ("base", *(arm for rule in RULES for arm in (f"split, {rule}", f"count of {rule}")))
ALIKE = 0.95  # cosine of a sample that is found: the margin leaves no trace of its norm
TRIALS, PROBE = 9, 4.0  # settings to tune over, and steps of each for a candidate

# How far the check of the predicted decrease splits, as shares of the candidates' median norm: the
# first at which half of them stay clear of the box's bounds. A smaller one would drown in rounding.
EPSILONS = (1e-4, 3e-5, 1e-5)

# Training until weight decay holds the network: θ = Σ λ_i y_i ∇f(x_i), as at the margin.
REST = {"decay": 1e-3, "until": 0.0, "steps": 4000}

# The method without splits, and how its victim is trained.
CASES: dict[str, tuple[type[Penalised], dict[str, Any]]] = {
    "margin": (Haim2022, {**REST, "loss": "logistic"}),
    "classes": (Buzaglo2023, {**REST, "loss": "cross_entropy"}),
    "change": (Loo2023, {"until": 1e-6, "lazy": 10.0}),
}


@dataclass(frozen=True)
class Splitting:
    """Run a method of `CASES` in all `ARMS`, on a budget that is the same on every machine."""

    case: str = "margin"
    steps: int = 1000
    samples: int = 12
    width: int = 200
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Return `runs` by arm, and the `predicted` decrease over the measured where base ends.

        All are on the processor, whatever the device.
        """
        problem, known = self.posed()
        kind, count = CASES[self.case][0], 2 * self.samples
        options: Any = {"steps": 10**9, "trials": TRIALS, "probe": PROBE}
        base = kind(**options)
        problem = seen_by(base, problem)
        trying = base.init(problem, self.samples, self.seed)
        while trying.phase == "tune" and trying.outcome is None:
            trying = base.advance(problem, trying)
        tuned = trying.state.trial

        def go(method: Method, count: int) -> tuple[dict[str, Any], Progress]:
            started = shen2026.begun_with(base, problem, count, self.seed, tuned)
            splits = isinstance(method, Shen2026)
            progress: Progress = shen2026.with_splits(started) if splits else started
            end = progress.total_steps + self.steps
            with threads_for(problem, self.samples):
                while progress.outcome is None and progress.total_steps < end:
                    progress = method.advance(problem, progress)
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
        assert isinstance(at_rest, Descending)
        return {"runs": found, "predicted": predicted_over_measured(base, problem, at_rest)}

    def posed(self) -> tuple[Problem, Data]:
        """Return the problem in float64, and its samples."""
        words: Any = (0, 1, 2) if self.case == "classes" else "parity"
        known = data.load("digits", self.samples, self.seed, classes=words, centre="pixels")
        victim = victims.two_layer(known, self.width, seed=self.seed, **CASES[self.case][1])
        change = self.case == "change"
        problem = victim.posed("all", "final") if change else victim.posed(premise="margin")
        return problem, known


def predicted_over_measured(base: Penalised, problem: Problem, progress: Descending) -> float:
    """½ε² Σ uᵀSu over what the loss does when candidates are split by a small ε.

    The published surrogate of ReLU has a forward and a backward function that do not belong
    together, so no loss has its second derivative: softplus of the same slope takes its place.
    """
    settings = base.settings_of(problem, progress)
    loss = Penalty(softened(problem, settings.sharpness(progress.state.steps)), settings, progress)
    pairs = shen2026.curvatures(loss, problem.dim, stream(progress.seed, 0))
    size = float(loss.candidates.norm(dim=1).median())
    low, high = bounds(problem.domain, loss.candidates)  # where the second derivative jumps
    room = torch.minimum((loss.candidates - low).abs(), (loss.candidates - high).abs())
    for share in EPSILONS:
        epsilon = share * size
        chosen = (room > epsilon * pairs.vectors.abs()).all(1).nonzero()[:, 0]
        if 2 * len(chosen) >= len(loss.candidates):
            break
    after = loss.after(halves(loss.candidates, chosen, pairs.vectors, epsilon), chosen)
    return 0.5 * epsilon**2 * float(pairs.values[chosen].sum()) / (after - loss.value)
