"""What features and first layers say of the truth: floors, spans and angles, by dense oracles."""

import math
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from exhume import data as datasets
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import floors, outside, principal_angles, residual_at_truth, span_residual
from exhume.models.formulation import POINTS
from exhume.victims import Victim, two_layer
from problems import case, gaussian, on_sphere


@dataclass
class Dense:
    """Features σ(Vx) with σ = ReLU, r rows an input, whole in memory."""

    weights: Tensor  # (r, p, d)
    device = torch.device("cpu")
    dtype = torch.float64

    @property
    def width(self) -> int:
        return self.weights.shape[1]

    def phi(self, inputs: Tensor) -> Tensor:
        return torch.einsum("rpd,nd->nrp", self.weights, inputs).relu().flatten(0, 1)

    def linearize(self, inputs: Tensor) -> SimpleNamespace:
        phi = self.phi(inputs)
        return SimpleNamespace(gram=lambda: phi @ phi.T)


def dense_span_residual(features: Dense, candidates: Tensor, truth: Tensor) -> float:
    basis = torch.linalg.svd(features.phi(candidates), full_matrices=False)
    rows = basis.Vh[basis.S / basis.S[0] > 1e-7]
    phi = features.phi(truth)
    return float((phi - phi @ rows.T @ rows).norm(dim=1).mean() / math.sqrt(features.width))


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(4, 4), (3, 6), (5, 2), (3, 30)])
def test_span_residual_against_the_svd(n: int, k: int, r: int) -> None:
    features = Dense(gaussian(r, 40, 6))
    truth, candidates = on_sphere(n, 6), on_sphere(k, 6, seed=1)
    candidates[-1] = 2 * candidates[0]  # linearly dependent features
    value = span_residual(features, candidates, truth)
    expected = dense_span_residual(features, candidates, truth)
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_span_residual_of_the_truth_is_zero_and_of_nothing_is_the_size() -> None:
    features, truth = Dense(gaussian(1, 40, 6)), on_sphere(4, 6)
    more = torch.cat([on_sphere(2, 6, seed=2), 3 * truth.flip(0)])
    assert span_residual(features, 3 * truth.flip(0), truth) < 1e-7
    assert span_residual(features, more, truth) < 1e-6
    size = float(features.phi(truth).norm(dim=1).mean() / math.sqrt(40))
    for nothing in (truth[:0], torch.zeros(2, 6)):
        assert span_residual(features, nothing, truth) == pytest.approx(size)
    with pytest.raises(InputError, match="NaN"):
        span_residual(features, truth * math.nan, truth)


@cache
def victim() -> Victim:
    """A tiny two-layer net on the sphere."""
    return two_layer(datasets.sphere(16, 4), width=128, until=1e-6)


def dense_floor(victim: Victim, parameters: str, point: str) -> float:
    """The residual at the truth, from weights, plain autograd and a dense least-squares fit."""
    weights = {
        "initial": [victim.initial],
        "final": [victim.trained],
        "midpoint": [{k: (victim.initial[k] + w) / 2 for k, w in victim.trained.items()}],
        "both": [victim.initial, victim.trained],
    }[point]
    names = {"last": ["3.weight"], "all": list(victim.trained)}[parameters]
    columns = []
    for at in weights:
        for x in victim.truth.inputs.double():
            w1, w2 = (at[name].clone().requires_grad_() for name in ("1.weight", "3.weight"))
            output = w2 @ (w1 @ x).relu()
            slopes = dict(zip(victim.trained, torch.autograd.grad(output, (w1, w2)), strict=True))
            columns.append(torch.cat([slopes[name].flatten() for name in names]))
    change = [(victim.trained[name] - victim.initial[name]).flatten() for name in names]
    target, basis = torch.cat(change), torch.stack(columns, 1)
    rest = target - basis @ torch.linalg.lstsq(basis, target[:, None]).solution[:, 0]
    return float(rest.square().sum() / target.square().sum())


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_floors_against_the_dense_oracle(parameters: str) -> None:
    made = victim()
    found = floors(lambda point: made.posed(parameters, point), made.truth)
    assert tuple(found) == POINTS
    for point, value in found.items():
        assert value == pytest.approx(dense_floor(made, parameters, point), rel=1e-4), point
    assert found["both"] < found["midpoint"] < min(found["initial"], found["final"])


def test_a_point_that_cannot_be_formed_has_no_floor() -> None:
    made = victim()

    def partial(point: str) -> Problem:
        if point in ("initial", "midpoint"):
            raise InputError("initial weights are missing: 1.weight")
        return made.posed("last", point)

    assert set(floors(partial, made.truth.inputs)) == {"final", "both"}
    exact = case(10, 2, 3.0)
    assert residual_at_truth(exact.problem, exact.inputs) < 1e-20
    assert residual_at_truth(exact.problem, on_sphere(2, 10, seed=9)) > 0.01


# Angles


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("swap", [False, True])
def test_principal_angles_are_those_the_spaces_were_made_with(extra: int, swap: bool) -> None:
    angles = torch.tensor([1.5, 0.9, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    q = torch.linalg.qr(gaussian(30, 10 + extra, seed=extra)).Q
    basis, other = torch.cat([q[:, :5], q[:, 10:]], 1), q[:, :5] * angles.cos()
    other = other + q[:, 5:10] * angles.sin()
    if swap:
        basis, other = other, basis
    mixed = gaussian(2 * other.shape[1], other.shape[1], seed=5) @ other.T  # samples in that span
    found = principal_angles(basis, mixed)
    torch.testing.assert_close(found, angles.rad2deg(), rtol=1e-5, atol=0)


def test_angles_and_what_lies_outside_against_the_dense_oracle() -> None:
    basis, truth = torch.linalg.qr(gaussian(12, 5)).Q, gaussian(3, 12, seed=1)
    span = torch.linalg.qr(truth.T).Q
    sines = torch.linalg.svdvals((torch.eye(12).double() - basis @ basis.T) @ span)
    torch.testing.assert_close(principal_angles(basis, truth), sines.asin().rad2deg())
    expected = (truth - truth @ basis @ basis.T).norm(dim=1) / truth.norm(dim=1)
    torch.testing.assert_close(outside(basis, truth), expected)


def test_samples_that_repeat_each_other_add_no_direction() -> None:
    basis = torch.eye(6, 2, dtype=torch.float64)
    truth = gaussian(2, 2, seed=2) @ basis.T
    again = torch.cat([truth, truth.sum(0, keepdim=True) + 1e-12 * gaussian(1, 6)])
    assert len(principal_angles(basis, again)) == 2
    assert float(principal_angles(basis, again).max()) < 1e-9
    assert float(outside(basis, again).max()) < 1e-11
