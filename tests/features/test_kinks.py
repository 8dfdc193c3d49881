"""ReLU and max-pooling with a slope that changes: values and slopes are torch's, steps better."""

import math
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp

from exhume.equation.domain import Box
from exhume.equation.objective import fitted_with
from exhume.equation.problem import Problem
from exhume.features.kinks import Softened
from exhume.features.network import load_forward_mode
from exhume.features.replay import TrainingRun
from exhume.models.formulation import Known
from exhume.recipes import Recipe
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt
from replays import posed, trained

SHARE = torch.tensor(0.5, dtype=torch.float64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=20)
@given(kernel=st.integers(1, 3), stride=st.integers(1, 3), side=st.integers(3, 7))
def test_values_and_slopes_are_those_of_torch(kernel: int, stride: int, side: int) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(inplace=True), nn.MaxPool2d(kernel, stride))
    module.double()

    def total(z: Tensor) -> Tensor:
        pooled = module(z).flatten()
        return (pooled * torch.arange(1.0, 1 + len(pooled))).sum()

    z = drawn(2, 1, side, side)
    load_forward_mode()
    with Softened(SHARE):
        ours = total(z), grad(total)(z)
    assert torch.allclose(ours[0], total(z))
    assert torch.allclose(ours[1], grad(total)(z))


def test_the_derivative_of_a_slope_is_that_of_its_mean_over_errors() -> None:
    z, along = drawn(50), drawn(50, seed=1)
    load_forward_mode()
    with Softened(SHARE):
        changed = jvp(grad(lambda z: F.relu(z).sum()), (z,), (along,))[1]
    sigma = 0.5 * z.square().mean().sqrt()
    density = torch.exp(-(z / sigma).square() / 2) / (sigma * math.sqrt(2 * math.pi))
    assert torch.allclose(changed, density * along)
    assert not grad(lambda z: grad(lambda z: F.relu(z).sum())(z).sum())(z).any()  # torch's is none


def test_padded_pools_are_left_to_torch() -> None:
    z = drawn(1, 1, 4, 4)
    with Softened(SHARE):
        pooled = F.max_pool2d(z, 2, padding=1)
    assert torch.equal(pooled, F.max_pool2d(z, 2, padding=1))


@pytest.mark.parametrize("seed", range(2))
def test_steps_come_nearer_to_the_samples_than_without(seed: int) -> None:
    recipe, labels = Recipe(lr=0.1, steps=4), torch.eye(3, dtype=torch.float64)
    torch.manual_seed(seed)
    maps = nn.Conv2d(1, 15, (1, 3)), nn.ReLU(), nn.Conv2d(15, 30, (1, 3)), nn.ReLU()
    module = nn.Sequential(nn.Unflatten(1, (1, 1, 6)), *maps, nn.Flatten(), nn.Linear(60, 3))
    x = drawn(3, 6, seed=seed)
    weights = trained(module.double(), x, labels, recipe)
    problem = posed(module, weights, Known(recipe), domain=Box(-5.0, 5.0))
    solver = LevenbergMarquardt(tolerance=1e-20, damping=0.1)

    sharp = replace(problem, features=replace(cast(TrainingRun, problem.features), sharp=True))

    def error(problem: Problem) -> float:
        start = fitted_with(problem, x + 0.5 * drawn(3, 6, seed=9 + seed), labels.view(-1, 1))
        state = DampedState(fit=start, damping=0.1)
        for _ in range(15):
            state = solver.step(problem, state)
        return float((state.fit.candidates - x).norm() / x.norm())

    assert error(problem) < 0.5 * error(sharp)
