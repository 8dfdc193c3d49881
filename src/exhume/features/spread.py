"""Products with features whose rows are spread over ranks: each has some, and sums are of all."""

from dataclasses import dataclass

from torch import Tensor

from exhume import ranks
from exhume.features import Linearization


@dataclass(frozen=True, eq=False)
class Spread:
    """Products of all ranks together (see `Linearization`); (p, m) are this rank's rows alone."""

    part: Linearization  # of this rank alone

    def gram(self) -> Tensor:
        """Return ΦΦᵀ, (n·k, n·k)."""
        return ranks.total(self.part.gram())

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT, (n·k, m)."""
        return ranks.total(self.part.apply(target))

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return this rank's rows of ΦᵀA."""
        return self.part.combine(coefficients)

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return this rank's rows of Σ_i ∂φ(x_i)[D_i] A_iᵀ."""
        return self.part.push(direction, coefficients)

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_c A_ic · ∂φ(x_i)ᵀ T_c, (n, d)."""
        return ranks.total(self.part.pull(target, coefficients))

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return the derivative of `pull` along D, (n, d)."""
        return ranks.total(self.part.bend(direction, target, coefficients))

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = tr(J_iᵀJ_j)/d, (n, n)."""
        return ranks.total(self.part.curvature(coefficients))
