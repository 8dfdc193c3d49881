"""Moves: dropping, merging, new starts and signs, against brute force or a known answer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components
from torch import Tensor

import problems
from exhume.equation.objective import fitted
from exhume.search import moves
from exhume.search.moves import (
    dropping,
    exchanged,
    exchanges,
    merged,
    reseed,
    spectral_starts,
    unflipped,
    without,
)
from nets import make
from problems import case, cosines, dense_complement, gaussian, on_sphere

fast = settings(max_examples=25, deadline=None)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@fast
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_greedy_order_against_trying_all(n: int, rows: int, m: int, seed: int) -> None:
    phi, target = gaussian(n * rows, 25, seed=seed), gaussian(25, m, seed=seed + 1)

    def left_with(kept: list[int]) -> float:
        own = phi.view(n, rows, 25)[kept].flatten(0, 1)
        return (dense_complement(own) @ target if kept else target).square().sum().item()

    left, costs = list(range(n)), []
    order, found = moves.greedy_order(phi @ phi.T, phi @ target, rows)
    for i in order.tolist():
        tries = {j: left_with([k for k in left if k != j]) for j in left}
        assert i == min(tries, key=tries.__getitem__)
        left.remove(i)
        costs.append(tries[i] - left_with(list(range(n))))
    torch.testing.assert_close(found, torch.tensor(costs).double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("parameters", "point"), [("last", "both"), ("all", "midpoint")])
def test_dropping_costs_what_is_left_without(parameters: str, point: str) -> None:
    problem = make("two_layer", width=40).problem(parameters, point)
    truth = case(15, 4, 10)
    surplus = torch.cat([on_sphere(1, 15, seed=9), truth.inputs])[[1, 0, 2, 3, 4]]
    for posed, x, rows in ((problem, on_sphere(4, 4), 2), (truth.problem, surplus, 1)):
        here = fitted(posed, x)
        order, share = dropping(posed, here)
        assert here.rows == rows and sorted(order.tolist()) == list(range(len(x)))
        for count in range(1, len(x)):
            left = fitted(posed, without(posed, here, count))
            assert len(left.candidates) == len(x) - count
            cost = share[count - 1].item()
            assert left.value - here.value == pytest.approx(cost, rel=1e-5, abs=1e-15)
    assert order[0] == 1 and share[-1] == pytest.approx(1)  # in shares of the target
    assert torch.equal(without(truth.problem, here, 1), truth.inputs)


@fast
@given(st.integers(1, 12), st.integers(1, 4), st.floats(0.3, 0.9), st.integers(0, 2**31))
def test_merged_groups_against_connected_components(
    n: int, columns: int, cosine: float, seed: int
) -> None:
    x, a = on_sphere(n, 3, seed), gaussian(n, columns, seed=seed + 1)
    count, labels = connected_components((cosines(x, x) > cosine).numpy())
    groups = [torch.tensor(labels == i).nonzero()[:, 0] for i in range(count)]
    weights = a.square().sum(1).sqrt()
    expected = torch.stack([weights[g] @ x[g] / weights[g].sum() for g in groups])
    torch.testing.assert_close(merged(x, a, cosine), expected, rtol=1e-9, atol=1e-9)
    angles = torch.arange(17, dtype=torch.float64) * 0.1
    chain = torch.stack([angles.cos(), angles.sin()], dim=1)  # a long one is one group
    assert [len(merged(chain, torch.ones(17, 1), cosine)) for cosine in (0.99, 0.999)] == [1, 17]


def test_a_missing_sample_is_seen_in_the_residual_of_several_outputs() -> None:
    truth = case(15, 4, 60, outputs=3, even=True)
    residual = fitted(truth.problem, truth.inputs[:3]).residual
    found = spectral_starts(truth.problem, residual, 1, generator())
    assert cosines(found, truth.inputs).abs().argmax().item() == 3
    assert cosines(found, truth.inputs[3:]).abs().item() > 0.9


def test_subspace_iteration_finds_the_dense_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = case(40, 2, 200, even=True)
    dense = spectral_starts(truth.problem, truth.problem.target, 2, generator())
    monkeypatch.setattr(moves, "DENSE", 0)
    iterated = spectral_starts(truth.problem, truth.problem.target, 2, generator())
    assert cosines(dense, iterated).abs().diagonal().min() > 0.999
    assert cosines(dense, truth.inputs).square().sum(0).min() > 0.9


def test_starts_beyond_the_dimension_are_random() -> None:
    problem = problems.make_problem(problems.make_features(3, 50), gaussian(50, 1))
    many = spectral_starts(problem, problem.target, 7, generator())
    assert many.shape == (7, 3)
    torch.testing.assert_close(many.norm(dim=1), torch.full((7,), 3.0).double().sqrt())
    assert cosines(many[:3], many[:3]).fill_diagonal_(0).abs().max() < 1e-6


def test_reseeding_keeps_what_matters_most_and_looks_where_the_rest_is_missing() -> None:
    truth = case(15, 5, 60, "relu+tanh", even=True)
    x = torch.cat([truth.inputs[:4], on_sphere(2, 15, seed=9)])[[4, 0, 1, 5, 2, 3]]
    found = reseed(truth.problem, fitted(truth.problem, x), 2, 7, generator())
    assert found.shape == (7, 15) and torch.equal(found[:4], x[[1, 2, 4, 5]])
    assert cosines(found[4:], truth.inputs[4:]).abs().max() > 0.9
    torch.testing.assert_close(found.norm(dim=1), torch.full((7,), 15.0).double().sqrt())
    found = reseed(truth.problem, fitted(truth.problem, truth.inputs[:4]), 0, 5, generator())
    assert torch.equal(found[:4], truth.inputs[:4]) and len(found) == 5
    alone = case(15, 1, 200)  # of which all is dropped, and the target itself points at it
    found = reseed(alone.problem, fitted(alone.problem, on_sphere(1, 15)), 1, 1, generator())
    assert cosines(found, alone.inputs).abs().item() > 0.9
    for problem in (make("mlp").problem("last"), make("mlp").problem("all")):  # without a moment
        found = reseed(problem, fitted(problem, on_sphere(2, 4)), 2, 3, generator())
        assert torch.equal(found, problem.domain.start(3, 4, generator()))


def same_rows(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((torch.cdist(a, b).amin(1) < 1e-6).all())


@pytest.mark.parametrize(
    ("outputs", "flipped", "mirrored"),
    [(1, [2, 4], []), (1, [0, 3, 4, 5], [1]), (3, [2, 4], [1]), (3, [0, 3, 4, 5], [])],
)
def test_flips_hidden_by_pairs_are_undone(
    outputs: int, flipped: list[int], mirrored: list[int]
) -> None:
    truth = case(30, 6, 8, outputs=outputs, even=True)
    both = truth.inputs, truth.coefficients
    candidates, coefficients = problems.with_hidden_flips(*both, flipped, mirrored)
    combined = truth.problem.features.linearize(candidates).combine(coefficients)
    torch.testing.assert_close(combined, truth.problem.target)  # no residual tells the difference
    assert same_rows(unflipped(candidates, coefficients), truth.inputs)
    assert not same_rows(candidates, truth.inputs)


def test_the_most_opposite_two_are_the_pair() -> None:
    truth = case(12, 6, 8)
    assert unflipped(truth.inputs, truth.coefficients) is truth.inputs  # no pair at all
    a = truth.coefficients.clone()
    a[2], a[4] = 0.2, 1.0  # the sum of these two flips is nearly the second, so three are opposite
    candidates, coefficients = problems.with_hidden_flips(truth.inputs, a, [2, 4], [])
    for seed in range(10):
        order = torch.randperm(8, generator=generator(seed))
        assert same_rows(unflipped(candidates[order], coefficients[order]), truth.inputs)


def test_two_patches_of_one_candidate_change_places() -> None:
    problem = make("vit", shape=[3, 4, 6]).problem()
    x = gaussian(2, 72)
    ways = exchanges(problem, 2)
    assert ways == 2 * 15  # six patches of 2×2, in pairs
    seen = {tuple(exchanged(problem, x, way).flatten().tolist()) for way in range(ways)}
    assert len(seen) == ways
    image, moved = (y.view(2, 3, 4, 6)[1] for y in (x, exchanged(problem, x, ways - 1)))
    assert torch.equal(moved[:, 2:, 4:], image[:, 2:, 2:4])
    assert torch.equal(moved[:, 2:, 2:4], image[:, 2:, 4:])
    assert torch.equal(moved[:, :2], image[:, :2])
    assert torch.equal(exchanged(problem, exchanged(problem, x, 7), 7), x)
    assert exchanges(make("vit", shape=[8, 12]).problem(), 2) == 0  # too many patches
    for other in (
        make("vit").problem("all"),
        make("resnet").problem(),
        make("two_layer").problem(),
    ):
        assert exchanges(other, 2) == 0
