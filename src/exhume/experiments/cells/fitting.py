"""Label fitting alone: how well random features of a width fit their training labels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exhume.checks import whole_number
from exhume.experiments.cells.samples import Samples
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, blocks
from exhume.victims.random_features import ROWS


@dataclass(frozen=True)
class LabelFit(Samples):
    """Fit labels by least squares on random features of any width, also where they do not fit.

    V is that of an `Attack` with the same seed.

    Attributes:
        width: p, from 1 on.
        activation: σ.
    """

    width: int = 1
    activation: str = "relu"

    def check(self) -> None:
        """Refuse what could not be run, before any work."""
        super().check()
        whole_number("width", self.width)
        named_activation(self.activation)

    def run(self, device: str) -> dict[str, Any]:
        """Fit the labels.

        Returns:
            `inputs` (d), `outputs` (m), and `label_error`: ‖Φθ − y‖²/‖y‖² of the least-squares θ.
        """
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
