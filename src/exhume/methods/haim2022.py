"""KKT reconstruction, as published: a network of one output, trained to the margin.

Haim et al., "Reconstructing Training Data from Trained Neural Networks". At the margin the
weights are θ = Σ λ_i y_i ∇f(x_i), λ_i ≥ 0. Twice as many candidates as samples, at a small scale,
half of them with the label −1; multipliers U(0, 1); momentum 0.9 on the loss of `methods.penalties`
with the box, a push for small multipliers, and a ReLU whose slope is sigmoid(αz).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exhume.equation.coefficients import Rule
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods.penalised import Penalised, Sweep
from exhume.methods.penalties import Hyperparameters, outputs
from exhume.search.tuning import Range

PUSH, MULTIPLIER_RATE = 5.0, 1e-4  # published: weight of multipliers below the threshold, step size

RANGES = {  # of the published sweep
    "rate": Range(1e-5, 1.0, logarithmic=True),
    "scale": Range(1e-6, 0.1, logarithmic=True),
    "threshold": Range(0.01, 0.5),
    "sharpness": Range(10.0, 500.0),
}
PUBLISHED = {  # good published runs of 50,000 steps, by name: presets, which the tuner tries first
    name: dict(zip(RANGES, values, strict=True))
    for name, values in {
        "b9": (0.5549, 8.857e-4, 0.4983, 19.14),  # CIFAR-10, vehicles against animals
        "k60": (0.3462, 4.474e-3, 0.4936, 21.68),  # the same
        "kcf9": (0.03052, 3.498e-2, 0.4471, 149.9),  # MNIST, odd against even
        "rbij": (0.2821, 1.742e-3, 0.4153, 19.21),  # the same
    }.items()
}


@dataclass(frozen=True)
class Haim2022(Penalised):
    """The published recipe; what is None is tuned."""

    rate: float | None = None  # step size of the candidates
    scale: float | None = None  # standard deviation of the candidates at the start
    threshold: float | None = None  # below this a multiplier is pushed up
    sharpness: float | None = None  # α of the surrogate
    multiplier_rate: float | None = MULTIPLIER_RATE  # step size of the multipliers
    name: str = "haim2022"

    def check(self, problem: Problem) -> None:
        """Refuse all but one output, trained to the margin."""
        if problem.rule is not Rule.MARGIN:
            raise InputError(
                "haim2022 is for weights at the margin (premise margin); use buzaglo2023 where "
                "decay holds them (premise decay), or loo2023 for a change (premise change)."
            )
        if outputs(problem) != 1:
            has = outputs(problem)
            raise InputError(f"haim2022 is for one output, but this has {has}; use buzaglo2023.")

    def sweep(self, problem: Problem) -> Sweep:
        """Return where the published sweep looked, and good published runs."""
        return RANGES, tuple(PUBLISHED.values())

    def hyperparameters(self, problem: Problem, values: Mapping[str, float]) -> Hyperparameters:
        """Return them with the published penalties: none for multipliers of either sign."""
        return Hyperparameters(
            values["rate"],
            self.multiplier_rate or values.get("multiplier_rate", MULTIPLIER_RATE),
            values["scale"],
            lambda step: values["sharpness"],
            threshold=values.get("threshold", 0.0),
            push=PUSH if problem.rule is Rule.MARGIN else 0.0,
            draw=torch.rand if problem.rule is Rule.MARGIN else torch.randn,
        )
