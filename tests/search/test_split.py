"""Splitting against dense second derivatives and the losses themselves, in float64."""

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume.equation.domain import Box
from exhume.errors import InputError
from exhume.search import split
from exhume.search.split import chosen_as_published, halves, line_search, smallest_eigenpairs
from problems import dense_phi, gaussian, make_features


def symmetric(n: int, d: int, seed: int) -> Tensor:
    matrices = gaussian(n, d, d, seed=seed)
    return (matrices + matrices.mT) / 2


def times(matrices: Tensor) -> split.Product:
    return lambda direction: (matrices @ direction[:, :, None])[:, :, 0]


def columns(product: split.Product, n: int, d: int) -> Tensor:
    axes = torch.eye(d, dtype=torch.float64)
    return torch.stack([product(axis.expand(n, d).contiguous()) for axis in axes], 2)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", ["tanh", "gelu", "softplus"])
def test_the_splitting_matrix_is_the_second_derivative(name: str, outputs: int) -> None:
    features = make_features(4, 30, name)
    x, a, residual = gaussian(3, 4), gaussian(3, outputs, seed=1), gaussian(30, outputs, seed=2)
    here, prior = features.linearize(x), gaussian(3, 4, seed=3).abs()
    product = partial(split.splitting_product, here, residual, a, prior=prior, scale=0.5)
    found = columns(product, 3, 4)
    for j in range(3):  # −2 Σ_c A_jc ∂²φ(x_j)ᵀR_c by autograd
        bent = torch.autograd.functional.hessian(
            lambda row, j=j: -2 * (dense_phi(features, row[None])[0] @ residual) @ a[j], x[j]
        )
        assert torch.allclose(found[j], 0.5 * bent + torch.diag(prior[j]), atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1e-9, 1.0, 1e9]))
@example(4, 4, 24, 1e-9)  # a vector shorter than 1e-12 on the way
def test_eigenpairs_of_all_candidates_at_once(n: int, d: int, seed: int, size: float) -> None:
    matrices = size * symmetric(n, d, seed)
    found = smallest_eigenpairs(times(matrices), gaussian(n, d, seed=seed + 1), d)
    values, vectors = torch.linalg.eigh(matrices)
    assert torch.allclose(found.values, values[:, 0], rtol=1e-9, atol=1e-9 * size)
    assert (found.bounds <= 1e-6 * size).all()
    overlap = (found.vectors * vectors[:, :, 0]).sum(1).abs()
    apart = values[:, min(1, d - 1)] - values[:, 0] > 1e-3 * size
    assert torch.allclose(overlap[apart], torch.ones_like(overlap)[apart], atol=1e-6)


def test_few_iterations_give_an_eigenvalue_within_the_bound() -> None:
    matrices, start = symmetric(5, 60, 0), gaussian(5, 60, seed=1)
    exact = torch.linalg.eigvalsh(matrices)
    loose, tight = (smallest_eigenpairs(times(matrices), start, steps) for steps in (8, 25))
    for found in (loose, tight):
        nearest = (exact - found.values[:, None]).abs().amin(1)
        assert (nearest <= found.bounds * (1 + 1e-9)).all()
        assert (found.values >= exact[:, 0] - 1e-12).all()
    assert (tight.values - exact[:, 0] < 0.05).all() and (tight.bounds < loose.bounds).all()


def test_krylov_spaces_that_end_early_or_are_not_numbers_spoil_no_other() -> None:
    u, eye = torch.nn.functional.normalize(gaussian(1, 6), dim=1), torch.eye(6).double()
    outer, ones = u.T @ u, torch.ones(5).double()
    some = torch.stack([0 * eye, 3 * eye, outer, torch.nan * outer, -2 * outer, eye - 5 * outer])
    found = smallest_eigenpairs(times(some), gaussian(6, 6, seed=1), 6)
    expected = torch.tensor([0.0, 3.0, 0.0, torch.nan, -2.0, -4.0], dtype=torch.float64)
    torch.testing.assert_close(found.values, expected, equal_nan=True, rtol=0, atol=1e-12)
    assert torch.allclose(found.vectors[[0, 1, 2, 4, 5]].norm(dim=1), ones)
    assert torch.allclose((found.vectors[4:] @ u.T).abs()[:, 0], ones[:2])
    assert 3 not in split.chosen_adaptively(found, 1.0, 0.0)
    assert 3 not in chosen_as_published(found.values, 6)


