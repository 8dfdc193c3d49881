"""Random features without an attack: how well labels fit, and what flipped samples explain."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exhume import data, victims
from exhume.checks import whole_number
from exhume.equation.objective import fitted
from exhume.experiments.cells.samples import Samples
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, blocks
from exhume.theory import hermite
from exhume.victims.random_features import ROWS


@dataclass(frozen=True)
class LabelFit(Samples):
    """Fit labels by least squares on random features of any width, also where they do not fit.

    V is that of an `Attack` with the same seed.
    """

    width: int = 1  # p, from 1 on
    activation: str = "relu"  # σ

    def check(self) -> None:
        """Refuse what could not be run, before any work."""
        super().check()
        whole_number("width", self.width)
        named_activation(self.activation)

    def run(self, device: str) -> dict[str, Any]:
        """Fit the labels; `label_error` is ‖Φθ − y‖²/‖y‖² of the least-squares θ."""
        self.check()
        known = self.known()
        inputs, targets = known.inputs.to(device), known.targets.to(device)
        sigma = named_activation(self.activation)
        weights = Seeded(self.width, known.dim, self.seed).to(inputs.device, torch.float64)
        if self.width < known.samples:
            features = sigma.value(inputs @ weights.rows(0, self.width).T)
            left = unexplained(features, targets)
        else:  # the same from the Gram matrix, which wide features add up to block by block
            gram = inputs.new_zeros(known.samples, known.samples)
            for part in blocks(self.width, ROWS):
                phi = sigma.value(inputs @ weights.rows(part.start, part.stop).T)
                gram += phi @ phi.T
            left = unexplained(gram, targets)
        return {"inputs": known.dim, "outputs": known.outputs, "label_error": left}


def unexplained(features: Tensor, targets: Tensor) -> float:
    """Return min_θ ‖Φθ − y‖²/‖y‖², with Φ (n, p), p ≤ n, and y (n, m) in float64.

    Example:
        >>> along, across = torch.eye(2, dtype=torch.float64).split(1, 1)
        >>> unexplained(along, 3 * along + 4 * across)
        0.64
    """
    left, sizes, _ = torch.linalg.svd(features, full_matrices=False)
    span = left[:, sizes > sizes[:1] * max(features.shape) * torch.finfo(features.dtype).eps]
    rest = targets - span @ (span.T @ targets)
    return float(rest.square().sum() / targets.square().sum())


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
        """Return the residual `alone` and `paired` with ±u, and the largest `odd` coefficient.

        That is of σ in Hermite polynomials of the odd orders from 3 to 15.
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
