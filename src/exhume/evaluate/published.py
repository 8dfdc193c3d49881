"""Reconstructed images scored as in the papers on networks trained to the margin.

Haim et al. 2022, Buzaglo et al. 2023, Shen et al. 2026. Each training image is given the
reconstruction nearest to it, by normalised cross-correlation or by distance; one may serve several.
The mean is added, the contrast of the reconstruction is stretched, and the pair is compared as
images.

These figures flatter. The neighbour is chosen with the truth at hand, out of as many candidates as
there are, so they grow with the number of candidates alone. The evaluation adds the mean of the
training images, so a candidate of nothing becomes their mean image. And a stretch makes any smooth
blob more alike: compare with `chance_level` and with `exhume.evaluate.other_data`. A reversed sign
is not forgiven.

The window of SSIM is 3 × 3 pixels. Ours is uniform, as in scikit-image; the published code weighs
it by a Gaussian and pads the border, which changes counts of good images by half at times. So say
which one a figure has (`window`), and compare with printed numbers under `"gaussian"` only.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import metrics
from exhume.evaluate.matching import check_vectors, distances, nearest, take

GOOD, GOOD_DSSIM = 0.4, 0.15
"""A reconstruction is good above this SSIM (Haim 2022), or below this DSSIM (Shen 2026)."""

BEST = 10
"""So many of the best are averaged."""

RATIO = 1.1
"""Reconstructions less than this times as far as the nearest one are averaged with it."""

SIDE = 3
"""Side of the window of SSIM."""

Window = Literal["uniform", "gaussian"]


@dataclass(frozen=True, eq=False)
class PublishedScore:
    """The published figures: one value a training image, NaN where it was given no reconstruction.

    Attributes:
        candidates: How many reconstructions there were, over all runs.
        window: Of the SSIM.
        neighbours: The nearest by cross-correlation, −1 for none.
        ncc: Its distance, of `ncc_distances`.
        ssim: Structural similarity of the training image and its reconstruction, stretched.
        psnr: Peak signal-to-noise ratio of the same pair, in dB.
        l2_neighbours: The nearest by distance, −1 for none.
        l2: Its distance, not squared, in the space of the model's inputs (which is that of pixels
            less their mean, for data loaded with `centre="pixels"`).

    The ten best of each figure are averaged for `top10_…`, or as many as there are.
    """

    candidates: int
    window: Window
    neighbours: Tensor
    ncc: Tensor
    ssim: Tensor
    psnr: Tensor
    l2_neighbours: Tensor
    l2: Tensor

    @property
    def samples(self) -> int:
        """How many training images there were."""
        return len(self.ssim)

    @property
    def dssim(self) -> Tensor:
        """Structural dissimilarity, (1 − SSIM)/2."""
        return (1 - self.ssim) / 2

    @property
    def good(self) -> int:
        """How many have an SSIM above 0.4."""
        return int((self.ssim > GOOD).sum())

    @property
    def good_dssim(self) -> int:
        """How many have a DSSIM below 0.15."""
        return int((self.dssim < GOOD_DSSIM).sum())

    @property
    def top10_ssim(self) -> float:
        """Mean of the ten highest."""
        return _mean_of_best(self.ssim, largest=True)

    @property
    def top10_dssim(self) -> float:
        """Mean of the ten lowest."""
        return _mean_of_best(self.dssim, largest=False)

    @property
    def top10_psnr(self) -> float:
        """Mean of the ten highest."""
        return _mean_of_best(self.psnr, largest=True)

    @property
    def top10_l2(self) -> float:
        """Mean of the ten lowest."""
        return _mean_of_best(self.l2, largest=False)

    def to_dict(self) -> dict[str, Any]:
        """The aggregates, for JSON: what is not finite is None."""
        means = {name: getattr(self, name) for name in TOP}
        return {
            "samples": self.samples,
            "candidates": self.candidates,
            "window": self.window,
            "good": self.good,
            "good_dssim": self.good_dssim,
            **{name: value if math.isfinite(value) else None for name, value in means.items()},
        }


TOP = ("top10_ssim", "top10_dssim", "top10_psnr", "top10_l2")


def published_score(
    candidates: Tensor,
    data: Data,
    mutual: bool = False,
    average: bool = False,
    window: Window = "uniform",
) -> PublishedScore:
    """Score reconstructions as published.

    Args:
        candidates: (k, d) in the space of the model's inputs; those of many runs are pooled by
            `torch.cat`.
        data: the training images.
        mutual: let each reconstruction stand only for the training image that it is nearest to.
            Images to which none is nearest are left without.
        average: replace the nearest reconstruction by the mean of all that are less than 1.1 times
            as far, in `ncc_distances`; for the image metrics only.
        window: of the SSIM; see `structural_similarity`.

    Returns:
        The score.

    Raises:
        InputError: the data is no images, or the candidates do not fit.

    Example:
        >>> from exhume import data
        >>> known = data.load("digits", 12, centre="pixels")
        >>> result = published_score(known.inputs[:4], known)
        >>> result.neighbours[:4].tolist(), result.good >= 4, round(result.top10_l2, 9) > 0
        ([0, 1, 2, 3], True, True)
    """
    if not is_published_for(data.shape):
        raise InputError(
            f"samples of shape {data.shape}: the published figures are for images, (H, W) with "
            "sides of 3 pixels or more, or (C, H, W) with sides of 6"
        )
    if window not in ("uniform", "gaussian"):
        raise InputError(f'window={window!r}: expected "uniform" or "gaussian"')
    x = check_vectors(data.inputs, "true sample")
    y = check_vectors(candidates, "candidate", dim=data.dim)
    costs, l2_costs = ncc_distances(x, y, data.shape), distances(x, y, "signed")
    if mutual:
        costs, l2_costs = mutual_best(costs), mutual_best(l2_costs)
    neighbours, l2_neighbours = _nearest_finite(costs), _nearest_finite(l2_costs)
    found, near = neighbours >= 0, l2_neighbours >= 0

    ssim, psnr, ncc, l2 = (torch.full((len(x),), math.nan, dtype=torch.float64) for _ in range(4))
    if found.any():
        chosen = averaged(costs[found], y) if average else y[neighbours[found]]
        originals = data.images().detach().cpu()[found]
        images = stretch(data.images(chosen))
        ssim[found] = structural_similarity(originals, images, window)
        psnr[found] = peak_signal_to_noise(originals, images)
        ncc[found] = costs[found].amin(1)
    l2[near] = metrics.norms(x - take(y, l2_neighbours))[near]
    return PublishedScore(len(y), window, neighbours, ncc, ssim, psnr, l2_neighbours, l2)


def chance_level(data: Data, held_out: Data, **options: Any) -> PublishedScore:
    """The score of real images of the same kind that the model never saw, as candidates.

    What a perfect generator that knows nothing of the training set would get. It grows with the
    number of images, so take as many as there are candidates in the score to compare with.

    Args:
        data: the training images.
        held_out: other images, in the same transform: `exhume.data.held_out`.
        options: of `published_score`; those of the score to compare with.
    """
    return published_score(held_out.inputs, data, **options)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two scores of the same training images, such as without and with splitting.

    Attributes:
        gains: By how much the second is better, one value a training image; NaN where either was
            given no reconstruction.
    """

    gains: Tensor

    @property
    def improved(self) -> int:
        """How many training images the second reconstructs better."""
        return int((self.gains > 0).sum())

    @property
    def worsened(self) -> int:
        """How many the first reconstructs better."""
        return int((self.gains < 0).sum())

    @property
    def mean_gain(self) -> float:
        """Over the images that both give a reconstruction; NaN where there are none."""
        return float(self.gains.nanmean())


