"""Solvers against dense linear algebra and the published loop."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import problems
from exhume.equation.domain import Box, Sphere, SphereInBox
from exhume.equation.objective import fitted, gradient
from exhume.methods.iurada2025 import Iurada2025, Momentum
from exhume.solvers import Outcome, Solver, solve
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt, conjugate_gradients, damped_step
from problems import ACTIVATIONS, case, gaussian, make_features, make_problem, on_sphere


def perturbed(x: Tensor, size: float, seed: int = 5) -> Tensor:
    return x + size * gaussian(*x.shape, seed=seed)


def test_conjugate_gradients_solve_and_stop_where_they_are_told() -> None:
    root, b = gaussian(12, 12), gaussian(3, 4, seed=1)
    matrix = root @ root.T + torch.eye(12, dtype=torch.float64)
    exact, inverse = torch.linalg.solve(matrix, b.flatten()).reshape(3, 4), matrix.inverse()
    scale = matrix.diagonal().reshape(3, 4)

    def operator(x: Tensor) -> Tensor:
        return (matrix @ x.flatten()).reshape(3, 4)

    for preconditioner, most in (
        (lambda r: r, 20),
        (lambda r: r / scale, 20),
        (lambda r: (inverse @ r.flatten()).reshape(3, 4), 1),
    ):
        found, used = conjugate_gradients(operator, b, preconditioner, 1e-12, 100)
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10)
        assert used <= most
    energies = []
    for products in range(1, 6):
        x, used = conjugate_gradients(operator, b, lambda r: r, 0.0, products)
        assert used == products
        energies.append(((x * operator(x)).sum() / 2 - (b * x).sum()).item())
    assert energies == sorted(energies, reverse=True)
    x, used = conjugate_gradients(operator, b, lambda r: r, 1e-1, 100)
    assert (operator(x) - b).norm() <= 1e-1 * b.norm() and used < 12
    x, used = conjugate_gradients(lambda r: 0 * r, b, lambda r: r, 1e-12, 100)
    assert used == 1 and not x.any()  # what the matrix does not see is left alone


@pytest.mark.parametrize("kind", ["sphere", "box", "both"])
@pytest.mark.parametrize(("name", "damping", "m"), [("relu", 1e-3, 1), ("relu+tanh", 1.0, 3)])
def test_damped_step_against_the_dense_system(name: str, damping: float, m: int, kind: str) -> None:
    n, d, p = 3, 6, 60
    domain = problems.make_domain(kind, d, seed=5)
    features = make_features(d, p, name, seed=2)
    problem = replace(make_problem(features, gaussian(p, m)), domain=domain)
    fit = fitted(problem, domain.project(2 * gaussian(n, d, seed=1)))
    oracle = problems.dense_random(problem.features).linearize(fit.candidates)
    jacobian = oracle.jacobian(fit.coefficients).reshape(p * m, n * d)
    outside = torch.kron(problems.dense_complement(oracle.phi), torch.eye(m).double())
    size = oracle.curvature(fit.coefficients).diagonal()
    matrix = jacobian.T @ outside @ jacobian + damping * torch.diag(size.repeat_interleave(d))
    pulled = jacobian.T @ fit.residual.flatten()
    if not isinstance(domain, Sphere):
        assert domain.held(fit.candidates, pulled.reshape(n, d)).any()
    projectors = problems.dense_tangent(domain, fit.candidates, pulled.reshape(n, d))
    values, vectors = torch.linalg.eigh(torch.block_diag(*projectors))
    basis = vectors[:, values > 0.5]  # of the tangent space
    expected = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ pulled)
    step, _ = damped_step(problem, fit, damping, accuracy=1e-13, products=300)
    torch.testing.assert_close(step.flatten(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_levenberg_marquardt_finds_back_to_the_truth(name: str, outputs: int) -> None:
    for dtype, tolerance, error in ((torch.float64, 1e-20, 1e-7), (torch.float32, 1e-12, 1e-3)):
        truth = case(15, 4, 4, name, outputs, dtype=dtype)
        solver = LevenbergMarquardt(tolerance=tolerance)
        state = solve(solver, truth.problem, perturbed(truth.inputs, 0.15), 60)
        assert state.outcome is Outcome.CONVERGED and state.fit.value <= tolerance
        found = state.fit.candidates
        torch.testing.assert_close(found.double(), truth.inputs, rtol=0, atol=error)


@pytest.mark.parametrize("kind", ["box", "both"])
def test_candidates_at_their_bounds_are_found(kind: str) -> None:
    box = Box(-1.0, 1.0)
    domain = box if kind == "box" else SphereInBox(Sphere(0.9 * math.sqrt(12)), box)
    x = domain.project(2 * gaussian(4, 12))
    assert (box.side(x) != 0).double().mean() > 0.3
    features = make_features(12, 12 * 4 * 4, "relu+tanh")
    target = problems.dense_phi(features, x).T @ gaussian(4, 1, seed=1)
    problem = replace(make_problem(features, target), domain=domain)
    state = solve(LevenbergMarquardt(tolerance=1e-20), problem, perturbed(x, 0.2, seed=2), 60)
    assert state.outcome is Outcome.CONVERGED
    assert (box.project(state.fit.candidates) - state.fit.candidates).abs().max() == 0
    torch.testing.assert_close(state.fit.candidates, x, rtol=0, atol=1e-6)


def test_levenberg_marquardt_never_goes_up_and_adapts_its_damping() -> None:
    problem, solver = case(12, 4, 3, "relu+tanh").problem, LevenbergMarquardt(damping=1e-4)
    states = [solver.init(problem, on_sphere(4, 12, seed=8))]
    while states[-1].outcome is None and states[-1].steps < 40:
        states.append(solver.step(problem, states[-1]))
    rejected, length = 0, torch.full((4,), 12.0).double().sqrt()
    for before, after in pairwise(states):
        factor = after.damping / before.damping
        if after.fit is before.fit:
            rejected += 1
            assert factor == pytest.approx(4)
        else:
            assert after.fit.value < before.fit.value
            assert factor == pytest.approx(1 / 3) or after.damping == 1e-7
        assert after.products > before.products
        torch.testing.assert_close(after.fit.candidates.norm(dim=1), length)
    assert 0 < rejected < len(states) - 1


def test_levenberg_marquardt_stalls_on_noise() -> None:
    problem = make_problem(make_features(8, 200, "tanh"), gaussian(200, 1))
    start = on_sphere(1, 8)  # two could run into each other, their coefficients to infinity
    state = solve(LevenbergMarquardt(), problem, start, 300)
    assert state.outcome is Outcome.STALLED and state.fit.value > 0.1
    assert state.stalled == LevenbergMarquardt().patience
    patient = solve(LevenbergMarquardt(progress=1e-9, patience=20), problem, start, 300).fit
    slopes = [
        problem.domain.tangent(fit.candidates)(gradient(problem, fit)).norm()
        for fit in (fitted(problem, start), patient)
    ]
    assert slopes[1] < 1e-3 * slopes[0]  # where it can go no further, it is at a minimum


def test_a_residual_that_is_low_enough_ends_with_the_first_step_that_does_not_halve_it() -> None:
    truth = case(20, 2, 8.0, dtype=torch.float32)
    near = truth.inputs + 0.03 * gaussian(*truth.inputs.shape, seed=3)
    steps = []
    for enough in (0.0, 1e-10):
        solver = LevenbergMarquardt(tolerance=0.0, damping=1e-3, enough=enough)
        state = solve(solver, truth.problem, near, 60)
        assert state.fit.value < 1e-11 and state.outcome is Outcome.STALLED
        steps.append(state.steps)
    assert steps[1] < steps[0]


def test_momentum_is_the_published_loop() -> None:
    truth, steps, rate = case(10, 3, 5), 3, 7.0
    problem = Iurada2025(rate=rate).view(truth.problem)
    start = gaussian(3, 10, seed=11)  # N(0, 1), not projected before the first step
    state = solve(Momentum(rate=rate), problem, start, steps)
    v, theta = problem.features.weights.tensor.numpy(), problem.target[:, 0].numpy()
    x, velocity = start.numpy(), np.zeros(start.shape)
    for _ in range(steps):  # ReLU with backward slope 0.02 where it is off
        phi = np.maximum(x @ v.T, 0)
        alpha = np.linalg.solve(phi @ phi.T, phi @ theta)
        r, slope = theta - phi.T @ alpha, np.where(phi > 0, 1.0, 0.02)
        velocity = 0.9 * velocity - (2 / (theta @ theta)) * (np.outer(alpha, r) * slope) @ v
        x = x - rate * velocity
        x = x * math.sqrt(x.shape[1]) / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(state.fit.candidates.numpy(), x, rtol=1e-7, atol=1e-9)
    assert state.steps == state.products == steps


def test_momentum_converges_near_the_truth_and_an_endless_step_diverges() -> None:
    truth = case(10, 2, 8, "relu+tanh")
    solver = Momentum(rate=4.0, tolerance=1e-5)
    state = solve(solver, truth.problem, perturbed(truth.inputs, 0.1), 1500)
    assert state.outcome is Outcome.CONVERGED and state.fit.value <= 1e-5
    single = truth.problem.to("cpu", torch.float32)
    state = solve(Momentum(rate=1e300), single, on_sphere(2, 10, seed=2), 10)
    assert state.outcome is Outcome.DIVERGED and state.steps == 1


@pytest.mark.parametrize("solver", [Momentum(rate=2.0), LevenbergMarquardt()])
def test_what_every_solver_keeps_to(solver: Solver[Any]) -> None:
    truth, start = case(12, 3, 5), on_sphere(3, 12, seed=2)
    before = solver.init(truth.problem, start)
    kept = before.fit.candidates.clone()
    once, twice = (solver.step(truth.problem, before) for _ in range(2))
    assert torch.equal(once.fit.candidates, twice.fit.candidates)  # the same bits
    assert torch.equal(before.fit.candidates, kept)  # a step leaves the state before it alone
    four = solve(solver, truth.problem, start, 4)
    assert four.outcome is None and four.steps == 4
    state = solve(solver, truth.problem, truth.inputs, 10)
    assert state.outcome is Outcome.CONVERGED and state.steps == 0
    assert solve(solver, truth.problem, truth.inputs * math.nan, 10).outcome is Outcome.DIVERGED
    assert len({outcome.sentence for outcome in Outcome}) == len(Outcome)  # one for each
