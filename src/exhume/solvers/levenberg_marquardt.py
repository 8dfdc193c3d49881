r"""Matrix-free Levenberg-Marquardt on the candidates, with the coefficients eliminated.

The residual is R(X) = P⊥_Φ(X) Δ. Kaufman's approximation of its Jacobian is −P⊥ J with
J = push(·, A), and a step solves (Jᵀ P⊥ J + λS) D = JᵀR by conjugate gradients on products.

The preconditioner is the Gauss-Newton matrix averaged over input directions, C ⊗ I_d with
C_ij = tr(J_iᵀJ_j)/d: one n×n factorisation a step. From step to step B = JᵀP⊥J changes little: with
directions Q of earlier solutions, and BQ, the next system B + λS is nearly solved in their span.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from exhume import ranks
from exhume.equation.coefficients import factor
from exhume.equation.objective import Fit, curvature, descent, fitted, gauss_newton
from exhume.equation.problem import Problem
from exhume.features.replay import Replayed
from exhume.solvers import PASSING, Outcome, State, judged
from exhume.solvers.budget import spent

LEAST_DAMPING = 1e-7  # steps are Gauss-Newton's long before
FLAT = 1e-12  # share of the largest curvature that all have at least: else nothing preconditions
KEPT = 1024  # directions, at most: of more, the oldest are of a matrix that has changed
NUMBERS = 2**25  # in all of them, at most: 512 MiB in float64, with their images
# Share of the residual that a step must take off for its Jacobian to serve the next, too: making
# one takes as long as ten such steps, and ten at that share take off nine tenths
CHORD = 0.2
DISTINCT = 1e-6  # share of the largest ⟨q, Aq⟩ below which a direction repeats others

Operator = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]  # a direction q and its image Bq, both (n, d), with ⟨q, Bq⟩ = 1


def normalised(direction: Tensor, image: Tensor) -> Pair:
    """Return the pair with ⟨q, Bq⟩ = 1; of a direction that the matrix does not see, zeros."""
    size = (direction * image).sum(dtype=torch.float64)
    least = torch.finfo(direction.dtype).tiny
    scale = torch.where(size > least, size.clamp_min(least).rsqrt(), 0.0).to(direction)
    return scale * direction, scale * image


def newest(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return the pairs that are worth keeping."""
    return tuple(pairs[-min(KEPT, NUMBERS // max(1, pairs[0][0].numel())) :]) if pairs else ()


def deflated(
    base: Operator, pairs: Sequence[Pair], damped: Operator, tangent: Operator
) -> Operator:
    """Return the preconditioner QQᵀ + (I − QQᵀA) M (I − AQQᵀ), for a base M and QᵀAQ = I.

    `damped` is λS. On the span of Q it is the inverse of A, and elsewhere close to M.
    """
    if not pairs:
        return base
    along = [tangent(direction) for direction, _ in pairs]
    every = torch.stack([q.flatten() for q in along])  # (k, n·d)
    images = torch.stack(
        [(image + damped(q)).flatten() for q, (_, image) in zip(along, pairs, strict=True)]
    )
    inner = (every @ images.T).double()
    sizes, mixed = torch.linalg.eigh((inner + inner.T) / 2)
    apart = sizes > DISTINCT * sizes[-1]
    mixed = (mixed[:, apart] / sizes[apart].sqrt()).to(every)
    every, images = mixed.T @ every, mixed.T @ images

    def inverse(residual: Tensor) -> Tensor:
        inside = every @ residual.flatten()
        outside = base(residual - (inside @ images).view_as(residual))
        inside = inside - images @ outside.flatten()
        result: Tensor = outside + (inside @ every).view_as(residual)
        return result

    return inverse


class Metric(Protocol):
    """A metric is a covariance S (d, d), known by its powers."""

    def power(self, rows: Tensor, exponent: float) -> Tensor:
        """Return each row x of (n, d) as S^exponent x."""


def conjugate_gradients(
    operator: Operator,
    right_side: Tensor,
    preconditioner: Operator,
    tolerance: float,
    products: int,
    path: list[Tensor] | None = None,
) -> tuple[Tensor, int]:
    """Solve B D = b for a positive definite B, both (n, d), with at most so many products.

    Stops when the preconditioned residual √⟨r, M⁻¹r⟩ has fallen by `tolerance`, or the run's budget
    is spent, and returns how many products were used, too. The path is given what was reached after
    1, 2, 4, 8, … of them.
    """
    solution, residual = torch.zeros_like(right_side), right_side
    search = scaled = preconditioner(residual)
    energy = first = ranks.agreed(_inner(residual, scaled))
    used = 0
    while used < products and energy > 0 and not (used and spent()):
        used += 1
        image = operator(search)
        along = ranks.agreed(_inner(search, image))
        if not along > 0:  # the matrix does not see this direction, or nothing that is finite
            break
        length = energy / along
        solution = solution + length * search
        if path is not None and used & (used - 1) == 0:
            path.append(solution)
        residual = residual - length * image
        scaled = preconditioner(residual)
        energy, before = ranks.agreed(_inner(residual, scaled)), energy
        if not energy > tolerance**2 * first:  # also where it is not a number
            break
        search = scaled + (energy / before) * search
    return solution, used


def _inner(a: Tensor, b: Tensor) -> float:
    return torch.sum(a * b, dtype=torch.float64).item()


@dataclass(frozen=True, eq=False, kw_only=True)
class DampedState(State):
    """A state of `LevenbergMarquardt`."""

    damping: float  # λ of the next step
    stalled: int = 0  # consecutive steps without worthwhile progress
    effort: int = 1  # how many times the products of a step the next may take, where that varies
    # what earlier linear solutions found; a run that is resumed begins without
    pairs: tuple[Pair, ...] = field(default=(), metadata=PASSING)


@dataclass(frozen=True)
class LevenbergMarquardt:
    """The Levenberg-Marquardt method with adaptive damping."""

    tolerance: float = 1e-12  # relative residual at which the run has converged
    damping: float = 1.0  # λ at the start, relative to the curvature of each candidate
    accuracy: float = 3e-2  # of the linear solves
    products: int = 40  # at most, a step
    patience: int = 8  # steps of less relative improvement than `progress` before it has stalled
    progress: float = 3e-3  # the improvement of the residual that is worth a step
    enough: float = 0.0  # residual from which a step that does not halve it is the last
    metric: Metric | None = None  # what is damped less: the covariance of samples, the same in all
    efforts: int = 1  # times as many products, at most, where steps are nearly linear
    halting: bool = False  # whether a step may end on the way to it, where that lowers more
    recycling: bool = False  # whether linear solutions begin with what earlier ones found
    chords: bool = False  # whether a Jacobian that is kept serves again while it serves well

    def init(self, problem: Problem, candidates: Tensor) -> DampedState:
        """Start at the projected candidates."""
        fit = fitted(problem, problem.domain.project(candidates))
        return judged(DampedState(fit=fit, damping=self.damping), self.tolerance)

    def step(self, problem: Problem, state: DampedState) -> DampedState:
        """Try one step; keep it and lower the damping (λ/3) if the residual fell, else 4λ."""
        damping = state.damping
        path: list[Tensor] | None = [] if self.halting else None
        most = state.effort * self.products
        pairs = list(state.pairs) if self.recycling else None
        direction, used = damped_step(
            problem, state.fit, damping, self.accuracy, most, self.metric, path, pairs
        )
        moved = problem.domain.project(state.fit.candidates + direction)
        fit, before = fitted(problem, moved, state.fit), state.fit.cost
        whole = fit
        for shorter in reversed(path or ()):
            if shorter is direction:
                continue
            if spent():
                break
            moved = problem.domain.project(state.fit.candidates + shorter)
            other = fitted(problem, moved, state.fit)
            if fit.cost < before and not other.cost < fit.cost:
                break
            fit = fit if fit.cost <= other.cost else other  # also where it is not a number
        accepted, effort = fit.cost < before, 1
        if accepted and fit is not whole:
            damping *= 6  # twice as much for the next step
        elif accepted and used == most:  # nearly linear: what is missing is a better solution
            effort = min(2 * state.effort, self.efforts)
        gain = 1 - fit.cost / before if accepted else 0.0
        stalled = 0 if gain > self.progress else state.stalled + 1
        last = accepted and fit.cost <= self.enough and gain < 0.5
        at, reached = state.fit.linearization, fit.linearization
        if isinstance(at, Replayed) and isinstance(reached, Replayed):
            if at.borrowed and not accepted:  # it was not the step that was too long
                at.give_back()
                return replace(state, steps=state.steps + 1, products=state.products + used)
            if self.chords and gain > CHORD:
                reached.borrow(at)
        state = DampedState(
            fit=fit if accepted else state.fit,
            damping=max(damping / 3, LEAST_DAMPING) if accepted else damping * 4,
            steps=state.steps + 1,
            products=state.products + used,
            stalled=stalled,
            effort=effort,
            outcome=Outcome.STALLED if last or stalled >= self.patience else None,
            pairs=newest(pairs or ()),
        )
        return judged(state, self.tolerance)


def damped_step(
    problem: Problem,
    fit: Fit,
    damping: float,
    accuracy: float,
    products: int,
    metric: Metric | None = None,
    path: list[Tensor] | None = None,
    pairs: list[Pair] | None = None,
) -> tuple[Tensor, int]:
    """Return D (n, d) with (JᵀP⊥J + λS) D = JᵀR in the tangent space, and how many products.

    S is diag(C), times the inverse of the metric where there is one. The pairs of earlier solutions
    precondition, and those of this one are added to them.
    """
    candidates, mean = fit.candidates, curvature(fit)
    scale = mean.diagonal().clamp_min(FLAT * mean.diagonal().max())
    lower = factor(mean + damping * torch.diag(scale))
    damp = (damping * scale)[:, None].to(candidates.dtype)
    inverse = torch.cholesky_inverse(lower).to(candidates.dtype)
    pulled = descent(fit)
    tangent = problem.domain.tangent(candidates, pulled)

    def damped(direction: Tensor) -> Tensor:
        return damp * (direction if metric is None else metric.power(direction, -1))

    def operator(direction: Tensor) -> Tensor:
        product = gauss_newton(fit, direction)
        if pairs is not None:
            pairs.append(normalised(direction, product))
        if metric is None:
            return tangent(product) + damped(direction)
        return tangent(product + damped(direction))

    def averaged(residual: Tensor) -> Tensor:
        solved = inverse @ residual
        return solved if metric is None else metric.power(solved, 1)

    recycled = deflated(averaged, list(pairs or ()), damped, tangent)

    def preconditioner(residual: Tensor) -> Tensor:
        return tangent(recycled(residual))

    return conjugate_gradients(operator, tangent(pulled), preconditioner, accuracy, products, path)
