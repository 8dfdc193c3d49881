"""What the weights determine near a solution, for any problem.

Near candidates X with Δ = Φ(X)ᵀA a direction of X that some change of A makes up for leaves the
weights as they are: it is in the null space of P⊥J, J = ∂(ΦᵀA)/∂X, P⊥ the projector off the span of
the features. This does not say that there is no other solution elsewhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError

UNKNOWNS = 4000  # most unknowns n·d: singular vectors of a dense matrix, minutes at this size
ENTRIES = 2**28  # most entries of that matrix: two gigabytes
NEGLIGIBLE = 1e-8  # a candidate with this share of the largest effect on the weights has none
TOLERANCE = 1e-9  # relative singular value that counts as zero: rounding in float64 stays below


@dataclass(frozen=True, eq=False)
class LocalIdentifiability:
    """This says what is determined to first order."""

    unknowns: int  # of the candidates, n·d, or the dimension of the domain's tangent space
    equations: int  # p·m, less those that the coefficients take up
    rank: int  # how many directions of the candidates are determined
    singular_values: Tensor  # of the equations, each candidate's at its own scale, largest first
    undetermined: Tensor  # directions of the candidates that are not, (q, n, d), orthonormal
    residual: float  # ‖Δ − Φ(X)ᵀA‖²/‖Δ‖² at the candidates; the rest means little where it is large

    @property
    def holds(self) -> bool:
        """Tell whether every direction is determined."""
        return self.rank == self.unknowns

    @property
    def smallest(self) -> float:
        """Return the last of as many singular values as unknowns, relative to the first; or 0."""
        values = self.singular_values
        return float(values[-1] / values[0]) if len(values) == self.unknowns else 0.0


def local_identifiability(
    problem: Problem, candidates: Tensor, within: bool = False
) -> LocalIdentifiability:
    """Return rank and null space of the equations at a solution, coefficients eliminated.

    Candidates are a solution X, (n, d). Only directions that stay in the problem's domain count
    if `within`.
    """
    if candidates.ndim != 2 or candidates.shape[1] != problem.dim or not len(candidates):
        found = tuple(candidates.shape)
        raise InputError(f"candidates: expected shape (n, {problem.dim}), got {found}.")
    count, dim = candidates.shape
    equations = problem.target.numel()
    if count * dim > UNKNOWNS or count * dim * equations > ENTRIES:
        most = f"up to {UNKNOWNS} unknowns, {ENTRIES // equations} in {equations} equations"
        raise InputError(f"candidates: {count} of dimension {dim} are too many: {most}.")
    problem = problem.to(problem.features.device, torch.float64)
    fit = fitted(problem, candidates)
    features = span(fit)
    moves = [_moves(problem, fit.candidates[i : i + 1], within) for i in range(count)]
    blocks = [columns(problem, fit, features, i, moves[i]) for i in range(count)]
    sizes = torch.stack([block.square().sum().sqrt() for block in blocks])
    scales = torch.where(sizes > NEGLIGIBLE * sizes.max(), 1 / sizes, 0.0)
    scaled = torch.cat([block * scale for block, scale in zip(blocks, scales, strict=True)], 1)
    _, values, vectors = torch.linalg.svd(scaled, full_matrices=True)
    rank = int((values > TOLERANCE * values[0]).sum())
    free = vectors[rank:].split([len(move) for move in moves], 1)
    units = torch.where(scales > 0, scales, 1.0)
    parts = [part * unit @ move for part, unit, move in zip(free, units, moves, strict=True)]
    directions = torch.cat(parts, 1)
    return LocalIdentifiability(
        unknowns=scaled.shape[1],
        equations=equations - features.shape[1] * problem.target.shape[1],
        rank=rank,
        singular_values=values,
        undetermined=torch.linalg.qr(directions.T).Q.T.reshape(-1, count, dim),
        residual=fit.value,
    )


def _moves(problem: Problem, candidate: Tensor, within: bool) -> Tensor:
    """Return orthonormal directions in which a candidate (1, d) may move, (t, d)."""
    identity = torch.eye(candidate.shape[1], dtype=torch.float64).to(candidate)
    if not within:
        return identity
    projector = problem.domain.tangent(candidate.expand_as(identity))(identity)
    values, vectors = torch.linalg.eigh(projector)
    return torch.as_tensor(vectors.T[values > 0.5])


def span(fit: Fit) -> Tensor:
    """Return an orthonormal basis of the features' span, (p, s)."""
    identity = torch.eye(len(fit.coefficients), dtype=torch.float64).to(fit.residual)
    left, values, _ = torch.linalg.svd(fit.linearization.combine(identity), full_matrices=False)
    return torch.as_tensor(left[:, values > TOLERANCE * values[0]])


def columns(problem: Problem, fit: Fit, features: Tensor, i: int, moves: Tensor) -> Tensor:
    """Return the columns of P⊥J for moves (t, d) of candidate i, (p·m, t); features are `span`."""
    if problem.premise is Premise.REPLAY:  # samples of a run do not act by themselves
        whole = torch.zeros(len(moves), *fit.candidates.shape).to(fit.candidates)
        whole[:, i] = moves
        pushed = [fit.linearization.push(each, fit.coefficients) for each in whole]
    else:
        own = fit.coefficients[i * fit.rows : (i + 1) * fit.rows]
        linearization = problem.features.linearize(fit.candidates[i : i + 1])
        pushed = [linearization.push(direction[None], own) for direction in moves]
    return torch.stack([(p - features @ (features.T @ p)).flatten() for p in pushed], 1)
