"""Symmetric tensors in coordinates, against the full arrays, and their decomposition."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume.theory import fewest_neurons
from exhume.theory.moments import contract, decompose, dimension, exponents, powers, slices
from problems import gaussian


def dense(coordinates: Tensor, size: int, degree: int) -> Tensor:
    """The full array of a symmetric tensor, entry by entry."""
    full = torch.zeros((size,) * degree, dtype=torch.float64)
    letters = exponents(size, degree)
    for index in itertools.product(range(size), repeat=degree):
        counts = torch.tensor([index.count(j) for j in range(size)])
        place = int((letters == counts).all(1).nonzero())
        times = math.factorial(degree) / math.prod(math.factorial(c) for c in counts.tolist())
        full[index] = coordinates[place] / math.sqrt(times)
    return full


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 99))
def test_coordinates_and_products_are_those_of_the_full_array(
    size: int, degree: int, seed: int
) -> None:
    tensor, other = gaussian(2, dimension(size, degree), seed=seed)
    full = dense(tensor, size, degree)
    assert torch.allclose(tensor @ other, (full * dense(other, size, degree)).sum())
    for axes in itertools.permutations(range(degree)):
        assert torch.equal(full.permute(axes), full)
    vectors = gaussian(2, size, seed=seed + 1)
    for k, v in enumerate(vectors):
        once = last = torch.tensordot(full, v, 1)
        assert torch.allclose(dense(contract(tensor, vectors, degree)[k], size, degree - 1), once)
        for _ in range(degree - 2):
            last = torch.tensordot(last, v, 1)
        assert torch.allclose(slices(vectors, degree)[k] @ tensor, last)
        assert torch.allclose(powers(vectors, degree)[k] @ tensor, last @ v)
    u, v = powers(vectors, degree)
    assert torch.allclose(u @ v, (vectors[0] @ vectors[1]) ** degree)


@pytest.mark.parametrize(
    ("degree", "size"), [(3, 3), (3, 4), (3, 5), (3, 6), (4, 3), (4, 4), (4, 5), (5, 3)]
)
def test_fewest_neurons_are_the_fewest(degree: int, size: int) -> None:
    def rank(count: int) -> int:
        units = torch.nn.functional.normalize(gaussian(count, size), dim=1)
        rows = slices(units, degree).flatten(0, 1)
        return int(torch.linalg.matrix_rank(rows, rtol=1e-10))

    fewest = fewest_neurons(degree, size)
    assert rank(fewest) == dimension(size, degree)
    assert rank(fewest - 1) < dimension(size, degree)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 4), st.integers(3, 5), st.integers(0, 99))
def test_decomposition_of_independent_terms(size: int, degree: int, seed: int) -> None:
    true = torch.nn.functional.normalize(gaussian(size, size, seed=seed), dim=1)
    assume(torch.linalg.cond(true) < 50)
    strengths = gaussian(size, seed=seed + 1).sign() * (1 + gaussian(size, seed=seed + 2).abs())
    found, weights, rest = decompose(strengths @ powers(true, degree), size, degree, 1e-10)
    assert rest < 1e-8 and len(found) == size
    cosines = (found @ true.T).abs()
    assert torch.allclose(cosines.amax(1), torch.ones(size, dtype=torch.float64))
    assert torch.allclose(weights.abs(), strengths[cosines.argmax(1)].abs(), rtol=1e-5)
    fewer, _, rest = decompose(strengths[1:] @ powers(true[1:], degree), size, degree, 1e-10)
    assert fewer.shape == (size - 1, size) and rest < 1e-8
