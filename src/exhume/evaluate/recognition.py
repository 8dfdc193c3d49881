"""How many images can be recognised among the candidates, and how many would be by chance.

The papers on networks trained to the margin (Haim 2022, Buzaglo 2023, Shen 2026) give each training
image its nearest candidate, stretch its contrast and take the SSIM: over 0.4 it is recognisable.
Such a count grows with the number of candidates, and with the likeness of all images. So it is
compared with that of as many images that the model never saw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import scipy
import torch
from torch import Tensor
from torch.nn import functional

from exhume.auditing.evidence import CLEAR, COUNTS, SSIM, fewest
from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate import metrics
from exhume.evaluate.metrics import check_vectors, nearest, take
from exhume.wording import finite

# Cosines over which a likeness is plain, and over which it is that of the best published images
COSINES = 0.8, 0.9
SAME = 1 / 512  # of the largest pixel: less than half a grey level of 256 shows no difference


@dataclass(frozen=True, eq=False)
class Recognised:
    """This says how many of n images are recognisable; plural names have one value an image."""

    originals: Tensor  # The images, (n, *shape) in [0, 1]
    pictures: Tensor  # The nearest candidate by `ncc_distances` with its contrast stretched, or NaN
    ssims: Tensor  # Structural similarity of the two, NaN without candidates
    # Largest cosine with any candidate, 0 at least, as inputs: less the mean that these are less
    cosines: Tensor
    control: "Recognised | None" = None  # The same of images that the model never saw

    def __repr__(self) -> str:
        """Give the counts, and not every image."""
        counts = ", ".join(f"{name}={getattr(self, name)}" for name in ("samples", *COUNTS))
        return f"Recognised({counts}, control={self.control})"

    @property
    def samples(self) -> int:
        """Count the images."""
        return len(self.ssims)

    @property
    def ssim(self) -> int:
        """Count the images with an SSIM over 0.4."""
        return int((self.ssims > SSIM).sum())

    @property
    def cosine80(self) -> int:
        """Count the images with a cosine over 0.8."""
        return int((self.cosines > COSINES[0]).sum())

    @property
    def cosine90(self) -> int:
        """Count the images with a cosine over 0.9."""
        return int((self.cosines > COSINES[1]).sum())

    @property
    def p_value(self) -> float | None:
        """Return how likely counts so far above the control's are by chance; None without one."""
        if (control := self.control) is None:
            return None
        counts = [(getattr(self, name), getattr(control, name)) for name in COUNTS]
        return by_chance([(own, self.samples, other, control.samples) for own, other in counts])

    @property
    def clear(self) -> Tensor:
        """Tell which images are recognisable beyond chance, (n,): over all that are held out.

        None is, without a control, or where that has nearly as many recognisable ones.
        """
        if self.control is None or not (self.p_value or 0.0) < CLEAR:
            return torch.zeros(self.samples, dtype=torch.bool)
        most = self.control.ssims.nan_to_num(0.0).amax() if self.control.samples else 0.0
        return torch.as_tensor((self.ssims > SSIM) & (self.ssims > most))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, and the two figures of every image, for JSON."""
        figures = {"ssims": self.ssims, "cosines": self.cosines}
        return {
            **{name: getattr(self, name) for name in ("samples", *COUNTS)},
            "p_value": self.p_value,
            **{name: [finite(value) for value in row.tolist()] for name, row in figures.items()},
            "control": None if self.control is None else self.control.to_dict(),
        }


def by_chance(counts: Sequence[tuple[int, int, int, int]]) -> float:
    """Return how likely chance is to put any of these counts so far above that of a control.

    Each is a count, of how many, and the same of the control: one-sided by Fisher's exact test, as
    many times the least as there are counts.
    """
    tables = ([[own, of - own], [other, others - other]] for own, of, other, others in counts)
    chances = (scipy.stats.fisher_exact(table, alternative="greater").pvalue for table in tables)
    return min(1.0, len(counts) * float(min(chances)))


def recognised(samples: Tensor, data: Data, held_out: Data | None) -> Recognised:
    """Count the training images that are recognisable among candidates (k, d), beside a control.

    `samples` are in the space of the model's inputs; those of many runs are pooled by `torch.cat`.
    As many held-out images are taken (`exhume.data.held_out` draws some) as there are training
    images, or `enough`. Without any, `control` is None, and a count says nothing yet. One
    that is a training image is refused. Negatives are not recognised.

    Where the mean image m was taken off, each training image x_i has a share in it, and so in every
    picture it is compared with: candidates of nothing are the mean image. In the control, the
    held-out h_i may take that share over, m + (h_i − x_i)/n, or leave m as it is, which candidates
    may know of; the better of the two counts, so that the control is rather too high than too low.
    """
    if not are_images(data.shape):
        sides = "(H, W) with sides of 3 pixels or more, or (C, H, W) with sides of 6"
        raise InputError(f"shape {data.shape}: only images can be recognised, {sides}")
    y = check_vectors(samples, "candidate", dim=data.dim)
    own, control = data.images().detach().cpu().double(), None
    if held_out is not None:
        if held_out.shape != data.shape:
            both = f"held-out images have shape {held_out.shape}, the training images {data.shape}"
            raise InputError(f"{both}: draw them with exhume.data.held_out")
        other = held_out.images().detach().cpu().double()[: enough(data)]
        seen = torch.cdist(other.flatten(1), own.flatten(1), p=math.inf) < SAME * own.abs().amax()
        seen = seen.any(1)
        if seen.any():
            which = f"{int(seen.sum())} of {len(other)} held-out images are training images"
            raise InputError(f"{which}; name images that the model never saw.")
        control = _compared(y, data, other)
        if data.transform.mean is not None:
            moved = (other - own[torch.arange(len(other)) % len(own)]) / len(own)
            control = _better(control, _compared(y, data, other, moved))
    return replace(_compared(y, data, own), control=control)


def enough(data: Data) -> int:
    """Return how many held-out images are compared: as many as can tell, and as the data have."""
    return max(data.samples, fewest(data.samples))


def _compared(y: Tensor, data: Data, images: Tensor, moved: Tensor | None = None) -> Recognised:
    """Compare candidates y (k, d) with images (n, *shape), for each of which the mean has moved."""
    offset = torch.zeros_like(images) if moved is None else moved
    x = data.transform.apply((images - offset).flatten(1))
    near = nearest(ncc_distances(x, y, data.shape))
    pictures = stretch(data.images(take(y, near, missing=math.nan)) + offset)
    nothing = y.new_zeros(1, data.dim)  # like which every image is by 0
    directions = functional.normalize(torch.cat([y, nothing]))
    cosines = (functional.normalize(x) @ directions.T).amax(1).clamp(max=1)
    return Recognised(images, pictures, metrics.ssim(images, pictures), cosines)


def _better(one: Recognised, two: Recognised) -> Recognised:
    """Return for each image the higher SSIM, with its picture, and the higher cosine."""
    first = (one.ssims >= two.ssims).reshape(-1, *[1] * (one.pictures.ndim - 1))
    pictures = torch.where(first, one.pictures, two.pictures)
    ssims, cosines = one.ssims.maximum(two.ssims), one.cosines.maximum(two.cosines)
    return Recognised(one.originals, pictures, ssims, cosines)


def are_images(shape: tuple[int, ...]) -> bool:
    """Tell whether samples are images large enough to compare: sides of 3, in colour of 6."""
    return len(shape) in (2, 3) and min(shape[-2:]) >= metrics.SIDE * (len(shape) - 1)


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
