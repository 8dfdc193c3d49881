"""Split: a candidate that is stuck becomes two, where their sum explains more than it did.

Shen et al., "Data Reconstruction: Identifiability and Optimization with Sample Splitting". A
candidate x of weight λ becomes x ± εu of weight λ/2 each, which changes the loss by ½ε²uᵀSu + O(ε⁴)
with S = −2 Σ_c A_c ∂²φ_c(x)ᵀR + (second derivative of the prior): see docs/theory.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.func import grad

from exhume.equation.domain import Domain
from exhume.errors import InputError
from exhume.features import Linearization
from exhume.features.weights import free_memory

ITERATIONS = 20
"""The published number of products for the eigenvectors."""

EPSILON = 0.02
"""A half is moved by no more than this, as published."""

RANGE = 2000.0
"""The least ε that is tried is so many times smaller than the most: the published 1e-5."""

GRID, REFINEMENTS = 9, 12
"""The loss is taken so often over the whole range of ε, then around the best: 21 products are
about as many as the eigenvectors cost."""

Product = Callable[[Tensor], Tensor]
"""Maps a direction for every candidate, (n, d), to S D, (n, d)."""


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """An extreme eigenpair of one symmetric matrix a candidate."""

    values: Tensor  # uᵀSu, (n,) float64, taken with the u below
    vectors: Tensor  # u, (n, d), of norm 1
    bounds: Tensor  # ‖Su − (uᵀSu)u‖, (n,) float64: so near to the value is an eigenvalue


def splitting_product(
    linearization: Linearization,
    residual: Tensor,
    coefficients: Tensor,
    direction: Tensor,
    prior: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return S D, (n, d): every candidate's splitting matrix times a direction of its own.

    Args:
        linearization: at the candidates.
        residual: R, (p, m).
        coefficients: A, (n·k, m), with every factor that the loss has.
        direction: D, (n, d).
        prior: diagonal of the prior's second derivative, (n, d), each row by the candidate's share.
        scale: of ‖R‖² in the loss, for example 1/‖Δ‖².
    """
    product = -2 * scale * linearization.bend(direction, residual, coefficients)
    return product if prior is None else product + prior * direction


def kept_to(domain: Domain, candidates: Tensor, slope: Tensor, product: Product) -> Product:
    """Return the product for halves that are projected to a domain: P S P + P ∂P[·]g.

    P is the tangent projector at the candidates and g the slope of the loss there. A curved
    domain pulls both halves back to the same side; on the sphere of radius r that adds −⟨g, x⟩/r²
    to every eigenvalue.
    """

    def tangent(x: Tensor, direction: Tensor) -> Tensor:
        return domain.tangent(x, direction, -slope)

    def kept(direction: Tensor) -> Tensor:
        inside = tangent(candidates, direction)
        turned = grad(lambda x: (tangent(x, slope) * inside).sum())(candidates)  # symmetric
        return tangent(candidates, product(inside) + turned)

    return kept


def smallest_eigenpairs(
    product: Product, start: Tensor, iterations: int = ITERATIONS
) -> Eigenpairs:
    """Find the smallest eigenvalue and its eigenvector of n symmetric matrices at once.

    Lanczos with full reorthogonalisation: n Krylov spaces in lockstep, begun at random in the
    tangent space, so that an iteration is one product for all candidates. A space that is exhausted
    is left as it is. One more product gives the value and the bound themselves, whatever rounding
    did to the iteration. What is not a number stays with its own candidate.

    Example:
        >>> S = torch.diag(torch.tensor([3.0, -2.0, 1.0]).double())
        >>> found = smallest_eigenpairs(lambda D: D @ S, torch.ones(1, 3).double(), 3)
        >>> [round(x, 6) for x in found.values.tolist() + found.vectors[0].abs().tolist()]
        [-2.0, 0.0, 1.0, 0.0]
    """
    n, d = start.shape
    room = int(free_memory(start.device) / 2 / (start.numel() * start.element_size()))
    if room < 2:
        raise InputError(
            f"splitting {n} candidates of {d} entries takes more memory than there is; attack with "
            "fewer candidates, or without splitting."
        )
    steps = min(iterations, d, room)
    basis = start.new_zeros(n, steps, d)
    matrices = torch.zeros(n, steps, steps, dtype=torch.float64, device=start.device)
    size = torch.zeros(n, dtype=torch.float64, device=start.device)
    negligible = 10 * d**0.5 * torch.finfo(start.dtype).eps
    vectors = torch.nn.functional.normalize(start, dim=1)
    alive = torch.ones(n, dtype=torch.bool, device=start.device)
    dead = torch.zeros(n, steps, dtype=torch.bool, device=start.device)
    for k in range(steps):
        basis[:, k], dead[:, k] = vectors, ~alive
        image = product(vectors)
        matrices[:, k, k] = _dot(vectors, image)
        space = basis[:, : k + 1]
        for _ in range(2):
            image = image - _combined((space @ image[:, :, None])[:, :, 0], space)
        length = image.double().norm(dim=1)
        size = torch.maximum(size, torch.maximum(matrices[:, k, k].abs(), length))
        alive = alive & (length > negligible * size)
        if k + 1 < steps:
            length = torch.where(alive, length, 0)
            matrices[:, k, k + 1] = matrices[:, k + 1, k] = length
            unit = image.double() / torch.where(alive, length, 1)[:, None]
            vectors = unit.to(image.dtype) * alive[:, None]
    matrices = matrices / torch.where(size > 0, size, 1)[:, None, None]
    matrices.diagonal(dim1=1, dim2=2).masked_fill_(dead, 4.0)  # above every eigenvalue
    weights = torch.linalg.eigh(matrices.nan_to_num()).eigenvectors[:, :, 0]
    vectors = torch.nn.functional.normalize(_combined(weights.to(basis), basis), dim=1)
    image = product(vectors)
    values = _dot(vectors, image)
    bounds = (image.double() - values[:, None] * vectors.double()).norm(dim=1)
    return Eigenpairs(values, vectors, bounds)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return (left.double() * right.double()).sum(1)


