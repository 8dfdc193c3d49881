"""Features: what one candidate would leave in the weights.

Everything a solver needs is a sum over the p rows of the target (see `Linearization`), so the
same interface serves features in memory, regenerated block by block, or read from a file.
"""

from typing import Protocol, Self

import torch
from torch import Tensor

from exhume.features.activations import Activation

NO_NORM = "A sample's norm leaves no trace in these features; it is assumed, not found."
WEAK_SIGN = "A sample and its negative leave nearly the same trace; the sign is least certain."
NO_SIGN = "A sample and its negative leave the same trace; the sign cannot be found."


class Linearization(Protocol):
    """Features Φ (n·k, p) of n candidates and their derivative are known by products only.

    Shapes: A (n·k, m) coefficients, T (p, m) a target or residual, D (n, d) a direction in the
    candidates. Reductions over p return float64; what stays in p has the features' own dtype.
    """

    def gram(self) -> Tensor:
        """Return ΦΦᵀ, (n·k, n·k)."""

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT, (n·k, m), with the products taken in the dtype of T."""

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return ΦᵀA, (p, m)."""

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_i ∂φ(x_i)[D_i] A_iᵀ, (p, m): the Jacobian of ΦᵀA in the candidates, times D."""

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_c A_ic · ∂φ(x_i)ᵀ T_c, (n, d): the transpose of `push`."""

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_c A_ic · ∂²φ(x_i)[D_i]ᵀ T_c, (n, d): the derivative of `pull` along D.

        T and A are held fixed. A row depends on its own direction alone, so each is a product with
        that candidate's Hessian of ⟨ΦᵀA, T⟩.
        """

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = tr(J_iᵀJ_j)/d, (n, n), with J_i = push restricted to candidate i.

        It is the solver's damping and preconditioner; where d > 32 an unbiased estimate will do.
        """


class Features(Protocol):
    """Features map candidates to rows Φ, and are linearised where the caller says.

    Classes that inherit from it have the defaults below; others need all of it.
    """

    @property
    def name(self) -> str:
        """Say what they are, for a report."""

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Say, a sentence each, what of a sample these features cannot show."""
        return ()

    @property
    def dim(self) -> int:
        """Return d, the number of entries of one candidate."""

    @property
    def width(self) -> int:
        """Return p, the number of rows of the target."""

    @property
    def outputs(self) -> int:
        """Return c, the outputs whose gradients are a candidate's rows; 0 for activations."""
        return 0

    @property
    def patches(self) -> tuple[int, int] | None:
        """Return height and width of patches of an image whose places these features hardly show.

        None where there are none, or where places show as much as what is there.
        """
        return None

    @property
    def device(self) -> torch.device:
        """Return where the candidates live."""

    @property
    def dtype(self) -> torch.dtype:
        """Return in which precision the candidates live."""

    def linearize(self, candidates: Tensor) -> Linearization:
        """Return features and derivatives at n candidates (n, d)."""

    def predict(self, candidates: Tensor, factor: float = 1.0) -> Tensor | None:
        """Return f(x; factor · θ), (n, c), at the last point θ; None without a whole network."""
        return None

    def moment(self, weights: Tensor, directions: Tensor) -> Tensor | None:
        """Return M Q, (d, k), for a symmetric M(w) whose extreme eigenvectors point at samples.

        M is linear in w (p,), a column of the target or of a residual, and a mean over rows. None
        where the features have no such moment: the search then starts at random.
        """
        return None

    def restrict(self, basis: Tensor) -> Self:
        """Return the features z ↦ φ(Uz), of coordinates z (r,) in the span of U (d, r)."""

    def substituted(self, activation: Activation) -> Self:
        """Return the same features with that activation, a surrogate, for every ReLU."""

    def leaky(self) -> Self:
        """Return the same with the published slope of ReLU, where slopes are written by hand."""
        return self

    def exact(self) -> Self:
        """Return the same features with every product in full precision."""
        return self

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same features elsewhere."""

    def resident(self) -> Self:
        """Return the same features with as much of them in memory as fits, for many products."""
        return self

    def share(self, index: int, count: int) -> tuple[Self, list[slice]] | None:
        """Return one of `count` shares of these features, and which rows of the target it has.

        The shares are of about the same size. None where the features cannot be divided.
        """
        return None
