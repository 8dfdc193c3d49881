"""Images cut into tiles of one size, as the first layer of a vision transformer sees them."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """How images of one shape are cut, in the order of reading."""

    shape: tuple[int, ...]  # of an image, (H, W) or (C, H, W)
    sides: tuple[int, int]  # of a tile

    @property
    def shape_of_one(self) -> tuple[int, int, int]:
        """Return channels, height and width of a tile."""
        return math.prod(self.shape[:-2]), *self.sides

    @property
    def entries(self) -> int:
        """Return t, the number of entries of a tile."""
        return math.prod(self.shape_of_one)

    @property
    def places(self) -> int:
        """Return how many tiles make an image."""
        return math.prod(self.shape) // self.entries

    def cut(self, images: Tensor) -> Tensor:
        """Return the tiles of images (n, d), (n, places, t)."""
        (high, wide), (channels, a, b) = self.shape[-2:], self.shape_of_one
        cut = images.reshape(len(images), channels, high // a, a, wide // b, b)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(len(images), self.places, self.entries)

    def joined(self, tiles: Tensor) -> Tensor:
        """Return the images (n, d) of tiles (n, places, t)."""
        (high, wide), (channels, a, b) = self.shape[-2:], self.shape_of_one
        apart = tiles.reshape(len(tiles), high // a, wide // b, channels, a, b)
        return apart.permute(0, 3, 1, 4, 2, 5).reshape(len(tiles), -1)
