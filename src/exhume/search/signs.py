"""Signs: undo the one way in which a surplus of ReLU candidates explains the weights wrongly.

relu(−z) = relu(z) − z. So a flipped candidate −x_i with the coefficient of x_i is off by a linear
function of V, and a pair ±u, relu(z) − relu(−z) = z, can make good for all flips at once:
a surplus of two candidates hides any number of flips at zero residual. The pair tells which:
its linear part is a sum of the flipped candidates, and that sum has one solution while n < d.
"""

import torch
from torch import Tensor

OPPOSITE = -0.99
"""Cosine under which two candidates are a pair ±u."""


def unflipped(candidates: Tensor, coefficients: Tensor) -> Tensor:
    """Candidates without pairs ±u, and with those turned round that the pairs made good for.

    Args:
        candidates: X, (n, d).
        coefficients: A, (n, m).

    Returns:
        Candidates (n', d), n' ≤ n; X itself where there is no pair.

    Example:
        Two flipped samples of coefficient 1, made good for by ±u with u ∝ x₁ + x₂:

        >>> u = [4.5**0.5, 4.5**0.5, 0.0]
        >>> X = torch.tensor([[-3.0, 0.0, 0.0], [0.0, -3.0, 0.0], u, [-t for t in u]])
        >>> A = torch.tensor([[1.0], [1.0], [2**0.5], [-(2**0.5)]])
        >>> unflipped(X, A).tolist()
        [[3.0, -0.0, -0.0], [-0.0, 3.0, -0.0]]
    """
    x, a = candidates.double(), coefficients.double()
    unit = torch.nn.functional.normalize(x, dim=1)
    cosine = unit @ unit.T
    pairs = (torch.triu(cosine) < OPPOSITE).nonzero()
    pairs = pairs[cosine[pairs[:, 0], pairs[:, 1]].argsort()]  # the most opposite first
    alive = torch.ones(len(x), dtype=torch.bool, device=x.device)
    linear = torch.zeros(x.shape[1], a.shape[1], dtype=x.dtype, device=x.device)
    for i, j in pairs.tolist():
        if not (alive[i] and alive[j]):
            continue
        keep, drop = (i, j) if a[i].norm() >= a[j].norm() else (j, i)
        alive[drop] = False
        both = a[keep] + a[drop]
        if both.norm() > 1e-3 * a[keep].norm():  # perhaps a sample and its mirror image
            linear -= torch.outer(x[keep], a[drop])
            a[keep] = both
        else:  # nothing but a linear function
            alive[keep] = False
            linear += torch.outer(x[keep], (a[keep] - a[drop]) / 2)
    if alive.all():
        return candidates
    x, a = x[alive], a[alive]
    columns = torch.einsum("nd,nm->dmn", x, a).flatten(0, 1)
    share = torch.linalg.lstsq(columns, -linear.reshape(-1, 1)).solution[:, 0]
    return torch.where(share[:, None] > 0.5, -x, x).to(candidates.dtype)
