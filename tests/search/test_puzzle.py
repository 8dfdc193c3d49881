"""Tiles put together: planted places, groups and images come back, gradients against autograd."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exhume.equation.tiles import Tiles
from exhume.features.network import known_network
from exhume.search.photographs import photographs
from exhume.search.puzzle import alike, explained, placed, rearranged, together
from nets import make
from odd_modules import class_token
from problems import gaussian, on_sphere

fast = settings(max_examples=15, deadline=None)
seeds = st.integers(0, 10**6)
COLOUR, GREY = Tiles((3, 16, 16), (8, 8)), Tiles((24, 16), (8, 8))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shuffled(count: int, places: int, seed: int) -> Tensor:
    """Which of all tiles make which image, (count, places), in any order."""
    return torch.randperm(count * places, generator=generator(seed)).view(count, places)


def places_of(images: Tensor) -> Tensor:
    """The place of each tile of images (n, P), (n·P,)."""
    return images.flatten().argsort() % images.shape[1]


def same(images: Tensor, others: Tensor) -> bool:
    """Whether images (n, P) are made of the same tiles, in whatever order they come."""
    return sorted(images.tolist()) == sorted(others.tolist())


@fast
@given(seeds, st.integers(1, 4), st.integers(1, 5))
def test_every_place_is_given_as_many_tiles(seed: int, count: int, places: int) -> None:
    shares = gaussian(count * places, places, seed=seed)
    found = placed(shares)
    assert torch.bincount(found, minlength=places).tolist() == [count] * places
    own, rows = shares[torch.arange(len(shares)), found].sum(), torch.arange(len(shares))
    for other in range(20):  # no other way to share them out is better
        order = torch.randperm(len(shares), generator=generator(other))
        assert own >= shares[rows, rows[order] % places].sum() - 1e-9
    planted = places_of(shuffled(count, places, seed))
    shown = torch.nn.functional.one_hot(planted, places) + 0.1 * shares.clamp(-4, 4)
    assert torch.equal(placed(shown), planted)


@fast
@given(seeds, st.integers(1, 6), st.integers(1, 5))
def test_tiles_that_go_together_are_put_together(seed: int, count: int, places: int) -> None:
    truth = shuffled(count, places, seed)
    image = truth.flatten().argsort() // places
    noise = gaussian(count * places, count * places, seed=seed).clamp(-3, 3)
    scores = (image[:, None] == image) + 0.1 * (noise + noise.T)
    found = together(scores.double(), places_of(truth), generator(seed))
    assert same(found, truth)


def test_of_all_ways_to_put_tiles_together_the_best_is_found() -> None:
    scores, places = gaussian(6, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    scores = scores + scores.T
    found = together(scores, places, generator())
    sums = [
        sum(float(scores[a, b]) for row in rows for a, b in itertools.permutations(row, 2))
        for i, j in itertools.product((1, 4), (2, 5))
        for rows in [((0, i, j), (3, 5 - i, 7 - j))]
    ]
    value = scores[found[:, :, None], found[:, None]].sum() - scores.diagonal().sum()
    assert float(value) == pytest.approx(max(sums)) and len(set(sums)) == 4


def smooth(cut: Tiles, count: int, seed: int) -> Tensor:
    """Random images as smooth as photographs, (count, d)."""
    shape = (cut.shape_of_one[0], *cut.shape[-2:])
    noise = gaussian(count, cut.entries * cut.places, seed=seed)
    metric = photographs(shape, noise)
    assert metric is not None
    return metric.power(noise, 0.5)


def planted(cut: Tiles, images: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tiles of images in any order, their places, and which make which image."""
    truth = shuffled(len(images), cut.places, seed)
    tiles = torch.empty(truth.numel(), cut.entries).to(images)
    tiles[truth.flatten()] = cut.cut(images).flatten(0, 1)
    return tiles, places_of(truth), truth


def neighbours(cut: Tiles) -> list[tuple[int, int]]:
    """Pairs of places with a border between them."""
    wide = cut.shape[-1] // cut.sides[1]
    where = [divmod(place, wide) for place in range(cut.places)]
    pairs = itertools.permutations(range(cut.places), 2)
    return [(a, b) for a, b in pairs if math.dist(where[a], where[b]) == 1]


@pytest.mark.parametrize(("cut", "least"), [(COLOUR, 0.8), (GREY, 0.4)], ids=["colour", "grey"])
@pytest.mark.parametrize("seed", range(3))
def test_neighbours_of_a_smooth_image_are_alike(cut: Tiles, least: float, seed: int) -> None:
    tiles, places, truth = planted(cut, smooth(cut, 6, seed), seed)
    scores = alike(tiles, places, torch.zeros(len(tiles), 5).double(), cut)  # nothing was moved
    parts = torch.stack([scores[truth[:, a]][:, truth[:, b]] for a, b in neighbours(cut)])
    assert (parts.argmax(2) == torch.arange(6)).double().mean() > least  # by chance, a sixth
    assert cut is GREY or same(together(scores, places, generator()), truth)
    torch.testing.assert_close(scores, scores.T)
    assert not scores[places[:, None] == places].any()  # no image has two tiles of one place
    for place in range(cut.places):  # and none fits better than others whatever the partner
        assert scores[places == place].sum(0).abs().max() < 1e-9


