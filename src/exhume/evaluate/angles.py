"""How well the span of the true samples was found, before any search in it."""

import torch
from torch import Tensor

from exhume.data import Data
from exhume.evaluate.scoring import true_inputs

ROUNDING = 1e-6
"""A direction in which the samples have less than this share of their largest is rounding."""


def principal_angles(basis: Tensor, truth: Data | Tensor) -> Tensor:
    """Return the principal angles between a subspace and the span of the true samples, in degrees.

    sin θ are the singular values of (I − UUᵀ)Q, with Q a basis of the samples' span (the roles
    exchanged where U has fewer columns): tiny angles are not lost, as they are in cos θ. Angles
    above 45° are taken from the cosines.

    Args:
        basis: U (d, r), orthonormal columns.
        truth: the training data, or its (n, d) inputs.

    Returns:
        min(r, rank of the samples) angles, float64, the largest first.

    Example:
        >>> plane = torch.eye(3, 2, dtype=torch.float64)
        >>> truth = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 3.0]])
        >>> [round(angle, 9) for angle in principal_angles(plane, truth).tolist()]
        [45.0, 0.0]
    """
    inputs, _ = true_inputs(truth)
    _, sizes, rows = torch.linalg.svd(inputs, full_matrices=False)
    span = rows[sizes > ROUNDING * sizes[0]].T
    fewer, more = sorted((basis.detach().cpu().double(), span), key=lambda u: u.shape[1])
    products = more.T @ fewer  # scipy's subspace_angles loses a tiny angle beside a large one
    sines = torch.linalg.svdvals(fewer - more @ products).clamp(max=1)
    cosines = torch.linalg.svdvals(products).flip(0).clamp(max=1)
    return torch.where(sines < cosines, sines.asin(), cosines.acos()).rad2deg()


def outside(basis: Tensor, truth: Data | Tensor) -> Tensor:
    """Return the share of each sample's norm that a subspace leaves out, ‖x − UUᵀx‖ / ‖x‖.

    It bounds from below the error of any candidate that is kept in the subspace.

    Args:
        basis: U (d, r), orthonormal columns.
        truth: the training data, or its (n, d) inputs.

    Returns:
        (n,), float64.

    Example:
        >>> line = torch.tensor([[1.0], [0.0]])
        >>> outside(line, torch.tensor([[3.0, 4.0], [5.0, 0.0]])).tolist()
        [0.8, 0.0]
    """
    inputs, norms = true_inputs(truth)
    u = basis.detach().cpu().double()
    rest: Tensor = (inputs - inputs @ u @ u.T).norm(dim=1)
    return rest / norms
