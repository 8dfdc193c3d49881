"""Bounds of differential privacy against simulated channels, closed forms and mechanisms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from exhume.errors import InputError
from exhume.theory import privacy
from exhume.theory.privacy import PER_DIMENSION, epsilon_of, error_bound, rho_at_error, rho_of
from problems import gaussian, on_sphere


@pytest.mark.parametrize("ratio", [0.05, 0.5, 2.0])
def test_a_gaussian_channel_attains_the_bound_and_nobody_does_better(ratio: float) -> None:
    """y = x + noise holds I = (d/2) ln(1 + 1/s) nats; the posterior mean is y/(1 + s)."""
    dim, count = 8, 40_000
    noise = 1 / math.expm1(2 * ratio)
    x = gaussian(count, dim)
    y = x + math.sqrt(noise) * gaussian(count, dim, seed=1)

    def error(shrink: float) -> float:
        return float((x - shrink * y).square().sum() / x.square().sum())

    best = 1 / (1 + noise)
    assert error(best) == pytest.approx(error_bound(ratio * dim, dim), rel=0.01)
    assert all(error(shrink) > error(best) for shrink in (0.0, 0.8 * best, 1.2 * best))


def test_entropy_and_subspace_move_the_bound() -> None:
    """Error D in every direction costs Σ ½ ln(v_k/D) nats, as long as D is under every v_k."""
    variances = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    level = 0.3
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
    assert privacy.sphere_error_bound(3000, 3000) == pytest.approx(
        error_bound(3000, 3000), rel=1e-2
    )
    assert privacy.sphere_error_bound(41 * 5, 5) == 0.0


@pytest.mark.parametrize("dim", [2, 3, 40])
def test_the_error_on_a_sphere_is_convex_in_the_information(dim: int) -> None:
    """Then no mixture of better and worse days beats the bound; it stays below the Gaussian one."""
    rho = np.linspace(0.02, 3, 30) * dim
    errors = np.array([privacy.sphere_error_bound(r, dim) for r in rho.tolist()])
    assert (np.diff(errors, 2) > -1e-12).all() and (np.diff(errors) < 0).all()
    assert (errors < [error_bound(r, dim) for r in rho.tolist()]).all()


def test_a_noisy_channel_on_the_sphere_respects_its_bound() -> None:
    """x on a circle, y = x + noise: the posterior mean's error and information, by simulation."""
    count, noise = 20_000, 0.4
    x = on_sphere(count, 2) / math.sqrt(2)
    y = x + noise * gaussian(count, 2, seed=1)
    kappa = (y.norm(dim=1) / noise**2).numpy()  # the posterior is von Mises around y
    length = special.ive(1, kappa) / special.ive(0, kappa)
    mean = torch.from_numpy(length)[:, None] * y / y.norm(dim=1, keepdim=True)
    error = float((x - mean).square().sum(1).mean())
    nats = kappa * length - kappa - np.log(special.ive(0, kappa))  # from the uniform distribution
    least = privacy.sphere_error_bound(float(nats.mean()), 2)
    assert least < error < 1.2 * least


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
def test_the_gaussian_mechanism_keeps_what_the_conversion_promises(
    rho: float, delta: float
) -> None:
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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: error_bound(0.0, 3), "rho"),
        (lambda: error_bound(1.0, 0), "dim"),
        (lambda: privacy.sphere_error_bound(1.0, 1), "dim"),
        (lambda: rho_at_error(-1.0, 3), "error"),
        (lambda: epsilon_of(1.0, 0.0), "delta"),
        (lambda: rho_of(1.0, 1.0), "delta"),
        (lambda: rho_of(-1.0), "epsilon"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()
