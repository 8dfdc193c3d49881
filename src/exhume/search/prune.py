"""Prune: drop candidates that the others can stand in for, such as duplicates."""

import torch
from torch import Tensor

from exhume.equation.objective import Fit
from exhume.equation.problem import Problem


def greedy_order(
    gram: Tensor, products: Tensor, rows: int = 1, jitter: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """In which order to drop candidates, cheapest first, and what it costs in all.

    Dropping candidate i and refitting the others adds tr A_iᵀ (K⁻¹)_ii⁻¹ A_i to ‖R‖², with the
    k×k block of K⁻¹ and the k rows of A that belong to it. The inverse is down-dated after each
    drop, so of two duplicates only one is cheap.

    Args:
        gram: K = ΦΦᵀ, (n·k, n·k) float64.
        products: ΦΔ, (n·k, m) float64.
        rows: k, the rows of a candidate.
        jitter: added to the diagonal, relative to its mean.

    Returns:
        Indices (n,) in order of dropping, and the cumulative cost (n,) in units of ‖Δ‖².

    Example:
        >>> phi = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
        >>> order, cost = greedy_order(phi @ phi.T, phi @ torch.tensor([[1.0], [2.0]]).double())
        >>> order[1:].tolist(), [round(c, 6) for c in cost.tolist()]
        ([2, 1], [0.0, 1.0, 5.0])
    """
    n = len(gram) // rows
    scale = gram.diagonal().mean()
    inverse = torch.linalg.inv(gram + jitter * scale * torch.eye(len(gram)).to(gram))
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


def dropping(problem: Problem, fit: Fit) -> tuple[Tensor, Tensor]:
    """`greedy_order` of a point's candidates, the cost as a share of ‖Δ‖²."""
    target = problem.target.double()
    linearization = fit.linearization
    order, cost = greedy_order(linearization.gram(), linearization.apply(target), fit.rows)
    return order, cost / target.square().sum().item()


def without(problem: Problem, fit: Fit, count: int) -> Tensor:
    """The candidates (n − count, d) without the `count` that are cheapest to drop."""
    order, _ = dropping(problem, fit)
    return fit.candidates[order[count:].sort().values.to(fit.candidates.device)]
