"""Eliminating coefficients: against scipy's non-negative least squares, and by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from exhume.equation.coefficients import Rule, eliminate, non_negative


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def excess(rows: Tensor, target: Tensor, multipliers: Tensor) -> float:
    """By how much ‖T − Φᵀλ‖ is above the least for λ ≥ 0, in units of ‖T‖."""
    _, least = nnls(rows.T.numpy(), target.numpy(), maxiter=100_000)
    return float(((target - rows.T @ multipliers).norm() - least) / target.norm())


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 30),
    size=st.integers(1, 60),
    apart=st.sampled_from([None, 0.0, 1e-8, 1e-5, 1e-4, 1e-2]),
    seed=st.integers(0, 1000),
)
def test_multipliers_are_those_of_scipy(
    count: int, size: int, apart: float | None, seed: int
) -> None:
    rows, target = drawn(count, size, seed=seed), drawn(size, seed=seed + 1)
    if apart is not None:  # candidates that have become the same
        rows = torch.cat([rows, rows + apart * drawn(count, size, seed=seed + 2)])
    multipliers, _ = non_negative(rows @ rows.T, rows @ target)
    assert (multipliers >= 0).all()
    assert excess(rows, target, multipliers) < 1e-5


@pytest.mark.parametrize("apart", [1e-4, 1e-5])
def test_nearly_equal_rows_beyond_their_rank_do_no_harm(apart: float) -> None:
    """Block pivoting alone goes round in circles in many of these, and ends far off."""
    for seed in range(30):
        half, target = drawn(30, 25, seed=seed), drawn(25, seed=seed + 1)
        rows = torch.cat([half, half + apart * drawn(30, 25, seed=seed + 2)])
        multipliers, _ = non_negative(rows @ rows.T, rows @ target)
        assert excess(rows, target, multipliers) < 1e-5


def test_a_start_makes_no_difference_to_the_end() -> None:
    rows, target = drawn(12, 40, seed=3), drawn(40, seed=4)
    gram, products = rows @ rows.T, rows @ target
    expected, _ = non_negative(gram, products)
    assert 0 < int((expected > 0).sum()) < 12
    for seed in range(5):
        found, _ = non_negative(gram, products, drawn(12, seed=seed) > 0)
        torch.testing.assert_close(found, expected)


def test_where_nothing_helps_all_multipliers_are_zero() -> None:
    products = torch.tensor([-1.0, -2.0, 0.0], dtype=torch.float64)
    multipliers, _ = non_negative(torch.eye(3, dtype=torch.float64), products)
    assert multipliers.tolist() == [0.0, 0.0, 0.0]
    nothing = torch.zeros(2, 2, dtype=torch.float64)
    assert not eliminate(Rule.MARGIN, nothing, nothing[:, :1], 1)[0].any()


def test_what_is_not_a_number_stays_so() -> None:
    unknown = torch.full((2, 2), torch.nan, dtype=torch.float64)
    assert non_negative(unknown, unknown[0])[0].isnan().any()


def test_of_one_output_a_coefficient_has_the_sign_of_the_output() -> None:
    rows, target = drawn(10, 30, seed=5), drawn(30, seed=6)
    outputs = rows @ target
    found, lower = eliminate(Rule.MARGIN, rows @ rows.T, outputs[:, None], 1)
    signs = outputs.sign()
    assert (signs * found[:, 0] >= 0).all()
    assert excess(signs[:, None] * rows, target, signs * found[:, 0]) < 1e-9
    # The factor inverts K among those in use, and leaves out those held at zero.
    used = found[:, 0] != 0
    assert 0 < int(used.sum()) < 10
    solved = torch.cholesky_solve(drawn(10, 1, seed=7), lower)
    inner = (rows @ rows.T)[used][:, used]
    torch.testing.assert_close(solved[used], torch.linalg.solve(inner, drawn(10, 1, seed=7)[used]))
    assert solved[~used].abs().max() < 1e-20


def test_of_several_outputs_coefficients_favour_the_class_of_the_network() -> None:
    classes, target = 4, drawn(50, seed=8)
    rows = drawn(6 * classes, 50, seed=9)
    outputs = (rows @ target).view(-1, classes)
    found = eliminate(Rule.MARGIN, rows @ rows.T, (rows @ target)[:, None], classes)[0]
    parts = found.view(-1, classes)
    own = outputs.argmax(1)
    assert parts.sum(1).abs().max() < 1e-12
    assert (parts.gather(1, own[:, None]) >= 0).all() and parts.any()
    assert (parts.scatter(1, own[:, None], 0.0) <= 0).all()
    pairs = torch.stack(
        [
            rows[i * classes + int(own[i])] - rows[i * classes + k]
            for i in range(6)
            for k in range(classes)
            if k != own[i]
        ]
    )
    _, least = nnls(pairs.T.numpy(), target.numpy())
    assert float((target - rows.T @ found[:, 0]).norm()) == pytest.approx(least, rel=1e-9)
