"""Prune: drop candidates that the others can stand in for, such as duplicates."""

import torch
from torch import Tensor

from exhume.objective import Point
from exhume.problem import Problem


def greedy_order(gram: Tensor, products: Tensor, jitter: float = 1e-12) -> tuple[Tensor, Tensor]:
    """In which order to drop candidates, cheapest first, and what it costs in all.

    Dropping candidate i and refitting the others adds Σ_c A_ic² / (K⁻¹)_ii to ‖R‖². The
    inverse is down-dated after each drop, so of two duplicates only one is cheap.

    Args:
        gram: K = ΦΦᵀ, (n, n) float64.
        products: ΦΔ, (n, m) float64.
        jitter: added to the diagonal, relative to its mean.

    Returns:
        Indices (n,) in order of dropping, and the cumulative cost (n,) in units of ‖Δ‖².

    Example:
        >>> phi = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        >>> order, cost = greedy_order(phi @ phi.T, phi @ torch.tensor([[1.0], [2.0]]).double())
        >>> order[1:].tolist(), [round(c, 6) for c in cost.tolist()]
        ([2, 1], [0.0, 1.0, 5.0])
    """
    n = len(gram)
    scale = gram.diagonal().mean()
    inverse = torch.linalg.inv(gram + jitter * scale * torch.eye(n).to(gram))
    coefficients = inverse @ products
    alive = torch.ones(n, dtype=torch.bool, device=gram.device)
    order, costs = [], []
    for _ in range(n):
        cost = coefficients.square().sum(1) / inverse.diagonal()
        i = int(cost.where(alive, torch.inf).argmin())
        order.append(i)
        costs.append(cost[i].item())
        alive[i] = False
        column = inverse[:, i] / inverse[i, i]
        coefficients = coefficients - column[:, None] * coefficients[i]
        inverse = inverse - torch.outer(column, inverse[i])
        inverse[i, i] = 1.0  # a dropped candidate: decoupled, never divided by zero
    return torch.tensor(order), torch.tensor(costs, dtype=torch.float64).cumsum(0)


def dropping(problem: Problem, point: Point) -> tuple[Tensor, Tensor]:
    """`greedy_order` of a point's candidates, the cost as a share of ‖Δ‖²."""
    target = problem.target.double()
    linearization = point.linearization
    order, cost = greedy_order(linearization.gram(), linearization.apply(target))
    return order, cost / target.square().sum().item()


def without(problem: Problem, point: Point, count: int) -> Tensor:
    """The candidates (n − count, d) without the `count` that are cheapest to drop."""
    order, _ = dropping(problem, point)
    return point.candidates[order[count:].sort().values.to(point.candidates.device)]
