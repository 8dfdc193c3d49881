"""Linear systems that resemble each other: what one solution found preconditions the next.

From step to step the Gauss-Newton matrix B = JᵀP⊥J changes little. With directions Q of earlier
solutions, and their images BQ, the next system A = B + λS is nearly solved in their span.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KEPT = 1024  # directions, at most: of more, the oldest are of a matrix that has changed
NUMBERS = 2**25  # in all of them, at most: 512 MiB in float64, with their images
DISTINCT = 1e-6  # share of the largest ⟨q, Aq⟩ below which a direction repeats others

Operator = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]  # a direction q and its image Bq, both (n, d), with ⟨q, Bq⟩ = 1


def normalised(direction: Tensor, image: Tensor) -> Pair:
    """Return the pair with ⟨q, Bq⟩ = 1; of a direction that the matrix does not see, zeros."""
    size = (direction * image).sum(dtype=torch.float64)
    least = torch.finfo(direction.dtype).tiny
    scale = torch.where(size > least, size.clamp_min(least).rsqrt(), 0.0).to(direction)
    return scale * direction, scale * image


def newest(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return the pairs that are worth keeping."""
    return tuple(pairs[-min(KEPT, NUMBERS // max(1, pairs[0][0].numel())) :]) if pairs else ()


def deflated(
    base: Operator, pairs: Sequence[Pair], damped: Operator, tangent: Operator
) -> Operator:
    """Return the preconditioner QQᵀ + (I − QQᵀA) M (I − AQQᵀ), for a base M and QᵀAQ = I.

    `damped` is λS. On the span of Q it is the inverse of A, and elsewhere close to M.

    Example:
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> pairs = [normalised(q[None], q[None] @ matrix) for q in torch.eye(2)]
        >>> inverse = deflated(lambda r: r, pairs, torch.zeros_like, lambda r: r)
        >>> (inverse(torch.tensor([[1.0, 0.0]])) @ matrix).allclose(torch.tensor([[1.0, 0.0]]))
        True
    """
    if not pairs:
        return base
    along = [tangent(direction) for direction, _ in pairs]
    every = torch.stack([q.flatten() for q in along])  # (k, n·d)
    images = torch.stack(
        [(image + damped(q)).flatten() for q, (_, image) in zip(along, pairs, strict=True)]
    )
    inner = (every @ images.T).double()
    sizes, mixed = torch.linalg.eigh((inner + inner.T) / 2)
    apart = sizes > DISTINCT * sizes[-1]
    mixed = (mixed[:, apart] / sizes[apart].sqrt()).to(every)
    every, images = mixed.T @ every, mixed.T @ images

    def inverse(residual: Tensor) -> Tensor:
        inside = every @ residual.flatten()
        outside = base(residual - (inside @ images).view_as(residual))
        inside = inside - images @ outside.flatten()
        result: Tensor = outside + (inside @ every).view_as(residual)
        return result

    return inverse
