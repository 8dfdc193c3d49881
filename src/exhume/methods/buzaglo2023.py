"""KKT reconstruction for several classes and for any loss with weight decay, as published.

Buzaglo et al., "Deconstructing Data Reconstruction: Multiclass, Weight Decay and General Losses".
Several outputs at the margin: A_j = λ_j (e_y − e_k), k the runner-up, with fixed labels. Weights
held by decay: θ = Σ λ_i ∇f(x_i), multipliers of either sign, from N(0, 1), without a penalty. All
else is as in `methods.haim2022`.
"""

from dataclasses import dataclass

from exhume.equation.coefficients import Rule
from exhume.equation.problem import Problem
from exhume.methods import haim2022
from exhume.methods.penalised import Sweep
from exhume.methods.penalties import outputs
from exhume.search.tuning import Range

MULTIPLIER_RATES = Range(1e-4, 1.0, logarithmic=True)  # around the published ones

# Good published runs; for weight decay no step size of the multipliers is published.
SEVERAL_CLASSES = (
    dict(rate=1.36e-3, multiplier_rate=0.479, scale=6.2e-5, threshold=0.203, sharpness=39.5),
    dict(rate=2.4e-4, multiplier_rate=0.951, scale=3.6e-4, threshold=0.040, sharpness=326.0),
)
WEIGHT_DECAY = (
    dict(rate=0.952, scale=0.0197, sharpness=90.0),
    dict(rate=0.872, scale=0.0137, sharpness=107.0),
)


@dataclass(frozen=True)
class Buzaglo2023(haim2022.Haim2022):
    """The published recipe; what is None is tuned."""

    multiplier_rate: float | None = None  # step size of the multipliers
    name: str = "buzaglo2023"

    def check(self, problem: Problem) -> None:
        """Accept every problem: the margin, and free coefficients, for a change of weights too."""

    def sweep(self, problem: Problem) -> Sweep:
        """Return where the published sweeps looked, and good published runs."""
        if problem.rule is Rule.FREE:
            ranges = {name: haim2022.RANGES[name] for name in ("rate", "scale", "sharpness")}
            return ranges | {"multiplier_rate": MULTIPLIER_RATES}, WEIGHT_DECAY
        if outputs(problem) == 1:
            return haim2022.RANGES, haim2022.PUBLISHED
        return haim2022.RANGES | {"multiplier_rate": MULTIPLIER_RATES}, SEVERAL_CLASSES
