"""KKT reconstruction for several classes and for any loss with weight decay, as published.

Buzaglo et al., "Deconstructing Data Reconstruction: Multiclass, Weight Decay and General Losses".
Several outputs at the margin: A_j = λ_j (e_y − e_k), k the runner-up, with fixed labels. Weights
held by decay: θ = Σ λ_i ∇f(x_i), multipliers of either sign, from N(0, 1), without a penalty. All
else is as in `methods.haim2022`.
"""

from dataclasses import dataclass

from exhume.equation.coefficients import Rule
from exhume.equation.problem import Premise, Problem
from exhume.methods import haim2022
from exhume.methods.penalised import Sweep
from exhume.methods.penalties import outputs
from exhume.search.tuning import Range

COUNT = 1000  # candidates of the published runs
MULTIPLIER_RATES = Range(1e-4, 1.0, logarithmic=True)  # around the published ones

# Good published runs of 50,000 steps, by name: presets, which the tuner tries first
SEVERAL_CLASSES = {
    "classes1": dict(
        rate=1.362e-3, scale=6.228e-5, threshold=0.2032, sharpness=39.52, multiplier_rate=0.4793
    ),
    "classes2": dict(
        rate=2.420e-4, scale=3.605e-4, threshold=0.0401, sharpness=326.5, multiplier_rate=0.9513
    ),
}
WEIGHT_DECAY = {
    "decay1": dict(rate=0.9518, scale=1.975e-2, sharpness=90.3, multiplier_rate=1e-4),
    "decay2": dict(rate=0.8715, scale=1.365e-2, sharpness=107.4, multiplier_rate=1e-4),
}
PUBLISHED = haim2022.PUBLISHED | SEVERAL_CLASSES | WEIGHT_DECAY


@dataclass(frozen=True)
class Buzaglo2023(haim2022.Haim2022):
    """The published recipe; what is None is tuned."""

    multiplier_rate: float | None = None  # step size of the multipliers; 1e-4 under weight decay
    name: str = "buzaglo2023"

    def check(self, problem: Problem) -> None:
        """Accept every problem: the margin, and free coefficients, for a change of weights too."""

    def sweep(self, problem: Problem) -> Sweep:
        """Return where the published sweeps looked, and good published runs."""
        if problem.rule is Rule.FREE:
            ranges = {name: haim2022.RANGES[name] for name in ("rate", "scale", "sharpness")}
            if problem.premise is not Premise.DECAY:  # nothing is published of a change of weights
                ranges["multiplier_rate"] = MULTIPLIER_RATES
            return ranges, tuple(WEIGHT_DECAY.values())
        if outputs(problem) == 1:
            return super().sweep(problem)
        ranges = haim2022.RANGES | {"multiplier_rate": MULTIPLIER_RATES}
        return ranges, tuple(SEVERAL_CLASSES.values())

    def pace(self, problem: Problem, count: int) -> float:
        """Return count/1000 for several classes, up to 1: their published steps are that large.

        ‖t − ΦᵀΛ/s‖² bends along n multipliers together by about n‖φ‖²/s², and s = n: fewer
        candidates than the published ones can bear a step size that is smaller in proportion.
        """
        several = problem.rule is Rule.MARGIN and outputs(problem) > 1
        return min(1.0, count / COUNT) if several else 1.0
