"""The relative residual with the coefficients eliminated: value, gradient, Gauss-Newton product."""

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.coefficients import eliminate
from exhume.features import Linearization
from exhume.problem import Problem


@dataclass(frozen=True, eq=False)
class Point:
    """Everything known at one set of candidates.

    Attributes:
        candidates: X, (n, d).
        linearization: features and derivatives at X.
        coefficients: A, (n·k, m) float64: the best, or those of a method that has its own.
        factor: Cholesky factor of the Gram matrix, (n·k, n·k) float64; empty where the
            coefficients are a method's own.
        residual: R = Δ − ΦᵀA, (p, m).
        value: ‖R‖²/‖Δ‖² in [0, 1].
    """

    candidates: Tensor
    linearization: Linearization
    coefficients: Tensor
    factor: Tensor
    residual: Tensor
    value: float

    @property
    def eliminated(self) -> bool:
        """Whether the coefficients are the best, and not a method's own."""
        return self.factor.numel() > 0

    @property
    def rows(self) -> int:
        """k, the rows of Φ that belong to one candidate."""
        return len(self.coefficients) // len(self.candidates)

    @property
    def shares(self) -> Tensor:
        """The coefficients of each candidate in one row, (n, k·m)."""
        return self.coefficients.reshape(len(self.candidates), -1)


def evaluate(problem: Problem, candidates: Tensor, near: Point | None = None) -> Point:
    """L(X) = min_A ‖Δ − Φ(X)ᵀA‖² / ‖Δ‖², with the residual taken directly, not by cancellation.

    Args:
        problem: with its rule for A.
        candidates: X, (n, d).
        near: a point with as many candidates, whose coefficients are a good guess.
    """
    candidates = candidates.to(problem.features.device, problem.features.dtype)
    linearization = problem.features.linearize(candidates)
    products = linearization.apply(problem.target.double())
    rows = len(products) // max(1, len(candidates))
    warm = None if near is None else near.coefficients
    coefficients, factor = eliminate(problem.rule, linearization.gram(), products, rows, warm)
    residual = problem.target - linearization.combine(coefficients)
    value = (residual.double().square().sum() / problem.target.double().square().sum()).item()
    return Point(candidates, linearization, coefficients, factor, residual, value)


def at(problem: Problem, candidates: Tensor, coefficients: Tensor) -> Point:
    """‖Δ − Φ(X)ᵀA‖² / ‖Δ‖² with coefficients A (n·k, m) of the caller's."""
    candidates = candidates.to(problem.features.device, problem.features.dtype)
    coefficients = coefficients.to(candidates.device).double()
    linearization = problem.features.linearize(candidates)
    residual = problem.target - linearization.combine(coefficients)
    value = (residual.double().square().sum() / problem.target.double().square().sum()).item()
    return Point(
        candidates, linearization, coefficients, coefficients.new_empty(0, 0), residual, value
    )


def gradient(problem: Problem, point: Point) -> Tensor:
    """∂L/∂X = −(2/‖Δ‖²) pull(R, A), (n, d): A is optimal, so its change does not count."""
    scale = -2 / problem.target.double().square().sum()
    pulled = point.linearization.pull(point.residual, point.coefficients)
    return pulled * scale.to(pulled.dtype)


def gauss_newton(point: Point, direction: Tensor) -> Tensor:
    """JᵀP⊥J D, (n, d): the Gauss-Newton product with the coefficients eliminated.

    J = push(·, A) and P⊥ = I − ΦᵀK⁻¹Φ (Kaufman's form); the factor 2/‖Δ‖² is left out.
    """
    linearization = point.linearization
    pushed = linearization.push(direction, point.coefficients)
    inside = torch.cholesky_solve(linearization.apply(pushed), point.factor)
    return linearization.pull(pushed - linearization.combine(inside), point.coefficients)
