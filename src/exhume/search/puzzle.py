"""Tiles of several images put together: which of them belong to one, at which places.

A layer that sees images tile by tile changes by Σ δ_ip x_ipᵀ over all tiles p of all images i, and
the embedding of a place, which is added after it, by Σ_i δ_ip: as if a tile ended in one 1 among
zeros, which says its place. Tiles of one image fit together as photographs do, and their δ are
alike, because one label moved them all. Then the network itself says what δ an image should have.
"""

from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import normalize

from exhume.equation.tiles import Tiles
from exhume.features.network import Network, Weights, derivatives
from exhume.search.photographs import photographs

STARTS = 30  # random ones: most lead to the same images, or nothing fits together
SWEEPS = 30  # over the places, at most: five are usual
TOGETHER = 256  # images whose gradients are taken at once: more gain nothing
RIDGE = 1e-9  # share of a gram matrix that makes it one that can be solved


def placed(shares: Tensor) -> Tensor:
    """Return the place of each of k tiles by its share in every one (k, P), k/P for each place."""
    count = len(shares) // shares.shape[1]
    slots = shares.repeat_interleave(count, 1).cpu()
    return torch.from_numpy(linear_sum_assignment(slots.numpy(), maximize=True)[1] // count)


def alike(tiles: Tensor, places: Tensor, moved: Tensor, cut: Tiles) -> Tensor:
    """Return how well each tile (k, t) at its place (k,) goes with each other, (k, k), on the CPU.

    It is −xᵀS⁻¹y, by how much the two are likelier together as parts of one photograph, and the
    cosine of what training moved for them (k, h), each less what any partner has, over its spread.
    """
    images = tiles.new_zeros(len(tiles), cut.places, cut.entries)
    images[torch.arange(len(tiles)), places] = tiles
    whole, unit = cut.joined(images), normalize(moved)
    metric = photographs((cut.shape_of_one[0], *cut.shape[-2:]), whole)
    assert metric is not None
    total = torch.zeros(len(tiles), len(tiles), dtype=torch.float64)
    for score in (-(whole @ metric.power(whole, -1).T), unit @ unit.T):
        score, own = score.double().cpu(), torch.zeros_like(total)
        for a in range(cut.places):
            for b in set(range(cut.places)) - {a}:
                part = score[places == a][:, places == b]
                part = part - part.mean(0) - part.mean(1, keepdim=True) + part.mean()
                own[(places == a).nonzero(), (places == b).nonzero().T] = part
        total += own / own.square().mean().sqrt().clamp_min(torch.finfo(own.dtype).tiny)
    return total


def together(scores: Tensor, places: Tensor, generator: torch.Generator) -> Tensor:
    """Return which tiles make images, (k/P, P): those with the largest sum of scores (k, k) found.

    The tiles of one place are given to the images of all others at once, place by place.
    """
    groups = [(places == p).nonzero()[:, 0] for p in range(int(places.max()) + 1)]
    best, most = torch.stack(groups, 1), -torch.inf
    for _ in range(STARTS):
        order = [torch.randperm(len(group), generator=generator) for group in groups]
        images = torch.stack([g[o] for g, o in zip(groups, order, strict=True)], 1)
        value = -torch.inf
        for _ in range(SWEEPS):
            for p, group in enumerate(groups):
                others = torch.cat([images[:, :p], images[:, p + 1 :]], 1)
                gain = scores[others].sum(1)[:, group]
                images[:, p] = group[linear_sum_assignment(gain.numpy(), maximize=True)[1]]
            before, value = value, float(scores[images[:, :, None], images[:, None]].sum())
            if value <= before:
                break
        if value > most:
            best, most = images, value
    return best


def explained(
    network: Network, weights: Weights, embedding: str, images: Tensor, moved: Tensor
) -> Tensor:
    """Return what share of the δ (m, P·h) that each image (m, d) should have moved is explained.

    What is added to a token moves the outputs by ∂f_c/∂token, so that an image's δ combine these
    gradients with coefficients of its own, as in the lazy equation: least squares, image by image.
    """

    def outputs(tokens: Tensor, image: Tensor) -> Tensor:
        return network({**weights, embedding: tokens}, image[None])[0]

    units = weights[embedding].shape[-1]
    with torch.no_grad(), derivatives(rounded=False):
        every = vmap(jacrev(outputs), (None, 0), chunk_size=TOGETHER)(weights[embedding], images)
    rows = every.reshape(*every.shape[:2], -1, units)[:, :, -(moved.shape[1] // units) :].flatten(2)
    gram, right = (rows @ rows.mT).double(), (rows @ moved[..., None]).double()
    least = torch.finfo(gram.dtype).tiny
    ridge = (RIDGE * gram.diagonal(dim1=1, dim2=2).mean(1)).clamp_min(least)[:, None, None]
    found = torch.linalg.solve(gram + ridge * torch.eye(gram.shape[1]).to(gram), right)
    share: Tensor = (found * right).sum((1, 2)) / moved.double().square().sum(1).clamp_min(least)
    return share.nan_to_num(0.0, 0.0, 0.0)


def rearranged(images: Tensor, share: Callable[[Tensor], Tensor]) -> Tensor:
    """Return which tiles make images, (n, P), with as much explained as exchanges lead to.

    `share` says it of any images (m, P). At one place after the other, all tiles there are tried in
    every image, and given to those where they explain most.
    """
    images, (n, places), value = images.clone(), images.shape, -torch.inf
    for _ in range(SWEEPS):
        for p in range(places):
            group, tried = images[:, p].clone(), images[:, None].repeat(1, n, 1)
            tried[:, :, p] = group
            scores = share(tried.view(n * n, places)).view(n, n).cpu()
            images[:, p] = group[linear_sum_assignment(scores.numpy(), maximize=True)[1]]
        before, value = value, float(share(images).sum())
        if value <= before:
            break
    return images
