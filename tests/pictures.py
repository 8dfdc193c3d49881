"""Made-up images for the tests of the evaluation."""

import math

import torch

from exhume.data import Data, Transform


def pictures(count: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Uniform pixels, (count, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *shape, generator=generator, dtype=torch.float64)


def images(count: int, *shape: int, rescale: bool = False, centre: bool = False) -> Data:
    """Random pictures as data: shifted and scaled, and on the sphere; or less their mean."""
    pixels = pictures(count, math.prod(shape))
    transform = Transform(0.5, 0.25)
    if centre:
        mean = pixels.mean(0)
        transform = Transform(mean.mean().item(), mean=mean)
    norms = transform.apply(pixels).norm(dim=1) if rescale else None
    targets = torch.ones(count, 1, dtype=torch.float64)
    whole = Transform(transform.shift, transform.scale, norms, transform.mean)
    return Data(transform.apply(pixels, norms), targets, shape, "random", whole)
