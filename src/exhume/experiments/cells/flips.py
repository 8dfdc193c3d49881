"""Signs: what is left of the weights when samples are replaced by their negatives."""

from dataclasses import dataclass
from typing import Any

import torch

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.theory import hermite


@dataclass(frozen=True)
class Flips:
    """Explain random features by their samples with half of them negated.

    With σ(−z) = σ(z) − z the weights change by −V Σ a_i x_i over the flipped, which two candidates
    ±u, u along that sum, make up for. The ratio is p/(d·n).
    """

    activation: str = "relu"
    dim: int = 30
    samples: int = 8
    ratio: float = 6.0
    seed: int = 0

    def run(self, device: str) -> dict[str, Any]:
        """Evaluate the flipped samples.

        Returns:
            `alone`, the residual with half of the samples flipped; `paired`, the same with ±u
            added; `odd`, the largest Hermite coefficient of σ of an odd order from 3 to 15.
        """
        known = data.sphere(self.dim, self.samples, self.seed)
        width = round(self.ratio * self.dim * self.samples)
        victim = victims.random_features(known, width, self.activation, self.seed)
        problem = victim.problem.to(device, torch.float64)
        coefficients = fitted(problem, known.inputs).coefficients.cpu()
        flipped = known.inputs.clone()
        chosen = slice(0, self.samples // 2)
        flipped[chosen] *= -1
        u = (coefficients[chosen] * known.inputs[chosen]).sum(0, keepdim=True)
        u *= self.dim**0.5 / u.norm()
        odd = hermite.coefficients(self.activation, 15).values[3::2]
        return {
            "alone": fitted(problem, flipped).value,
            "paired": fitted(problem, torch.cat([flipped, u, -u])).value,
            "odd": float(odd.abs().max()),
        }
