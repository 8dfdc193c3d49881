"""Hermite coefficients, kernels and signs against closed forms and each other."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exhume.errors import InputError
from exhume.features.activations import Activation, activation, polynomial, smoothed_relu, softplus
from exhume.theory.hermite import ORDERS, coefficients, kernel, sign_ambiguity
from problems import ACTIVATIONS

RHO = torch.tensor(
    [-1.0, -0.999999, -0.9, -0.3, 0.0, 0.2, 0.7, 0.99, 0.9999, 1 - 1e-7, 1 - 1e-12, 1.0],
    dtype=torch.float64,
)


def relu_coefficient(k: int) -> float:
    """E[relu(g) He_k(g)]/√k! by integrating by parts: He_{k−2}(0) φ(0)/√k! for k ≥ 2."""
    if k < 2:
        return (1 / math.sqrt(2 * math.pi), 0.5)[k]
    if k % 2:
        return 0.0
    half = (k - 2) // 2
    log = math.lgamma(k - 1) - math.lgamma(half + 1) - half * math.log(2) - math.lgamma(k + 1) / 2
    return (-1) ** half * math.exp(log) / math.sqrt(2 * math.pi)


def test_relu_and_erf_have_their_closed_forms_and_errors_are_honest() -> None:
    found = coefficients("relu", ORDERS)
    expected = torch.tensor([relu_coefficient(k) for k in range(ORDERS + 1)], dtype=torch.float64)
    off = float((found.values - expected).abs().max())
    assert off < 1e-13 and off <= found.error < 1e-12
    assert found.energy == pytest.approx(0.5, abs=1e-14)
    for k, h in enumerate(coefficients("erf", 41).values.tolist()):
        j = (k - 1) // 2  # h_k² are the coefficients of (2/π) arcsin(2ρ/3)
        series = math.comb(2 * j, j) / (4**j * (2 * j + 1)) * (2 / 3) ** k if k % 2 else 0.0
        assert h**2 == pytest.approx(2 / math.pi * series, abs=1e-15)
    found = coefficients(lambda z: torch.relu(z - 0.3), 2)
    density, above = math.exp(-0.045) / math.sqrt(2 * math.pi), 0.5 * math.erfc(0.3 / math.sqrt(2))
    off = abs(float(found.values[0]) - (density - 0.3 * above))
    assert off < 10 * found.error and 1e-9 < found.error < 1e-3


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=9))
@settings(max_examples=20, deadline=None)
def test_polynomials_are_exact(numbers: list[float]) -> None:
    found = coefficients(polynomial(*numbers), 12).values.numpy()
    series = np.polynomial.hermite_e.poly2herme(numbers)
    expected = np.zeros(13)
    expected[: len(series)] = [c * math.sqrt(math.factorial(k)) for k, c in enumerate(series)]
    assert np.allclose(found, expected, atol=1e-11 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_energies_add_up_and_kernels_are_the_series_where_it_converges(name: str) -> None:
    found = coefficients(name, ORDERS)
    rest = found.energy - float(found.values.square().sum())
    kinked = "relu" in name  # h_k² falls as k^{−5/2}: about K^{−3/2} is left
    assert -1e-12 * found.energy < rest < (1e-4 if kinked else 1e-9)
    assert found.rest == pytest.approx(max(rest, 0.0) / found.energy, abs=1e-12)
    rho = torch.linspace(-0.75, 0.75, 31, dtype=torch.float64)
    series = (found.values.square() * rho[:, None] ** torch.arange(ORDERS + 1)).sum(1)
    assert torch.allclose(kernel(name, rho), series, rtol=0, atol=1e-11)


def test_kernels_have_their_closed_form_up_to_the_ends() -> None:
    relu = ((1 - RHO * RHO).sqrt() + (math.pi - torch.arccos(RHO)) * RHO) / (2 * math.pi)
    for name, closed in (("relu", relu), ("erf", 2 / math.pi * torch.arcsin(2 * RHO / 3))):
        assert torch.allclose(kernel(name, RHO), closed, rtol=0, atol=1e-12)
    assert torch.equal(kernel("relu", RHO.reshape(3, 4)), kernel(torch.relu, RHO).reshape(3, 4))


@pytest.mark.parametrize(
    "sigma",
    [
        *(activation(name) for name in ACTIVATIONS),
        softplus(7.0),
        smoothed_relu(30.0),
        *(polynomial(*c) for c in ((0, 1), (1, 0, 2), (0, 1, 2), (0, 1, 0, 2), (1, 0, 0, 1))),
        polynomial(0, 0),
    ],
    ids=lambda sigma: sigma.name,
)
def test_signs_are_what_activations_say_of_themselves(sigma: Activation) -> None:
    assert sign_ambiguity(sigma).verdict == sigma.sign


def test_energies_of_the_parts_are_those_of_the_coefficients() -> None:
    found, values = sign_ambiguity("relu+tanh"), coefficients("relu+tanh", ORDERS).values
    assert found.even == pytest.approx(float(values[::2].square().sum()), abs=1e-4)
    assert found.odd == pytest.approx(float(values[1::2].square().sum()), abs=1e-12)
    assert found.bent == pytest.approx(float(values[3::2].square().sum()), abs=1e-12)
    assert found.bent == pytest.approx(sign_ambiguity("tanh").bent, abs=1e-14)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: coefficients("relu", ORDERS + 1), "orders"),
        (lambda: coefficients("swish"), "unknown activation"),
        (lambda: coefficients(lambda z: torch.exp(0.3 * z * z)), "grows too fast"),
        (lambda: coefficients(lambda z: z.sum()), "shape"),
        (lambda: coefficients(torch.log), "NaN"),
        (lambda: kernel("relu", 1.1), "rho"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()
