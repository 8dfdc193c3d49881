"""How far a paired candidate is from its true sample: as vectors, as images."""

import math

import torch
from torch import Tensor
from torch.nn import functional

SSIM_WINDOW = 7
"""Side of the window of SSIM in pixels; 7 is what scikit-image takes unless told."""


def norms(vectors: Tensor) -> Tensor:
    """Return the Euclidean norm of each row of (n, d), (n,)."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return lengths


def errors(truth: Tensor, paired: Tensor) -> Tensor:
    """Return the distance of each pair over the norm of the true sample, ‖x_i − y_i‖ / ‖x_i‖.

    The zero vector has the error 1.

    Args:
        truth: (n, d), no zero row.
        paired: (n, d); row i belongs to row i.

    Example:
        >>> errors(torch.tensor([[6.0, 8.0]]), torch.tensor([[6.0, 3.0]])).tolist()
        [0.5]
    """
    return norms(truth - paired) / norms(truth)


def published_errors(truth: Tensor, paired: Tensor) -> Tensor:
    """Return the error of the published code, ‖|x_i| − |y_i|‖ / √d, absolute values by element.

    Independent points on the sphere of radius √d are at √(2 − 4/π) ≈ 0.85, not at √2.

    Example:
        >>> published_errors(torch.tensor([[1.0, -1.0]]), torch.tensor([[-1.0, -1.0]])).tolist()
        [0.0]
    """
    return norms(truth.abs() - paired.abs()) / math.sqrt(truth.shape[1])


def cosines(truth: Tensor, paired: Tensor) -> Tensor:
    """Return the cosine of each pair, x_i·y_i / (‖x_i‖ ‖y_i‖) in [−1, 1]; 0 where y_i is zero.

    Example:
        >>> cosines(torch.tensor([[1.0, 0.0]]), torch.tensor([[-9.0, 0.0]])).tolist()
        [-1.0]
    """
    products, sizes = (truth * paired).sum(1), norms(truth) * norms(paired)
    return torch.where(sizes > 0, products / sizes, 0.0).clamp(-1, 1)


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of pairs of images in dB, −10 log10 ‖x − y‖²/d.

    Values outside [0, 1] are clipped first. Equal images have an infinite ratio, NaN stays NaN.

    Args:
        images: (n, …), in [0, 1].
        others: the same shape; image i belongs to image i.

    Returns:
        (n,), float64.

    Example:
        >>> psnr(torch.zeros(2, 4, 4), torch.tensor([0.1, -3.0])[:, None, None]).round(decimals=4)
        tensor([20., inf], dtype=torch.float64)
    """
    x, y = (side.double().clamp(0, 1) for side in (images, others))
    return -10 * (x - y).square().flatten(1).mean(1).log10()


def ssim(images: Tensor, others: Tensor, window: int) -> Tensor:
    """Return the structural similarity of pairs of images, the mean over windows and channels.

    S = (2 μ_x μ_y + 0.01²)(2 σ_xy + 0.03²) / ((μ_x² + μ_y² + 0.01²)(σ_x² + σ_y² + 0.03²)) in each
    window inside the image. All pixels of a window weigh the same, and covariances are over their
    number less one, as in scikit-image. Values outside [0, 1] are clipped first.

    Args:
        images: (n, height, width) or (n, channels, height, width), in [0, 1].
        others: the same shape; image i belongs to image i.
        window: side of the window in pixels, odd, at least 3; `ssim_window` gives one that fits.

    Returns:
        (n,), float64, at most 1, which equal images reach; NaN stays NaN.

    Example:
        >>> image = torch.eye(8)[None]
        >>> ssim(image, image, window=7).tolist()
        [1.0]
    """
    x, y = (side.double().clamp(0, 1).reshape(-1, 1, *side.shape[-2:]) for side in (images, others))
    kernel = x.new_full((1, 1, window, window), 1 / window**2)

    def mean(values: Tensor) -> Tensor:
        return functional.conv2d(values, kernel)

    mean_x, mean_y, unbiased = mean(x), mean(y), window**2 / (window**2 - 1)
    variances = unbiased * (mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2)
    covariance = unbiased * (mean(x * y) - mean_x * mean_y)
    above = (2 * mean_x * mean_y + 0.01**2) * (2 * covariance + 0.03**2)
    below = (mean_x**2 + mean_y**2 + 0.01**2) * (variances + 0.03**2)
    return (above / below).reshape(len(images), -1).mean(1)


def ssim_window(shape: tuple[int, ...]) -> int | None:
    """Return the window of SSIM: 7 pixels, or the largest odd number that fits; None below 3.

    Example:
        >>> ssim_window((3, 32, 32)), ssim_window((8, 8)), ssim_window((6, 9)), ssim_window((2, 9))
        (7, 7, 5, None)
    """
    side = min(shape[-2:])
    window = min(SSIM_WINDOW, side - 1 + side % 2)
    return window if window >= 3 else None
