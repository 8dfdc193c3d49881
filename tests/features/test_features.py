"""Features: every product against dense float64 oracles; streamed, mapped and stored alike."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from exhume.equation.objective import fitted, gauss_newton, gradient
from exhume.errors import InputError
from exhume.features.activations import (
    Activation,
    activation,
    polynomial,
    smoothed_relu,
    softplus,
)
from exhume.features.exact import exact_operations
from exhume.features.random import RandomFeatures, RandomLinearization
from exhume.features.weights import TILE, Mapped, Seeded, Stored, blocks, materialise
from exhume.testing import check_features
from problems import (
    ACTIVATIONS,
    case,
    dense_jacobian,
    dense_phi,
    dense_v,
    gaussian,
    make_features,
    make_problem,
    on_sphere,
)

SHAPES = [(1, 1, 3, 1), (3, 5, 17, 1), (4, 3, 29, 2), (6, 4, 5, 3)]  # n, d, p, m; n > p in the last

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def close(got: Tensor, expected: Tensor, relative: float = 1e-11) -> None:
    torch.testing.assert_close(
        got.double().cpu(),
        expected.double().cpu(),
        rtol=0,
        atol=relative * max(expected.abs().max().item(), 1e-30),
    )


# Products


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_products_against_the_dense_oracle(
    name: str, shape: tuple[int, int, int, int], block: int | None
) -> None:
    n, d, p, m = shape
    features = make_features(d, p, name, block=block)
    x, direction = on_sphere(n, d), gaussian(n, d, seed=1)
    a, t = gaussian(n, m, seed=2), gaussian(p, m, seed=3)
    here = features.linearize(x)
    phi = dense_phi(features, x)
    jacobian = dense_jacobian(features, x, a)
    close(here.gram(), phi @ phi.T)
    close(here.apply(t), phi @ t)
    close(here.combine(a), phi.T @ a)
    close(here.push(direction, a).flatten(), jacobian @ direction.flatten())
    close(here.pull(t, a).flatten(), jacobian.T @ t.flatten())
    by_sample = jacobian.reshape(p * m, n, d)
    close(here.curvature(a), torch.einsum("qid,qjd->ij", by_sample, by_sample) / d)
    for other in (direction, gaussian(n, d, seed=4)):  # the second time with what was kept
        close(here.bend(other, t, a), dense_bend(features, x, other, t, a))


def dense_bend(features: RandomFeatures, x: Tensor, d: Tensor, t: Tensor, a: Tensor) -> Tensor:
    """The Hessian of ⟨ΦᵀA, T⟩ in all candidates at once, times D."""

    def product(x: Tensor) -> Tensor:
        z = x @ dense_v(features).T + (0 if features.bias is None else features.bias)
        return (features.activation.value(z).T @ a * t).sum()

    return torch.autograd.functional.hvp(product, x, d)[1]


@pytest.mark.parametrize("bias", [None, gaussian(40, seed=1)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bend_of_a_seed_read_again_for_each_product(
    name: str, bias: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exhume.features.random.KEPT_BYTES", 0)
    weights = Seeded(40, 5, seed=0).to(torch.device("cpu"), torch.float64)
    features = RandomFeatures(weights, activation(name), block=7, bias=bias)
    x, direction, t, a = on_sphere(3, 5), gaussian(3, 5, seed=1), gaussian(40, 2), gaussian(3, 2)
    here = features.linearize(x)
    assert here._kept is None
    close(here.bend(direction, t, a), dense_bend(features, x, direction, t, a))
    assert here._seconds == []
    for check in (features, replace(features, bias=None)):
        check_features(check)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(ACTIVATIONS),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_pull_is_the_transpose_of_push(
    name: str, n: int, d: int, p: int, m: int, seed: int
) -> None:
    here = make_features(d, p, name, seed).linearize(on_sphere(n, d, seed))
    direction, a = gaussian(n, d, seed=seed + 1), gaussian(n, m, seed=seed + 2)
    t = gaussian(p, m, seed=seed + 3)
    pushed = here.push(direction, a)
    left, right = (pushed * t).sum(), (direction * here.pull(t, a)).sum()
    assert abs(left - right) <= 1e-12 * (1 + pushed.norm() * t.norm())


def test_reductions_are_float64_and_the_rest_is_not() -> None:
    features = make_features(4, 9, dtype=torch.float32)
    here = features.linearize(on_sphere(2, 4))
    a, t = gaussian(2, 1), gaussian(9, 1).float()
    assert here.gram().dtype == here.apply(t).dtype == here.curvature(a).dtype == torch.float64
    assert here.combine(a).dtype == here.pull(t, a).dtype == torch.float32


# Biases, and coordinates in a subspace


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_products_with_a_bias_against_the_dense_oracle(name: str, block: int | None) -> None:
    n, d, p, m = 3, 4, 11, 2
    plain = make_features(d, p, name, block=block)
    bias = gaussian(p, seed=7)
    x, direction = on_sphere(n, d), gaussian(n, d, seed=1)
    a, t = gaussian(n, m, seed=2), gaussian(p, m, seed=3)
    here = replace(plain, bias=bias).linearize(x)

    def phi(x: Tensor) -> Tensor:
        return plain.activation.value(x @ dense_v(plain).T + bias)

    jacobian = torch.autograd.functional.jacobian(lambda x: (phi(x).T @ a).flatten(), x).flatten(1)
    close(here.gram(), phi(x) @ phi(x).T)
    close(here.apply(t), phi(x) @ t)
    close(here.combine(a), phi(x).T @ a)
    close(here.push(direction, a).flatten(), jacobian @ direction.flatten())
    close(here.pull(t, a).flatten(), jacobian.T @ t.flatten())
    by_sample = jacobian.reshape(p * m, n, d)
    close(here.curvature(a), torch.einsum("qid,qjd->ij", by_sample, by_sample) / d)


def test_a_bias_moves_with_the_features_and_conforms() -> None:
    features = replace(make_features(4, 20, "tanh"), bias=gaussian(20))
    check_features(features)
    single = features.to(torch.device("cpu"), torch.float32)
    assert single.bias is not None
    assert single.bias.dtype == torch.float32
    x = on_sphere(2, 4)
    close(single.linearize(x).gram(), features.linearize(x).gram(), 1e-6)


def test_a_bias_shows_norm_and_sign() -> None:
    features = make_features(4, 20, "relu")
    assert any("norm" in sentence for sentence in features.undetermined)
    assert replace(features, bias=gaussian(20)).undetermined == ()
    assert replace(features, bias=torch.zeros(20)).undetermined == features.undetermined


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5), st.integers(0, 2), st.booleans(), st.sampled_from([None, 3]), st.integers(0)
)
def test_features_of_coordinates_are_those_of_the_point(
    r: int, source: int, bias: bool, block: int | None, seed: int
) -> None:
    seed %= 2**31
    v = Seeded(17, 5, seed=3)
    weights = (v, Stored(v.rows(0, 17)), materialise(v))[source].to(
        torch.device("cpu"), torch.float64
    )
    features = RandomFeatures(
        weights, activation("gelu"), block, bias=gaussian(17) if bias else None
    )
    basis = torch.linalg.qr(gaussian(5, r, seed=seed)).Q
    inside = features.restrict(basis)
    assert (inside.dim, inside.width) == (r, 17)
    z, a, t = gaussian(3, r, seed=seed), gaussian(3, 1), gaussian(17, 1)
    here, there = inside.linearize(z), features.linearize(z @ basis.T)
    close(here.gram(), there.gram())
    close(here.combine(a), there.combine(a))
    close(here.pull(t, a), there.pull(t, a) @ basis)
    direction = gaussian(3, r, seed=1)
    close(here.push(direction, a), there.push(direction @ basis.T, a))
    spread = (dense_v(features) @ basis).square().mean().sqrt().item()
    assert inside.spread == pytest.approx(spread, rel=1e-9)


# The second moment


def test_moment_of_features_with_another_spread() -> None:
    features = make_features(5, 23)
    v, w, q = dense_v(features), gaussian(23), gaussian(5, 2, seed=1)
    eye = torch.eye(5, dtype=torch.float64)
    dense = sum(w[k] * (torch.outer(v[k], v[k]) / 0.3**2 - eye) for k in range(23)) / 23
    close(replace(features, spread=0.3).moment(w, q), dense @ q)


@pytest.mark.parametrize("block", [None, 1, 7, 100])
def test_moment_against_its_formula(block: int | None) -> None:
    features = make_features(5, 23, block=block)
    w, q = gaussian(23), gaussian(5, 2, seed=1)
    v = dense_v(features)
    eye = torch.eye(5, dtype=torch.float64)
    dense = sum(w[k] * (5 * torch.outer(v[k], v[k]) - eye) for k in range(23)) / 23
    close(features.moment(w, q), dense @ q)


@pytest.mark.parametrize(
    ("name", "second"), [("relu", 1 / math.sqrt(2 * math.pi)), ("polynomial:0,0,1", 2.0)]
)
def test_moment_points_at_the_samples(name: str, second: float) -> None:
    features = make_features(4, 200_000, name)
    x, a = on_sphere(2, 4), torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    w = features.linearize(x).combine(a)[:, 0]
    moment = features.moment(w, torch.eye(4, dtype=torch.float64))
    assert (moment - second * (x.T * a[:, 0]) @ x / 4).abs().max() < 0.05 * second


# Activations


@pytest.mark.parametrize("name", [*ACTIVATIONS, "polynomial:0,0,0,1", "polynomial:0,2"])
def test_slope_against_finite_differences(name: str) -> None:
    sigma = activation(name)
    z = torch.linspace(-4.05, 4.05, 82, dtype=torch.float64)  # holds no zero, where ReLU has a kink
    h = 1e-6
    difference = (sigma.value(z + h) - sigma.value(z - h)) / (2 * h)
    torch.testing.assert_close(sigma.slope(z), difference, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", [*ACTIVATIONS, "polynomial:0,0,0,1", "polynomial:0,2"])
def test_second_and_third_derivatives_against_finite_differences(name: str) -> None:
    sigma = activation(name)
    z = torch.linspace(-4.05, 4.05, 82, dtype=torch.float64)
    h = 1e-6
    second = (sigma.slope(z + h) - sigma.slope(z - h)) / (2 * h)
    third = (sigma.second(z + h) - sigma.second(z - h)) / (2 * h)
    torch.testing.assert_close(sigma.second(z), second, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(sigma.third(z), third, rtol=1e-8, atol=1e-8)
    assert sigma.piecewise_linear == (not second.any())
    with torch.no_grad():
        assert torch.equal(sigma.second(z), sigma.second(z.clone()))


@pytest.mark.parametrize("sharpness", [1.0, 7.5, 300.0])
@pytest.mark.parametrize("make", [smoothed_relu, softplus])
def test_surrogates_are_differentiated_to_their_slope_however_torch_does_it(
    make: Callable[[float], Activation], sharpness: float
) -> None:
    sigma = make(sharpness)
    z = torch.linspace(-4, 4, 81, dtype=torch.float64) * 8 / sharpness
    s = torch.sigmoid(sharpness * z)
    expected = [s, sharpness * s * (1 - s), sharpness**2 * s * (1 - s) * (1 - 2 * s)]
    close(sigma.slope(z), expected[0])
    close(sigma.second(z), expected[1])
    close(sigma.third(z), expected[2])

    def reverse(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.func.grad(lambda at: function(at).sum())

    def forward(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda at: torch.func.jvp(function, (at,), (torch.ones_like(at),))[1]

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
        assert sigma.homogeneous == scales == exact
        assert not sigma.piecewise_linear
    assert smoothed_relu(2.0).name == "smoothed_relu:2"
    assert softplus(0.5).name == "softplus:0.5"


@pytest.mark.parametrize("make", [smoothed_relu, softplus])
@pytest.mark.parametrize("sharpness", [0.0, -1.0, math.inf, math.nan])
def test_surrogates_refuse_what_has_no_slope(
    make: Callable[[float], Activation], sharpness: float
) -> None:
    with pytest.raises(InputError, match="expected a finite number above 0"):
        make(sharpness)


def test_substituted_random_features() -> None:
    features, sigma = make_features(4, 20, "relu"), smoothed_relu(3.0)
    x, t, a = on_sphere(3, 4), gaussian(20, 1), gaussian(3, 1)
    there = features.substituted(sigma)
    close(there.linearize(x).gram(), features.linearize(x).gram())
    slope = torch.sigmoid(3 * x @ dense_v(features).T)
    close(there.linearize(x).pull(t, a), (a @ t.T * slope) @ dense_v(features))
    direction = gaussian(3, 4, seed=3)
    close(there.linearize(x).bend(direction, t, a), dense_bend(there, x, direction, t, a))
    check_features(features.substituted(softplus(4.0)))
    other = make_features(4, 20, "tanh")
    assert other.substituted(sigma) is other


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_homogeneous_says_so_truly(name: str) -> None:
    sigma, z = activation(name), torch.linspace(-3, 3, 13, dtype=torch.float64)
    scales = torch.allclose(sigma.value(3 * z), 3 * sigma.value(z))
    assert sigma.homogeneous == scales == (name == "relu")


def test_leaky_backward_leaves_the_forward_function_alone() -> None:
    z = torch.tensor([-2.0, -0.1, 0.0, 0.1, 3.0])
    leaky = activation("relu").leaky_backward()
    assert torch.equal(leaky.value(z), torch.relu(z))
    torch.testing.assert_close(leaky.slope(z), torch.tensor([0.02, 0.02, 0.02, 1, 1]))
    assert activation("relu+tanh").leaky_backward() is activation("relu+tanh")


@pytest.mark.parametrize(
    "name", ["swish", "", "polynomial", "polynomial:", "polynomial:1", "polynomial:1,x"]
)
def test_bad_activations_are_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(InputError, match=r"known are|coefficients|list of numbers"):
        activation(name)


def test_a_polynomial_refuses_infinity() -> None:
    with pytest.raises(InputError, match="finite"):
        polynomial(0.0, math.inf)


# Where V comes from


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 600), st.integers(0, 600), st.integers(30, 700))
def test_seeded_numbers_do_not_depend_on_how_they_are_read(a: int, b: int, size: int) -> None:
    start, stop = sorted((a, b))
    v = Seeded(600, 3, seed=5)
    whole = v.rows(0, 600)
    assert torch.equal(v.rows(start, stop), whole[start:stop])
    read = [v.rows(part.start, part.stop) for part in blocks(600, size)]
    assert torch.equal(torch.cat(read), whole)
    assert torch.equal(materialise(v, size).tensor, whole)


def test_seeded_entries_are_independent_normals_of_variance_one_over_d() -> None:
    d = 50
    v = Seeded(4 * TILE, d, seed=3).rows(0, 4 * TILE).double() * math.sqrt(d)
    assert stats.kstest(v.flatten().numpy(), "norm").pvalue > 1e-3
    tiles = v.reshape(4, -1)
    other = Seeded(TILE, d, seed=4).rows(0, TILE).double().reshape(1, -1) * math.sqrt(d)
    correlations = torch.cat([tiles, other]) @ torch.cat([tiles, other]).T / tiles.shape[1]
    assert (correlations - torch.eye(5)).abs().max() < 5 * math.sqrt(2 / tiles.shape[1])
    gram = v.T @ v / len(v)
    assert (gram - torch.eye(d)).abs().max() < 5 * math.sqrt(2 / len(v))


def test_seed_zero_is_frozen() -> None:
    v = Seeded(TILE + 1, 3, seed=0)
    first = [[-0.08621105, -0.79230708, 0.00454071], [-0.01342794, -0.04608301, 0.40077439]]
    close(v.rows(0, 2), torch.tensor(first), 1e-6)
    next_tile = [[-0.83697569, 0.79243547, -1.01824534]]
    close(v.rows(TILE, TILE + 1), torch.tensor(next_tile), 1e-6)


def test_mapped_reads_what_was_saved(tmp_path: Path) -> None:
    v = gaussian(11, 4).numpy()
    np.save(tmp_path / "v.npy", v)
    mapped = Mapped(tmp_path / "v.npy", dtype=torch.float64)
    assert mapped.shape == (11, 4)
    assert torch.equal(mapped.rows(3, 9), torch.from_numpy(v[3:9]))
    assert mapped.to(torch.device("cpu"), torch.float32).rows(0, 1).dtype == torch.float32
    np.save(tmp_path / "columns.npy", np.asfortranarray(v))
    assert torch.equal(
        Mapped(tmp_path / "columns.npy", dtype=torch.float64).rows(3, 9), torch.from_numpy(v[3:9])
    )


def write_nothing(path: Path) -> None:
    pass


def write_truncated(path: Path) -> None:
    np.save(path, np.ones((30, 4)))
    path.write_bytes(path.read_bytes()[:-8])


def write_vector(path: Path) -> None:
    np.save(path, np.ones(5))


def write_text(path: Path) -> None:
    path.write_text("not numbers")


def write_pickle(path: Path) -> None:
    np.save(path, np.array([[object()]]), allow_pickle=True)


@pytest.mark.parametrize(
    "write", [write_nothing, write_truncated, write_vector, write_text, write_pickle]
)
def test_a_bad_file_is_named_before_any_work(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "v.npy")
    with pytest.raises(InputError, match=r"v\.npy"):
        Mapped(tmp_path / "v.npy")


# Streamed, mapped and stored are the same features


def everything(features: RandomFeatures, target: Tensor, x: Tensor) -> list[Tensor]:
    problem = make_problem(features, target.to(features.device))
    point = fitted(problem, x)
    direction = gaussian(*x.shape, seed=9).to(point.candidates)
    return [
        torch.tensor(point.value),
        point.residual,
        gradient(problem, point),
        gauss_newton(point, direction),
        point.linearization.curvature(point.coefficients),
        features.moment(problem.target[:, 0], direction.T),
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "v.npy"
    np.save(path, Seeded(300, 6, seed=2).rows(0, 300).numpy())
    return path


@settings(max_examples=10, deadline=None)
@given(
    block=st.one_of(st.sampled_from([1, 255, 256, 257, 299, 300, 301, 10_000]), st.integers(2, 310))
)
@pytest.mark.parametrize("name", ["relu", "relu+tanh"])
def test_block_size_and_source_of_v_do_not_matter(name: str, saved: Path, block: int) -> None:
    target, x = gaussian(300, 2), on_sphere(4, 6)
    sigma = activation(name)
    exact = everything(make_features(6, 300, name, seed=2), target, x)
    seeded = Seeded(300, 6, seed=2)
    for weights in (seeded, Mapped(saved), materialise(seeded)):
        for got, expected in zip(
            everything(RandomFeatures(weights, sigma, block), target, x), exact, strict=True
        ):
            close(got, expected, 1e-5)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("name", ["relu", "relu+tanh"])
def test_half_precision_is_for_steps_only_and_does_not_mind_the_scale(
    name: str, size: float
) -> None:
    target, x = size * gaussian(300, 2), on_sphere(4, 6)
    v = Seeded(300, 6, seed=2).rows(0, 300)
    coarse = RandomFeatures(Stored(v, v.half()), activation(name), block=100)
    value, residual, *steps = everything(coarse, target, x)
    exact = everything(make_features(6, 300, name, seed=2), target, x)
    close(value, exact[0], 1e-5)
    close(residual, exact[1], 1e-5)
    for got, expected in zip(steps, exact[2:], strict=True):
        close(got, expected, 1e-2)
    assert not torch.allclose(steps[0].double(), exact[2], rtol=1e-6, atol=0)  # it was coarse


def test_resident_features_are_in_memory_and_the_same(saved: Path) -> None:
    for weights in (Seeded(300, 6, seed=2), Mapped(saved)):
        streamed = RandomFeatures(weights, activation("relu"))
        resident = streamed.resident()
        assert isinstance(resident.weights, Stored)
        assert torch.equal(resident.weights.tensor, weights.rows(0, 300))
        assert resident.resident().weights.tensor is resident.weights.tensor


@needs_gpu
def test_gpu_and_cpu_draw_the_same_numbers() -> None:
    v = Seeded(1000, 7, seed=1)
    assert torch.equal(v.to(torch.device("cuda"), torch.float32).rows(3, 999).cpu(), v.rows(3, 999))


@needs_gpu
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", ["relu", "relu+tanh"])
def test_gpu_and_cpu_agree(name: str, stored: bool) -> None:
    target, x = gaussian(3000, 2), on_sphere(5, 20)
    cpu = RandomFeatures(Seeded(3000, 20, seed=2), activation(name), block=700)
    gpu = cpu.to(torch.device("cuda"), torch.float32)
    gpu = gpu.resident() if stored else gpu
    value, residual, *steps = everything(gpu, target, x)
    expected_value, expected_residual, *expected_steps = everything(cpu, target, x)
    close(value, expected_value, 1e-5)
    close(residual, expected_residual, 1e-5)
    for got, expected in zip(steps, expected_steps, strict=True):
        close(got, expected, 1e-2)  # steps may be taken in half precision


@needs_gpu
def test_gpu_residual_at_the_truth_is_at_the_level_of_float32() -> None:
    problem = case(30, 6, 4)
    assert fitted(problem.problem.to("cuda"), problem.inputs).value < 1e-12


# The conformance check itself


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bundled_features_conform(name: str) -> None:
    check_features(make_features(5, 40, name), dim=5, samples=3, seed=1)
    check_features(RandomFeatures(Seeded(40, 5, seed=0), activation(name), block=7))


@dataclass(frozen=True)
class TwoRows:
    """Two feature rows a candidate, σ(Vx) and σ(Wx): k = 2, no moment."""

    v: Tensor
    w: Tensor
    name = "two rows"

    @property
    def dim(self) -> int:
        return self.v.shape[1]

    @property
    def width(self) -> int:
        return self.v.shape[0]

    device = torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    def linearize(self, candidates: Tensor) -> "TwoRowsLinearization":
        return TwoRowsLinearization(self, candidates)

    def moment(self, weights: Tensor, directions: Tensor) -> None:
        return None

    def to(self, device: torch.device, dtype: torch.dtype) -> "TwoRows":
        return TwoRows(self.v.to(device, dtype), self.w.to(device, dtype))

    def restrict(self, basis: Tensor) -> "TwoRows":
        return TwoRows(self.v @ basis, self.w @ basis)

    def substituted(self, activation: Activation) -> "TwoRows":
        return self

    def resident(self) -> "TwoRows":
        return self


@dataclass(frozen=True)
class TwoRowsLinearization:
    features: TwoRows
    candidates: Tensor

    def phi(self, x: Tensor) -> Tensor:
        rows = torch.stack([x @ self.features.v.T, x @ self.features.w.T], dim=1)
        return torch.tanh(rows).flatten(0, 1)

    def gram(self) -> Tensor:
        return self.phi(self.candidates) @ self.phi(self.candidates).T

    def apply(self, target: Tensor) -> Tensor:
        return self.phi(self.candidates) @ target

    def combine(self, coefficients: Tensor) -> Tensor:
        return self.phi(self.candidates).T @ coefficients

    def jacobian(self, a: Tensor) -> Tensor:
        return torch.func.jacrev(lambda x: self.phi(x).T @ a)(self.candidates)

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        return torch.einsum("pmnd,nd->pm", self.jacobian(coefficients), direction)

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        return torch.einsum("pmnd,pm->nd", self.jacobian(coefficients), target)

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return (self.phi(x).T @ coefficients * target).sum()

        def along(x: Tensor) -> Tensor:
            return (torch.func.grad(product)(x) * direction).sum()

        return torch.func.grad(along)(self.candidates)  # the Hessian is symmetric

    def curvature(self, coefficients: Tensor) -> Tensor:
        j = self.jacobian(coefficients)
        return torch.einsum("pmid,pmjd->ij", j, j) / self.features.dim


def test_features_of_another_make_conform() -> None:
    check_features(TwoRows(gaussian(12, 3), gaussian(12, 3, seed=1)), dim=3)


BREAKAGES: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "gram": lambda right: lambda self: right(self) + torch.eye(len(self.candidates)),
    "apply": lambda right: lambda self, t: 1.001 * right(self, t),
    "combine": lambda right: lambda self, a: 1.001 * right(self, a),
    "push": lambda right: lambda self, d, a: 1.001 * right(self, d, a),
    "pull": lambda right: lambda self, t, a: 1.001 * right(self, t, a),
    "bend": lambda right: lambda self, d, t, a: 1.001 * right(self, d, t, a),
    "curvature": lambda right: lambda self, a: torch.diag(right(self, a).diagonal()),
}


@pytest.mark.parametrize("method", BREAKAGES)
def test_check_features_notices_one_wrong_method(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = BREAKAGES[method](getattr(RandomLinearization, method))
    monkeypatch.setattr(RandomLinearization, method, wrong)
    with pytest.raises(AssertionError, match=method):
        check_features(make_features(4, 20, "tanh"))


def test_check_features_notices_a_wrong_slope_moment_and_dimension() -> None:
    features = make_features(4, 20, "relu")
    leaky = replace(features, activation=features.activation.leaky_backward())
    with pytest.raises(AssertionError, match="push is not the derivative of combine"):
        check_features(leaky)
    with pytest.raises(AssertionError, match="dim: expected 3, the features say 4"):
        check_features(features, dim=3)

    class Skewed(RandomFeatures):
        def moment(self, weights: Tensor, directions: Tensor) -> Tensor:
            return super().moment(weights, directions).roll(1, 0)

    with pytest.raises(AssertionError, match="moment is not a symmetric matrix"):
        check_features(Skewed(features.weights, features.activation))


def test_check_features_notices_a_wrong_restriction() -> None:
    class Unrotated(RandomFeatures):
        def restrict(self, basis: Tensor) -> RandomFeatures:
            kept = self.weights.rows(0, self.width)[:, : basis.shape[1]]
            return replace(self, weights=Stored(kept))

    class Forgetful(RandomFeatures):
        def restrict(self, basis: Tensor) -> RandomFeatures:
            return replace(super().restrict(basis), bias=None)

    features = make_features(4, 20, "tanh")
    for kind in (Unrotated, Forgetful):
        wrong = kind(features.weights, features.activation, bias=gaussian(20))
        with pytest.raises(AssertionError, match="restrict: has other features"):
            check_features(wrong)


def test_check_features_notices_rows_weighed_by_their_place_alone() -> None:
    """Φ with its i-th row times i: all products fit together, only the order matters."""

    class Weighed(RandomFeatures):
        def linearize(self, candidates: Tensor) -> RandomLinearization:
            here = super().linearize(candidates)
            place = torch.arange(1, len(candidates) + 1).to(candidates)[:, None]
            assert here._kept is not None
            here._kept = [replace(b, phi=place * b.phi, slope=place * b.slope) for b in here._kept]
            return here

    features = make_features(4, 20, "tanh")
    with pytest.raises(AssertionError, match="depends on the order of the candidates"):
        check_features(Weighed(features.weights, features.activation))


def test_check_features_notices_features_that_depend_on_the_order() -> None:
    class Ranked(RandomFeatures):
        def linearize(self, candidates: Tensor) -> RandomLinearization:
            rank = torch.arange(1, len(candidates) + 1).to(candidates)[:, None]
            return super().linearize(candidates * rank)

    features = make_features(4, 20, "polynomial:0,1")
    with pytest.raises(AssertionError):
        check_features(Ranked(features.weights, features.activation))
