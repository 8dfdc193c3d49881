"""Eliminating coefficients: against scipy's non-negative least squares, and by hand."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from exhume.equation import coefficients
from exhume.equation.coefficients import Rule, eliminate, factor, non_negative
from problems import gaussian


def excess(rows: Tensor, target: Tensor, multipliers: Tensor) -> float:
    """By how much ‖T − Φᵀλ‖ is above the least for λ ≥ 0, in units of ‖T‖."""
    _, least = nnls(rows.T.numpy(), target.numpy(), maxiter=100_000)
    return float(((target - rows.T @ multipliers).norm() - least) / target.norm())


aparts = st.sampled_from([None, 0.0, 1e-8, 1e-5, 1e-4, 1e-2])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 60), aparts, st.lists(st.integers(0, 1000), max_size=2))
@example(30, 25, 1e-4, [*range(8)])  # block pivoting alone goes round in circles in many of these
@example(30, 25, 1e-5, [*range(8)])
def test_multipliers_are_those_of_scipy(
    count: int, size: int, apart: float | None, seeds: list[int]
) -> None:
    for seed in seeds:
        rows, target = gaussian(count, size, seed=seed), gaussian(size, seed=seed + 1)
        if apart is not None:  # candidates that have become the same
            rows = torch.cat([rows, rows + apart * gaussian(count, size, seed=seed + 2)])
        multipliers, _ = non_negative(rows @ rows.T, rows @ target)
        assert (multipliers >= 0).all()
        assert excess(rows, target, multipliers) < 1e-5


def test_systems_without_an_answer() -> None:
    phi, target = gaussian(6, 3), gaussian(3, 2, seed=1)  # more candidates than weights
    a, lower = coefficients.least_squares(phi @ phi.T, phi @ target)
    torch.testing.assert_close(phi.T @ a, target, rtol=0, atol=1e-6)
    torch.testing.assert_close(lower @ lower.T, phi @ phi.T, rtol=0, atol=1e-6)
    unknown, nothing = torch.full((2, 2), math.nan).double(), torch.zeros(2, 2).double()
    assert factor(unknown).isnan().all() and factor(nothing).isfinite().all()
    assert non_negative(unknown, unknown[0])[0].isnan().any()
    worse = torch.tensor([-1.0, -2.0, 0.0], dtype=torch.float64)
    assert non_negative(torch.eye(3).double(), worse)[0].tolist() == [0.0, 0.0, 0.0]
    assert not eliminate(Rule.MARGIN, nothing, nothing[:, :1], 1)[0].any()


def test_of_one_output_a_coefficient_has_the_sign_of_the_output() -> None:
    rows, target = gaussian(10, 30, seed=5), gaussian(30, seed=6)
    outputs = rows @ target
    found, lower = eliminate(Rule.MARGIN, rows @ rows.T, outputs[:, None], 1)
    signs = outputs.sign()
    assert (signs * found[:, 0] >= 0).all()
    assert excess(signs[:, None] * rows, target, signs * found[:, 0]) < 1e-9
    # The factor inverts K among those in use, and leaves out those held at zero.
    used, right = found[:, 0] != 0, gaussian(10, 1, seed=7)
    assert 0 < int(used.sum()) < 10
    solved = torch.cholesky_solve(right, lower)
    inner = (rows @ rows.T)[used][:, used]
    torch.testing.assert_close(solved[used], torch.linalg.solve(inner, right[used]))
    assert solved[~used].abs().max() < 1e-20


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 7), st.integers(1, 5), st.integers(0, 10_000))
def test_several_outputs_have_the_multipliers_of_scipy(classes: int, count: int, seed: int) -> None:
    """λ_ik ≥ 0 of φ_y − φ_k, with y the largest output of a sample and k those next to it."""
    rows, target = gaussian(count * classes, 60, seed=seed), gaussian(60, seed=seed + 1)
    products, gram = rows @ target, rows @ rows.T
    found, lower = eliminate(Rule.MARGIN, gram, products[:, None], classes)
    chosen = []
    for i in range(0, count * classes, classes):
        first, *rest = sorted(range(i, i + classes), key=lambda row: -products[row])
        chosen += [(first, rival) for rival in rest[: coefficients.RIVALS]]
    differences = torch.stack([rows[y] - rows[k] for y, k in chosen])
    multipliers, least = nnls(differences.T.numpy(), target.numpy())
    expected = torch.zeros(count * classes).double()
    for (y, k), multiplier in zip(chosen, multipliers.tolist(), strict=True):
        expected[y] += multiplier
        expected[k] -= multiplier
    torch.testing.assert_close(found[:, 0], expected, rtol=1e-6, atol=1e-8)
    assert float((target - rows.T @ found[:, 0]).norm()) == pytest.approx(least, rel=1e-9)
    torch.testing.assert_close(lower, factor(gram))
    first, second = coefficients.margins(products.view(count, classes))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == chosen
