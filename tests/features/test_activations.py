"""Activations: derivatives against differences and formulas, and what is refused."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from exhume.features.activations import Activation, activation, polynomial, smoothed_relu, softplus
from exhume.features.network import exact_operations
from problems import ACTIVATIONS, close, refusals

Scalar = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("name", [*ACTIVATIONS, "polynomial:0,0,0,1", "polynomial:0,2"])
def test_derivatives_against_differences(name: str) -> None:
    sigma, h = activation(name), 1e-6
    z = torch.linspace(-4.05, 4.05, 82, dtype=torch.float64)  # holds no zero, where ReLU has a kink
    orders = (sigma.value, sigma.slope, sigma.second, sigma.third)
    for function, derivative in itertools.pairwise(orders):
        difference = (function(z + h) - function(z - h)) / (2 * h)
        torch.testing.assert_close(derivative(z), difference, rtol=1e-8, atol=1e-8)
    assert sigma.piecewise_linear == (not sigma.second(z).any())
    scales = torch.allclose(sigma.value(3 * z), 3 * sigma.value(z))
    assert sigma.homogeneous <= scales  # linear polynomials do not say so


def reverse(function: Scalar) -> Scalar:
    return torch.func.grad(lambda at: function(at).sum())


def forward(function: Scalar) -> Scalar:
    return lambda at: torch.func.jvp(function, (at,), (torch.ones_like(at),))[1]


@pytest.mark.parametrize("sharpness", [1.0, 300.0])
@pytest.mark.parametrize("make", [smoothed_relu, softplus])
def test_surrogates_are_differentiated_to_their_slope_however_torch_does_it(
    make: Callable[[float], Activation], sharpness: float
) -> None:
    sigma = make(sharpness)
    z = torch.linspace(-4, 4, 41, dtype=torch.float64) * 8 / sharpness
    s = torch.sigmoid(sharpness * z)
    expected = [s, sharpness * s * (1 - s), sharpness**2 * s * (1 - s) * (1 - 2 * s)]
    for derivative, right in zip((sigma.slope, sigma.second, sigma.third), expected, strict=True):
        close(derivative(z), right)
    with exact_operations():  # loads forward mode without its warning
        for order in (1, 2, 3):
            for kinds in itertools.product((reverse, forward), repeat=order):
                function = sigma.value
                for kind in kinds:
                    function = kind(function)
                close(function(z), expected[order - 1])
                close(torch.func.vmap(function)(z), expected[order - 1])


@pytest.mark.parametrize("sharpness", [0.5, 20.0])
def test_surrogates_have_their_value_and_say_what_they_are(sharpness: float) -> None:
    z = torch.linspace(-90, 90, 181)
    smoothed, smooth = smoothed_relu(sharpness), softplus(sharpness)
    assert torch.allclose(smoothed.value(z), torch.relu(z), rtol=0, atol=1e-6)
    expected = torch.logaddexp(sharpness * z.double(), torch.zeros(181).double()) / sharpness
    close(smooth.value(z.double()), expected, 1e-15)
    assert smooth.value(z).isfinite().all()
    for sigma, exact in ((smoothed, True), (smooth, False)):
        scales = torch.allclose(sigma.value(3 * z / 30), 3 * sigma.value(z / 30), atol=1e-5)
        assert sigma.homogeneous == scales == exact and not sigma.piecewise_linear
    assert (smoothed_relu(2.0).name, softplus(0.5).name) == ("smoothed_relu:2", "softplus:0.5")


def test_leaky_backward_leaves_the_forward_function_alone() -> None:
    z = torch.tensor([-2.0, -0.1, 0.0, 0.1, 3.0])
    leaky = activation("relu").leaky_backward()
    assert torch.equal(leaky.value(z), torch.relu(z))
    torch.testing.assert_close(leaky.slope(z), torch.tensor([0.02, 0.02, 0.02, 1, 1]))
    assert activation("relu+tanh").leaky_backward() is activation("relu+tanh")


test_what_is_no_activation_is_refused = refusals(
    (lambda: activation("swish"), "known are"),
    (lambda: activation("polynomial"), "coefficients"),
    (lambda: activation("polynomial:1"), "coefficients"),
    (lambda: activation("polynomial:1,x"), "list of numbers"),
    (lambda: polynomial(0.0, math.inf), "finite coefficients"),
    (lambda: smoothed_relu(0.0), "alpha: expected a .*number above 0"),
    *((lambda x=x: softplus(x), "beta: expected a .*number") for x in (-1, math.inf, math.nan)),
)
