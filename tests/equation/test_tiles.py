"""Images cut into tiles: nothing is lost, and tiles are what a convolution that tiles sees."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exhume.equation.tiles import Tiles
from problems import gaussian

fast = settings(max_examples=25, deadline=None)
sides = st.integers(1, 3)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Tiles, int, int]:
    """How images are cut, grey without or with a channel or in colour, into how many a side."""
    high, wide, a, b = (draw(sides) for _ in range(4))
    colours = draw(st.sampled_from([(), (1,), (3,)]))
    return Tiles((*colours, high * a, wide * b), (a, b)), high, wide


@fast
@given(cuts())
def test_tiles_and_images_are_made_of_each_other(cut: tuple[Tiles, int, int]) -> None:
    tiles, high, wide = cut
    images = gaussian(2, math.prod(tiles.shape))
    assert tiles.places == high * wide
    apart = tiles.cut(images)
    assert apart.shape == (2, tiles.places, tiles.entries)
    assert torch.equal(tiles.joined(apart), images)
    assert torch.equal(tiles.cut(tiles.joined(apart.flip(1))), apart.flip(1))


@fast
@given(cuts())
def test_a_convolution_that_tiles_is_dense_in_tiles_in_the_order_of_reading(
    cut: tuple[Tiles, int, int],
) -> None:
    tiles, high, wide = cut
    channels, *kernel = tiles.shape_of_one
    layer = nn.Conv2d(channels, 5, kernel, stride=kernel).double().requires_grad_(False)
    images = gaussian(2, math.prod(tiles.shape))
    maps = layer(images.view(2, channels, *tiles.shape[-2:]))
    assert maps.shape == (2, 5, high, wide)
    dense = tiles.cut(images) @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(dense, maps.flatten(2).mT)
