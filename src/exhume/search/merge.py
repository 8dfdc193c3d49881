"""Merge: join candidates that have become the same sample."""

import torch
from torch import Tensor


def merged(candidates: Tensor, coefficients: Tensor, cosine: float) -> Tensor:
    """One candidate for each group that is linked by cosines above `cosine`.

    Args:
        candidates: X, (n, d).
        coefficients: A, (n, k·m), one row a candidate; a group's mean is weighted by |A|.
        cosine: the least similarity of a link.

    Returns:
        Candidates (g, d) with g ≤ n, in the order of each group's first member. Not projected.

    Example:
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 0.1]])
        >>> joined = merged(X, torch.tensor([[3.0], [1.0], [-1.0]]), 0.9)
        >>> [[round(t, 3) for t in x] for x in joined.tolist()]
        [[1.0, 0.025], [0.0, 2.0]]
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
