"""How a model's inputs and the pixels of a picture belong together."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from exhume.checks import number
from exhume.errors import InputError

Image = NDArray[np.float64]  # in [0, 1], (H, W) or (C, H, W)
Levels = float | tuple[float, ...]  # a number for all channels, or one for each


@dataclass(frozen=True)
class Pixels:
    """The affine map between inputs and pixels: pixel = input · scale + shift.

    Samples are rows (n, d) with channels first: each channel is d / channels entries in a row.

    Example:
        >>> import torch
        >>> Pixels((0.0, 1.0), 2.0).to_pixels(torch.ones(1, 4)).tolist()
        [[2.0, 2.0, 3.0, 3.0]]
    """

    shift: Levels = 0.0  # the pixel value that an input of zero stands for
    scale: Levels = 1.0  # the pixel value of one unit of input, positive

    def __post_init__(self) -> None:
        """Refuse what could not be undone, and keep lists, as JSON has them, as tuples."""
        counts = []
        for name, above in (("shift", -float("inf")), ("scale", 0.0)):
            value = getattr(self, name)
            levels = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not levels:
                raise InputError(f"{name}: expected a number, or one for each channel, got none.")
            levels = tuple(number(name, level, above=above) for level in levels)
            several = isinstance(value, list | tuple)
            object.__setattr__(self, name, levels if several else levels[0])
            counts.append(len(levels))
        if len({*counts} - {1}) > 1:
            raise InputError(
                f"{counts[0]} shifts but {counts[1]} scales: expected one for each channel."
            )

    def to_pixels(self, inputs: Tensor) -> Tensor:
        """Return the pixels of inputs, both (n, d), not clipped."""
        return inputs * spread(self.scale, inputs) + spread(self.shift, inputs)

    def to_inputs(self, pixels: Tensor) -> Tensor:
        """Return the inputs of pixels, both (n, d)."""
        return (pixels - spread(self.shift, pixels)) / spread(self.scale, pixels)


def spread(levels: Levels, rows: Tensor) -> float | Tensor:
    """Return a number as it is, and one number for each channel as (d,), to meet rows (n, d)."""
    if not isinstance(levels, tuple):
        return levels
    if rows.shape[1] % len(levels):
        raise InputError(f"rows of {rows.shape[1]} numbers do not have {len(levels)} channels.")
    return rows.new_tensor(levels).repeat_interleave(rows.shape[1] // len(levels))


def displayed(image: Image) -> Image:
    """Put height first, and channels last if there are three; clip values to [0, 1]."""
    image = np.clip(np.nan_to_num(image), 0.0, 1.0)
    if image.ndim == 2:
        return image
    return image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)


def encoded(image: Image, side: int | None = None) -> str:
    """Return a picture in [0, 1] as a PNG in base64, with no side longer than that, if given."""
    from PIL import Image as Pictures

    picture = Pictures.fromarray(np.rint(255 * displayed(image)).astype(np.uint8))
    picture.thumbnail((side or picture.width, side or picture.height))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
