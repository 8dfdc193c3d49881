"""The relative residual with the coefficients eliminated: value, gradient, Gauss-Newton product.

Where the rule is MARGIN, the samples that act on the weights lie on the margin: with one output,
candidates are held to it by a term beside the residual. (With several it did not help.)
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from exhume.equation.coefficients import Rule, eliminate
from exhume.equation.problem import Problem
from exhume.features import Linearization
from exhume.features.random import RandomLinearization
from exhume.features.replay import Replayed

STIFFNESS = 0.3  # of being off by the whole margin: steers, while the residual still decides


@dataclass(frozen=True, eq=False)
class Slack:
    """The slack says how far candidates are from the margin γ: STIFFNESS · Σ_i w_i (m_i/γ − 1)².

    w_i is the share of candidate i in all multipliers: those without any are left alone.
    """

    weights: Tensor  # STIFFNESS · ‖Δ‖² · w, (n,) float64
    deviation: Tensor  # m_i/γ − 1, (n,) float64, with γ the weighted median of the margins m
    slope: Tensor  # its derivative in the candidates, (n, d)

    @property
    def value(self) -> Tensor:
        """Return the sum in units of ‖Δ‖², to be added to ‖R‖²."""
        return (self.weights * self.deviation.square()).sum()


@dataclass(frozen=True, eq=False)
class Fit:
    """A fit holds everything that is known at one set of candidates."""

    candidates: Tensor  # X, (n, d)
    linearization: Linearization  # features and derivatives at X
    coefficients: Tensor  # A, (n·k, m) float64: the best, or those of a method that has its own
    factor: Tensor  # Cholesky factor of the Gram matrix, float64; empty if A is a method's own
    residual: Tensor  # R = Δ − ΦᵀA, (p, m)
    value: float  # ‖R‖²/‖Δ‖² in [0, 1]
    penalty: float = 0.0  # of the slack, in the same units
    slack: Slack | None = None  # how far candidates are from the margin, where that is asked

    @property
    def cost(self) -> float:
        """Return what a solver lowers."""
        return self.value + self.penalty

    @property
    def eliminated(self) -> bool:
        """Tell whether the coefficients are the best, and not a method's own."""
        return self.factor.numel() > 0

    @cached_property
    def root(self) -> Tensor:
        """Return L⁻¹, (n·k, n·k) float64, with K = LLᵀ: a step takes many products with it.

        Applied twice it keeps digits that K⁻¹ would lose where candidates nearly coincide.
        """
        identity = torch.eye(len(self.factor)).to(self.factor)
        inverse: Tensor = torch.linalg.solve_triangular(self.factor, identity, upper=False)
        return inverse

    @property
    def rows(self) -> int:
        """Return k, the rows of Φ that belong to one candidate."""
        return len(self.coefficients) // len(self.candidates)

    @property
    def shares(self) -> Tensor:
        """Return the coefficients of each candidate in one row, (n, k·m)."""
        return self.coefficients.reshape(len(self.candidates), -1)


def fitted(problem: Problem, candidates: Tensor, near: Fit | None = None) -> Fit:
    """Return the fit with the best coefficients: L(X) = min_A ‖Δ − Φ(X)ᵀA‖² / ‖Δ‖².

    The residual is taken directly, not by cancellation. `near` is a fit of as many candidates
    whose coefficients are a good guess, and stay where they are not the best but its own.
    """
    if near is not None and not near.eliminated:
        return fitted_with(problem, candidates, near.coefficients)
    candidates, linearization = problem.linearize(candidates)
    products = linearization.apply(problem.target.double())
    rows = len(products) // max(1, len(candidates))
    warm = None if near is None else near.coefficients
    weights = problem.target if problem.start is None else problem.target + problem.start
    margin = problem.rule is not Rule.FREE and problem.start is not None
    outputs = linearization.apply(weights.double()) if margin else products
    gram = linearization.gram()
    coefficients, factor = eliminate(problem.rule, gram, products, rows, warm, outputs)
    residual = problem.target - linearization.combine(coefficients)
    size = problem.size
    value = problem.total(residual.double().square().sum()) / size
    if problem.rule is Rule.FREE or rows != 1:
        return Fit(candidates, linearization, coefficients, factor, residual, value.item())
    slack = _slack(weights, linearization, outputs[:, 0], coefficients[:, 0], size)
    left, penalty = torch.stack([value, slack.value / size]).tolist()
    return Fit(candidates, linearization, coefficients, factor, residual, left, penalty, slack)


