"""The relative residual against dense projectors, and its symmetries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume.equation.objective import curvature, descent, fitted, gauss_newton, gradient
from exhume.equation.problem import Problem
from nets import dense, make, names_of
from problems import (
    ACTIVATIONS,
    case,
    close,
    dense_complement,
    dense_phi,
    dense_random,
    gaussian,
    make_features,
    make_problem,
    on_sphere,
)

fast = settings(max_examples=8, deadline=None)


def random_problem(
    shape: tuple[int, int, int, int], name: str = "relu+tanh", seed: int = 0
) -> tuple[Problem, Tensor]:
    n, d, p, m = shape
    problem = make_problem(make_features(d, p, name, seed), gaussian(p, m, seed=seed + 1))
    return problem, on_sphere(n, d, seed=seed + 2)


@pytest.mark.parametrize("shape", [(1, 4, 15, 1), (4, 3, 30, 3)])  # n, d, p, m
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_all_of_it_against_the_dense_projector(name: str, shape: tuple[int, int, int, int]) -> None:
    problem, x = random_problem(shape, name)

    def dense_value(x: Tensor) -> float:
        outside = dense_complement(dense_phi(problem.features, x)) @ problem.target
        return (outside.square().sum() / problem.target.square().sum()).item()

    fit, h = fitted(problem, x), 1e-6
    complement = dense_complement(dense_phi(problem.features, x))
    torch.testing.assert_close(fit.residual, complement @ problem.target, rtol=0, atol=1e-8)
    assert fit.value == pytest.approx(dense_value(x), rel=1e-10) and 0 <= fit.value <= 1
    slope, direction = gradient(problem, fit), gaussian(*x.shape, seed=100)
    ahead, behind = (dense_value(x + s * h * direction) for s in (1, -1))
    assert (slope * direction).sum().item() == pytest.approx((ahead - behind) / (2 * h), 1e-5)
    oracle = dense_random(problem.features).linearize(x)
    pushed = complement @ oracle.push(direction, fit.coefficients)
    close(gauss_newton(fit, direction), oracle.pull(pushed, fit.coefficients), 1e-9)
    assert torch.equal(descent(fit), fit.linearization.pull(fit.residual, fit.coefficients))
    assert torch.equal(curvature(fit), fit.linearization.curvature(fit.coefficients))


@pytest.mark.parametrize(
    ("name", "parameters", "point"),
    [("two_layer", "all", "midpoint"), ("mlp", "last", "both"), ("mlp", "all", "both")],
)
def test_all_of_it_with_several_rows_a_candidate(name: str, parameters: str, point: str) -> None:
    net, x, direction = make(name), on_sphere(2, 4), gaussian(2, 4, seed=7)
    problem = net.problem(parameters, point)
    oracle = dense(net, point, None if parameters == "last" else names_of(net)).linearize(x)
    fit, complement = fitted(problem, x), dense_complement(oracle.phi)
    assert fit.rows > 1 and 0.01 < fit.value < 0.99
    close(fit.residual, complement @ problem.target, 1e-7)
    value = (fit.residual.norm() / problem.target.norm()).item() ** 2
    assert fit.value == pytest.approx(value, rel=1e-9)
    close(descent(fit), oracle.pull(fit.residual, fit.coefficients), 1e-7)
    pushed = complement @ oracle.push(direction, fit.coefficients)
    close(gauss_newton(fit, direction), oracle.pull(pushed, fit.coefficients), 1e-7)


@pytest.mark.parametrize(("c", "n"), [(1, 3), (3, 1), (4, 4)])
def test_the_last_layer_needs_no_jacobian_of_all_outputs(c: int, n: int) -> None:
    """The Jacobian of c outputs in W_L has rows e_c ⊗ φ(x); its Gram matrix is I ⊗ ΦΦᵀ."""
    net, x, direction = make("mlp", outputs=c), on_sphere(n, 4), gaussian(n, 4, seed=3)
    head = f"{len(net.plain) - 1}.weight"
    few, full = net.problem("last"), net.problem(head)  # c columns, or a block of parameters
    one, other = fitted(few, x), fitted(full, x)
    assert one.coefficients.shape == (n, c) and other.coefficients.shape == (n * c, 1)
    assert other.value == pytest.approx(one.value, rel=1e-7)
    close(other.shares, one.shares, 1e-6)
    close(gradient(full, other), gradient(few, one), 1e-7)
    close(gauss_newton(other, direction), gauss_newton(one, direction), 1e-7)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_truth_explains_the_weights(name: str, outputs: int) -> None:
    truth = case(12, 4, 6, name, outputs)
    fit = fitted(truth.problem, truth.inputs)
    assert fit.value < 1e-18
    torch.testing.assert_close(fit.coefficients, truth.coefficients, rtol=1e-6, atol=1e-9)
    single = case(12, 4, 6, name, outputs, dtype=torch.float32)
    assert 0 < fitted(single.problem, single.inputs).value < 1e-12


def test_few_many_equal_and_no_candidates() -> None:
    problem, x = random_problem((6, 5, 40, 2))
    values = [fitted(problem, x[:count]).value for count in range(7)]
    assert values == sorted(values, reverse=True) and values[0] == pytest.approx(1)
    fit, doubled = fitted(problem, x[:3]), fitted(problem, x[[0, 1, 2, 1]])
    assert doubled.value == pytest.approx(fit.value, rel=1e-8)
    both = doubled.coefficients[1] + doubled.coefficients[3]
    torch.testing.assert_close(both, fit.coefficients[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(*doubled.coefficients[[1, 3]], rtol=1e-2, atol=1e-4)
    assert math.isnan(fitted(problem, x * math.nan).value)


@fast
@given(
    st.integers(0, 2**31 - 10),
    st.permutations(range(4)),
    st.floats(1e-6, 1e6),
    st.sampled_from([1, -1]),
)
def test_order_scale_and_rotation_do_not_matter(
    seed: int, order: list[int], size: float, sign: int
) -> None:
    problem, x = random_problem((4, 5, 40, 2), seed=seed)
    fit, other = fitted(problem, x), fitted(problem, x[order])
    assert other.value == pytest.approx(fit.value, rel=1e-9)
    torch.testing.assert_close(other.coefficients, fit.coefficients[order], rtol=1e-6, atol=1e-8)
    slope = gradient(problem, fit)
    torch.testing.assert_close(gradient(problem, other), slope[order], rtol=1e-6, atol=1e-10)
    rotation = sign * size * torch.linalg.qr(gaussian(2, 2, seed=seed)).Q
    turned = make_problem(problem.features, problem.target @ rotation)
    assert fitted(turned, x).value == pytest.approx(fit.value, rel=1e-9)
    torch.testing.assert_close(gradient(turned, fitted(turned, x)), slope, rtol=1e-6, atol=1e-10)
