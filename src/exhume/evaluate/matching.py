"""Who belongs to whom: distances between true samples and candidates, and the best pairing."""

from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from exhume.errors import InputError

Kind = Literal["sign_invariant", "signed", "published"]


def distances(truth: Tensor, candidates: Tensor, kind: Kind = "sign_invariant") -> Tensor:
    """Return the distance of every true sample x_i to every candidate y_j.

    signed:          ‖x_i − y_j‖
    sign_invariant:  min(‖x_i − y_j‖, ‖x_i + y_j‖)
    published:       ‖|x_i| − |y_j|‖, absolute values element by element. It forgives the sign of
                     every single pixel, so it is never larger than the other two.

    All three go through ‖x‖² + ‖y‖² − 2 x·y: no (n, k, d) array, at the price of an absolute
    rounding error of about 1e-8 ‖x‖. That is enough to choose pairs; take the distance of a chosen
    pair from the pair itself.

    Args:
        truth: (n, d).
        candidates: (k, d); k and n may differ.
        kind: which of the three.

    Returns:
        (n, k), float64.

    Example:
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> y = torch.tensor([[-3.0, -4.0], [3.0, -4.0]])
        >>> distances(x, y, "signed").tolist()
        [[10.0, 8.0]]
        >>> distances(x, y).tolist()
        [[0.0, 6.0]]
        >>> distances(x, y, "published").tolist()
        [[0.0, 0.0]]
    """
    x, y = truth.double(), candidates.double()
    if kind == "published":
        x, y = x.abs(), y.abs()
    products = x @ y.T
    if kind == "sign_invariant":
        products = products.abs()
    squares = x.square().sum(1)[:, None] + y.square().sum(1)[None, :]
    return (squares - 2 * products).clamp(min=0).sqrt()


def assign(costs: Tensor) -> Tensor:
    """Pair rows and columns of costs (n, k) one to one at the least total cost.

    Infinity forbids a pair. The result is the column of each row, −1 for rows left over (k < n).

    Example:
        >>> assign(torch.tensor([[1.0, 2.0], [1.0, 9.0], [8.0, 8.0]])).tolist()
        [1, 0, -1]
    """
    rows, columns = map(torch.from_numpy, linear_sum_assignment(costs.numpy()))
    matched = torch.full((costs.shape[0],), -1, dtype=torch.int64)
    matched[rows] = columns
    return matched


def nearest(costs: Tensor) -> Tensor:
    """Return the cheapest column of each row of costs (n, k), −1 where there is none (k = 0).

    One column may serve several rows.

    Example:
        >>> nearest(torch.tensor([[1.0, 2.0], [1.0, 9.0]])).tolist()
        [0, 0]
    """
    if costs.shape[1] == 0:
        return torch.full((costs.shape[0],), -1, dtype=torch.int64)
    return costs.argmin(dim=1)


def take(vectors: Tensor, indices: Tensor, missing: float = 0.0) -> Tensor:
    """Return the rows at the given indices; every entry is `missing` where the index is −1.

    Example:
        >>> take(torch.tensor([[5.0, 6.0]]), torch.tensor([-1, 0])).tolist()
        [[0.0, 0.0], [5.0, 6.0]]
    """
    taken = vectors.new_full((len(indices), vectors.shape[1]), missing)
    found = indices >= 0
    taken[found] = vectors[indices[found]]
    return taken


def check_vectors(vectors: Tensor, what: str, dim: int | None = None) -> Tensor:
    """Return rows in float64 on the CPU, or say what is wrong with them.

    Args:
        vectors: (k, d).
        what: "candidate" or "true sample", for the message.
        dim: the d that is expected, if known.

    Raises:
        InputError: not two-dimensional, another d, or a row that is not finite.
    """
    if vectors.ndim != 2 or (dim is not None and vectors.shape[1] != dim):
        expected = f"(any number, {dim})" if dim is not None else "(number, dimension)"
        raise InputError(
            f"the {what}s have shape {tuple(vectors.shape)}, expected {expected}: "
            "one flattened vector a row"
        )
    vectors = vectors.detach().to("cpu", torch.float64)
    # The square, so that a finite row too large to measure is caught here too.
    bad = (~torch.isfinite(vectors.square().sum(1))).nonzero().flatten().tolist()
    if bad:
        value = "NaN" if vectors[bad[0]].isnan().any() else "a value too large to measure"
        raise InputError(
            f"{what} {bad[0]} holds {value} ({len(bad)} of {len(vectors)} rows do): "
            "leave such rows out, or find out why the run diverged"
        )
    return vectors