def _slack(
    weights: Tensor,
    linearization: Linearization,
    outputs: Tensor,
    multipliers: Tensor,
    size: Tensor,
) -> Slack:
    """Margins m = |f| from Φθ = L f, (n,), against their median weighted by |A|; size is ‖Δ‖²."""
    signs = torch.where(outputs < 0, -1.0, 1.0).to(outputs)
    margins, sizes = signs * outputs, multipliers.abs()
    shares = sizes / sizes.sum().clamp_min(torch.finfo(sizes.dtype).tiny)
    order = margins.argsort()
    middle = torch.searchsorted(shares[order].cumsum(0), shares.new_tensor([0.5]))
    level = margins[order[middle.clamp_max(len(order) - 1)]].clamp_min(1e-30)
    slope = linearization.pull(weights, signs[:, None]) / level
    return Slack(STIFFNESS * size * shares, margins / level - 1, slope.to(outputs.dtype))


def fitted_with(problem: Problem, candidates: Tensor, coefficients: Tensor) -> Fit:
    """Return the fit ‖Δ − Φ(X)ᵀA‖² / ‖Δ‖² with coefficients A (n·k, m) of the caller's."""
    candidates, linearization = problem.linearize(candidates)
    coefficients = coefficients.to(candidates.device).double()
    residual = problem.target - linearization.combine(coefficients)
    value = (problem.total(residual.double().square().sum()) / problem.size).item()
    no_factor = coefficients.new_empty(0, 0)
    return Fit(candidates, linearization, coefficients, no_factor, residual, value)


def descent(fit: Fit) -> Tensor:
    """Return JᵀR with J = push(·, A), (n, d), and what pulls candidates to the margin.

    Weights and level of the slack are held; the factor 2/‖Δ‖² is left out.
    """
    pulled = fit.linearization.pull(fit.residual, fit.coefficients)
    if fit.slack is None:
        return pulled
    force = (fit.slack.weights * fit.slack.deviation)[:, None] * fit.slack.slope
    return pulled - force.to(pulled.dtype)


def gradient(problem: Problem, fit: Fit) -> Tensor:
    """Return ∂L/∂X = −(2/‖Δ‖²) JᵀR, (n, d), with weights and level of the slack held."""
    pulled = descent(fit)
    return pulled * (-2 / problem.size).to(pulled.dtype)


def curvature(fit: Fit) -> Tensor:
    """Return the Gauss-Newton matrix averaged over input directions, (n, n), with the slack's."""
    matrix = fit.linearization.curvature(fit.coefficients)
    if fit.slack is None:
        return matrix
    own = fit.slack.weights * fit.slack.slope.square().mean(1)
    return matrix + torch.diag(own)


def gauss_newton(fit: Fit, direction: Tensor) -> Tensor:
    """Return JᵀP⊥J D, (n, d), with J = push(·, A) and P⊥ = I − ΦᵀK⁻¹Φ (Kaufman's form), or I.

    That of the slack is added; the factor 2/‖Δ‖² is left out.
    """
    linearization = fit.linearization
    if isinstance(linearization, Replayed):
        whole = linearization.twice(direction)
    elif isinstance(linearization, RandomLinearization) and fit.eliminated and fit.slack is None:
        whole = linearization.twice(direction, fit.coefficients, fit.root)
    else:
        whole = None
    if whole is not None:
        return whole
    pushed = linearization.push(direction, fit.coefficients)
    if fit.eliminated:
        along = fit.root.T @ (fit.root @ linearization.apply(pushed))
        pushed = pushed - linearization.combine(along)
    product = linearization.pull(pushed, fit.coefficients)
    if fit.slack is None:
        return product
    along = (fit.slack.slope * direction).sum(1)
    return product + ((fit.slack.weights * along)[:, None] * fit.slack.slope).to(product.dtype)
