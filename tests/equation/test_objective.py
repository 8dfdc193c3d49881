"""The relative residual against dense projectors, and the problem and domain it lives in."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume.equation.coefficients import factor, least_squares
from exhume.equation.domain import Sphere
from exhume.equation.objective import fitted, gauss_newton, gradient
from exhume.equation.problem import Problem
from exhume.errors import InputError
from problems import (
    ACTIVATIONS,
    THREAT,
    case,
    dense_complement,
    dense_jacobian,
    dense_phi,
    gaussian,
    make_features,
    make_problem,
    on_sphere,
)

SHAPES = [(1, 4, 15, 1), (3, 5, 40, 1), (4, 3, 30, 3)]  # n, d, p, m
seeds = st.integers(0, 2**31 - 10)
fast = settings(max_examples=25, deadline=None)


def random_problem(
    shape: tuple[int, int, int, int], name: str = "relu+tanh", seed: int = 0
) -> tuple[Problem, Tensor]:
    n, d, p, m = shape
    problem = make_problem(make_features(d, p, name, seed), gaussian(p, m, seed=seed + 1))
    return problem, on_sphere(n, d, seed=seed + 2)


def dense_value(problem: Problem, x: Tensor) -> float:
    outside = dense_complement(dense_phi(problem.features, x)) @ problem.target
    return (outside.square().sum() / problem.target.square().sum()).item()


# Value, gradient, Gauss-Newton product


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_and_residual_against_the_dense_projector(
    name: str, shape: tuple[int, int, int, int]
) -> None:
    problem, x = random_problem(shape, name)
    fit = fitted(problem, x)
    outside = dense_complement(dense_phi(problem.features, x)) @ problem.target
    torch.testing.assert_close(fit.residual, outside, rtol=0, atol=1e-8)
    assert fit.value == pytest.approx(dense_value(problem, x), rel=1e-10)
    assert 0 <= fit.value <= 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradient_against_finite_differences(name: str, shape: tuple[int, int, int, int]) -> None:
    problem, x = random_problem(shape, name)
    slope = gradient(problem, fitted(problem, x))
    h = 1e-6
    for seed in range(3):
        direction = gaussian(*x.shape, seed=100 + seed)
        ahead, behind = (dense_value(problem, x + s * h * direction) for s in (1, -1))
        assert (slope * direction).sum().item() == pytest.approx((ahead - behind) / (2 * h), 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gauss_newton_against_the_dense_matrix(name: str, shape: tuple[int, int, int, int]) -> None:
    problem, x = random_problem(shape, name)
    m = shape[3]
    fit = fitted(problem, x)
    jacobian = dense_jacobian(problem.features, x, fit.coefficients)
    outside = torch.kron(
        dense_complement(dense_phi(problem.features, x)), torch.eye(m, dtype=torch.float64)
    )
    direction = gaussian(*x.shape, seed=7)
    expected = jacobian.T @ outside @ jacobian @ direction.flatten()
    given = gauss_newton(fit, direction).flatten()
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-9 * expected.abs().max().item())


def test_gauss_newton_is_half_the_second_derivative_where_the_residual_is_zero() -> None:
    truth = case(4, 2, 8, "tanh", outputs=2)
    scale = truth.problem.target.square().sum().item()
    direction, h = gaussian(2, 4, seed=3), 1e-4
    curvature = (gauss_newton(fitted(truth.problem, truth.inputs), direction) * direction).sum()
    ahead, behind = (dense_value(truth.problem, truth.inputs + s * h * direction) for s in (1, -1))
    assert (ahead + behind) / (2 * h**2) == pytest.approx(curvature.item() / scale, rel=1e-4)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_truth_explains_the_weights(name: str, outputs: int) -> None:
    truth = case(12, 4, 6, name, outputs)
    fit = fitted(truth.problem, truth.inputs)
    assert fit.value < 1e-18
    torch.testing.assert_close(fit.coefficients, truth.coefficients, rtol=1e-6, atol=1e-9)
    single = case(12, 4, 6, name, outputs, dtype=torch.float32)
    assert 0 < fitted(single.problem, single.inputs).value < 1e-12


def test_no_candidates_explain_nothing() -> None:
    problem, x = random_problem(SHAPES[1])
    assert fitted(problem, x[:0]).value == pytest.approx(1)


# Symmetries


@fast
@given(seeds, st.permutations(range(4)))
def test_order_of_the_candidates_does_not_matter(seed: int, order: list[int]) -> None:
    problem, x = random_problem((4, 5, 40, 2), seed=seed)
    fit, other = fitted(problem, x), fitted(problem, x[order])
    assert other.value == pytest.approx(fit.value, rel=1e-9)
    torch.testing.assert_close(other.coefficients, fit.coefficients[order], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(
        gradient(problem, other), gradient(problem, fit)[order], rtol=1e-6, atol=1e-10
    )


@fast
@given(seeds, st.floats(1e-6, 1e6), st.sampled_from([1, -1]))
def test_scale_of_the_target_does_not_matter(seed: int, size: float, sign: int) -> None:
    problem, x = random_problem((3, 5, 40, 2), seed=seed)
    scaled = make_problem(problem.features, sign * size * problem.target)
    fit, other = fitted(problem, x), fitted(scaled, x)
    assert other.value == pytest.approx(fit.value, rel=1e-9)
    torch.testing.assert_close(
        gradient(scaled, other), gradient(problem, fit), rtol=1e-6, atol=1e-10
    )


@fast
@given(seeds)
def test_rotation_of_the_outputs_does_not_matter(seed: int) -> None:
    problem, x = random_problem((3, 5, 40, 3), seed=seed)
    rotation = torch.linalg.qr(gaussian(3, 3, seed=seed)).Q
    rotated = make_problem(problem.features, problem.target @ rotation)
    assert fitted(rotated, x).value == pytest.approx(fitted(problem, x).value, rel=1e-9)


@fast
@given(seeds, st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_norm_of_a_candidate_leaves_no_trace_with_relu_only(seed: int, sizes: list[float]) -> None:
    stretch = torch.tensor(sizes, dtype=torch.float64)[:, None]
    problem, x = random_problem((3, 5, 40, 2), "relu", seed)
    value = fitted(problem, x).value
    assert fitted(problem, stretch * x).value == pytest.approx(value, rel=1e-7)
    slope = gradient(problem, fitted(problem, x))
    assert (slope * x).sum(1).abs().max() < 1e-10  # so the gradient has no radial part
    other, _ = random_problem((3, 5, 40, 2), "relu+tanh", seed)
    assert fitted(other, 3 * x).value != pytest.approx(fitted(other, x).value, rel=1e-6)


def test_more_candidates_never_explain_less() -> None:
    problem, x = random_problem((6, 5, 40, 2))
    values = [fitted(problem, x[:count]).value for count in range(1, 7)]
    assert values == sorted(values, reverse=True)


# The linear half


def test_two_equal_candidates_do_no_harm() -> None:
    problem, x = random_problem((3, 5, 40, 2))
    fit, doubled = fitted(problem, x), fitted(problem, x[[0, 1, 2, 1]])
    assert doubled.value == pytest.approx(fit.value, rel=1e-8)
    both = doubled.coefficients[1] + doubled.coefficients[3]
    torch.testing.assert_close(both, fit.coefficients[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        doubled.coefficients[1], doubled.coefficients[3], rtol=1e-2, atol=1e-4
    )


def test_least_squares_of_singular_systems() -> None:
    phi = gaussian(6, 3)  # more candidates than weights
    target = gaussian(3, 2, seed=1)
    a, lower = least_squares(phi @ phi.T, phi @ target)
    torch.testing.assert_close(phi.T @ a, target, rtol=0, atol=1e-6)
    torch.testing.assert_close(lower @ lower.T, phi @ phi.T, rtol=0, atol=1e-6)


def test_factor_gives_up_on_what_is_no_gram_matrix() -> None:
    assert factor(torch.full((2, 2), math.nan, dtype=torch.float64)).isnan().all()
    assert factor(torch.zeros(2, 2, dtype=torch.float64)).isfinite().all()


def test_candidates_that_are_not_numbers_have_no_value() -> None:
    problem, x = random_problem(SHAPES[1])
    assert math.isnan(fitted(problem, x * math.nan).value)


# Domain


@fast
@given(seeds, st.integers(1, 8), st.sampled_from([None, 0.5, 7.0]))
def test_sphere_projects_and_keeps_to_its_tangents(seed: int, d: int, radius: float | None) -> None:
    sphere = Sphere(radius)
    x, direction, h = sphere.project(gaussian(3, d, seed=seed)), gaussian(3, d, seed=seed + 1), 1e-5
    size = radius or math.sqrt(d)
    torch.testing.assert_close(x.norm(dim=1), torch.full((3,), size, dtype=torch.float64))
    torch.testing.assert_close(sphere.project(x), x)
    tangent = sphere.tangent(x, direction)
    assert (tangent * x).sum(1).abs().max() < 1e-12 * size * (1 + direction.norm().item())
    torch.testing.assert_close(sphere.tangent(x, tangent), tangent)
    moved = (sphere.project(x + h * direction) - sphere.project(x - h * direction)) / (2 * h)
    torch.testing.assert_close(moved, tangent, rtol=1e-4, atol=1e-4)


def test_sphere_starts_are_uniform_and_reproducible() -> None:
    def draw() -> Tensor:
        return Sphere().start(2000, 3, torch.Generator().manual_seed(4))

    assert torch.equal(draw(), draw())
    torch.testing.assert_close(draw().norm(dim=1), torch.full((2000,), 3.0).double().sqrt())
    assert draw().mean(0).abs().max() < 0.12
    assert (draw().T @ draw() / 2000 - torch.eye(3)).abs().max() < 0.12


# Problem


def test_a_problem_knows_its_sizes() -> None:
    problem, _ = random_problem((3, 5, 40, 2))
    assert problem.dim == 5
    assert problem.ratio(4) == pytest.approx(40 * 2 / (5 * 4))
    moved = problem.to("cpu", torch.float32)
    assert moved.target.dtype == moved.features.dtype == torch.float32
    assert moved.domain == problem.domain


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        (torch.ones(40), "expected shape"),
        (torch.ones(39, 1), "expected shape"),
        (torch.ones(1, 40), "expected shape"),
        (torch.ones(40, 0), "expected shape"),
        (torch.full((40, 1), math.nan), "NaN"),
        (torch.full((40, 1), math.inf), "infinite"),
        (torch.zeros(40, 2), "zero everywhere"),
    ],
)
def test_a_target_that_no_attack_could_use_is_refused(target: Tensor, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Problem(target, make_features(5, 40), THREAT, (5,))
