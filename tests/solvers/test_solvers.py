"""Solvers against dense linear algebra, published formulas and torch's own optimiser."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from exhume.equation.objective import fitted, gradient
from exhume.equation.problem import Problem
from exhume.methods import reconstruct
from exhume.methods.iurada2025 import Iurada2025
from exhume.solvers import Outcome, Solver, State, run
from exhume.solvers.gradient import Adam, Momentum
from exhume.solvers.levenberg_marquardt import (
    LevenbergMarquardt,
    conjugate_gradients,
    damped_step,
)
from problems import (
    ACTIVATIONS,
    case,
    dense_complement,
    dense_jacobian,
    dense_phi,
    gaussian,
    make_features,
    make_problem,
    on_sphere,
)


def perturbed(x: Tensor, size: float, seed: int = 5) -> Tensor:
    return x + size * gaussian(*x.shape, seed=seed)


def trace(solver: Solver, problem: Problem, start: Tensor, steps: int) -> list[State]:
    states = [solver.init(problem, start)]
    while states[-1].outcome is None and states[-1].steps < steps:
        states.append(solver.step(problem, states[-1]))
    return states


# Conjugate gradients


def positive_definite(size: int, seed: int = 0) -> Tensor:
    root = gaussian(size, size, seed=seed)
    return root @ root.T + torch.eye(size, dtype=torch.float64)


def test_conjugate_gradients_against_a_dense_solve() -> None:
    matrix, b = positive_definite(12), gaussian(3, 4, seed=1)

    def operator(x: Tensor) -> Tensor:
        return (matrix @ x.flatten()).reshape(3, 4)

    exact = torch.linalg.solve(matrix, b.flatten()).reshape(3, 4)
    plain, used = conjugate_gradients(operator, b, lambda r: r, 1e-13, 100)
    torch.testing.assert_close(plain, exact, rtol=1e-9, atol=1e-10)
    assert used <= 20
    scale = matrix.diagonal().reshape(3, 4)
    scaled, _ = conjugate_gradients(operator, b, lambda r: r / scale, 1e-13, 100)
    torch.testing.assert_close(scaled, exact, rtol=1e-9, atol=1e-10)
    inverse = torch.linalg.inv(matrix)
    perfect, used = conjugate_gradients(
        operator, b, lambda r: (inverse @ r.flatten()).reshape(3, 4), 1e-8, 100
    )
    torch.testing.assert_close(perfect, exact, rtol=1e-7, atol=1e-8)
    assert used == 1


def test_conjugate_gradients_stops_where_it_is_told() -> None:
    matrix, b = positive_definite(30), gaussian(30, 1, seed=1)
    energies = []
    for products in range(1, 6):
        x, used = conjugate_gradients(lambda v: matrix @ v, b, lambda r: r, 0.0, products)
        assert used == products
        energies.append((x.T @ matrix @ x / 2 - b.T @ x).item())
    assert energies == sorted(energies, reverse=True)
    x, used = conjugate_gradients(lambda v: matrix @ v, b, lambda r: r, 1e-2, 100)
    assert (matrix @ x - b).norm() <= 1e-2 * b.norm()
    assert used < 30


# Levenberg-Marquardt


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("damping", [1e-3, 1.0])
@pytest.mark.parametrize("name", ["relu", "relu+tanh"])
def test_damped_step_against_the_dense_system(name: str, damping: float, m: int) -> None:
    n, d, p = 3, 5, 60
    problem = make_problem(make_features(d, p, name), gaussian(p, m))
    x = on_sphere(n, d, seed=1)
    fit = fitted(problem, x)
    jacobian = dense_jacobian(problem.features, x, fit.coefficients)
    outside = torch.kron(
        dense_complement(dense_phi(problem.features, x)), torch.eye(m, dtype=torch.float64)
    )
    per_sample = jacobian.reshape(p * m, n, d).square().sum((0, 2)) / d
    matrix = jacobian.T @ outside @ jacobian + damping * torch.diag(per_sample.repeat_interleave(d))
    radial = torch.block_diag(*(row[:, None] / row.norm() for row in x))
    basis = torch.linalg.svd(radial).U[:, n:]  # of the tangent space, (n·d, n·(d − 1))
    right_side = basis.T @ jacobian.T @ fit.residual.flatten()
    expected = basis @ torch.linalg.solve(basis.T @ matrix @ basis, right_side)
    step, _ = damped_step(problem, fit, damping, accuracy=1e-13, products=200)
    torch.testing.assert_close(step.flatten(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_levenberg_marquardt_finds_back_to_the_truth(name: str, outputs: int) -> None:
    truth = case(15, 4, 4, name, outputs)
    solver = LevenbergMarquardt(tolerance=1e-20)
    state = run(solver, truth.problem, perturbed(truth.inputs, 0.15), 60)
    assert state.outcome is Outcome.CONVERGED
    assert state.fit.value <= 1e-20
    torch.testing.assert_close(state.fit.candidates, truth.inputs, rtol=0, atol=1e-7)


def test_levenberg_marquardt_in_single_precision() -> None:
    truth = case(30, 6, 4, dtype=torch.float32)
    state = run(LevenbergMarquardt(), truth.problem, perturbed(truth.inputs, 0.1), 60)
    assert state.outcome is Outcome.CONVERGED
    torch.testing.assert_close(state.fit.candidates.double(), truth.inputs, rtol=0, atol=1e-4)


def test_levenberg_marquardt_never_goes_up_and_adapts_its_damping() -> None:
    truth = case(12, 4, 3, "relu+tanh")
    states = trace(LevenbergMarquardt(damping=1e-4), truth.problem, on_sphere(4, 12, seed=8), 40)
    rejected = 0
    for before, after in pairwise(states):
        factor = after.memory["damping"].item() / before.memory["damping"].item()
        if after.fit is before.fit:
            rejected += 1
            assert factor == pytest.approx(4)
        else:
            assert after.fit.value < before.fit.value
            assert factor == pytest.approx(1 / 3) or after.memory["damping"].item() == 1e-7
        assert after.products > before.products
        torch.testing.assert_close(
            after.fit.candidates.norm(dim=1), torch.full((4,), 12.0).double().sqrt()
        )
    assert 0 < rejected < len(states) - 1


# First-order baselines


def numpy_momentum(
    v: np.ndarray, theta: np.ndarray, x: np.ndarray, rate: float, steps: int
) -> np.ndarray:
    """The published loop, ReLU with backward slope 0.02 where it is off."""
    velocity = np.zeros_like(x)
    for _ in range(steps):
        z = x @ v.T
        phi = np.maximum(z, 0)
        alpha = np.linalg.solve(phi @ phi.T, phi @ theta)
        r = theta - phi.T @ alpha
        slope = np.where(phi > 0, 1.0, 0.02)
        grad = -(2 / (theta @ theta)) * (np.outer(alpha, r) * slope) @ v
        velocity = 0.9 * velocity + grad
        x = x - rate * velocity
        x = x * math.sqrt(x.shape[1]) / np.linalg.norm(x, axis=1, keepdims=True)
    return x


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_momentum_is_the_published_loop(steps: int) -> None:
    truth = case(10, 3, 5)
    method = Iurada2025(rate=7.0)
    problem = method.view(truth.problem)
    start = gaussian(3, 10, seed=11)  # N(0, 1), not projected before the first step
    state = run(Momentum(rate=7.0), problem, start, steps)
    v, theta = problem.features.weights.tensor.numpy(), problem.target[:, 0].numpy()
    expected = numpy_momentum(v, theta, start.numpy(), 7.0, steps)
    np.testing.assert_allclose(state.fit.candidates.numpy(), expected, rtol=1e-7, atol=1e-9)
    assert state.steps == steps


def test_adam_is_torchs_adam_with_a_projection_after_each_step() -> None:
    truth = case(10, 3, 5, "relu+tanh")
    start = on_sphere(3, 10, seed=4)
    parameter = torch.nn.Parameter(start.clone())
    reference = torch.optim.Adam([parameter], lr=0.05, betas=(0.8, 0.99), eps=1e-30)
    solver = Adam(rate=0.05, decay=(0.8, 0.99))
    for state in trace(solver, truth.problem, start, 5)[1:]:
        parameter.grad = gradient(truth.problem, fitted(truth.problem, parameter.detach()))
        reference.step()
        parameter.data = truth.problem.domain.project(parameter.data)
        torch.testing.assert_close(state.fit.candidates, parameter.data, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("solver", [Momentum(rate=4.0, tolerance=1e-5), Adam(tolerance=1e-5)])
def test_first_order_baselines_converge_near_the_truth(solver: Solver) -> None:
    truth = case(10, 2, 8, "relu+tanh")
    state = run(solver, truth.problem, perturbed(truth.inputs, 0.1), 1500)
    assert state.outcome is Outcome.CONVERGED
    assert state.fit.value <= 1e-5


# What they share

SOLVERS = [Momentum(rate=2.0), Adam(), LevenbergMarquardt()]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_the_same_start_gives_the_same_bits(solver: Solver) -> None:
    truth = case(12, 3, 5, dtype=torch.float32)
    start = on_sphere(3, 12, seed=2)
    one, two = (run(solver, truth.problem, start, 6).fit.candidates for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_a_step_leaves_the_state_before_it_alone(solver: Solver) -> None:
    truth = case(12, 3, 5)
    before = solver.init(truth.problem, on_sphere(3, 12, seed=2))
    candidates = before.fit.candidates.clone()
    memory = {key: value.clone() for key, value in before.memory.items()}
    once, twice = solver.step(truth.problem, before), solver.step(truth.problem, before)
    assert torch.equal(once.fit.candidates, twice.fit.candidates)
    assert torch.equal(before.fit.candidates, candidates)
    assert all(torch.equal(before.memory[key], memory[key]) for key in memory)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_the_truth_has_converged_before_the_first_step(solver: Solver) -> None:
    truth = case(12, 3, 5)
    state = run(solver, truth.problem, truth.inputs, 10)
    assert state.outcome is Outcome.CONVERGED
    assert state.steps == 0


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_candidates_that_are_not_numbers_have_diverged(solver: Solver) -> None:
    truth = case(12, 3, 5)
    state = run(solver, truth.problem, truth.inputs * math.nan, 10)
    assert state.outcome is Outcome.DIVERGED


def test_an_endless_step_diverges() -> None:
    truth = case(12, 3, 5, dtype=torch.float32)
    state = run(Momentum(rate=1e300), truth.problem, on_sphere(3, 12, seed=2), 10)
    assert state.outcome is Outcome.DIVERGED
    assert state.steps == 1


def test_levenberg_marquardt_stalls_on_noise() -> None:
    problem = make_problem(make_features(8, 200, "tanh"), gaussian(200, 1))
    start = on_sphere(1, 8)  # two could run into each other, their coefficients to infinity
    state = run(LevenbergMarquardt(), problem, start, 300)
    assert state.outcome is Outcome.STALLED
    assert state.stalled == LevenbergMarquardt().patience
    assert state.fit.value > 0.1
    patient = run(LevenbergMarquardt(progress=1e-9, patience=20), problem, start, 300).fit
    slopes = [
        problem.domain.tangent(fit.candidates, gradient(problem, fit)).norm()
        for fit in (fitted(problem, start), patient)
    ]
    assert slopes[1] < 1e-3 * slopes[0]  # where it can go no further, it is at a minimum


def test_running_out_of_steps_or_time_is_neither() -> None:
    truth = case(12, 3, 5)
    assert run(Momentum(rate=1e-3), truth.problem, on_sphere(3, 12), 2).outcome is None
    found = reconstruct(truth.problem, samples=3, time_limit=0.0)
    assert found.outcome is Outcome.BUDGET
    assert found.steps == 0
    few = reconstruct(truth.problem, samples=3, method=Iurada2025(steps=4))
    assert few.outcome is Outcome.BUDGET
    assert few.steps == 4


def test_every_outcome_has_a_sentence() -> None:
    assert len({outcome.sentence for outcome in Outcome}) == len(Outcome)
    assert all(outcome.sentence.endswith(".") for outcome in Outcome)
