"""Counts, Hermite coefficients, kernels and bounds of privacy, against oracles and closed forms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import nn

from exhume.features.activations import activation, polynomial, smoothed_relu, softplus
from exhume.theory import counting, privacy
from exhume.theory.counting import blocks, label_fitting, most_samples, reconstruction, safe_width
from exhume.theory.hermite import ORDERS, coefficients, kernel, sign_ambiguity
from exhume.theory.privacy import PER_DIMENSION, epsilon_of, error_bound, rho_at_error, rho_of
from problems import ACTIVATIONS, dense_v, gaussian, make_features, on_sphere, refusals


def rank_at(width: int, dim: int, samples: int, outputs: int, basis: torch.Tensor) -> bool:
    """Whether tangent directions of the sphere, in a subspace, and A are determined."""
    features = make_features(dim, width, "relu+tanh", seed=width)
    v, sigma = dense_v(features) @ basis, features.activation
    z = on_sphere(samples, basis.shape[1], seed=1) * math.sqrt(dim / basis.shape[1])
    a, axes = gaussian(samples, outputs, seed=2), torch.eye(outputs, dtype=torch.float64)
    columns = []
    for i in range(samples):
        moved = sigma.slope(v @ z[i])[:, None] * (v @ torch.linalg.svd(z[i : i + 1]).Vh[1:].T)
        columns += [torch.outer(column, a[i]).flatten() for column in moved.T]
        columns += [torch.outer(sigma.value(v @ z[i]), e).flatten() for e in axes]
    matrix = torch.stack(columns, 1)
    values = torch.linalg.svdvals(matrix / matrix.norm(dim=0))
    return len(values) == matrix.shape[1] and bool(values[-1] > 1e-9 * values[0])


@pytest.mark.parametrize("sizes", [(4, 3, 1), (4, 3, 2), (3, 4, 3), (5, 2, 4), (2, 5, 2)])
@pytest.mark.parametrize("subspace", [None, 2, "span"])
def test_the_threshold_is_where_the_jacobian_gets_full_rank(sizes: Any, subspace: Any) -> None:
    least, (dim, samples, _) = reconstruction(*sizes, subspace), sizes
    rank = min(samples, dim) if subspace == "span" else subspace or dim
    basis = torch.linalg.qr(gaussian(dim, rank)).Q
    assert rank_at(least, *sizes, basis)
    assert not rank_at(least - 1, *sizes, basis)


@given(*[st.integers(1, 60)] * 3, st.sampled_from([None, "span", 1]))
@settings(deadline=None, max_examples=50)
def test_thresholds_are_monotone_and_each_others_inverse(dim, samples, outputs, subspace) -> None:
    sizes = dim, samples, outputs
    least = reconstruction(*sizes, subspace)
    assert most_samples(least * outputs, dim, outputs, subspace) >= samples
    if least > 1:
        assert most_samples((least - 1) * outputs, dim, outputs, subspace) < samples
    assert safe_width(*sizes, subspace) == least - 1
    assert reconstruction(dim, samples) == dim * samples  # for one output the count is the law
    assert reconstruction(dim, samples, subspace=1) == label_fitting(samples) == samples
    assert samples <= least <= reconstruction(*sizes)
    assert reconstruction(dim, samples + 1, outputs, subspace) > least
    assert reconstruction(dim, samples, outputs + 1, subspace) <= least
    assert reconstruction(dim + 1, samples, outputs, subspace) >= least
    lost = counting.unknowns(*sizes, subspace, norm=False) - counting.unknowns(*sizes, subspace)
    assert lost == samples


def test_blocks_of_a_module() -> None:
    net = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 10))
    found = {block.name: block for block in blocks(net, 20, 10)}
    own, whole = ["0.weight", "0.bias", "2.weight", "2.bias"], 50 * 21 + 10 * 51
    assert list(found) == [*own, "first layer", "last layer", "all"]
    counts = {"first layer": 50 * 20 + 50, "last layer": 500, "all": whole}
    assert counts == {name: found[name].parameters for name in counts}
    assert found["0.weight"].shape == (50, 20) and found["all"].samples == whole // 29
    assert found["last layer"].samples == most_samples(500, 20, 10) == 500 // 29
    assert found["last layer"].spanned == most_samples(500, 20, 10, "span") == 18
    assert sum(found[name].share for name in own) == pytest.approx(1)
    assert found["2.bias"].samples == 0
    shapes = {"head.weight": (1, 40), "body.weight": (40, 5)}
    assert {b.name: b.parameters for b in blocks(shapes, 5, head="head")}["last layer"] == 40
    (alone,) = blocks({"last": (40, 1)}, 5)
    assert (alone.name, alone.samples, alone.spanned) == ("last", 8, 8)


def relu_coefficient(k: int) -> float:
    """±√ of the series of its kernel, by κ'' = 1/(2π√(1 − ρ²)); signs alternate from k = 2 on."""
    j = k // 2 - 1
    if k < 2 or k % 2:
        return (1 / math.sqrt(2 * math.pi), 0.5)[k] if k < 2 else 0.0
    term = math.comb(2 * j, j) / 4**j / ((2 * j + 1) * (2 * j + 2))
    return (-1) ** j * math.sqrt(term / (2 * math.pi))


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
    sign = sign_ambiguity(name)
    for energy, first in ((sign.even, 0), (sign.odd, 1), (sign.bent, 3)):
        part = found.values[first::2].square().sum().item()
        assert energy == pytest.approx(part, abs=1e-4 if kinked else 1e-9)
    rho = torch.linspace(-0.75, 0.75, 31, dtype=torch.float64)
    series = (found.values.square() * rho[:, None] ** torch.arange(ORDERS + 1)).sum(1)
    assert torch.allclose(kernel(name, rho), series, rtol=0, atol=1e-11)


def test_kernels_have_their_closed_form_up_to_the_ends() -> None:
    inside = [-0.999999, -0.9, -0.3, 0.0, 0.2, 0.7, 0.99, 0.9999, 1 - 1e-7, 1 - 1e-12]
    rho = torch.tensor([-1.0, *inside, 1.0], dtype=torch.float64)
    relu = ((1 - rho * rho).sqrt() + (math.pi - torch.arccos(rho)) * rho) / (2 * math.pi)
    for name, closed in (("relu", relu), ("erf", 2 / math.pi * torch.arcsin(2 * rho / 3))):
        assert torch.allclose(kernel(name, rho), closed, rtol=0, atol=1e-12)
    assert torch.equal(kernel("relu", rho.reshape(3, 4)), kernel(torch.relu, rho).reshape(3, 4))


def test_signs_are_what_activations_say_of_themselves() -> None:
    mixed = ((0, 0), (0, 1), (1, 0, 2), (0, 1, 2), (0, 1, 0, 2), (1, 0, 0, 1))
    others = (softplus(7.0), smoothed_relu(30.0), *(polynomial(*each) for each in mixed))
    for sigma in (*map(activation, ACTIVATIONS), *others):
        assert sign_ambiguity(sigma).verdict == sigma.sign, sigma.name


@pytest.mark.parametrize("ratio", [0.05, 0.5, 2.0])
def test_a_gaussian_channel_attains_the_bound_and_nobody_does_better(ratio: float) -> None:
    """y = x + noise holds I = (d/2) ln(1 + 1/s) nats; the posterior mean is y/(1 + s)."""
    dim, count, noise = 8, 40_000, 1 / math.expm1(2 * ratio)
    x = gaussian(count, dim)
    y = x + math.sqrt(noise) * gaussian(count, dim, seed=1)

    def error(shrink: float) -> float:
        return float((x - shrink * y).square().sum() / x.square().sum())

    best = 1 / (1 + noise)
    assert error(best) == pytest.approx(error_bound(ratio * dim, dim), rel=0.01)
    assert all(error(shrink) > error(best) for shrink in (0.0, 0.8 * best, 1.2 * best))


def test_entropy_and_subspace_move_the_bound() -> None:
    """Error D in every direction costs Σ ½ ln(v_k/D) nats, as long as D is under every v_k."""
    variances, level = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64), 0.3
    rho = float(0.5 * (variances / level).log().sum())
    entropy = 3 * PER_DIMENSION + 0.5 * float((variances / variances.mean()).log().sum())
    relative = 3 * level / float(variances.sum())
    assert error_bound(rho, 3, entropy) == pytest.approx(relative, rel=1e-12)
    assert error_bound(3.0, 6) < error_bound(3.0, 600)  # in 6 of 600 dimensions: less protection
    uniform = 6 * math.log(math.sqrt(12))  # in a box, scaled to a variance of one
    assert error_bound(3.0, 6, uniform) < error_bound(3.0, 6)


@pytest.mark.parametrize("kappa", [1e-3, 0.1, 1.0, 20.0])
def test_on_the_circle_and_in_three_dimensions_there_are_closed_forms(kappa: float) -> None:
    length = 1 / math.tanh(kappa) - 1 / kappa
    nats = kappa * length + math.log(kappa / math.sinh(kappa))
    assert privacy.sphere_error_bound(nats, 3) == pytest.approx(1 - length**2, rel=1e-6)
    length = special.ive(1, kappa) / special.ive(0, kappa)
    nats = kappa * length - math.log(special.ive(0, kappa)) - kappa
    assert privacy.sphere_error_bound(nats, 2) == pytest.approx(1 - length**2, rel=1e-6)
    flat = error_bound(3000, 3000)
    assert privacy.sphere_error_bound(3000, 3000) == pytest.approx(flat, rel=1e-2)
    assert privacy.sphere_error_bound(41 * 5, 5) == 0.0


@pytest.mark.parametrize("dim", [2, 3, 40])
def test_the_error_on_a_sphere_is_convex_in_the_information(dim: int) -> None:
    """Then no mixture of better and worse days beats the bound; it stays below the Gaussian one."""
    rho = np.linspace(0.02, 3, 30) * dim
    errors = np.array([privacy.sphere_error_bound(r, dim) for r in rho.tolist()])
    assert (np.diff(errors, 2) > -1e-12).all() and (np.diff(errors) < 0).all()
    assert (errors < [error_bound(r, dim) for r in rho.tolist()]).all()


@given(st.floats(1e-3, 1e3), st.integers(1, 5000), st.floats(-2, 0), st.floats(1e-12, 0.5))
@settings(deadline=None)
def test_inverses_go_round(rho: float, dim: int, less: float, delta: float) -> None:
    entropy = (PER_DIMENSION + less) * dim
    error = error_bound(rho, dim, entropy)
    if error > 1e-290:
        assert rho_at_error(error, dim, entropy) == pytest.approx(rho, rel=1e-6, abs=1e-6)
    assert rho_of(epsilon_of(rho, delta), delta) == pytest.approx(rho, rel=1e-9)


@given(st.floats(0.01, 5), st.floats(1e-8, 0.1))
@settings(deadline=None)
def test_the_gaussian_mechanism_keeps_what_is_promised(rho: float, delta: float) -> None:
    """Its exact δ(ε) = Φ(a/2 − ε/a) − e^ε Φ(−a/2 − ε/a), a = √(2ρ), is under δ."""
    epsilon, ratio = epsilon_of(rho, delta), math.sqrt(2 * rho)
    tail = epsilon + stats.norm.logcdf(-ratio / 2 - epsilon / ratio)
    assert stats.norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(tail) <= delta


def test_pure_privacy_is_zcdp_with_half_the_square() -> None:
    """Randomised response: Rényi divergences of order α stay under α ε²/2."""
    p = torch.tensor([1.3, 0.0], dtype=torch.float64).softmax(0)
    for alpha in (1.01, 2.0, 8.0, 50.0):
        divergence = float((p**alpha * p.flip(0) ** (1 - alpha)).sum().log()) / (alpha - 1)
        assert divergence <= rho_of(1.3) * alpha


test_what_cannot_be_is_refused = refusals(
    (lambda: reconstruction(0, 5), "dim"),
    (lambda: reconstruction(5, 5, 0), "outputs"),
    (lambda: reconstruction(5, 5, 1, 6), "subspace"),
    (lambda: label_fitting(True), "samples"),
    (lambda: most_samples(0, 5), "equations"),
    (lambda: blocks({}, 5), "no parameters"),
    (lambda: blocks({"a.weight": (2, 2)}, 5, head="b"), "head"),
    (lambda: coefficients("relu", ORDERS + 1), "orders"),
    (lambda: coefficients("swish"), "unknown activation"),
    (lambda: coefficients(lambda z: torch.exp(0.3 * z * z)), "grows too fast"),
    (lambda: coefficients(lambda z: z.sum()), "shape"),
    (lambda: coefficients(torch.log), "NaN"),
    (lambda: kernel("relu", 1.1), "rho"),
    (lambda: error_bound(0.0, 3), "rho"),
    (lambda: error_bound(1.0, 0), "dim"),
    (lambda: privacy.sphere_error_bound(1.0, 1), "dim"),
    (lambda: rho_at_error(-1.0, 3), "error"),
    (lambda: epsilon_of(1.0, 0.0), "delta"),
    (lambda: rho_of(1.0, 1.0), "delta"),
    (lambda: rho_of(-1.0), "epsilon"),
)
