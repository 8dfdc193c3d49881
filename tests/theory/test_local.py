"""What weights determine near a solution, against dense Jacobians."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exhume import data, victims
from exhume.equation.objective import fitted
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.theory import local_identifiability


def joint_null_space(problem: Problem, candidates: Tensor) -> int:
    """The dimension of the null space in X and A together, by autograd."""
    point = fitted(problem, candidates)
    a = point.coefficients

    def weights(x: Tensor, coefficients: Tensor) -> Tensor:
        v = problem.features.weights.rows(0, problem.features.width).double()  # type: ignore[attr-defined]
        sigma: Tensor = problem.features.activation.value(x @ v.T)  # type: ignore[attr-defined]
        return sigma.T @ coefficients

    jacobians = torch.autograd.functional.jacobian(weights, (candidates, a))
    matrices = [j.reshape(problem.target.numel(), -1) for j in jacobians]
    both = torch.cat([m / m.norm() for m in matrices], 1)
    return both.shape[1] - int(torch.linalg.matrix_rank(both, rtol=1e-9))


@pytest.mark.parametrize(("activation", "free"), [("relu", 3), ("tanh", 0)])
def test_directions_that_random_features_leave_free(activation: str, free: int) -> None:
    known = data.sphere(5, 3)
    problem = victims.random_features(known, 80, activation).problem.to("cpu", torch.float64)
    found = local_identifiability(problem, known.inputs)
    assert (found.unknowns, found.rank, found.equations) == (15, 15 - free, 77)
    assert len(found.undetermined) == free == joint_null_space(problem, known.inputs)
    assert found.residual < 1e-10 and found.holds == (free == 0)
    along = torch.zeros(3, 3, 5, dtype=torch.float64)
    for i, x in enumerate(known.inputs):
        along[i, i] = x / x.norm()
    if free:  # the norms
        flat = found.undetermined.flatten(1)
        assert torch.allclose(flat @ along.flatten(1).T @ along.flatten(1), flat, atol=1e-8)
        assert torch.allclose(flat @ flat.T, torch.eye(3, dtype=torch.float64), atol=1e-10)
    assert local_identifiability(problem, known.inputs, within=True).holds


def test_a_direction_left_free_changes_nothing_and_another_does() -> None:
    known = data.sphere(6, 4)
    problem = victims.random_features(known, 20, "tanh").problem.to("cpu", torch.float64)
    problem = replace(problem, target=problem.target - fitted(problem, known.inputs).residual)
    found = local_identifiability(problem, known.inputs)
    assert not found.holds and found.smallest == 0  # fewer equations than unknowns
    assert found.rank == found.equations == 16
    free = found.undetermined[0]
    other = torch.linalg.svd(found.undetermined.flatten(1)).Vh[-1].reshape(4, 6)
    moved = [math.sqrt(fitted(problem, known.inputs + 1e-5 * move).value) for move in (free, other)]
    assert moved[0] < 1e-3 * moved[1]


def test_a_candidate_without_coefficient_is_wholly_free() -> None:
    known = data.sphere(5, 2)
    problem = victims.random_features(known, 60, "tanh").problem
    extra = torch.cat([known.inputs, data.sphere(5, 1, seed=7).inputs])
    weights = problem.features.weights.rows(0, 60).double()  # type: ignore[attr-defined]
    target = torch.tanh(known.inputs @ weights.T).T @ torch.ones(2, 1, dtype=torch.float64)
    exact = replace(problem.to("cpu", torch.float64), target=target)
    found = local_identifiability(exact, extra)
    assert found.rank == 10 and found.undetermined[:, :2].abs().max() < 1e-6


def test_a_kkt_point_determines_all_but_the_norms() -> None:
    made = victims.polynomial(victims.labellings(data.sphere(9, 4, 2))[0], 16)
    found = local_identifiability(made.problem, made.truth.inputs)
    assert found.residual < 1e-20
    assert (found.unknowns, found.rank) == (36, 32)
    unit = torch.nn.functional.normalize(made.truth.inputs, dim=1)
    across = found.undetermined - (found.undetermined * unit).sum(2, keepdim=True) * unit
    assert across.abs().max() < 1e-6


def test_the_local_version_refuses_what_it_cannot_hold() -> None:
    problem = victims.random_features(data.sphere(5, 2), 60).problem
    for candidates, words in (
        (torch.zeros(2, 4), "shape"),
        (torch.zeros(1000, 5), "4000 unknowns"),
    ):
        with pytest.raises(InputError, match=words):
            local_identifiability(problem, candidates)
