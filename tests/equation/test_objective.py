"""The relative residual against dense projectors, and its symmetries."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import problems
from exhume.equation.objective import curvature, descent, fitted, gauss_newton, gradient
from exhume.equation.problem import Problem
from nets import dense, make, names_of
from problems import ACTIVATIONS, close, gaussian, make_features, make_problem, on_sphere

Posed = tuple[Problem, problems.Dense, Tensor]  # with the dense oracle, and candidates


def random(n: int, d: int, p: int, m: int, name: str = "relu+tanh", seed: int = 0) -> Posed:
    features = make_features(d, p, name, seed)
    problem = make_problem(features, gaussian(p, m, seed=seed + 1))
    return problem, problems.dense_random(features), on_sphere(n, d, seed=seed + 2)


def block(name: str, parameters: str, point: str) -> Posed:
    """Several rows a candidate."""
    net = make(name)
    names = None if parameters == "last" else names_of(net)
    return net.problem(parameters, point), dense(net, point, names), on_sphere(2, 4)


SHAPES = (1, 4, 15, 1), (4, 3, 30, 3)  # n, d, p, m
RANDOM = [partial(random, *shape, name) for shape in SHAPES for name in ACTIVATIONS]
BLOCKS = ("two_layer", "all", "midpoint"), ("mlp", "last", "both"), ("mlp", "all", "both")


@pytest.mark.parametrize("pose", [*RANDOM, *(partial(block, *names) for names in BLOCKS)])
def test_all_of_it_against_dense_algebra(pose: Callable[[], Posed]) -> None:
    problem, oracle, x = pose()

    def projected(x: Tensor) -> Tensor:
        return problems.dense_complement(oracle.linearize(x).phi) @ problem.target

    def dense_value(x: Tensor) -> float:
        return float((projected(x).norm() / problem.target.norm()) ** 2)

    fit, there, direction = fitted(problem, x), oracle.linearize(x), gaussian(*x.shape, seed=100)
    close(fit.residual, projected(x), 1e-7)
    assert fit.value == pytest.approx(dense_value(x), rel=1e-9) and 0.01 < fit.value < 1
    ahead, behind = (dense_value(x + h * direction) for h in (1e-6, -1e-6))
    slope = (gradient(problem, fit) * direction).sum().item()
    assert slope == pytest.approx((ahead - behind) / 2e-6, rel=1e-5)
    pushed = problems.dense_complement(there.phi) @ there.push(direction, fit.coefficients)
    close(gauss_newton(fit, direction), there.pull(pushed, fit.coefficients), 1e-7)
    close(descent(fit), there.pull(fit.residual, fit.coefficients), 1e-7)
    close(curvature(fit), there.curvature(fit.coefficients), 1e-7)


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


def test_few_many_equal_and_no_candidates() -> None:
    problem, _, x = random(6, 5, 40, 2)
    values = [fitted(problem, x[:count]).value for count in range(7)]
    assert values == sorted(values, reverse=True) and values[0] == pytest.approx(1)
    fit, doubled = fitted(problem, x[:3]), fitted(problem, x[[0, 1, 2, 1]])
    assert doubled.value == pytest.approx(fit.value, rel=1e-8)
    both = doubled.coefficients[1] + doubled.coefficients[3]
    torch.testing.assert_close(both, fit.coefficients[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(*doubled.coefficients[[1, 3]], rtol=1e-2, atol=1e-4)
    assert math.isnan(fitted(problem, x * math.nan).value)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**31 - 10), st.permutations(range(4)), st.floats(1e-6, 1e6))
def test_order_scale_and_rotation_do_not_matter(seed: int, order: list[int], size: float) -> None:
    problem, _, x = random(4, 5, 40, 2, seed=seed)
    fit, other = fitted(problem, x), fitted(problem, x[order])
    assert other.value == pytest.approx(fit.value, rel=1e-9)
    torch.testing.assert_close(other.coefficients, fit.coefficients[order], rtol=1e-6, atol=1e-8)
    slope = gradient(problem, fit)
    torch.testing.assert_close(gradient(problem, other), slope[order], rtol=1e-6, atol=1e-10)
    rotation = -size * torch.linalg.qr(gaussian(2, 2, seed=seed)).Q
    turned = make_problem(problem.features, problem.target @ rotation)
    assert fitted(turned, x).value == pytest.approx(fit.value, rel=1e-9)
    torch.testing.assert_close(gradient(turned, fitted(turned, x)), slope, rtol=1e-6, atol=1e-10)
