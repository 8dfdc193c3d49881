"""What a fit that was found rests on: the equations that test it, and how far it could be off.

Candidates that explain the weights are evidence of nothing if others do so as well. There are two
ways for that: fewer equations than unknowns, and a direction in which candidates may move. Both are
measured at the candidates, in float64; docs/theory.md has the count.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from exhume.equation.coefficients import factor
from exhume.equation.objective import Fit, curvature, fitted, fitted_with, gauss_newton
from exhume.equation.problem import SPHERE, Premise, Problem
from exhume.features import NO_NORM, Features
from exhume.features.replay import TrainingRun
from exhume.methods import Reconstruction
from exhume.solvers import Outcome
from exhume.solvers.levenberg_marquardt import FLAT, conjugate_gradients
from exhume.theory import counting
from exhume.theory.local import TOLERANCE, columns, span

ENOUGH = 1.2  # With fewer equations for each unknown, a residual of zero may mean nothing
DENSE = 500  # unknowns up to which the matrix is made: its eigenvalues take a tenth of a second
COLUMNS = 2**21  # entries of its columns, at most: 16 MB, which is as quick; a sketch beyond
ROWS = 1000  # most features whose independence is looked at: a second, for their eigenvalues
ENTRIES = 2**24  # of these features, at most: 128 MB
PRODUCTS = 400  # most, of a sketch; what is not solved by then is badly conditioned, or singular
SOLVED = 1e-3  # relative: one free direction of a million would leave more of a random vector
FREE = 1e-60  # share of the largest eigenvalue that stands for none: candidates may go anywhere
ROUNDING = 1e-12  # shares of a Gram matrix in float64 below this are none
NOTHING = 1e-9  # a share of all features that no fit tests: weights are plainly explained without
NOWHERE = 0.1  # a search cut off with this much left was nowhere near: no slack tells more of it
TWINS = 32  # points at which two features that agree are one; at fewer, some of ReLU's are zero
BINS = 2**24  # of an entry of a unit vector, to tell such features apart: float32 has as many
STREAM = 0x5EED  # of random points and directions: another one than that of any search
LEAST = 1e-14  # of residuals: features in float32 allow no less, whatever is found by chance
CUT = (Outcome.BUDGET, Outcome.DIVERGED)  # how a search ends that was not over


@dataclass(frozen=True, eq=False)
class Support:
    """The support says how many equations test the candidates, and how far each could be off."""

    equations: int  # independent ones, less those that the coefficients take up
    unknowns: int  # of the candidates, n·t with t directions in which each may move
    # how far each candidate may move, relative to its norm, until the residual is twice what it
    # is, (n,): to first order, all others and the coefficients making up for it; may be infinite,
    # and is NaN where it is not known
    slack: Tensor
    # its standard error, relative to its norm, (n,), as if what is left were noise
    errors: Tensor

    @property
    def ratio(self) -> float:
        """Return the equations for each unknown."""
        return self.equations / max(1, self.unknowns)

    @property
    def enough(self) -> bool:
        """Tell whether there are more equations than other candidates could meet."""
        return self.ratio >= ENOUGH

    @property
    def measured(self) -> bool:
        """Tell whether it is known how far candidates could be off."""
        return not bool(self.slack.isnan().any())


def support(problem: Problem, found: Reconstruction, dense: int = DENSE) -> Support:
    """Return what the candidates of an attack rest on.

    With q = n·k rows of features, s independent columns of Δ and p independent features there are
    s(p − q) equations: each column is to lie in the span of the q rows. A replay has no rows to
    combine, and p equations. With more unknowns than `dense` the slack is sketched, and where that
    takes too much memory it is not known.

    Example:
        >>> import exhume
        >>> victim = exhume.victims.random_features(exhume.data.sphere(5, 3), 60, "tanh")
        >>> rests = support(victim.problem, exhume.reconstruct(victim.problem, 3))
        >>> rests.equations, rests.unknowns, rests.enough, bool(rests.slack.max() < 1e-3)
        (57, 12, True, True)
    """
    open_ = torch.full((len(found.samples),), math.inf, dtype=torch.float64)
    if not (math.isfinite(found.residual) and found.samples.isfinite().all()):
        return Support(0, found.samples.numel(), open_, open_)
    try:
        problem = replace(problem, features=problem.features.resident())
        return _measured(*_at(problem, found), found, dense)
    except (RuntimeError, MemoryError):  # torch's own for memory is among them: it is not known
        width, outputs = problem.target.shape
        most = counting.equations(width, outputs, len(found.coefficients))
        return Support(most, found.samples.numel(), open_ * math.nan, open_ * math.nan)


def _measured(problem: Problem, fit: Fit, found: Reconstruction, dense: int) -> Support:
    hidden = NO_NORM in problem.features.undetermined
    along = problem.domain.tangent(fit.candidates)(fit.candidates)
    known = hidden or bool(along.norm() <= 1e-6 * fit.candidates.norm())
    count, each = len(fit.candidates), (found.rank or problem.dim) - known
    unknowns, residual = count * each, max(found.residual, LEAST)
    equations = _equations(problem, fit, unknowns, residual)
    largest = total = torch.full((count,), 0.0 if each == 0 else math.nan, dtype=torch.float64)
    cut = found.outcome in CUT and residual > NOWHERE
    if each > 0 and not (cut or problem.premise.weights_alone):  # there it would decide nothing
        basis = None
        if found.rank is not None:
            basis = torch.linalg.svd(fit.candidates, full_matrices=False).Vh[: found.rank].T
        moves = _Moves(fit.candidates, hidden, known, basis)
        whole = unknowns <= dense and unknowns * problem.target.numel() <= COLUMNS
        try:
            if whole:
                largest, total = _inverse(problem, fit, moves)
            else:  # in float64, half as many take as long as those of the search
                largest, total = _sketch(fit, moves, min(PRODUCTS, found.products // 2))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # features that do not move
            largest = total = torch.full_like(total, math.inf)
    lengths = fit.candidates.norm(dim=1).cpu().clamp_min(torch.finfo(torch.float64).tiny)
    left = residual * problem.target.square().sum().cpu() / lengths.square()
    spare = equations - unknowns
    errors = (left * total / spare).sqrt() if spare > 0 else torch.full_like(total, math.inf)
    return Support(equations, unknowns, (left * largest).sqrt(), errors)


@dataclass(frozen=True, eq=False)
class _Moves:
    """The directions in which candidates may move, and which of them count.

    A domain that fixes the norm does not confine them: a part that nothing sees would then seem to
    follow from the rest, though its sign does not. It is the norm that does not count.
    """

    candidates: Tensor  # (n, d)
    hidden: bool  # whether the norm leaves no trace: moves along a candidate itself are left out
    known: bool  # whether it is known: moves along a candidate itself do not count
    basis: Tensor | None  # (d, r) orthonormal, of the subspace that they are kept in

    def allowed(self, direction: Tensor) -> Tensor:
        """Return the part of a direction (n, d) that is one: a symmetric projector."""
        if self.basis is not None:
            direction = direction @ self.basis @ self.basis.T
        return SPHERE.tangent(self.candidates)(direction) if self.hidden else direction

    def counted(self, direction: Tensor) -> Tensor:
        """Return the part of a direction (n, d) that counts."""
        return SPHERE.tangent(self.candidates)(direction) if self.known else direction

    def of(self, i: int) -> "_Moves":
        """Return those of candidate i alone, once for each entry of it."""
        dim = self.candidates.shape[1]
        return replace(self, candidates=self.candidates[i : i + 1].expand(dim, dim))

    def spanning(self) -> Tensor:
        """Return an orthonormal basis of the moves of one candidate, (t, d)."""
        projector = self.allowed(torch.eye(self.candidates.shape[1]).to(self.candidates))
        values, vectors = torch.linalg.eigh((projector + projector.T) / 2)
        return torch.as_tensor(vectors.T[values > 0.5])


def _at(problem: Problem, found: Reconstruction) -> tuple[Problem, Fit]:
    """Return problem and fit in float64, a simulated run with what was found of its recipe."""
    if problem.premise is Premise.REPLAY and found.recipe is not None:
        run = cast(TrainingRun, problem.features)
        told = found.recipe if run.recipe.lr is not None else replace(found.recipe, lr=None)
        problem = replace(problem, features=replace(run, recipe=told, sharp=True))
    problem = problem.to(problem.features.device, torch.float64)
    if problem.premise is Premise.REPLAY:
        return problem, fitted_with(problem, found.samples, found.coefficients)
    return problem, fitted(problem, found.samples)


def _equations(problem: Problem, fit: Fit, unknowns: int, residual: float) -> int:
    """Return s(p − q), with p the independent ones among as many features as are needed."""
    replayed = problem.premise is Premise.REPLAY
    features = getattr(problem.features, "lazy", problem.features)  # a simulated run has no rows
    values = torch.linalg.eigvalsh(problem.target.T @ problem.target)
    least = max(min(residual, NOTHING), ROUNDING)
    taken = 0 if replayed else len(fit.coefficients)
    columns = int((values > least * values[-1]).sum())
    columns = 1 if replayed else min(columns, taken)
    rows = max(1, features.outputs) if replayed else fit.rows
    needed = math.ceil(2 * ENOUGH * unknowns / columns) + taken
    most = max(taken, min(needed, features.width, ROWS, ENTRIES // features.width)) // rows + 1
    generator = torch.Generator().manual_seed(STREAM)
    random = problem.domain.start(most - len(fit.candidates), problem.dim, generator)
    points = torch.cat([fit.candidates, random.to(fit.candidates)])
    gram = features.linearize(points).gram()
    sizes = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
    shares = torch.linalg.eigvalsh(sizes[:, None] * gram * sizes)
    independent = int((shares > least * shares[-1]).sum())
    if independent == len(gram):  # there are more than were looked at, but for twins
        rows = len(gram) // most
        seen = max(2, min(TWINS, ENTRIES // (rows * features.width)))
        independent = _distinct(features, points[-seen:], rows)
    return max(0, columns * (min(independent, features.width) - taken))


def _distinct(features: Features, points: Tensor, rows: int) -> int:
    """Count the features that are neither zero nor multiples of each other at some points."""
    generator = torch.Generator().manual_seed(STREAM)
    mixed = torch.randn(len(points) * rows, 3, generator=generator, dtype=torch.float64)
    values = features.linearize(points).combine(mixed.to(points))  # (p, 3): enough to tell them
    sizes = values.norm(dim=1)
    unit = torch.nn.functional.normalize(values[sizes > TOLERANCE * sizes.max()], dim=1)
    sign = unit.gather(1, unit.abs().argmax(1, keepdim=True)).sign()
    first, second, _ = (BINS * sign * unit).round().long().unbind(1)
    return len(torch.unique(first * 4 * BINS + second))


def _inverse(problem: Problem, fit: Fit, moves: _Moves) -> tuple[Tensor, Tensor]:
    """Return largest eigenvalue and trace of each candidate's block of (JᵀP⊥J)⁻¹, (n,) each."""
    features = span(fit) if fit.eliminated else fit.residual.new_empty(len(fit.residual), 0)
    bases = [moves.of(i).spanning() for i in range(len(fit.candidates))]
    parts = [columns(problem, fit, features, i, basis) for i, basis in enumerate(bases)]
    jacobian = torch.cat(parts, 1)
    values, vectors = torch.linalg.eigh((jacobian.T @ jacobian).cpu())
    zero = torch.finfo(torch.float64).eps * len(values) * values[-1]  # to rounding
    inverse = (vectors / torch.where(values > zero, values, FREE * values[-1])) @ vectors.T
    start, spectra = 0, []
    for i, basis in enumerate(basis.cpu() for basis in bases):
        own = slice(start, start := start + len(basis))
        block = basis.T @ inverse[own, own] @ basis
        counted = moves.of(i).counted
        block = counted(counted(block.to(fit.candidates)).T.contiguous())
        spectra.append(torch.linalg.eigvalsh((block + block.T) / 2).clamp_min(0))
    values = torch.stack(spectra).cpu()
    return values[:, -1], values.sum(1)


