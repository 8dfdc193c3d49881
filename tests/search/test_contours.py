"""Components with contours: differences, turns, the likelihood against a plain one, and noise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from exhume.errors import InputError
from exhume.search.contours import above_noise, clear, contours, likelier, orthogonal, turned
from problems import gaussian

fast = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 10**6)


def laplace(count: int, values: int, seed: int = 0) -> Tensor:
    """Sources with long tails, (count, values), of size 1."""
    uniform = torch.rand(count, values, generator=torch.Generator().manual_seed(seed)).double()
    return -(uniform - 0.5).sign() * (1 - (2 * uniform - 1).abs()).log() / math.sqrt(2)


def cost_of(unmixing: Tensor, values: Tensor) -> Tensor:
    """Minus the log-likelihood of Cauchy's distribution, as the formula has it."""
    each = torch.log(1 + (unmixing @ values) ** 2).mean(1)
    return each.sum() - torch.linalg.det(unmixing).abs().log()


@given(
    channels=st.integers(1, 3),
    high=st.integers(2, 6),
    wide=st.integers(2, 6),
    orders=st.integers(1, 3),
)
@fast
def test_contours_are_differences_of_the_same_size(
    channels: int, high: int, wide: int, orders: int
) -> None:
    images = gaussian(4, channels, high, wide, seed=channels * high + wide)
    found = contours(images, orders)
    kinds = [
        (i, j) for order in range(1, orders + 1) for j in range(order + 1) for i in [order - j]
    ]
    sizes = [max(0, wide - i) * max(0, high - j) for i, j in kinds]
    assert found.shape == (4, channels * sum(sizes))
    for part in found.split([size for size in sizes * channels if size], 1):
        assert part.square().mean().item() == pytest.approx(1.0)
    # contrast makes none, nor, in grey, does brightness that is the same everywhere
    assert contours(2 * images, orders) == pytest.approx(found)
    if channels == 1:
        assert contours(images + 5, orders) == pytest.approx(found)
        for (i, j), part in zip(kinds, found.split(sizes, 1), strict=True):
            kind = np.diff(np.diff(images.numpy(), i, 3), j, 2).reshape(4, -1)
            assert part.numpy() == pytest.approx(
                kind / np.sqrt((kind**2).mean() if kind.size else 1)
            )


def test_colours_may_be_mixed() -> None:
    images = gaussian(4, 3, 5, 5) * torch.tensor([1.0, 2.0, 4.0]).double()[:, None, None]
    mixed = torch.einsum("co,kchw->kohw", orthogonal(gaussian(3, 3, seed=1)), images)
    torch.testing.assert_close(contours(mixed, 3).abs(), contours(images, 3).abs())


def test_what_is_the_same_everywhere_has_no_contours() -> None:
    images = gaussian(4, 2, 5, 5)
    images[:, 1] = 0  # one colour of them
    assert contours(images, 2).shape == (4, 20 + 20 + 15 + 16 + 15)
    with pytest.raises(InputError, match="without any contours"):
        contours(torch.ones(4, 3, 5, 5).double(), 2)


def test_turns_find_the_sources_of_a_mixture() -> None:
    mixing = orthogonal(gaussian(4, 4, seed=3))
    turn = orthogonal(gaussian(4, 4, seed=4))
    for _ in range(8):
        turn = turned(turn, mixing @ laplace(4, 4000))
    assert turn @ turn.T == pytest.approx(torch.eye(4).double(), abs=1e-9)
    assert ((turn @ mixing).abs().amax(1) > 0.99).all()  # each component is one source


@fast
@given(seeds, st.integers(1, 5), st.integers(20, 200), st.booleans())
def test_a_step_gains_what_the_formula_says(seed: int, k: int, count: int, long: bool) -> None:
    values = laplace(k, count, seed) if long else gaussian(k, count, seed=seed)
    unmixing = gaussian(k, k, seed=seed + 1) + 2 * torch.eye(k).double()
    for _ in range(4):
        likely, gain = likelier(unmixing, values)
        fallen = float(cost_of(unmixing, values) - cost_of(likely, values))
        assert gain >= 0 and gain == pytest.approx(fallen / k, abs=1e-10)
        unmixing = likely


def slope_of(unmixing: Tensor, values: Tensor) -> Tensor:
    unmixing = unmixing.clone().requires_grad_()
    return torch.autograd.grad(cost_of(unmixing, values), unmixing)[0]


