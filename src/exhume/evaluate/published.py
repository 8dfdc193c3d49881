"""Reconstructed images scored as in the papers on networks trained to the margin.

Each training image is given the nearest reconstruction, whose contrast is stretched (Haim 2022,
Buzaglo 2023, Shen 2026). These figures flatter: they grow with the number of candidates alone, and
a candidate of nothing becomes the mean image. Compare them with `chance_level` and `other_data`.
The window of SSIM is uniform; the published code weighs it by a Gaussian, which changes counts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import metrics
from exhume.evaluate.metrics import check_vectors, distances, nearest, take
from exhume.wording import finite

# A reconstruction is good above this SSIM (Haim 2022), or below this DSSIM (Shen 2026)
GOOD, GOOD_DSSIM = 0.4, 0.15
BEST = 10  # The papers print the mean of this many of the best
SIDE = 3  # Side of the window of SSIM, as in the papers


@dataclass(frozen=True, eq=False)
class PublishedScore:
    """The published figures have one value a training image, NaN where there are no candidates."""

    candidates: int  # How many reconstructions there were, over all runs
    neighbours: Tensor  # The nearest by `ncc_distances`, −1 for none
    ssim: Tensor  # Structural similarity of the training image and its reconstruction, stretched
    psnr: Tensor  # Peak signal-to-noise ratio of the same pair, in dB
    l2_neighbours: Tensor  # The nearest by distance, −1 for none
    # Its distance, not squared, in the space of the model's inputs (which is that of pixels less
    # their mean, for data loaded with `centre="pixels"`)
    l2: Tensor
    top10_ssim: float  # The mean of the ten highest, or of as many as there are
    top10_dssim: float  # The same of the ten lowest
    top10_psnr: float  # The same of the ten highest
    top10_l2: float  # The same of the ten lowest

    @property
    def samples(self) -> int:
        """Count the training images."""
        return len(self.ssim)

    @property
    def dssim(self) -> Tensor:
        """Return the structural dissimilarity, (1 − SSIM)/2."""
        return (1 - self.ssim) / 2

    @property
    def good(self) -> int:
        """Count the images with an SSIM above 0.4."""
        return int((self.ssim > GOOD).sum())

    @property
    def good_dssim(self) -> int:
        """Count the images with a DSSIM below 0.15."""
        return int((self.dssim < GOOD_DSSIM).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return the aggregates, for JSON: what is not finite is None."""
        means = ("top10_ssim", "top10_dssim", "top10_psnr", "top10_l2")
        return {
            "samples": self.samples,
            "candidates": self.candidates,
            "window": "uniform",
            "good": self.good,
            "good_dssim": self.good_dssim,
            **{name: finite(getattr(self, name)) for name in means},
        }


def published_score(candidates: Tensor, data: Data) -> PublishedScore:
    """Score reconstructions (k, d) of training images as published, in the space of the inputs.

    Those of many runs are pooled by `torch.cat`.
    """
    if not is_published_for(data.shape):
        sides = "(H, W) with sides of 3 pixels or more, or (C, H, W) with sides of 6"
        raise InputError(f"shape {data.shape}: the published figures are for images, {sides}")
    x = check_vectors(data.inputs, "true sample")
    y = check_vectors(candidates, "candidate", dim=data.dim)
    neighbours = nearest(ncc_distances(x, y, data.shape))
    l2_neighbours = nearest(distances(x, y, "signed"))
    originals = data.images().detach().cpu()
    images = stretch(data.images(take(y, neighbours, missing=math.nan)))
    ssim, psnr = metrics.ssim(originals, images, SIDE), metrics.psnr(originals, images)
    l2 = metrics.norms(x - take(y, l2_neighbours, missing=math.nan))

    def best(values: Tensor, largest: bool) -> float:
        there = values[~values.isnan()]
        return float(there.topk(min(BEST, len(there)), largest=largest).values.mean())

    means = best(ssim, True), best((1 - ssim) / 2, False), best(psnr, True), best(l2, False)
    return PublishedScore(len(y), neighbours, ssim, psnr, l2_neighbours, l2, *means)


def chance_level(data: Data, held_out: Data) -> PublishedScore:
    """Score real images that the model never saw (`exhume.data.held_out`) as candidates.

    A perfect generator that knows nothing of the training set would get this. It grows with the
    number of images, so take as many as there are candidates in the score to compare with.
    """
    return published_score(held_out.inputs, data)


def is_published_for(shape: tuple[int, ...]) -> bool:
    """Tell whether samples of a shape are images that can be scored: sides of 3, in colour of 6."""
    return len(shape) in (2, 3) and min(shape[-2:]) >= SIDE * (len(shape) - 1)


def ncc_distances(truth: Tensor, candidates: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the cross-correlation distance of every training image to every reconstruction.

    D_ij = 1 − (1/C) Σ_c ⟨x̃_ic, ỹ_jc⟩, (n, k) in [0, 2], each channel standardised to mean 0 and
    norm 1 (a constant one to 0): half the mean squared difference of images that are standardised
    to deviation 1. Colour images are halved in resolution first, by bicubic interpolation.
    Brightness and contrast of a channel do not count.

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


def _standardised(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return images (n, d) at the resolution of the comparison, mean 0 and norm 1 by channel."""
    images = flat.reshape(len(flat), *(shape[:-2] or (1,)), *shape[-2:])
    if len(shape) == 3:
        images = functional.interpolate(images, scale_factor=0.5, mode="bicubic")
    channels = images.flatten(2)
    centred = channels - channels.mean(2, keepdim=True)
    lengths = centred.norm(dim=2, keepdim=True)
    # What rounding leaves of a constant channel is no image.
    constant = lengths <= 1e-12 * channels.norm(dim=2, keepdim=True)
    return torch.where(constant, 0.0, centred / lengths).flatten(1)


def stretch(images: Tensor) -> Tensor:
    """Map each image (n, …) to [0, 1] by its own minimum and maximum; a constant one to 0."""
    flat = images.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    span = torch.where(high > low, high - low, 1.0)
    return ((flat - low) / span).reshape(images.shape)
