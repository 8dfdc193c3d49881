r"""Matrix-free Levenberg-Marquardt on the candidates, with the coefficients eliminated.

The residual is R(X) = P⊥_Φ(X) Δ. Kaufman's approximation of its Jacobian is −P⊥ J with
J = push(·, A), and a step solves (Jᵀ P⊥ J + λS) D = JᵀR by conjugate gradients on products.

The preconditioner is the Gauss-Newton matrix averaged over input directions, C ⊗ I_d with
C_ij = tr(J_iᵀJ_j)/d: one n×n factorisation a step. For random features the true matrix is
a sample average around it, of ratio p·m/(d·n), so a handful of products is enough.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.coefficients import factor
from exhume.equation.objective import Fit, curvature, descent, fitted, gauss_newton
from exhume.equation.problem import Problem
from exhume.solvers import Outcome, State

LEAST_DAMPING = 1e-7
"""Damping does not fall below this: steps are Gauss-Newton's long before."""

FLAT = 1e-12
"""A candidate without any curvature is damped as if it had this share of the largest, so that the
preconditioner exists."""

Operator = Callable[[Tensor], Tensor]


def conjugate_gradients(
    operator: Operator,
    right_side: Tensor,
    preconditioner: Operator,
    tolerance: float,
    products: int,
) -> tuple[Tensor, int]:
    """Solve B D = b for a positive definite B, both (n, d), with at most so many products.

    Stops when the preconditioned residual √⟨r, M⁻¹r⟩ has fallen by `tolerance`.

    Returns:
        D and the number of products used.

    Example:
        >>> D, used = conjugate_gradients(lambda q: 2 * q, torch.ones(1, 3), lambda r: r, 1e-6, 9)
        >>> D.tolist(), used
        ([[0.5, 0.5, 0.5]], 1)
    """
    solution = torch.zeros_like(right_side)
    residual = right_side
    search = scaled = preconditioner(residual)
    energy = first = _inner(residual, scaled)
    used = 0
    while used < products and energy > 0:
        used += 1
        image = operator(search)
        length = energy / _inner(search, image)
        solution = solution + length * search
        residual = residual - length * image
        scaled = preconditioner(residual)
        energy, before = _inner(residual, scaled), energy
        if not energy > tolerance**2 * first:  # also where it is not a number
            break
        search = scaled + (energy / before) * search
    return solution, used


def _inner(a: Tensor, b: Tensor) -> float:
    return torch.sum(a * b, dtype=torch.float64).item()


@dataclass(frozen=True, eq=False, kw_only=True)
class DampedState(State):
    """A state of `LevenbergMarquardt`.

    Attributes:
        damping: λ of the next step.
        stalled: consecutive steps without worthwhile progress.
    """

    damping: float
    stalled: int = 0


@dataclass(frozen=True)
class LevenbergMarquardt:
    """The Levenberg-Marquardt method with adaptive damping.

    Attributes:
        tolerance: relative residual at which the run has converged.
        damping: λ at the start, relative to the curvature of each candidate.
        accuracy: of the linear solves.
        products: most products a step.
        patience: steps of less than `progress` relative improvement before it has stalled.
        progress: the improvement of the residual that is worth a step.
    """

    tolerance: float = 1e-12
    damping: float = 1.0
    accuracy: float = 3e-2
    products: int = 40
    patience: int = 8
    progress: float = 3e-3

    def init(self, problem: Problem, candidates: Tensor) -> DampedState:
        """Start at the projected candidates."""
        fit = fitted(problem, problem.domain.project(candidates))
        return self._judged(DampedState(fit=fit, damping=self.damping))

    def step(self, problem: Problem, state: DampedState) -> DampedState:
        """Try one step; keep it and lower the damping (λ/3) if the residual fell, else 4λ."""
        damping = state.damping
        direction, used = damped_step(problem, state.fit, damping, self.accuracy, self.products)
        moved = problem.domain.project(state.fit.candidates + direction)
        fit = fitted(problem, moved, state.fit)
        before = state.fit.cost
        accepted = fit.cost < before
        gain = 1 - fit.cost / before if accepted else 0.0
        return self._judged(
            DampedState(
                fit=fit if accepted else state.fit,
                damping=max(damping / 3, LEAST_DAMPING) if accepted else damping * 4,
                steps=state.steps + 1,
                products=state.products + used,
                stalled=0 if gain > self.progress else state.stalled + 1,
            )
        )

    def _judged(self, state: DampedState) -> DampedState:
        if not math.isfinite(state.fit.value):
            return replace(state, outcome=Outcome.DIVERGED)
        if state.fit.value <= self.tolerance:
            return replace(state, outcome=Outcome.CONVERGED)
        if state.stalled >= self.patience:
            return replace(state, outcome=Outcome.STALLED)
        return state


def damped_step(
    problem: Problem, fit: Fit, damping: float, accuracy: float, products: int
) -> tuple[Tensor, int]:
    """Return D with (JᵀP⊥J + λS) D = JᵀR in the tangent space, S = diag(C).

    Returns:
        D (n, d) and the number of products used.
    """
    domain, candidates = problem.domain, fit.candidates
    mean = curvature(fit)
    scale = mean.diagonal().clamp_min(FLAT * mean.diagonal().max())
    lower = factor(mean + damping * torch.diag(scale))
    damp = (damping * scale)[:, None].to(candidates.dtype)
    inverse = torch.cholesky_inverse(lower).to(candidates.dtype)

    pulled = descent(fit)

    def tangent(direction: Tensor) -> Tensor:
        return domain.tangent(candidates, direction, pulled)

    def operator(direction: Tensor) -> Tensor:
        return tangent(gauss_newton(fit, direction)) + damp * direction

    def preconditioner(residual: Tensor) -> Tensor:
        return tangent(inverse @ residual)

    return conjugate_gradients(operator, tangent(pulled), preconditioner, accuracy, products)