@fast
@given(seeds, st.integers(1, 5))
def test_steps_are_downhill_until_there_is_hardly_a_slope(seed: int, k: int) -> None:
    values = gaussian(k, k, seed=seed) @ laplace(k, 400, seed)
    unmixing = orthogonal(gaussian(k, k, seed=seed + 1))
    first = slope_of(unmixing, values)
    likely, gain = likelier(unmixing, values)
    assert gain > 0 and (first * (likely - unmixing)).sum() < 0
    for _ in range(60):
        likely = likelier(likely, values)[0]
    assert (slope_of(likely, values) @ likely.T).norm() < 0.1 * (first @ unmixing.T).norm()


@pytest.mark.parametrize("seed", range(3))
def test_few_steps_are_enough_near_independent_sources(seed: int) -> None:
    values, gains = laplace(6, 5000, seed), []
    values[::2] *= values[::2].abs()  # some have longer tails
    unmixing = torch.eye(6).double() + 0.1 * gaussian(6, 6, seed=seed)
    for _ in range(30):
        before = unmixing
        unmixing, gain = likelier(unmixing, values)
        gains.append(gain)
    assert gains[0] > 0.1 and gains[12] < 1e-8  # without a term of the curvature, 1e-6 or more
    assert gains[-1] < 1e-13 and torch.allclose(unmixing, before)  # nothing more is to be had
    assert (normalize(unmixing).abs().amax(1) > 0.999).all()


def lost(unmixing: Tensor, mixing: Tensor) -> float:
    """How far the columns of a mixing matrix are from those found, by the cosine."""
    found = normalize(torch.linalg.inv(unmixing), dim=0)
    return 1 - float((normalize(mixing, dim=0).T @ found).abs().amax(1).mean())


@pytest.mark.parametrize("seed", range(3))
def test_the_likelihood_finds_sources_that_meet_better_than_turns_do(seed: int) -> None:
    sources, mixing = laplace(8, 2000, seed), gaussian(8, 8, seed=seed + 50)
    sources[1::2, :200] = sources[::2, :200]  # pairs with a tenth in common: correlated by that
    sizes, vectors = torch.linalg.eigh(mixing @ sources @ (mixing @ sources).T / 2000)
    white = (vectors / sizes.sqrt()).T @ mixing
    turn = orthogonal(gaussian(8, 8, seed=seed + 90))
    for _ in range(60):
        turn = turned(turn, white @ sources)
    unmixing = turn
    for _ in range(30):
        unmixing = likelier(unmixing, white @ sources)[0]
    assert lost(unmixing, white) < 0.75 * lost(turn, white) < 0.01


def test_noise_is_told_from_what_stands_out() -> None:
    def count(matrix: Tensor) -> int:
        return above_noise(torch.linalg.svdvals(matrix), tuple(matrix.shape))

    noise, low = gaussian(60, 200, seed=5), gaussian(60, 7, seed=6) @ gaussian(7, 200, seed=7)
    assert count(noise) <= 1  # the largest may stand out by chance
    assert count(noise.T) <= 1
    assert count(0.1 * noise + low) == count((0.1 * noise + low).T) == 7
    assert count(1e-9 * noise + low) == 7  # rounding
    assert count(low) == 7
    assert 1 <= count(gaussian(50, 50, seed=8)) <= 50  # no such noise has a least value


@pytest.mark.parametrize("sides", [(60, 200), (200, 60), (120, 130)])
def test_what_noise_leaves_of_directions_is_what_the_formula_says(sides: tuple[int, int]) -> None:
    high, wide = sides
    own = torch.linalg.qr(gaussian(wide, 6, seed=1))[0].T
    sizes = torch.tensor([300.0, 100, 60, 40, 30, 25]).double()
    low = torch.linalg.qr(gaussian(high, 6, seed=2))[0] * sizes @ own
    _, seen, vectors = torch.linalg.svd(low + gaussian(high, wide, seed=3), full_matrices=False)
    shares = clear(seen, sides)
    left = (vectors[: len(shares)] @ own.T).square().sum(1)  # what of them is no noise
    if high == 120:  # the least value says little of the noise where sides are alike
        assert ((shares > 0) & (shares <= 1)).all()
    else:
        torch.testing.assert_close(shares[:6], left[:6], rtol=0, atol=0.08)
    torch.testing.assert_close(clear(torch.linalg.svdvals(low), sides), torch.ones(6).double())
