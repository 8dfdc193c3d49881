"""Moves of a search, from the candidates of one trial to those of the next: docs/theory.md."""

import itertools
import math

import torch
from torch import Tensor

from exhume.equation.coefficients import factor
from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Problem
from exhume.equation.tiles import Tiles

OPPOSITE = -0.99  # cosine below which two candidates are a pair ±u; solved ones come closer to −1
WAYS = 250  # most exchanges of patches that are all tried: more would take longer than a search
DENSE = 1024  # dimension up to which the moment is diagonalised, in well under a second


def greedy_order(gram: Tensor, products: Tensor, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Return indices (n,) of candidates to drop, cheapest first, and the cumulative cost (n,).

    Dropping candidate i and refitting the others adds tr A_iᵀ (K⁻¹)_ii⁻¹ A_i to ‖R‖², with the
    k×k block of K⁻¹ and the k rows of A that belong to it; K = ΦΦᵀ, (n·k, n·k), and ΦΔ, (n·k, m),
    are given. The inverse is down-dated after each drop, so only one of two duplicates is cheap.
    """
    n = len(gram) // rows
    jitter = 1e-12 * gram.diagonal().mean()  # duplicates make K singular
    inverse = torch.linalg.inv(gram + jitter * torch.eye(len(gram)).to(gram))
    coefficients = inverse @ products
    alive = torch.ones(n, dtype=torch.bool, device=gram.device)
    order, costs = [], []
    for _ in range(n):
        own = inverse.view(n, rows, n, rows).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        parts = coefficients.view(n, rows, -1)
        cost = (parts * torch.linalg.solve(own, parts)).sum((1, 2))
        i = int(cost.where(alive, torch.inf).argmin())
        order.append(i)
        costs.append(cost[i].item())
        alive[i] = False
        its = slice(i * rows, (i + 1) * rows)
        columns = torch.linalg.solve(inverse[its, its], inverse[its]).T  # (n·k, k)
        coefficients = coefficients - columns @ coefficients[its]
        inverse = inverse - columns @ inverse[its]
        inverse[its, its] = torch.eye(rows).to(gram)  # a dropped candidate: decoupled
    return torch.tensor(order), torch.tensor(costs, dtype=torch.float64).cumsum(0)


def drop_costs(problem: Problem, fit: Fit) -> Tensor:
    """Return what dropping each candidate alone would add, tr A_iᵀ (K⁻¹)_ii⁻¹ A_i / ‖Δ‖², (n,)."""
    n = len(fit.candidates)
    inverse = torch.cholesky_inverse(factor(fit.linearization.gram()))
    own = inverse.view(n, fit.rows, n, fit.rows).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    parts = fit.coefficients.view(n, fit.rows, -1)
    costs = (parts * torch.linalg.solve_ex(own, parts).result).sum((1, 2))
    return torch.as_tensor(costs / problem.size).nan_to_num(0.0)


def dropping(problem: Problem, fit: Fit) -> tuple[Tensor, Tensor]:
    """Return `greedy_order` of a fit's candidates, with the cost as a share of ‖Δ‖²."""
    gram, products = fit.linearization.gram(), fit.linearization.apply(problem.target.double())
    order, cost = greedy_order(gram, products, fit.rows)
    return order, cost / problem.size.item()


def without(problem: Problem, fit: Fit, count: int) -> Tensor:
    """Return the candidates (n − count, d) without the `count` that are cheapest to drop."""
    order, _ = dropping(problem, fit)
    return fit.candidates[order[count:].sort().values.to(fit.candidates.device)]


def merged(candidates: Tensor, coefficients: Tensor, cosine: float) -> Tensor:
    """Return one candidate, (g, d), for each group that is linked by cosines above `cosine`.

    It is the group's mean, weighted by the norms of the coefficients' rows (n, k·m), not projected.
    """
    unit = torch.nn.functional.normalize(candidates, dim=1)
    linked = (unit @ unit.T > cosine).float()
    reach = linked
    for _ in range(len(candidates).bit_length()):  # transitive closure by squaring
        reach = ((reach @ reach) > 0).float()
    first = reach.argmax(1)  # the lowest member of each candidate's group
    groups = torch.tensor(sorted(set(first.tolist())), device=candidates.device)
    weight = coefficients.norm(dim=1).to(candidates.dtype)
    weight = weight + torch.finfo(weight.dtype).eps * weight.max() + torch.finfo(weight.dtype).tiny
    share = (first[None, :] == groups[:, None]) * weight  # (g, n)
    means: Tensor = (share / share.sum(1, keepdim=True)) @ candidates
    return means


def unflipped(candidates: Tensor, coefficients: Tensor) -> Tensor:
    """Undo the one way in which a surplus of ReLU candidates explains the weights wrongly.

    A pair ±u, relu(z) − relu(−z) = z, can make good for any number of flipped candidates −x_i; its
    linear part is their sum, which has one solution while n < d. Pairs are dropped, and what they
    made good for is turned round. X itself is returned where there is no pair.
    """
    x, a = candidates.double(), coefficients.double()
    unit = torch.nn.functional.normalize(x, dim=1)
    cosine = unit @ unit.T
    pairs = (torch.triu(cosine) < OPPOSITE).nonzero()
    pairs = pairs[cosine[pairs[:, 0], pairs[:, 1]].argsort()]  # the most opposite first
    alive = torch.ones(len(x), dtype=torch.bool, device=x.device)
    linear = torch.zeros(x.shape[1], a.shape[1], dtype=x.dtype, device=x.device)
    for i, j in pairs.tolist():
        if not (alive[i] and alive[j]):
            continue
        keep, drop = (i, j) if a[i].norm() >= a[j].norm() else (j, i)
        alive[drop] = False
        both = a[keep] + a[drop]
        if both.norm() > 1e-3 * a[keep].norm():  # perhaps a sample and its mirror image
            linear -= torch.outer(x[keep], a[drop])
            a[keep] = both
        else:  # nothing but a linear function
            alive[keep] = False
            linear += torch.outer(x[keep], (a[keep] - a[drop]) / 2)
    if alive.all():
        return candidates
    x, a = x[alive], a[alive]
    columns = torch.einsum("nd,nm->dmn", x, a).flatten(0, 1)
    share = torch.linalg.lstsq(columns, -linear.reshape(-1, 1)).solution[:, 0]
    return torch.where(share[:, None] > 0.5, -x, x).to(candidates.dtype)


def exchanges(problem: Problem, count: int) -> int:
    """Return in how many ways two patches of one of so many candidates can change places.

    It is 0 where there are none, or too many to try all.
    """
    if problem.features.patches is None:
        return 0
    places = Tiles(problem.shape, problem.features.patches).places
    ways = count * math.comb(places, 2)
    return ways if ways <= WAYS else 0


def exchanged(problem: Problem, candidates: Tensor, way: int) -> Tensor:
    """Return the candidates (n, d) with two patches of one in each other's place."""
    assert problem.features.patches is not None
    tiles = Tiles(problem.shape, problem.features.patches)
    patches = tiles.cut(candidates).clone()
    pairs = list(itertools.combinations(range(tiles.places), 2))
    one, other = pairs[way % len(pairs)]
    patches[way // len(pairs), [one, other]] = patches[way // len(pairs), [other, one]]
    return tiles.joined(patches)


def reseed(problem: Problem, fit: Fit, drop: int, count: int, generator: torch.Generator) -> Tensor:
    """Drop the cheapest, then fill up to `count` candidates where the residual points."""
    kept, residual = fit.candidates, fit.residual
    if drop > 0:
        kept = without(problem, fit, drop)
        residual = fitted(problem, kept).residual if len(kept) else problem.target
    new = spectral_starts(problem, residual, count - len(kept), generator)
    return torch.cat([kept, new.to(kept)])


def spectral_starts(
    problem: Problem, residual: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """Draw candidates at eigenvectors of largest |eigenvalue| of M₂(R), and the rest at random."""
    random = problem.domain.start(count, problem.dim, generator)
    weights = residual[:, 0]
    if residual.shape[1] > 1:  # R u with u the leading right singular vector of R
        inner = problem.total((residual.T @ residual).double())
        leading = torch.linalg.eigh(inner).eigenvectors[:, -1]
        weights = residual @ leading.to(residual.dtype)
    vectors = extreme_eigenvectors(problem, weights, min(count, problem.dim), generator)
    if vectors is None:
        return random
    signs = torch.randint(0, 2, (vectors.shape[1], 1), generator=generator) * 2.0 - 1
    random[: vectors.shape[1]] = problem.domain.project(vectors.T.double().cpu() * signs.double())
    return random


def extreme_eigenvectors(
    problem: Problem, weights: Tensor, count: int, generator: torch.Generator
) -> Tensor | None:
    """Return eigenvectors (d, count) of largest |eigenvalue|, in descending order, or None."""
    d, features = problem.dim, problem.features
    dense = d <= DENSE
    if dense:
        basis = torch.eye(d, dtype=features.dtype, device=features.device)
    else:
        start = torch.randn(d, min(d, count + 16), generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(start.to(features.device, features.dtype)).Q
    image = problem.moment(weights, basis)
    for _ in range(0 if dense else 5):
        if image is not None:
            basis = torch.linalg.qr(image).Q
            image = problem.moment(weights, basis)
    if image is None:
        return None
    small = (basis.T @ image).double()
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    extreme: Tensor = basis.double() @ vectors[:, values.abs().argsort(descending=True)[:count]]
    return extreme