def test_tiles_are_alike_whose_units_training_moved_alike() -> None:
    tiles, places, truth = planted(COLOUR, gaussian(6, 768), 1)  # noise, of which none fits
    image = truth.flatten().argsort() // 4
    size = 10 ** gaussian(24, 1, seed=2)  # which does not matter
    moved = size * (gaussian(6, 30, seed=3)[image] + 0.5 * gaussian(24, 30, seed=4))
    assert same(together(alike(tiles, places, moved, COLOUR), places, generator()), truth)
    unmoved = torch.zeros_like(moved)
    assert not same(together(alike(tiles, places, unmoved, COLOUR), places, generator()), truth)


def test_smoothness_and_what_moved_count_alike() -> None:
    tiles, places, _ = planted(COLOUR, smooth(COLOUR, 6, 5), 1)
    moved, nothing = gaussian(24, 30, seed=6), torch.zeros(24, 30).double()
    fit, both = alike(tiles, places, nothing, COLOUR), alike(tiles, places, moved, COLOUR)
    for part in (fit, both - fit):
        assert part.square().mean().item() == pytest.approx(1.0)
    torch.testing.assert_close(alike(3 * tiles, places, 5 * moved, COLOUR), both)


def gradients(module: nn.Module, name: str, image: Tensor, shown: int) -> Tensor:
    """∂f_c/∂(the last entries of a parameter) of one image, by torch.autograd, (c, shown)."""
    outputs, parameter = module(image[None])[0], module.get_parameter(name)
    rows = [torch.autograd.grad(f, parameter, retain_graph=True)[0].flatten() for f in outputs]
    return torch.stack(rows)[:, -shown:]


def transformer() -> tuple[nn.Module, tuple[int, ...], str]:
    net = make("vit", outputs=3)
    net.plain.load_state_dict(net.trained)
    return net.plain, (4, 4), "2.positions"


def with_class_token() -> tuple[nn.Module, tuple[int, ...], str]:
    return class_token().double(), (3, 4, 4), "1.places"


@pytest.mark.parametrize("made", [transformer, with_class_token])
def test_what_moved_is_explained_by_gradients(made: Any) -> None:
    module, shape, name = made()
    network = known_network(module, shape, 3)
    weights = {key: w.detach() for key, w in module.state_dict().items()}
    images = on_sphere(5, network.dim)
    shown = 4 * weights[name].shape[-1]  # four places, after the class token if there is one
    rows = torch.stack([gradients(module, name, x.view(shape), shown) for x in images])
    inside = torch.einsum("mc,mcs->ms", gaussian(5, 3, seed=1), rows)
    share = explained(network, weights, name, images, inside)
    torch.testing.assert_close(share, torch.ones(5).double(), rtol=0, atol=1e-6)
    moved = 3 * inside + gaussian(5, shown, seed=2) * inside.std()
    moved[1] = inside[0]  # of another image
    found = explained(network, weights, name, images, moved)
    for one, own, there in zip(found, rows, moved, strict=True):
        near = own.T @ torch.linalg.lstsq(own.T, there[:, None]).solution
        assert float(one) == pytest.approx(float((near.norm() / there.norm()) ** 2), abs=1e-6)
        assert 0 < one < 0.999


@fast
@given(seeds, st.integers(1, 4), st.integers(2, 4))
def test_images_are_rearranged_to_what_is_explained_best(
    seed: int, count: int, places: int
) -> None:
    truth = shuffled(count, places, seed)
    image = truth.flatten().argsort() // places
    weight = 1 + torch.arange(places).double()

    def share(images: Tensor) -> Tensor:
        """What two or more tiles of one image have together, each place with its weight."""
        assert (
            images.shape[1] == places and (places_of(truth)[images] == torch.arange(places)).all()
        )
        own = (image[images][:, :, None] == image[images][:, None]).double()
        return (own * weight * weight[:, None]).sum((1, 2))

    mixed = truth.clone()
    mixed[:, -1] = truth[torch.randperm(count, generator=generator(seed)), -1]
    mixed[:, 0] = truth[torch.randperm(count, generator=generator(seed + 1)), 0]
    before = mixed.clone()
    found = rearranged(mixed, share)
    assert torch.equal(mixed, before)
    assert share(found).sum() >= share(mixed).sum()
    if places > 3:  # then two of them are where they were
        assert same(found, truth)
