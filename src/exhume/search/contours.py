"""Independent components of images: which combinations of mixed rows have contours.

Neighbouring pixels of an image differ little but at its contours, so their differences have a sharp
peak and long tails; those of a mixture of images are nearer to normal. FastICA (Hyvärinen 1999)
turns whitened rows until they are farthest from normal, which finds images roughly however many
there are; then the likelihood of long-tailed differences is raised (Pham and Garat 1997, with the
steps of Picard: Ablin et al. 2018), which no longer holds that contours of two images never meet.
"""

import math

import torch
from torch import Tensor

from exhume.errors import InputError

ROUNDING = 1e-6  # share of the largest singular value that the rounding of float32 may leave
LEAST = 0.3  # of the curvature in a step's directions: where it is less the model does not hold
SHORTEST = 1e-6  # of a step, for the likelihood to rise: then it is rounding that falls


def contours(images: Tensor, orders: int) -> Tensor:
    """Return differences of neighbouring pixels up to an order, (k, C, H, W) → (k, T).

    Colours are taken along the principal axes of all images, and every kind of difference of every
    colour is divided by its root mean square, so that brightness does not drown the others. With
    third differences more images come back, but white noise is largest in them; fourth add nothing.
    """
    flat = images.transpose(0, 1).flatten(1)
    axes = torch.linalg.eigh(flat @ flat.T)[1]
    parts, least = [], ROUNDING * flat.square().mean().sqrt()
    for colour in torch.einsum("co,kchw->okhw", axes, images):
        for order in range(1, orders + 1):
            for down in range(order + 1):
                kind = colour.diff(n=order - down, dim=2).diff(n=down, dim=1)
                size = kind.square().mean().sqrt() if kind.numel() else least
                parts += [kind.flatten(1) / size] if size > least else []
    if not parts:
        raise InputError("unmixed: the rows of the first layer are images without any contours.")
    return torch.cat(parts, 1)


def turned(turn: Tensor, values: Tensor) -> Tensor:
    """Return one step of FastICA: Q ← orthogonal(E[g(QZ) Zᵀ] − E[g'(QZ)] Q), g(s) = s·exp(−s²/2).

    Z (k, T) are whitened values. That g belongs to contours: it disregards the long tails, whose
    few values would decide, and asks for a sharp peak.
    """
    s = turn @ values
    bell = torch.exp(-s.square() / 2)
    mean = (s * bell) @ values.T / values.shape[1]
    slope = ((1 - s.square()) * bell).mean(1, keepdim=True)
    return orthogonal((mean - slope * turn).double()).to(turn)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix, (MMᵀ)^{−½} M."""
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    root = values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt()
    nearest: Tensor = (vectors * root) @ vectors.T @ matrix
    return nearest


def likelier(unmixing: Tensor, values: Tensor) -> tuple[Tensor, float]:
    """Return W (k, k) after a step up the likelihood of Y = WZ, and by how much a row gains.

    Values are taken to be Cauchy's, the longest tails there are: −log p(y) = log(1 + y²), so that
    the cost of W is Σ_i E[log(1 + y_i²)] − log|det W|. A step W ← (I + D)W solves H D = −G for its
    slope G_ij = E[ψ(y_i) y_j] − δ_ij, ψ = 2y/(1 + y²), with the curvature of independent rows:
    D_ij and D_ji meet in the matrix (h_ij, 1; 1, h_ji), h_ij = E[ψ'(y_i)] E[y_j²]. Both are given
    in float64: in float32 the gains of late steps are lost.
    """
    (k, count), eye = values.shape, torch.eye(len(values)).to(values)
    y = unmixing @ values
    squares = y.square()
    whole = 1 + squares
    bent = 2 * (2 / whole - 1) / whole  # ψ'
    slope = 2 * y / whole @ y.T / count - eye
    h = torch.outer(bent.mean(1), squares.mean(1))
    smaller = (h + h.T - ((h - h.T).square() + 4).sqrt()) / 2
    h = h + (LEAST - smaller).clamp_min(0)
    step = (slope.T - h.T * slope) / (h * h.T - 1)
    own = (bent * squares).mean(1) + 1
    step.diagonal().copy_(-slope.diagonal() / own.clamp_min(LEAST))

    def cost(y: Tensor, w: Tensor) -> float:
        return float(torch.log1p(y.square()).sum() / count - torch.linalg.slogdet(w).logabsdet)

    before, length = cost(y, unmixing), 1.0
    while length > SHORTEST:
        move = eye + length * step
        if (gain := before - cost(move @ y, move @ unmixing)) > 0:
            return move @ unmixing, gain / k
        length /= 2
    return unmixing, 0.0


def above_noise(sizes: Tensor, sides: tuple[int, ...]) -> int:
    """Return how many singular values of a matrix, largest first, are not those of noise.

    Noise of sides a ≥ b has them between σ(√a − √b) and σ(√a + √b) (Marchenko and Pastur), and the
    smallest of all is taken for its least. Each of the c values above the others takes a row and a
    column of the noise away, so that c is found by and by.
    """
    long, short = max(sides), min(sides)
    count, found = -1, 0
    while found > count:
        count = found
        a, b = math.sqrt(long - count), math.sqrt(max(0, short - count))
        edge = sizes[-1] * (a + b) / (a - b) if a > b else sizes[-1]
        found = int((sizes > edge.clamp_min(ROUNDING * sizes[0])).sum())
    return count


def clear(sizes: Tensor, sides: tuple[int, ...]) -> Tensor:
    """Return how much of the right singular vectors above the noise of (h, d) is none, c² (c,).

    Noise of σ makes s of a singular value tσ√d, and turns its vector away from where it was: with
    β = h/d, s²/σ²d = (1 + t²)(β + t²)/t² and c² = (t⁴ − β)/(t⁴ + t²) (Benaych-Georges and
    Nadakuditi 2012, for few values above the noise; here they are taken off both sides, as above).
    """
    count = above_noise(sizes, sides)
    h, d = (max(1, side - count) for side in sides)
    a, b = math.sqrt(max(h, d)), math.sqrt(min(h, d))
    noise = (sizes[-1] / (a - b) if a > b else 0 * sizes[-1]).clamp_min(ROUNDING * sizes[0] / a)
    u = (sizes[:count] / noise).square() / d - 1 - h / d
    t = (u + (u.square() - 4 * h / d).clamp_min(0).sqrt()) / 2  # t²
    return ((t.square() - h / d) / (t.square() + t)).nan_to_num(0.0).clamp(0, 1)
