"""Who belongs to whom, and how far apart they are: as vectors, as images."""

import math
from typing import Literal

import scipy
import torch
from torch import Tensor
from torch.nn import functional

from exhume.errors import InputError

Kind = Literal["sign_invariant", "signed", "published"]

# Side of the window of SSIM in pixels, and deviation of its weights: those of the papers on images
SIDE, DEVIATION = 3, 1.5


def distances(truth: Tensor, candidates: Tensor, kind: Kind = "sign_invariant") -> Tensor:
    """Return the distance of every true sample x_i to every candidate y_j, (n, k) in float64.

    signed:          ‖x_i − y_j‖
    sign_invariant:  min(‖x_i − y_j‖, ‖x_i + y_j‖)
    published:       ‖|x_i| − |y_j|‖, absolute values element by element. It forgives the sign of
                     every single pixel, so it is never larger than the other two.

    Through ‖x‖² + ‖y‖² − 2 x·y they have a rounding error of about 1e-8 ‖x‖: enough to choose
    pairs; take the distance of a chosen pair from the pair itself.
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
    """
    rows, columns = map(torch.from_numpy, scipy.optimize.linear_sum_assignment(costs.numpy()))
    matched = torch.full((len(costs),), -1)
    matched[rows] = columns
    return matched


def nearest(costs: Tensor) -> Tensor:
    """Return the cheapest column of each row of costs (n, k), −1 where there is none (k = 0)."""
    return costs.argmin(1) if costs.shape[1] else torch.full((len(costs),), -1)


def take(vectors: Tensor, indices: Tensor, missing: float = 0.0) -> Tensor:
    """Return the rows at the given indices; every entry is `missing` where the index is −1."""
    return torch.cat([vectors, vectors.new_full((1, vectors.shape[1]), missing)])[indices]


def check_vectors(vectors: Tensor, what: str, dim: int | None = None) -> Tensor:
    """Return rows (k, d) in float64 on the CPU; refuse another shape, and rows not finite."""
    if vectors.ndim != 2 or (dim is not None and vectors.shape[1] != dim):
        expected = f"(any number, {dim})" if dim is not None else "(number, dimension)"
        shape = tuple(vectors.shape)
        raise InputError(f"the {what}s have shape {shape}, expected {expected}: one vector a row")
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


def norms(vectors: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of (n, d), (n,)."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return lengths


def errors(truth: Tensor, paired: Tensor) -> Tensor:
    """Return ‖x_i − y_i‖ / ‖x_i‖ of each pair of rows (n, d); the zero vector has the error 1."""
    return norms(truth - paired) / norms(truth)


def published_errors(truth: Tensor, paired: Tensor) -> Tensor:
    """Return the error of the published code, ‖|x_i| − |y_i|‖ / √d, absolute values by element."""
    return norms(truth.abs() - paired.abs()) / math.sqrt(truth.shape[1])


def cosines(truth: Tensor, paired: Tensor) -> Tensor:
    """Return the cosine of each pair, x_i·y_i / (‖x_i‖ ‖y_i‖) in [−1, 1]; 0 where y_i is zero."""
    products, sizes = (truth * paired).sum(1), norms(truth) * norms(paired)
    return torch.where(sizes > 0, products / sizes, 0.0).clamp(-1, 1)


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Return −10 log10 ‖x − y‖²/d of pairs of images (n, …), clipped to [0, 1], in dB."""
    x, y = (side.double().clamp(0, 1) for side in (images, others))
    return -10 * (x - y).square().flatten(1).mean(1).log10()


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """Return the structural similarity of pairs of images, the mean over pixels and channels.

    S = (2 μ_x μ_y + 0.01²)(2 σ_xy + 0.03²) / ((μ_x² + μ_y² + 0.01²)(σ_x² + σ_y² + 0.03²)) in the
    window around each pixel, moments weighed by a Gaussian; the image is mirrored at its edges, as
    in the published code. Values outside [0, 1] are clipped first; NaN stays NaN. Images are
    (n, H, W) or (n, C, H, W), with sides of 3 pixels or more.
    """
    x, y = (side.double().clamp(0, 1).reshape(-1, 1, *side.shape[-2:]) for side in (images, others))
    edge = SIDE // 2
    steps = torch.arange(-edge, edge + 1, dtype=torch.float64)
    weights = (-(steps**2) / (2 * DEVIATION**2)).exp()
    kernel = (weights[:, None] * weights / weights.sum() ** 2)[None, None]

    def mean(values: Tensor) -> Tensor:
        return functional.conv2d(functional.pad(values, [edge] * 4, "reflect"), kernel)

    mean_x, mean_y = mean(x), mean(y)
    variances = mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    above = (2 * mean_x * mean_y + 0.01**2) * (2 * covariance + 0.03**2)
    below = (mean_x**2 + mean_y**2 + 0.01**2) * (variances + 0.03**2)
    return (above / below).reshape(len(images), -1).mean(1)
