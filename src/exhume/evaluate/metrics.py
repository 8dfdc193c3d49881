"""How far a paired candidate is from its true sample: as vectors, as images."""

import math

import numpy as np
import torch
from torch import Tensor

SSIM_WINDOW = 7


def norms(vectors: Tensor) -> Tensor:
    """Euclidean norm of each row of (n, d), (n,).

    Example:
        >>> norms(torch.tensor([[3.0, 4.0]])).tolist()
        [5.0]
    """
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return lengths


def errors(truth: Tensor, paired: Tensor) -> Tensor:
    """Distance of each pair over the norm of the true sample: ‖x_i − y_i‖ / ‖x_i‖.

    1 is the error of the zero vector. On the sphere of radius √d the norm is √d.

    Args:
        truth: (n, d), no zero row.
        paired: (n, d); row i belongs to row i.

    Returns:
        (n,).

    Example:
        >>> errors(torch.tensor([[6.0, 8.0]]), torch.tensor([[6.0, 3.0]])).tolist()
        [0.5]
    """
    return norms(truth - paired) / norms(truth)


def published_errors(truth: Tensor, paired: Tensor) -> Tensor:
    """The error of the published code: ‖|x_i| − |y_i|‖ / √d, absolute values by element.

    Independent points on the sphere of radius √d are at √(2 − 4/π) ≈ 0.85, not at √2.

    Args:
        truth: (n, d).
        paired: (n, d); row i belongs to row i.

    Returns:
        (n,).

    Example:
        >>> published_errors(torch.tensor([[1.0, -1.0]]), torch.tensor([[-1.0, -1.0]])).tolist()
        [0.0]
    """
    return norms(truth.abs() - paired.abs()) / math.sqrt(truth.shape[1])


def cosines(truth: Tensor, paired: Tensor) -> Tensor:
    """Cosine of each pair, x_i·y_i / (‖x_i‖ ‖y_i‖); 0 where y_i is zero.

    Args:
        truth: (n, d), no zero row.
        paired: (n, d); row i belongs to row i.

    Returns:
        (n,) in [−1, 1].

    Example:
        >>> cosines(torch.tensor([[1.0, 0.0]]), torch.tensor([[-9.0, 0.0]])).tolist()
        [-1.0]
    """
    products, sizes = (truth * paired).sum(1), norms(truth) * norms(paired)
    return torch.where(sizes > 0, products / sizes, 0.0).clamp(-1, 1)


def psnr(image: Tensor, other: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two images in [0, 1]: −10 log10(mean squared error).

    Values outside [0, 1] are clipped first. Equal images: infinity.

    Example:
        >>> round(psnr(torch.zeros(4, 4), torch.full((4, 4), 0.1)), 4)
        20.0
        >>> psnr(torch.zeros(4, 4), torch.full((4, 4), -3.0))
        inf
    """
    from skimage.metrics import peak_signal_noise_ratio

    with np.errstate(divide="ignore"):
        value = peak_signal_noise_ratio(  # type: ignore[no-untyped-call]
            _pixels(image), _pixels(other), data_range=1
        )
    return float(value)


def ssim(image: Tensor, other: Tensor, window: int) -> float:
    """Mean structural similarity of two images in [0, 1], uniform window.

    Values outside [0, 1] are clipped first.

    Args:
        image: (height, width) or (channels, height, width).
        other: the same shape.
        window: side of the window in pixels, odd, at least 3; `ssim_window` gives one that fits.

    Returns:
        At most 1, reached by equal images.

    Example:
        >>> image = torch.eye(8)
        >>> round(ssim(image, image, window=7), 12)
        1.0
    """
    from skimage.metrics import structural_similarity

    channel_axis = 0 if image.ndim == 3 else None
    value = structural_similarity(  # type: ignore[no-untyped-call]
        _pixels(image), _pixels(other), data_range=1, win_size=window, channel_axis=channel_axis
    )
    return float(value)


def ssim_window(shape: tuple[int, ...]) -> int | None:
    """The window of SSIM: 7 pixels, or the largest odd number that fits; None below 3.

    Example:
        >>> ssim_window((3, 32, 32)), ssim_window((8, 8)), ssim_window((6, 9)), ssim_window((2, 9))
        (7, 7, 5, None)
    """
    side = min(shape[-2:])
    window = min(SSIM_WINDOW, side - 1 + side % 2)
    return window if window >= 3 else None


def _pixels(image: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return image.detach().to("cpu", torch.float64).clamp(0, 1).numpy()