def _sketch(fit: Fit, moves: _Moves, products: int) -> tuple[Tensor, Tensor]:
    """Return about the same from few products; infinite where that fails.

    With S = diag(C), conjugate gradients on JᵀP⊥J z = √S g with a random g end with nothing left
    only if no direction is free. ‖z_i‖/√S_i is then about the largest eigenvalue of candidate i's
    block of the inverse, and ⟨g_i, z_i⟩/√S_i is its trace on average: no less than that, then.
    """
    generator = torch.Generator().manual_seed(STREAM)
    mean = curvature(fit)
    scale = mean.diagonal().clamp_min(FLAT * mean.diagonal().max())
    inverse = torch.cholesky_inverse(factor(mean + FLAT * torch.diag(scale))).to(fit.candidates)
    drawn = torch.randn(fit.candidates.shape, generator=generator, dtype=torch.float64)
    random = moves.allowed(drawn.to(fit.candidates))
    root = scale.sqrt()[:, None].to(fit.candidates)

    def operator(direction: Tensor) -> Tensor:
        return moves.allowed(gauss_newton(fit, direction))

    def preconditioner(rest: Tensor) -> Tensor:
        return moves.allowed(inverse @ rest)

    right = root * random
    solved, _ = conjugate_gradients(operator, right, preconditioner, SOLVED, products)
    left = operator(solved) - right
    sizes = [(part * preconditioner(part)).sum() for part in (left, right)]
    if not sizes[0] <= (2 * SOLVED) ** 2 * sizes[1]:
        open_ = torch.full((len(solved),), math.inf, dtype=torch.float64)
        return open_, open_
    counted = moves.counted(solved) / root
    largest = counted.norm(dim=1)
    return largest.cpu(), (random * counted).sum(1).maximum(largest).cpu()
