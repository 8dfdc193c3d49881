"""Split: a candidate x of weight λ that is stuck becomes two, x ± εu of weight λ/2 each.

That changes the loss by ½ε²uᵀSu + O(ε⁴), S = −2 Σ_c A_c ∂²φ_c(x)ᵀR + (second derivative of the
prior): docs/theory.md. Shen et al., "Data Reconstruction: Identifiability and Optimization with
Sample Splitting".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy
import torch
from torch import Tensor
from torch.func import grad

from exhume.equation.domain import Domain
from exhume.errors import InputError
from exhume.features import Linearization
from exhume.features.weights import free_memory

ITERATIONS = 20  # products for the eigenvectors, as published
EPSILON = 0.02  # a half is moved by no more than this, as published
RANGE = 2000.0  # the least ε tried is so many times smaller than the most: the published 1e-5
GRID, REFINEMENTS = 9, 12  # losses over all ε, then around the best: about what eigenvectors cost
Product = Callable[[Tensor], Tensor]  # a direction for every candidate, (n, d), to S D, (n, d)


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

    The prior is the diagonal of its second derivative, (n, d), and the scale that of ‖R‖² in the
    loss; coefficients have every other factor that the loss has.
    """
    product = -2 * scale * linearization.bend(direction, residual, coefficients)
    return product if prior is None else product + prior * direction


def kept_to(domain: Domain, candidates: Tensor, slope: Tensor, product: Product) -> Product:
    """Return the product for halves that are projected to a domain: P S P + P ∂P[·]g.

    P is the tangent projector and g the slope of the loss. A curved domain pulls both halves to the
    same side; a sphere of radius r adds −⟨g, x⟩/r² to every eigenvalue.
    """
    tangent = domain.tangent(candidates, -slope)

    def kept(direction: Tensor) -> Tensor:
        inside = tangent(direction)
        turned = grad(lambda x: (domain.tangent(x, -slope)(slope) * inside).sum())(candidates)
        return tangent(product(inside) + turned)  # which is symmetric

    return kept


def smallest_eigenpairs(
    product: Product, start: Tensor, iterations: int = ITERATIONS
) -> Eigenpairs:
    """Find the smallest eigenvalue and its eigenvector of n symmetric matrices at once.

    Lanczos with full reorthogonalisation: n Krylov spaces in lockstep, so that an iteration is one
    product for all candidates. One more gives value and bound, whatever rounding did before. What
    is not a number stays with its own candidate.
    """
    n, d = start.shape
    room = int(free_memory(start.device) / 2 / (start.numel() * start.element_size()))
    if room < 2:
        raise InputError(
            f"splitting {n} candidates of {d} entries takes more memory than there is; use fewer."
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

    The rule looks at m times the smallest eigenvalues (n,), m candidates at the start: if fewer
    than 3 in 10 are negative (1 in 10 from n = 1000 on), all of these; else, in the lower half,
    those under −0.1, 150 at most.
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

    Their value is below zero by more than its bound, and ½ε²|uᵀSu| at the largest ε is above the
    price of a split. One ε serves all, so as many of the most negative are taken as carry the
    decrease: (Σ|v|)²/Σv², the number of equal parts it amounts to.
    """
    promised = -0.5 * upper**2 * pairs.values
    wanted = (pairs.values < -pairs.bounds) & (promised > price)
    if not wanted.any():
        return wanted.nonzero()[:, 0]
    parts = promised.where(wanted, torch.zeros_like(promised))
    number = math.ceil(float(parts.sum() ** 2 / parts.square().sum()) - 1e-9)
    return parts.argsort(descending=True)[:number].sort().values


def line_search(loss: Callable[[float], float], upper: float = EPSILON) -> float | None:
    """Return the ε in [upper/2000, upper] of the least loss, or None if none is below loss(0)."""
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
        scipy.optimize.minimize_scalar(tried_at, bounds=ends, method="bounded", options=options)
    tried_at(1 - math.log(2) / math.log(RANGE))  # half of the most: the published last resort
    epsilon = min(tried, key=tried.__getitem__)
    return epsilon if tried[epsilon] < loss(0.0) else None


def halves(candidates: Tensor, chosen: Tensor, directions: Tensor, epsilon: float) -> Tensor:
    """Return the candidates with x + εu in the place of each chosen x, and x − εu at the end."""
    shift = epsilon * directions[chosen]
    return torch.cat([candidates.index_add(0, chosen, shift), candidates[chosen] - shift])


def copied(values: Tensor, chosen: Tensor) -> Tensor:
    """Return what each half has from its parent: labels, velocities, parents; (n + q, …)."""
    return torch.cat([values, values[chosen]])


def shared(values: Tensor, chosen: Tensor) -> Tensor:
    """Return what each half has half of: multipliers, their velocities, shares; (n + q, …)."""
    half = values[chosen] / 2
    return torch.cat([values.index_copy(0, chosen, half), half])
