"""How alike neighbours are in images: the covariance S of photographs, and its powers.

Levenberg-Marquardt damps by DᵀS⁻¹D where it is given S, so that what is smooth comes first, and
what the weights hardly show stays smooth. The data still decide: at the end no damping is left.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

COLOURS = 0.9  # how channels of photographs go together: about that much in every collection


@dataclass(frozen=True, eq=False)
class Photographs:
    """S = Q diag(s) Qᵀ for images of c channels, with Q of waves over height, width and colours."""

    waves: tuple[Tensor, Tensor, Tensor]  # orthonormal columns: (c, c), (h, h), (w, w)
    sizes: Tensor  # s, (c, h, w), with a mean of 1

    def power(self, rows: Tensor, exponent: float) -> Tensor:
        """Return each row x of (n, d) as S^exponent x."""
        return self._scaled(rows, self.sizes**exponent)

    def filtered(self, rows: Tensor, noise: float) -> Tensor:
        """Return each row x of (n, d) as S(S + ρI)⁻¹x, the likeliest image behind white noise.

        ρ is the noise's variance over that of the image (Wiener's filter).
        """
        return self._scaled(rows, self.sizes / (self.sizes + noise))

    def _scaled(self, rows: Tensor, factors: Tensor) -> Tensor:
        """Multiply waves of rows by factors (c, h, w)."""
        colours, height, width = self.waves
        x = rows.view(len(rows), *self.sizes.shape)
        x = torch.einsum("nchw,ca,hb,we->nabe", x, colours, height, width) * factors
        return torch.einsum("nabe,ca,hb,we->nchw", x, colours, height, width).reshape(rows.shape)


def photographs(shape: tuple[int, ...], like: Tensor) -> Photographs | None:
    """Return the covariance of images of that shape (c, h, w); None for other shapes."""
    return _photographs(shape, like.device, like.dtype) if len(shape) == 3 else None


@cache
def _photographs(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Photographs:
    """The amplitude of a wave falls as 1/(1 + f) at f half waves over the image."""
    channels, *sides = shape
    colours = torch.full((channels, channels), COLOURS, dtype=torch.float64).fill_diagonal_(1.0)
    shares, mixed = torch.linalg.eigh(colours)
    height, width = (torch.arange(side, dtype=torch.float64) for side in sides)
    frequency = (height[:, None].square() + width.square()).sqrt()
    sizes = shares[:, None, None] / (1 + frequency).square()
    waves = (mixed, *(_cosines(side) for side in sides))
    colour, rows, columns = (wave.to(device, dtype) for wave in waves)
    return Photographs((colour, rows, columns), (sizes / sizes.mean()).to(device, dtype))


def _cosines(size: int) -> Tensor:
    """The orthonormal cosine waves over so many places, (size, size), a column each."""
    place = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi / size * (place[:, None] + 0.5) * place)
    return torch.nn.functional.normalize(waves, dim=0)