def _combined(weights: Tensor, basis: Tensor) -> Tensor:
    """(n, k), (n, k, d) → (n, d)."""
    return (weights[:, None] @ basis)[:, 0]


def chosen_as_published(values: Tensor, count: float) -> Tensor:
    """Return whom to split by the published rule, as indices in ascending order.

    The thresholds refer to m times the smallest eigenvalues (n,) of S, with m the number of
    candidates at the start. If fewer than 3 in 10 are negative (1 in 10 from 1000 candidates on),
    all of these; else, in the lower half, those under −0.1, 150 at most.

    Example:
        >>> chosen_as_published(torch.tensor([0.2, -0.01, 0.3, 0.1]), 4).tolist()
        [1]
        >>> chosen_as_published(torch.tensor([0.2, -0.01, -0.3, -0.1]), 4).tolist()
        [2, 3]
    """
    scaled = values * count
    n = len(scaled)
    negative = scaled < 0
    if int(negative.sum()) < (0.3 if n < 1000 else 0.1) * n:
        return negative.nonzero()[:, 0]
    lowest = scaled.argsort()[: n // 2][:150]
    return lowest[scaled[lowest] < -0.1].sort().values


def chosen_adaptively(pairs: Eigenpairs, upper: float, price: float) -> Tensor:
    """Return whom to split with no threshold set by hand, as indices in ascending order.

    - Significant: the value is below zero by more than its bound, which also holds what rounding
      does to the product.
    - Promising: ½ε²|uᵀSu| at the largest ε is above the price of a split.
    - Enough: one ε serves all, so the decrease is shared out as |uᵀSu|. The most negative are
      taken, as many as carry it: (Σ|v|)²/Σv², the number of equal parts it amounts to.

    Example:
        >>> values = torch.tensor([-4.0, -0.1, 0.5, -4.0, -3.0])
        >>> bounds = torch.tensor([0.1, 0.1, 0.1, 0.1, 3.5])
        >>> chosen_adaptively(Eigenpairs(values, torch.zeros(5, 2), bounds), 1.0, 0.0).tolist()
        [0, 3]
    """
    promised = -0.5 * upper**2 * pairs.values
    wanted = (pairs.values < -pairs.bounds) & (promised > price)
    if not wanted.any():
        return wanted.nonzero()[:, 0]
    parts = promised.where(wanted, torch.zeros_like(promised))
    number = math.ceil(float(parts.sum() ** 2 / parts.square().sum()) - 1e-9)
    return parts.argsort(descending=True)[:number].sort().values


def line_search(loss: Callable[[float], float], upper: float = EPSILON) -> float | None:
    """Return the ε in [upper/2000, upper] of the least loss, or None where none lowers it.

    A geometric grid, then bounded scalar minimisation in log ε around its best; half of `upper` is
    the last resort, as published. At 0 the loss says what it must fall below: the loss without
    splits, less their price if they have one.

    Example:
        >>> round(line_search(lambda e: (e - 0.01) ** 2), 4), line_search(lambda e: e)
        (0.01, None)
    """
    tried: dict[float, float] = {}

    def tried_at(position: float) -> float:
        epsilon = upper * RANGE ** (position - 1)
        value = loss(epsilon)
        tried[epsilon] = value if math.isfinite(value) else math.inf
        return tried[epsilon]

    grid = [k / (GRID - 1) for k in range(GRID)]
    values = [tried_at(position) for position in grid]
    best = min(range(GRID), key=values.__getitem__)
    if math.isfinite(values[best]):
        ends = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
        options = {"maxiter": REFINEMENTS, "xatol": 1e-3}
        minimize_scalar(tried_at, bounds=ends, method="bounded", options=options)
    tried_at(1 - math.log(2) / math.log(RANGE))
    epsilon = min(tried, key=tried.__getitem__)
    return epsilon if tried[epsilon] < loss(0.0) else None


def halves(candidates: Tensor, chosen: Tensor, directions: Tensor, epsilon: float) -> Tensor:
    """Return the candidates with x + εu in the place of each chosen x, and x − εu at the end.

    Example:
        >>> X, u = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> halves(X, torch.tensor([1]), u, 0.5).tolist()
        [[1.0, 2.0], [3.5, 4.0], [2.5, 4.0]]
    """
    shift = epsilon * directions[chosen]
    return torch.cat([candidates.index_add(0, chosen, shift), candidates[chosen] - shift])


def copied(values: Tensor, chosen: Tensor) -> Tensor:
    """Return what each half has from its parent: labels, velocities, parents; (n + q, …)."""
    return torch.cat([values, values[chosen]])


def shared(values: Tensor, chosen: Tensor) -> Tensor:
    """Return what each half has half of: multipliers, their velocities, shares; (n + q, …).

    Example:
        >>> shared(torch.tensor([5.0, 6.0, 7.0]), torch.tensor([1])).tolist()
        [5.0, 3.0, 7.0, 3.0]
    """
    half = values[chosen] / 2
    return torch.cat([values.index_copy(0, chosen, half), half])
