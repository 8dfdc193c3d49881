"""The terms of the published losses, each against plain autograd."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published_losses import KINDS, spot
from torch import Tensor

from exhume.equation.problem import Problem
from exhume.features.dense import DenseGradients
from exhume.features.gradient import ParameterGradients
from exhume.methods.penalties import balanced_labels, margin_pattern, roughness
from problems import gaussian


def any_module(problem: Problem) -> Problem:
    """The same problem with the features of a module that need not be dense."""
    features = problem.features
    assert isinstance(features, DenseGradients)
    general = ParameterGradients(features.network, features.points, "", block=features.block)
    return replace(problem, features=general)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_slopes_are_the_published_ones(kind: str, dense: bool) -> None:
    there = spot(kind)
    there = there if dense else replace(there, problem=any_module(there.problem))
    found = there.loss()
    x = there.place.candidates.clone().requires_grad_()
    multipliers = there.place.multipliers.clone().requires_grad_()
    value = there.oracle(x, multipliers)
    slopes = torch.autograd.grad(value, (x, multipliers))
    assert found.value == pytest.approx(value.item(), rel=1e-12)
    residual = there.oracle.residual(x, multipliers).detach()
    torch.testing.assert_close(found.residual[:, 0], residual)
    assert found.stationarity.item() == pytest.approx(residual.square().sum().item())
    torch.testing.assert_close(found.slope, slopes[0])
    torch.testing.assert_close(found.multiplier_slope, slopes[1])


def test_the_weights_of_the_published_losses() -> None:
    """What the terms above take from the recipe, by the papers' numbers."""
    one, change = spot("one").settings, spot("change").settings
    assert (one.box, one.push, one.threshold, one.adam) == (1, 5, 0.4, False)
    assert spot("several").settings.push == 5 and spot("decay").settings.push == 0
    assert change.box == pytest.approx(0.1 / 6)  # 0.1·M·mean is a sum over M·d
    assert change.smoothness == pytest.approx(0.0015 * 30 / 6)
    assert spot("change").place.divisor == 4 * 2 and change.adam


@pytest.mark.parametrize("kind", ["one", "box"])
def test_the_curvature_of_the_box_is_that_of_the_oracle(kind: str) -> None:
    there = spot(kind)
    low, high = there.oracle.low, there.oracle.high

    def outside(x: Tensor) -> Tensor:
        each = torch.relu(x - high).square() + torch.relu(low - x).square()
        return (there.place.shares[:, None] * each).sum()

    hessian = torch.autograd.functional.hessian(outside, there.place.candidates).reshape(24, 24)
    curvature = there.loss().prior_curvature.flatten()
    assert 0 < (curvature > 0).sum() < 24
    torch.testing.assert_close(torch.diag(curvature), hessian)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2), (1, 5)])
def test_the_blur_is_symmetric_and_leaves_what_is_even(shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    matrix = roughness(torch.eye(size).double(), shape)
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix.sum(1), torch.zeros(size).double())
    assert matrix.diagonal().min() >= 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_two_halves_of_a_candidate_are_as_good_as_the_whole(kind: str) -> None:
    there = spot(kind)
    rows = torch.tensor([0, 1, 1, 2, 3, 3])
    half = torch.tensor([1, 0.5, 0.5, 1, 0.5, 0.5]).double()
    split = there.loss(
        candidates=there.place.candidates[rows],
        multipliers=there.place.multipliers[rows] * half[:, None],
        labels=there.place.labels[rows],
        shares=there.place.shares[rows] * half,
    )
    whole = there.loss()
    assert split.value == pytest.approx(whole.value, rel=1e-13)
    torch.testing.assert_close(split.residual, whole.residual)
    torch.testing.assert_close(split.slope, whole.slope[rows] * half[:, None])
    torch.testing.assert_close(split.multiplier_slope, whole.multiplier_slope[rows])


def test_the_push_and_the_box_count_by_share() -> None:
    there = spot("one")
    place, few = there.place, 0.1 * there.place.multipliers
    far = {"multipliers": few, "candidates": 3 * place.candidates}
    full = there.loss(**far)
    quarter = there.loss(**far, shares=place.shares / 4)
    assert full.below > 0 and full.outside > 0
    assert quarter.outside.item() == pytest.approx(full.outside.item() / 4)
    alone = there.loss(**far | {"multipliers": few / 4}, shares=place.shares / 4)
    assert alone.below.item() == pytest.approx(full.below.item() / 4)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_labels_are_balanced(count: int, outputs: int) -> None:
    labels = balanced_labels(count, outputs)
    names = [-1, 1] if outputs == 1 else range(outputs)
    numbers = [int((labels == name).sum()) for name in names]
    assert sum(numbers) == count and max(numbers) - min(numbers) <= 1
    assert labels.tolist() == sorted(labels.tolist())


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 6), st.integers(0, 1000))
def test_the_pattern_is_the_margin(classes: int, seed: int) -> None:
    outputs = gaussian(8, classes, seed=seed)
    labels = balanced_labels(8, classes)
    margins = (margin_pattern(labels, outputs) * outputs).sum(1)
    for y, f, margin in zip(labels.tolist(), outputs.tolist(), margins.tolist(), strict=True):
        assert margin == pytest.approx(f[y] - max(f[k] for k in range(classes) if k != y))
