"""Symmetric tensors by their coordinates in an orthonormal basis.

T ∈ Sym^α(R^r) has one entry T_m for each multi-index m (|m| = α), which stands α!/m! times in the
full array. The coordinates t_m = √(α!/m!) T_m make the inner product of coordinates that of the
arrays, so singular values found in coordinates are those of the tensors.
"""

import itertools
import math

import torch
from torch import Tensor


def dimension(size: int, degree: int) -> int:
    """Return C(r+α−1, α), the dimension of Sym^α(R^r).

    Example:
        >>> dimension(5, 3), dimension(5, 4)
        (35, 70)
    """
    return math.comb(size + degree - 1, degree)


def exponents(size: int, degree: int) -> Tensor:
    """Return the multi-indices m with |m| = α over r letters, (M, r) int64.

    Example:
        >>> exponents(2, 2).tolist()
        [[2, 0], [1, 1], [0, 2]]
    """
    words = list(itertools.combinations_with_replacement(range(size), degree))
    letters = torch.tensor(words, dtype=torch.int64).reshape(len(words), degree)
    return torch.nn.functional.one_hot(letters, size).sum(1)


def powers(vectors: Tensor, degree: int) -> Tensor:
    """Return coordinates of v^{⊗α} for each row, (k, r) → (k, M): √(α!/m!) v^m.

    Inner products are powers of inner products, ⟨u^{⊗α}, v^{⊗α}⟩ = (u·v)^α.

    Example:
        >>> v = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> round(powers(v, 3).square().sum().item(), 9)
        125.0
    """
    letters = exponents(vectors.shape[1], degree)
    monomials = (vectors[:, None, :] ** letters).prod(2)
    return monomials * _weights(letters).to(vectors)


def slices(vectors: Tensor, degree: int) -> Tensor:
    """Return the maps T ↦ T(v, …, v, ·) for each row v, as matrices on coordinates, (k, r, M).

    T(v^{α−1}, e_j) = (1/α) ∂/∂v_j T(v^α). Its rows span the tangent space at v of the cone of
    rank-one tensors.

    Example:
        >>> v = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> x = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
        >>> (slices(v, 3) @ powers(x, 3)[0]).round(decimals=9).tolist()  # (v·x)² x
        [[3.0, -1.0]]
    """
    size = vectors.shape[1]
    letters = exponents(size, degree)
    weights = _weights(letters).to(vectors)
    rows = []
    for j in range(size):
        lowered = letters.clone()
        lowered[:, j] = (lowered[:, j] - 1).clamp_min(0)
        monomials = (vectors[:, None, :] ** lowered).prod(2)
        rows.append(monomials * weights * letters[:, j].to(vectors) / degree)
    return torch.stack(rows, 1)


def contract(tensor: Tensor, vectors: Tensor, degree: int) -> Tensor:
    """Return T(v, ·, …, ·) for each row v, in coordinates of one degree less.

    (M,), (k, r) → (k, M'). With v = e_1 … e_r these are the rows of the flattening of T.

    Example:
        >>> x = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
        >>> v = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
        >>> difference = contract(powers(x, 3)[0], v, 3) - 2 * powers(x, 2)  # (v·x) x²
        >>> bool(difference.abs().max() < 1e-12)
        True
    """
    size = vectors.shape[1]
    letters, shorter = exponents(size, degree), exponents(size, degree - 1)
    entries = tensor / _weights(letters).to(tensor)
    place = {tuple(m): k for k, m in enumerate(letters.tolist())}
    raised = shorter[:, None, :] + torch.eye(size, dtype=torch.int64)  # m' + e_j, (M', r, r)
    index = torch.tensor([[place[tuple(m)] for m in row] for row in raised.tolist()])
    return (vectors @ entries[index].T) * _weights(shorter).to(tensor)


def matrix(tensor: Tensor, size: int) -> Tensor:
    """Return the symmetric matrix of coordinates of degree 2, (M,) → (r, r).

    Example:
        >>> x = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
        >>> matrix(powers(x, 2)[0], 2).round(decimals=9).tolist()
        [[9.0, -3.0], [-3.0, 1.0]]
    """
    return contract(tensor, torch.eye(size, dtype=tensor.dtype), 2)


def _weights(letters: Tensor) -> Tensor:
    """Return √(α!/m!) for each multi-index, (M,) float64."""
    counts = letters.double()
    logarithms = torch.lgamma(counts.sum(1) + 1) - torch.lgamma(counts + 1).sum(1)
    return logarithms.exp().round().sqrt()
