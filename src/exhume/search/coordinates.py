"""Coordinates z of inputs x = Bz, all of them of about the same size in samples.

In images neighbours are alike: with the spectrum of photographs in B, what is smooth comes first,
and what the weights hardly show stays small. Inputs that never moved a weight of a dense first
layer are zero in every sample.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.domain import Mapped
from exhume.equation.objective import Fit
from exhume.equation.problem import Problem

CHANNELS = 0.9  # how colours of photographs go together: about that much in every collection
MOST = 2**13  # entries of an input up to which B is made: a matrix of 512 MiB in float64
DRAWN = 64  # inputs of the domain that show how large one is


@dataclass(frozen=True, eq=False, kw_only=True)
class InCoordinates(Problem):
    """A problem in the coordinates z of x = Bz."""

    full: Problem  # the problem it came from
    basis: Tensor  # B (d, k), float64


def in_coordinates(problem: Problem) -> Problem:
    """Return the problem in the coordinates that suit it, or itself."""
    basis, seen = _photographs(problem.shape), _seen(problem)
    if seen is not None and not seen.all():
        basis = torch.eye(problem.dim, dtype=torch.float64) if basis is None else basis
        basis = basis * seen[:, None]
    if basis is None:
        return problem
    drawn = problem.domain.start(DRAWN, problem.dim, torch.Generator().manual_seed(0))
    basis = basis * (drawn.norm() / math.sqrt(DRAWN) / basis.norm())  # ‖Bz‖ is as large on average
    return InCoordinates(
        target=problem.target,
        features=problem.features.restrict(basis),
        threat_model=problem.threat_model,
        shape=(basis.shape[1],),
        domain=Mapped(problem.domain, basis),
        resolution=problem.resolution,
        premise=problem.premise,
        full=problem,
        basis=basis,
    )


def lifted(problem: Problem, fit: Fit) -> Fit:
    """Return the same fit with inputs in the place of coordinates."""
    if not isinstance(problem, InCoordinates):
        return fit
    return replace(fit, candidates=fit.candidates @ problem.basis.to(fit.candidates).T)


def _seen(problem: Problem) -> Tensor | None:
    """Tell which entries of the input ever moved a weight of a dense first layer, (d,)."""
    layer = problem.first_layer
    return None if layer is None else (layer.trained != layer.initial).any(0).cpu()


def _photographs(shape: tuple[int, ...]) -> Tensor | None:
    """Return B (d, d) with the covariance BBᵀ of photographs of that shape (c, h, w), or None.

    Its columns are cosines over the picture, as large as 1/(1 + f) at f half waves, in colours that
    go together.
    """
    if len(shape) != 3 or math.prod(shape) > MOST:
        return None
    colours = torch.full((shape[0], shape[0]), CHANNELS, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(colours.fill_diagonal_(1.0))
    rows, columns = (_cosines(size) for size in shape[1:])
    height, width = (torch.arange(size, dtype=torch.float64) for size in shape[1:])
    sizes = 1 / (1 + (height[:, None].square() + width.square()).sqrt())
    waves = torch.kron(rows.contiguous(), columns.contiguous()) * sizes.flatten()
    return torch.kron((vectors * values.sqrt()).contiguous(), waves.contiguous())


def _cosines(size: int) -> Tensor:
    """Return the orthonormal cosine waves over so many places, (size, size), a column each."""
    place = torch.arange(size, dtype=torch.float64)
    waves: Tensor = torch.cos(math.pi / size * (place[:, None] + 0.5) * place)
    return torch.nn.functional.normalize(waves, dim=0)