def test_single_precision_and_memory_limit_the_eigenpairs(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices, start = symmetric(4, 20, 0).float(), gaussian(4, 20, seed=1).float()
    product = Mock(side_effect=times(matrices))
    found, exact = smallest_eigenpairs(product, start, 20), torch.linalg.eigvalsh(matrices.double())
    assert found.vectors.dtype == torch.float32 and found.values.dtype == torch.float64
    assert torch.allclose(found.values, exact[:, 0], atol=1e-4) and (found.bounds < 1e-2).all()
    assert product.call_count == 20 + 1
    monkeypatch.setattr(split, "free_memory", lambda device: 2 * 4 * 20 * 4 * 3.5)
    smallest_eigenpairs(product, start, 20)
    assert product.call_count == 21 + 3 + 1
    monkeypatch.setattr(split, "free_memory", lambda device: 2 * 4 * 20 * 4 * 1.5)
    with pytest.raises(InputError, match="4 candidates of 20 entries"):
        smallest_eigenpairs(product, start, 20)


def test_entries_held_at_a_bound_are_not_moved() -> None:
    x, slope = torch.tensor([[1.0, 0.2]]).double(), torch.tensor([[-3.0, 1.0]]).double()
    matrices = torch.tensor([[[-5.0, 1.0], [1.0, -1.0]]]).double()
    product = split.kept_to(Box(0, 1), x, slope, times(matrices))
    assert columns(product, 1, 2).tolist() == [[[0.0, 0.0], [0.0, -1.0]]]


@pytest.mark.parametrize(
    ("values", "count", "chosen"),
    [
        ([-0.5, 0.1, 0.2, -1e-9, *[0.3] * 6], 10, [0, 3]),
        ([-0.5, -0.009, 0.2, -0.3, -0.2, 0.1], 10, [0, 3, 4]),  # −0.09 once scaled is too little
        ([-4.0, -3.0, -2.0, -1.0], 1, [0, 1]),
        ([-float(i) for i in range(400)], 1, [*range(250, 400)]),
        ([-1e-6] * 100 + [0.1] * 900, 1, []),  # a tenth is enough to ask for −0.1
        ([-1e-6] * 99 + [0.1] * 901, 1, [*range(99)]),
        ([1.0] * 3, 1, []),
    ],
)
def test_the_published_choice(values: list[float], count: float, chosen: list[int]) -> None:
    assert chosen_as_published(torch.tensor(values).double(), count).tolist() == chosen


NEGATIVE = [-2.0, -2.0, -2.0, 0.1]


@pytest.mark.parametrize(
    ("values", "bounds", "upper", "price", "chosen"),
    [
        (NEGATIVE, [0.0] * 4, 1.0, 0.0, [0, 1, 2]),
        (NEGATIVE, [0.0] * 4, 1.0, 0.99, [0, 1, 2]),  # ½·2 against 0.99
        (NEGATIVE, [0.0] * 4, 1.0, 1.01, []),
        (NEGATIVE, [0.0] * 4, 0.1, 0.0101, []),
        ([-1.0, -100.0, -1.1, -1.0], [0.0] * 4, 1.0, 0.0, [1, 2]),  # 1.06 equal parts
        ([-1.0, -1.0], [0.5, 1.5], 1.0, 0.0, [0]),
    ],
)
def test_the_adaptive_choice(
    values: list[float], bounds: list[float], upper: float, price: float, chosen: list[int]
) -> None:
    vectors = torch.zeros(len(values), 2).double()
    pairs = split.Eigenpairs(torch.tensor(values).double(), vectors, torch.tensor(bounds).double())
    assert split.chosen_adaptively(pairs, upper, price).tolist() == chosen


def test_a_line_search_finds_the_best_or_nothing() -> None:
    least = line_search(lambda e: (math.log(e / 3e-4)) ** 2 if e else 99.0)
    assert least == pytest.approx(3e-4, rel=1e-2)
    assert line_search(lambda e: -e, 5.0) == 5.0
    for loss in (lambda e: e, lambda e: 1.0, lambda e: math.nan if e else 1.0):
        assert line_search(loss) is None
    assert 3e-4 < line_search(lambda e: -e if e < 1e-3 else math.inf) < 1e-3


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 6), st.integers(0, 99), st.floats(0, 3))
def test_halves_have_the_mean_and_the_sum_of_their_parent(n: int, seed: int, eps: float) -> None:
    x, u, weights = gaussian(n, 3, seed=seed), gaussian(n, 3, seed=seed + 1), gaussian(n)
    mask = gaussian(n, seed=seed + 2) > 0
    chosen = mask.nonzero()[:, 0]
    moved, parts = halves(x, chosen, u, eps), split.shared(weights, chosen)
    parents = split.copied(torch.arange(n), chosen)
    assert len(moved) == len(parts) == len(parents) == n + len(chosen)
    for j in range(n):
        own = parents == j
        assert int(own.sum()) == (2 if mask[j] else 1)
        assert torch.allclose(moved[own].mean(0), x[j])
        assert torch.allclose(parts[own].sum(), weights[j])
        if mask[j]:
            assert torch.allclose(moved[own][0] - moved[own][1], 2 * eps * u[j])
