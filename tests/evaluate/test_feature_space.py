"""What features and first layers say of the truth: floors, spans and angles, by dense oracles."""

import math

import pytest
import torch

from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import floors, outside, principal_angles, residual_at_truth, span_residual
from exhume.models.formulation import POINTS
from nets import dense, make, names_of
from problems import Dense, case, gaussian, on_sphere


def features_of(rows: int) -> Dense:
    """ReLU features in memory, so many rows an input of six entries."""
    weights = gaussian(rows, 40, 6)
    return Dense(lambda x: (weights @ x).relu(), 6, 40)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(4, 4), (5, 2), (3, 30)])
def test_span_residual_against_the_svd(n: int, k: int, rows: int) -> None:
    features = features_of(rows)
    truth, candidates = on_sphere(n, 6), on_sphere(k, 6, seed=1)
    candidates[-1] = 2 * candidates[0]  # linearly dependent features
    basis = torch.linalg.svd(features.linearize(candidates).phi, full_matrices=False)
    span, phi = basis.Vh[basis.S / basis.S[0] > 1e-7], features.linearize(truth).phi
    expected = float((phi - phi @ span.T @ span).norm(dim=1).mean() / math.sqrt(features.width))
    assert span_residual(features, candidates, truth) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_span_residual_of_the_truth_is_zero_and_of_nothing_is_the_size() -> None:
    features, truth = features_of(1), on_sphere(4, 6)
    more = torch.cat([on_sphere(2, 6, seed=2), 3 * truth.flip(0)])
    assert span_residual(features, more, truth) < 1e-6
    size = float(features.linearize(truth).phi.norm(dim=1).mean() / math.sqrt(40))
    for nothing in (truth[:0], torch.zeros(2, 6)):
        assert span_residual(features, nothing, truth) == pytest.approx(size)
    with pytest.raises(InputError, match="NaN"):
        span_residual(features, truth * math.nan, truth)


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_floors_against_the_dense_oracle(parameters: str) -> None:
    net, truth = make("two_layer", outputs=1, width=16), gaussian(3, 4)
    found = floors(lambda point: net.problem(parameters, point), truth)
    assert list(found) == list(POINTS)
    for point, value in found.items():
        target = net.problem(parameters, point).target.double()
        names = names_of(net) if parameters == "all" else None
        basis = dense(net, point, names).linearize(truth).phi.T
        rest = target - basis @ torch.linalg.lstsq(basis, target).solution
        assert value == pytest.approx(float(rest.norm() / target.norm()) ** 2, rel=1e-6), point
    assert found["both"] < min(found["initial"], found["final"])


def test_a_point_that_cannot_be_formed_has_no_floor() -> None:
    net = make("two_layer")

    def partial(point: str) -> Problem:
        if point in ("initial", "midpoint"):
            raise InputError("initial weights are missing: 1.weight")
        return net.problem("last", point)

    assert set(floors(partial, gaussian(3, 4))) == {"final", "both"}
    exact = case(10, 2, 3.0)
    assert residual_at_truth(exact.problem, exact.inputs) < 1e-20
    assert residual_at_truth(exact.problem, on_sphere(2, 10, seed=9)) > 0.01


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


def test_what_lies_outside_and_samples_that_repeat_each_other() -> None:
    basis, truth = torch.linalg.qr(gaussian(12, 5)).Q, gaussian(3, 12, seed=1)
    expected = (truth - truth @ basis @ basis.T).norm(dim=1) / truth.norm(dim=1)
    torch.testing.assert_close(outside(basis, truth), expected)
    plane = torch.eye(6, 2, dtype=torch.float64)
    within = gaussian(2, 2, seed=2) @ plane.T
    again = torch.cat([within, within.sum(0, keepdim=True) + 1e-12 * gaussian(1, 6)])
    assert principal_angles(plane, again).shape == (2,)
    assert float(principal_angles(plane, again).max()) < 1e-9
    assert float(outside(plane, again).max()) < 1e-11
