"""Random features without an attack: how well labels fit, and what flipped samples explain."""

from dataclasses import dataclass
from typing import Any

import torch

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.experiments.cells.samples import Samples
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, blocks
from exhume.theory import hermite
from exhume.victims.random_features import ROWS


@dataclass(frozen=True)
class LabelFit(Samples):
    """Fit labels by least squares on random features, those of an `Attack` with the same seed."""

    width: int = 1  # p, from 1 on
    activation: str = "relu"  # σ

    def run(self, device: str) -> dict[str, Any]:
        """Fit the labels; `label_error` is ‖Φθ − y‖²/‖y‖² of the least-squares θ."""
        self.check()
        known = self.known()
        inputs, targets = known.inputs.to(device), known.targets.to(device)
        sigma = named_activation(self.activation)
        weights = Seeded(self.width, known.dim, self.seed).to(inputs.device, torch.float64)
        if self.width < known.samples:
            span = sigma.value(inputs @ weights.rows(0, self.width).T)
        else:  # that of the Gram matrix, which wide features add up to block by block
            span = inputs.new_zeros(known.samples, known.samples)
            for part in blocks(self.width, ROWS):
                phi = sigma.value(inputs @ weights.rows(part.start, part.stop).T)
                span += phi @ phi.T
        left, sizes, _ = torch.linalg.svd(span, full_matrices=False)
        left = left[:, sizes > sizes[:1] * max(span.shape) * torch.finfo(span.dtype).eps]
        rest = targets - left @ (left.T @ targets)
        error = float(rest.square().sum() / targets.square().sum())
        return {"inputs": known.dim, "outputs": known.outputs, "label_error": error}


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
        """Return the residual `alone` and `paired` with ±u, and σ's largest `odd` Hermite term."""
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
