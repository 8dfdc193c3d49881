"""Eliminating the coefficients: the linear half of the problem, solved exactly in float64."""

from enum import Enum

import scipy
import torch
from torch import Tensor

JITTER = 1e-12  # share of the mean added to the diagonal, so that equal candidates do no harm
RIVALS = 3  # classes at whose margin a sample may be; all would cost c − 1 multipliers a candidate
# A multiplier that is held at zero gets a diagonal this many times the others', so that the inverse
# of the factor leaves it out to rounding
STIFF = 1e15


class Rule(Enum):
    """The rule says which coefficients a problem allows.

    FREE: any, one for each row of a candidate and column of the target.
    MARGIN: A_i = λ_i y_i with λ_i ≥ 0 and y_i = ±1 the network's own label of x_i; with several
        outputs A_i = Σ_k λ_ik (e_y − e_k), λ_ik ≥ 0, y the class that the network gives x_i
        and k those next to it.
    """

    FREE = "free"
    MARGIN = "margin"


def factor(gram: Tensor) -> Tensor:
    """Return L (n, n) with LLᵀ = K + jitter · tr(K)/n · I; jitter grows until there is one."""
    jitter = JITTER
    scale = gram.diagonal().mean().clamp_min(torch.finfo(gram.dtype).tiny)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    while True:
        lower: Tensor
        lower, failed = torch.linalg.cholesky_ex(gram + jitter * scale * identity)
        if not failed.item():
            return lower
        if jitter > 1:  # not a Gram matrix at all: NaN features
            return torch.full_like(gram, torch.nan)
        jitter *= 10


def least_squares(gram: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """Return the A (n, m) that minimises ‖T − ΦᵀA‖², from K = ΦΦᵀ and ΦT, and the factor of K."""
    lower = factor(gram)
    return torch.cholesky_solve(products, lower), lower


def eliminate(
    rule: Rule,
    gram: Tensor,
    products: Tensor,
    rows: int,
    warm: Tensor | None = None,
    outputs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the best A (n·k, m) that the rule allows, and a factor of K, from K = ΦΦᵀ and ΦT.

    A network that is homogeneous of degree L has Φθ = L f, so where T = θ, ΦT shows its outputs
    and with them the label that MARGIN asks for. Else `outputs` are Φθ, (n·k, 1).
    `warm` are coefficients of candidates nearby.
    With one row a candidate, K⁻¹ by the factor leaves out the candidates whose multiplier is held
    at zero; with several rows A counts as free.
    """
    if rule is Rule.FREE:
        return least_squares(gram, products)
    shown = products if outputs is None else outputs
    if rows == 1:
        labels = torch.where(shown[:, 0] < 0, -1.0, 1.0).to(gram)
        start = None if warm is None else warm[:, 0] * labels > 0
        signed = labels[:, None] * gram * labels
        multipliers, lower = non_negative(signed, labels * products[:, 0], start)
        return (labels * multipliers)[:, None], labels[:, None] * lower
    first, second = margins(shown[:, 0].view(-1, rows))
    across = gram[:, first] - gram[:, second]
    inner = across[first] - across[second]
    multipliers, _ = non_negative(inner, products[first, 0] - products[second, 0])
    best = torch.zeros_like(products[:, 0])
    best.index_add_(0, first, multipliers)
    best.index_add_(0, second, -multipliers)
    return best[:, None], factor(gram)


def margins(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of Φ, (n·q,) each, of the largest output y and of the q ≤ RIVALS next ones.

    Example:
        >>> first, second = margins(torch.tensor([[0.0, 5.0, 1.0], [7.0, 0.0, 2.0]]))
        >>> first.tolist(), second.tolist()
        ([1, 1, 3, 3], [2, 0, 5, 4])
    """
    n, c = outputs.shape
    order = outputs.topk(min(c, RIVALS + 1), 1).indices
    order = order + c * torch.arange(n, device=outputs.device)[:, None]
    rivals = order[:, 1:]
    return order[:, :1].expand_as(rivals).flatten(), rivals.flatten()


def non_negative(
    gram: Tensor, products: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the λ ≥ 0 that minimises λᵀKλ − 2 pᵀλ, by block principal pivoting.

    Some λ are free, at `start` those with p > 0, and the others zero. All that are on the wrong
    side (free and below zero, or zero and worth raising) change sides at once (Júdice and Pires
    1994). Where that has not helped for three rounds it begins again with `_one_by_one`. Beside λ
    (n,) comes a Cholesky factor of K in which zero λ are held (see `eliminate`).
    """
    free = products > 0 if start is None else start
    slack = 1e-10 * products.abs().max()
    fewest, patience = len(gram) + 1, 3
    while patience >= 0:
        solution, lower = _solved(gram, products, free)
        wrong = torch.where(free, solution < 0, products - gram @ solution > slack)
        count = int(wrong.sum())
        if count == 0 or not solution.isfinite().all():
            return solution.clamp_min(0), lower
        fewest, patience = (count, 3) if count < fewest else (fewest, patience - 1)
        free = free ^ wrong
    return _one_by_one(gram, products)


def _one_by_one(gram: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """The same from λ = 0 (Lawson and Hanson 1974), by scipy: ‖Lᵀλ − L⁻¹p‖² with K = LLᵀ."""
    lower = factor(gram)
    right = torch.linalg.solve_triangular(lower, products[:, None], upper=False)
    try:
        rows = lower.T.cpu().numpy(), right[:, 0].cpu().numpy()
        multipliers = torch.from_numpy(scipy.optimize.nnls(*rows, maxiter=10**4)[0]).to(products)
    except RuntimeError:  # it goes round in circles: what is below zero without bounds is held
        multipliers = torch.cholesky_solve(products[:, None], lower)[:, 0].clamp_min(0)
    return multipliers, _held_factor(gram, multipliers > 0)


def _solved(gram: Tensor, products: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """The λ of least value with all but the free held at zero, (n,), and the factor for it."""
    lower = _held_factor(gram, free)
    return torch.cholesky_solve((products * free)[:, None], lower)[:, 0] * free, lower


def _held_factor(gram: Tensor, free: Tensor) -> Tensor:
    """A Cholesky factor of K between free rows; the others stand alone and do not give way."""
    index = free.nonzero()[:, 0]
    stiff = STIFF * gram.diagonal().max().clamp_min(torch.finfo(gram.dtype).tiny).sqrt()
    lower = torch.diag((~free).to(gram.dtype) * stiff)
    lower[index[:, None], index] = factor(gram[index[:, None], index])
    return lower
