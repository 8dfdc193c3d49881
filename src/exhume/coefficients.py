"""Eliminating the coefficients: the linear half of the problem, solved exactly in float64."""

import torch
from torch import Tensor

JITTER = 1e-12
"""Added to the diagonal, relative to its mean, so that two equal candidates do no harm."""


def factor(gram: Tensor, jitter: float = JITTER) -> Tensor:
    """Cholesky factor L of K + jitter · tr(K)/n · I, the jitter raised until there is one.

    Args:
        gram: K, (n, n) float64, positive semi-definite.
        jitter: relative to the mean of the diagonal.

    Returns:
        L (n, n) with LLᵀ = K + jitter.
    """
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
    """The A that minimises ‖T − ΦᵀA‖², from K = ΦΦᵀ and ΦT.

    Returns:
        A (n, m) and the Cholesky factor of K.

    Example:
        >>> K = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
        >>> A, _ = least_squares(K, torch.tensor([[1.0], [1.0]], dtype=torch.float64))
        >>> [round(a, 6) for a in A[:, 0].tolist()]
        [0.5, 0.25]
    """
    lower = factor(gram)
    return torch.cholesky_solve(products, lower), lower
