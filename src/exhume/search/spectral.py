"""New candidates where the residual points: extreme eigenvectors of its second moment."""

import torch
from torch import Tensor

from exhume.equation.problem import Problem

DENSE = 1024
"""Up to this dimension the moment is formed and diagonalised; above it, subspace iteration."""


def spectral_starts(
    problem: Problem, residual: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """Candidates at the eigenvectors of largest |eigenvalue| of M₂(R), with random signs.

    With k samples missing from a residual the signal-to-noise ratio of the moment is p/(d·k).
    Where several outputs are seen, the combination of largest energy is looked at. Where the
    features have no moment, or d < count, the rest is drawn at random.

    Returns:
        Admissible points (count, d), float64 on the CPU.
    """
    random = problem.domain.start(count, problem.dim, generator)
    weights = _strongest_column(residual)
    vectors = extreme_eigenvectors(problem, weights, min(count, problem.dim), generator)
    if vectors is None:
        return random
    signs = torch.randint(0, 2, (vectors.shape[1], 1), generator=generator) * 2.0 - 1
    random[: vectors.shape[1]] = problem.domain.project(vectors.T.double().cpu() * signs.double())
    return random


def _strongest_column(residual: Tensor) -> Tensor:
    """R u with u the leading right singular vector of R (p, m), (p,)."""
    if residual.shape[1] == 1:
        return residual[:, 0]
    leading: Tensor = torch.linalg.eigh((residual.T @ residual).double()).eigenvectors[:, -1]
    return residual @ leading.to(residual.dtype)


def extreme_eigenvectors(
    problem: Problem, weights: Tensor, count: int, generator: torch.Generator
) -> Tensor | None:
    """Eigenvectors (d, count) of largest |eigenvalue|, in descending order."""
    d, features = problem.dim, problem.features
    dense = d <= DENSE
    if dense:
        basis = torch.eye(d, dtype=features.dtype, device=features.device)
    else:
        start = torch.randn(d, min(d, count + 16), generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(start.to(features.device, features.dtype)).Q
    image = features.moment(weights, basis)
    for _ in range(0 if dense else 5):
        if image is not None:
            basis = torch.linalg.qr(image).Q
            image = features.moment(weights, basis)
    if image is None:
        return None
    small = (basis.T @ image).double()
    values, vectors = torch.linalg.eigh((small + small.T) / 2)
    extreme: Tensor = basis.double() @ vectors[:, values.abs().argsort(descending=True)[:count]]
    return extreme