def compared(
    first: PublishedScore, second: PublishedScore, by: Literal["ssim", "l2"] = "ssim"
) -> Comparison:
    """How much better the second score is, image by image.

    More candidates improve both figures by their number alone: compare equal numbers.

    Args:
        first: the score to compare with.
        second: of the same training images in the same order.
        by: `"ssim"`, whose gain is a rise, or `"l2"`, whose gain is a fall.
    """
    if first.samples != second.samples:
        raise InputError(
            f"scores of {first.samples} and of {second.samples} training images: compare two of "
            "the same data"
        )
    gains = second.ssim - first.ssim if by == "ssim" else first.l2 - second.l2
    return Comparison(gains)


def ncc_distances(truth: Tensor, candidates: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Normalised cross-correlation distance of every training image to every reconstruction.

    D_ij = 1 − (1/C) Σ_c ⟨x̃_ic, ỹ_jc⟩, each channel standardised to mean 0 and norm 1 (a constant
    one to 0): half the mean squared difference of images that are standardised to deviation 1.
    Colour images are halved in resolution first, by bicubic interpolation. Brightness and contrast
    of a channel do not count. No array is larger than the images and the result.

    Args:
        truth: (n, d).
        candidates: (k, d).
        shape: of one image, (H, W) or (C, H, W).

    Returns:
        (n, k) in [0, 2], float64.

    Example:
        >>> image = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        >>> ncc_distances(image, torch.cat([5 * image + 1, -image]), (2, 2)).round(decimals=9)
        tensor([[0., 2.]], dtype=torch.float64)
    """
    if not len(candidates):  # interpolation refuses an empty batch
        return torch.zeros(len(truth), 0, dtype=torch.float64)
    x, y = (_standardised(rows.double(), shape) for rows in (truth, candidates))
    channels = shape[0] if len(shape) == 3 else 1
    return (1 - x @ y.T / channels).clamp(0, 2)


def _standardised(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images (n, d) at the resolution of the comparison, mean 0 and norm 1 by channel, flat."""
    images = rows.reshape(len(rows), *(shape[:-2] or (1,)), *shape[-2:])
    if len(shape) == 3:
        images = functional.interpolate(images, scale_factor=0.5, mode="bicubic")
    channels = images.flatten(2)
    centred = channels - channels.mean(2, keepdim=True)
    lengths = centred.norm(dim=2, keepdim=True)
    # What rounding leaves of a constant channel is no image.
    constant = lengths <= 1e-12 * channels.norm(dim=2, keepdim=True)
    return torch.where(constant, 0.0, centred / lengths).flatten(1)


def mutual_best(costs: Tensor) -> Tensor:
    """Costs (n, k) in which each column keeps its smallest entry, the others infinite.

    Example:
        >>> mutual_best(torch.tensor([[1.0, 2.0], [3.0, 1.0]])).tolist()
        [[1.0, inf], [inf, 1.0]]
    """
    kept = torch.full_like(costs, math.inf)
    if costs.numel():
        rows, columns = costs.argmin(0), torch.arange(costs.shape[1])
        kept[rows, columns] = costs[rows, columns]
    return kept


def averaged(costs: Tensor, candidates: Tensor) -> Tensor:
    """The mean of the candidates that are nearly as near as the nearest one, row by row.

    Args:
        costs: (n, k), one finite entry a row or more.
        candidates: (k, d).

    Returns:
        (n, d).

    Example:
        >>> averaged(torch.tensor([[1.0, 1.05, 9.0]]), torch.tensor([[0.0], [1.0], [7.0]])).item()
        0.5
    """
    best = costs.amin(1, keepdim=True)
    near = (costs < RATIO * best) | (costs == best)
    return near.to(candidates) @ candidates / near.sum(1, keepdim=True)


def stretch(images: Tensor) -> Tensor:
    """Each image (n, …) mapped to [0, 1] by its own minimum and maximum; a constant one to 0.

    Example:
        >>> stretch(torch.tensor([[-1.0, 0.0, 3.0], [2.0, 2.0, 2.0]])).tolist()
        [[0.0, 0.25, 1.0], [0.0, 0.0, 0.0]]
    """
    rows = images.flatten(1)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    span = torch.where(high > low, high - low, 1.0)
    return ((rows - low) / span).reshape(images.shape)


def structural_similarity(images: Tensor, others: Tensor, window: Window = "uniform") -> Tensor:
    """SSIM of pairs of images in [0, 1], mean over all 3 × 3 windows and the channels.

    S = (2 μ_x μ_y + 0.01²)(2 σ_xy + 0.03²) / ((μ_x² + μ_y² + 0.01²)(σ_x² + σ_y² + 0.03²)) in each
    window. `"uniform"`: windows inside the image, all pixels alike, covariances over 9 − 1, as in
    scikit-image. `"gaussian"`: a window around each pixel of the image, reflected at its border,
    weights exp(−r²/(2 · 1.5²)), covariances over the sum of the weights.

    Args:
        images: (n, H, W) or (n, C, H, W), sides of 3 or more.
        others: the same shape.
        window: one of the two.

    Returns:
        (n,), float64, at most 1.

    Example:
        >>> image = torch.eye(4)[None]
        >>> structural_similarity(image, image).tolist()
        [1.0]
    """
    x, y = (a.double().reshape(-1, 1, *a.shape[-2:]) for a in (images, others))
    places = torch.arange(SIDE, device=x.device, dtype=x.dtype) - SIDE // 2
    weights, unbiased = torch.ones_like(places), SIDE**2 / (SIDE**2 - 1)
    if window == "gaussian":
        weights, unbiased = (-(places**2) / (2 * 1.5**2)).exp(), 1.0
        x, y = (functional.pad(a, [SIDE // 2] * 4, mode="reflect") for a in (x, y))
    kernel = torch.outer(weights, weights)[None, None] / weights.sum() ** 2

    def mean(values: Tensor) -> Tensor:
        return functional.conv2d(values, kernel)

    mean_x, mean_y = mean(x), mean(y)
    variances = unbiased * (mean(x * x) - mean_x**2 + mean(y * y) - mean_y**2)
    covariance = unbiased * (mean(x * y) - mean_x * mean_y)
    above = (2 * mean_x * mean_y + 0.01**2) * (2 * covariance + 0.03**2)
    below = (mean_x**2 + mean_y**2 + 0.01**2) * (variances + 0.03**2)
    return (above / below).reshape(len(images), -1).mean(1)


def peak_signal_to_noise(images: Tensor, others: Tensor) -> Tensor:
    """−10 log10 of the mean squared difference of pairs of images in [0, 1], (n, …) to (n,).

    Example:
        >>> peak_signal_to_noise(torch.zeros(1, 4), torch.full((1, 4), 0.1)).round(decimals=4)
        tensor([20.], dtype=torch.float64)
    """
    return -10 * (images.double() - others.double()).square().flatten(1).mean(1).log10()


def is_published_for(shape: tuple[int, ...]) -> bool:
    """Whether samples of a shape are images that can be scored: sides of 3, in colour of 6.

    Example:
        >>> [is_published_for(shape) for shape in ((28, 28), (3, 32, 32), (100,), (3, 4, 4))]
        [True, True, False, False]
    """
    return len(shape) in (2, 3) and min(shape[-2:]) >= SIDE * (len(shape) - 1)


def _nearest_finite(costs: Tensor) -> Tensor:
    """`nearest`, −1 for rows that are infinite everywhere."""
    if costs.shape[1] == 0:
        return nearest(costs)
    return torch.where(costs.amin(1).isfinite(), nearest(costs), -1)


def _mean_of_best(values: Tensor, largest: bool) -> float:
    """Mean of the ten best that are there; NaN where none is."""
    there = values[~values.isnan()]
    return float(there.topk(min(BEST, len(there)), largest=largest).values.mean())
