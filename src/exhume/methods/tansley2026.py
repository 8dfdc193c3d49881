"""The subspace-aware attack: candidates in the span that the first layer's change reveals.

Tansley et al., "Efficient Techniques for Data Reconstruction, with Finite-Width Recovery
Guarantees". The search of the method `exhume` works on z, x = Uz, with the U of `search.subspace`.
Where W₁ does not move, the moment of the last layer is a start and no constraint: docs/theory.md.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exhume.equation.domain import Sphere
from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods.exhume import Exhume
from exhume.methods.progress import Progress, stream
from exhume.methods.stationary import Stationary, default_for
from exhume.search.moves import extreme_eigenvectors
from exhume.search.subspace import Subspace, estimate
from exhume.solvers import solve
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt

ENOUGH = 1.5  # equations for each unknown of the full space from which candidates are refined there
WORTHWHILE = 0.5  # share of what more freedom alone would leave; less must be left to be kept


@dataclass(frozen=True, eq=False, kw_only=True)
class Reduced(Problem):
    """A problem in coordinates of a subspace."""

    full: Problem  # the problem it came from
    subspace: Subspace  # with the basis


@dataclass(frozen=True)
class Tansley2026:
    """The subspace-aware attack."""

    rank: int | str = "gap"  # r, or the rule to find it: gap or energy
    search: Exhume | Stationary | None = None  # run in the subspace; the method `exhume` if None
    polish: int = 30  # most solver steps in the full space at the end
    basis: Tensor | None = field(default=None, repr=False, compare=False)  # U (d, r), where told
    name: str = "tansley2026"

    def view(self, problem: Problem) -> Problem:
        """Return the problem in coordinates of the subspace, or itself where W₁ did not move."""
        if isinstance(problem, Reduced):
            return problem
        if self.basis is not None:
            return reduced(problem, _told(self.basis, problem.dim))
        if problem.first_layer is None:
            probe = torch.zeros(problem.dim, 1).to(problem.target)
            moment = problem.features.moment(problem.target[:, 0], probe)
            if problem.drift > 0 or moment is None:
                raise InputError(
                    "tansley2026 needs a dense first layer that sees the input itself (no "
                    "convolution, patches or normalisation), and its change in training. Use "
                    "'exhume'."
                )
            return problem
        return reduced(problem, estimate(problem.first_layer, self.rank))

    def init(self, problem: Problem, samples: int | None, seed: int) -> Progress:
        """Begin at random in the subspace, or in the span of the moment's eigenvectors."""
        search, rank = self.search or default_for(problem), 0
        if isinstance(problem, Reduced) and self.basis is None and self.rank == "gap":
            rank = problem.subspace.rank
        if samples is not None and rank > samples:
            raise InputError(
                f"the change of the first layer spans {rank} directions, but {samples} samples "
                f"span at most {samples}: give the right number, or 'exhume' if Adam trained it."
            )
        if isinstance(problem, Reduced) or isinstance(search, Stationary):
            return search.init(problem, samples, seed)
        count, generator = search.afresh(problem, samples), stream(seed, 0)
        weights, most = problem.target[:, 0], min(2 * count, problem.dim)
        vectors = extreme_eigenvectors(problem, weights, most, generator)
        if vectors is None:
            return search.init(problem, samples, seed)
        basis = vectors.double().cpu()
        start = torch.randn(count, basis.shape[1], generator=generator, dtype=torch.float64)
        return search.begin(problem, samples, seed, problem.domain.project(start @ basis.T))

    def advance(self, problem: Problem, progress: Any) -> Progress:
        """Make a move of the search."""
        return (self.search or default_for(problem)).advance(problem, progress)

    def finish(self, problem: Problem, progress: Any) -> Fit:
        """Return candidates in the full space, refined there if that explains more."""
        search = self.search or default_for(problem)
        fit = search.finish(problem, progress)
        if not isinstance(problem, Reduced):
            return fit
        full, count = problem.full, len(fit.candidates)
        lifted = fitted(full, fit.candidates @ problem.subspace.basis.to(fit.candidates).T)
        explained = fit.value <= max(search.tolerance, full.resolution)
        if explained or full.ratio(count) < ENOUGH:
            return lifted
        solver = LevenbergMarquardt(tolerance=1e-14, damping=1e-3, patience=3)
        refined = solve(solver, full, lifted.candidates, self.polish).fit
        equations = full.target.numel()
        left = (equations - count * full.dim) / (equations - count * problem.dim)
        return refined if refined.value < WORTHWHILE * left * lifted.value else lifted


def confined(problem: Problem, candidates: Tensor) -> int | None:
    """Return the rank, where candidates (n, d) were looked for in a subspace and are in it."""
    if not isinstance(problem, Reduced):
        return None
    basis = problem.subspace.basis.to(candidates)
    off = (candidates - candidates @ basis @ basis.T).norm()
    return problem.subspace.rank if off <= 1e-4 * candidates.norm() else None


def reduced(problem: Problem, subspace: Subspace) -> Reduced:
    """Return the problem in the coordinates z of x = Uz, on a sphere of the same radius."""
    if not isinstance(problem.domain, Sphere):
        raise InputError(
            f"tansley2026 works on a sphere, but the domain is: {problem.domain.name}. Give the "
            "samples' norm instead, or use the method 'exhume'."
        )
    return Reduced(
        target=problem.target,
        features=problem.features.restrict(subspace.basis),
        threat_model=problem.threat_model,
        shape=(subspace.rank,),
        domain=Sphere(problem.domain.radius or problem.dim**0.5),
        resolution=problem.resolution,
        drift=problem.drift,
        premise=problem.premise,
        full=problem,
        subspace=subspace,
    )


def _told(basis: Tensor, dim: int) -> Subspace:
    """Return a subspace that is known, not estimated: nothing lies outside of it."""
    u = basis.double().cpu()
    if u.ndim != 2 or len(u) != dim or not 1 <= u.shape[1] <= dim:
        raise InputError(f"basis: expected shape ({dim}, r), r from 1 to {dim}, got {(*u.shape,)}.")
    ones = torch.ones(u.shape[1], dtype=u.dtype)
    if not (u.T @ u - torch.diag(ones)).abs().max() < 1e-5:
        raise InputError("basis: expected orthonormal columns; make them so with torch.linalg.qr.")
    return Subspace(u, ones, 1.0, torch.inf)
