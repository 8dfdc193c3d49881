"""Random features: one dense float64 oracle; streamed, mapped, stored and coarse alike."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume.equation.objective import fitted, gauss_newton, gradient
from exhume.features.activations import activation, smoothed_relu
from exhume.features.random import RandomFeatures
from exhume.features.weights import Mapped, Seeded, Stored, materialise
from problems import (
    ACTIVATIONS,
    Dense,
    case,
    close,
    dense_v,
    gaussian,
    make_features,
    make_problem,
    on_sphere,
    same_products,
)

SHAPES = [(1, 1, 3, 1), (4, 3, 29, 2), (6, 4, 5, 3)]  # n, d, p, m; n > p in the last

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def dense(features: RandomFeatures) -> Dense:
    """The oracle σ(Vx + b)."""
    v, b = dense_v(features), 0 if features.bias is None else features.bias
    return Dense(lambda x: features.activation.value(v @ x + b)[None], *reversed(v.shape))


# Products


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_products_against_the_dense_oracle(
    name: str, shape: tuple[int, int, int, int], bias: bool
) -> None:
    n, d, p, m = shape
    b = gaussian(p, seed=7) if bias else None
    features = replace(make_features(d, p, name, block=2 if bias else None), bias=b)

    same_products(features, dense(features), 1e-11, n, m)


def test_products_of_a_seed_that_is_read_again_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exhume.features.random.KEPT_BYTES", 0)
    weights = Seeded(40, 5, seed=0).to(torch.device("cpu"), torch.float64)
    features = RandomFeatures(weights, activation("gelu"), block=7)
    assert features.linearize(on_sphere(1, 5))._kept is None
    same_products(features, dense(features))


def test_reductions_are_float64_and_the_rest_is_not() -> None:
    features = replace(make_features(4, 9, dtype=torch.float32), bias=torch.ones(9))
    here = features.linearize(on_sphere(2, 4))
    a, t = gaussian(2, 1), gaussian(9, 1).float()
    assert here.gram().dtype == here.apply(t).dtype == here.curvature(a).dtype == torch.float64
    assert here.combine(a).dtype == here.pull(t, a).dtype == torch.float32
    double = features.to(torch.device("cpu"), torch.float64)
    assert double.bias is not None and double.bias.dtype == torch.float64


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 5), st.booleans(), st.sampled_from([None, 3]), st.integers(0, 2**31))
def test_features_of_coordinates_are_those_of_the_point(
    r: int, stored: bool, block: int | None, seed: int
) -> None:
    v = Seeded(17, 5, seed=3).to(torch.device("cpu"), torch.float64)
    weights = materialise(v) if stored else v
    features = RandomFeatures(weights, activation("gelu"), block, bias=gaussian(17))
    basis = torch.linalg.qr(gaussian(5, r, seed=seed)).Q
    inside = features.restrict(basis)
    assert (inside.dim, inside.width) == (r, 17)
    reduced = dense_v(features) @ basis
    assert inside.spread == pytest.approx(reduced.square().mean().sqrt().item(), rel=1e-9)
    same_products(inside, dense(features).restrict(basis), n=2, m=1)


def test_substituted_exact_and_leaky() -> None:
    features, sigma = make_features(4, 20, "relu"), smoothed_relu(3.0)
    x, t, a = on_sphere(3, 4), gaussian(20, 1), gaussian(3, 1)
    there = features.substituted(sigma).linearize(x)
    close(there.gram(), features.linearize(x).gram())
    slope = torch.sigmoid(3 * x @ dense_v(features).T)
    close(there.pull(t, a), (a @ t.T * slope) @ dense_v(features))
    other = make_features(4, 20, "tanh")
    assert other.substituted(sigma) is other
    z = torch.tensor([-1.0, 2.0]).double()
    assert features.leaky().activation.slope(z).tolist() == pytest.approx([0.02, 1])
    v = dense_v(features).float()
    exact = RandomFeatures(Stored(v, v.half()), activation("relu")).exact()
    assert exact.weights.half is None and exact.full_precision


def test_a_bias_shows_norm_and_sign() -> None:
    features = make_features(4, 20, "relu")
    assert any("norm" in sentence for sentence in features.undetermined)
    assert replace(features, bias=gaussian(20)).undetermined == ()
    assert replace(features, bias=torch.zeros(20)).undetermined == features.undetermined
    assert "cannot be found" in make_features(4, 20, "tanh").undetermined[0]


# The second moment


@pytest.mark.parametrize("block", [None, 1, 7, 100])
@pytest.mark.parametrize("spread", [None, 0.3])
def test_moment_against_its_formula(block: int | None, spread: float | None) -> None:
    features = replace(make_features(5, 23, block=block), spread=spread)
    v, w, q = dense_v(features), gaussian(23), gaussian(5, 2, seed=1)
    eye, scale = torch.eye(5, dtype=torch.float64), 5 if spread is None else 1 / spread**2
    dense = sum(w[k] * (scale * torch.outer(v[k], v[k]) - eye) for k in range(23)) / 23
    close(features.moment(w, q), dense @ q)


@pytest.mark.parametrize(
    ("name", "second"), [("relu", 1 / math.sqrt(2 * math.pi)), ("polynomial:0,0,1", 2.0)]
)
def test_moment_points_at_the_samples(name: str, second: float) -> None:
    features = make_features(4, 100_000, name)
    x, a = on_sphere(2, 4), torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    w = features.linearize(x).combine(a)[:, 0]
    moment = features.moment(w, torch.eye(4, dtype=torch.float64))
    assert (moment - second * (x.T * a[:, 0]) @ x / 4).abs().max() < 0.07 * second


# Streamed, mapped and stored are the same features


def everything(features: RandomFeatures, target: Tensor, x: Tensor) -> list[Tensor]:
    """The value and the residual, then what steps are made of."""
    problem = make_problem(features, target.to(features.device))
    fit = fitted(problem, x)
    direction = gaussian(*x.shape, seed=9).to(fit.candidates)
    return [
        torch.tensor(fit.value),
        fit.residual,
        gradient(problem, fit),
        gauss_newton(fit, direction),
        fit.linearization.curvature(fit.coefficients),
        features.moment(problem.target[:, 0], direction.T),
    ]


def agree(got: list[Tensor], expected: list[Tensor], values: float, steps: float) -> None:
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        close(one, other, values if i < 2 else steps)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "v.npy"
    np.save(path, Seeded(300, 6, seed=2).rows(0, 300).numpy())
    return path


@pytest.mark.parametrize("block", [1, 7, 256, 299, 300, 10_000])
def test_block_size_and_source_of_v_do_not_matter(saved: Path, block: int) -> None:
    target, x = gaussian(300, 2), on_sphere(4, 6)
    exact = everything(make_features(6, 300, "relu+tanh", seed=2), target, x)
    seeded = Seeded(300, 6, seed=2)
    for weights in (seeded, Mapped(saved), materialise(seeded)):
        features = RandomFeatures(weights, activation("relu+tanh"), block)
        agree(everything(features, target, x), exact, 1e-5, 1e-5)
        resident = features.resident()
        assert torch.equal(resident.weights.tensor, seeded.rows(0, 300))
        assert resident.resident().weights.tensor is resident.weights.tensor


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_half_precision_is_for_steps_only_and_does_not_mind_the_scale(size: float) -> None:
    target, x = size * gaussian(300, 2), on_sphere(4, 6)
    v = Seeded(300, 6, seed=2).rows(0, 300)
    coarse = RandomFeatures(Stored(v, v.half()), activation("relu"), block=100)
    got = everything(coarse, target, x)
    exact = everything(make_features(6, 300, "relu", seed=2), target, x)
    agree(got, exact, 1e-5, 1e-2)
    assert not torch.allclose(got[2].double(), exact[2], rtol=1e-6, atol=0)  # it was coarse


@needs_gpu
@pytest.mark.parametrize("stored", [False, True])
def test_gpu_and_cpu_agree(stored: bool) -> None:
    seeded, cuda = Seeded(3000, 20, seed=2), torch.device("cuda")
    drawn = seeded.to(cuda, torch.float32).rows(3, 999).cpu()
    assert torch.equal(drawn, seeded.rows(3, 999))
    target, x = gaussian(3000, 2), on_sphere(5, 20)
    cpu = RandomFeatures(seeded, activation("relu+tanh"), block=700)
    gpu = cpu.to(cuda, torch.float32)
    gpu = gpu.resident() if stored else gpu
    agree(everything(gpu, target, x), everything(cpu, target, x), 1e-5, 1e-2)
    problem = case(30, 6, 4)
    assert fitted(problem.problem.to("cuda"), problem.inputs).value < 1e-12
