"""Random features: one dense float64 oracle; streamed, mapped, stored and coarse V alike."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from exhume.equation.objective import fitted, gauss_newton
from exhume.errors import InputError
from exhume.features import NO_NORM, NO_SIGN, WEAK_SIGN, random
from exhume.features.activations import activation, smoothed_relu
from exhume.features.random import RandomFeatures
from exhume.features.weights import (
    GENERATORS,
    TILE,
    Mapped,
    Rows,
    Seeded,
    Stored,
    blocks,
    materialise,
    split,
)
from problems import (
    ACTIVATIONS,
    case,
    close,
    dense_random,
    dense_v,
    gaussian,
    make_features,
    make_problem,
    on_sphere,
    same_products,
)

CPU, F32 = torch.device("cpu"), torch.float32

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("n", "d", "p", "m"), [(1, 1, 3, 1), (4, 3, 29, 2), (6, 4, 5, 3)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_products_against_the_dense_oracle(name: str, n: int, d: int, p: int, m: int) -> None:
    plain = make_features(d, p, name)
    for features in (plain, replace(plain, bias=gaussian(p, seed=7), block=2)):
        same_products(features, dense_random(features), 1e-11, n, m)
        same_products(features.to(CPU, torch.float32), features, 1e-4, n, m)


def test_products_of_a_seed_that_is_read_again_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exhume.features.random.KEPT_BYTES", 0)
    weights = Seeded(40, 5, seed=0).to(CPU, torch.float64)
    features = RandomFeatures(weights, activation("gelu"), block=7)
    assert features.linearize(on_sphere(1, 5))._kept is None
    same_products(features, dense_random(features))
    x, draw, drawn = on_sphere(3, 5), Seeded.rows, []
    gram = features.linearize(x).gram()
    monkeypatch.setattr(Seeded, "rows", lambda *given: drawn.append(1) or draw(*given))
    linear = features.linearize(x)
    linear.apply(gaussian(40, 2))
    assert torch.equal(linear.gram(), gram) and len(drawn) == 6  # V is read once for both


@pytest.mark.parametrize("r", [1, 3, 5])
@pytest.mark.parametrize("stored", [False, True])
def test_features_of_coordinates_are_those_of_the_point(r: int, stored: bool) -> None:
    v = Seeded(17, 5, seed=3).to(CPU, torch.float64)
    weights = materialise(v) if stored else v
    features = RandomFeatures(weights, activation("gelu"), block=3, bias=gaussian(17))
    basis = torch.linalg.qr(gaussian(5, r, seed=r)).Q
    inside = features.restrict(basis)
    reduced = dense_v(features) @ basis
    assert inside.spread == pytest.approx(reduced.square().mean().sqrt().item(), rel=1e-9)
    same_products(inside, dense_random(features).restrict(basis), n=2, m=1)


def test_substituted_exact_and_leaky_and_what_a_bias_shows() -> None:
    features, sigma = make_features(4, 20, "relu"), smoothed_relu(3.0)
    x, t, a = on_sphere(3, 4), gaussian(20, 1), gaussian(3, 1)
    there = features.substituted(sigma).linearize(x)
    close(there.gram(), features.linearize(x).gram())
    slope = torch.sigmoid(3 * x @ dense_v(features).T)
    close(there.pull(t, a), (a @ t.T * slope) @ dense_v(features))
    other = make_features(4, 20, "tanh")
    assert other.substituted(sigma) is other
    assert features.leaky().activation.slope(-t).min() == 0.02
    v = dense_v(features).float()
    exact = RandomFeatures(Stored(v, v.half()), activation("relu")).exact()
    assert exact.weights.half is None and exact.full_precision
    assert features.undetermined == replace(features, bias=0 * t[:, 0]).undetermined
    assert features.undetermined == (NO_NORM, WEAK_SIGN) and other.undetermined == (NO_SIGN,)
    assert replace(features, bias=t[:, 0]).undetermined == ()


@pytest.mark.parametrize(("block", "spread"), [(None, 0.3), (1, None), (7, 0.3), (100, None)])
def test_moment_against_its_formula(block: int | None, spread: float | None) -> None:
    features = replace(make_features(5, 23), block=block, spread=spread)
    v, w, q = dense_v(features), gaussian(23), gaussian(5, 2, seed=1)
    eye, scale = torch.eye(5, dtype=torch.float64), 5 if spread is None else 1 / spread**2
    dense = sum(w[k] * (scale * torch.outer(v[k], v[k]) - eye) for k in range(23)) / 23
    close(features.moment(w, q), dense @ q)


@pytest.mark.parametrize(("name", "second"), [("relu", math.tau**-0.5), ("polynomial:0,0,1", 2)])
def test_moment_points_at_the_samples(name: str, second: float) -> None:
    features = make_features(4, 100_000, name)
    x, a = on_sphere(2, 4), torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    w = features.linearize(x).combine(a)[:, 0]
    moment = features.moment(w, torch.eye(4, dtype=torch.float64))
    assert (moment - second * (x.T * a[:, 0]) @ x / 4).abs().max() < 0.07 * second


@pytest.mark.parametrize("block", [7, 256, 299, 10_000])
def test_block_size_and_source_of_v_do_not_matter(block: int, tmp_path: Path) -> None:
    seeded, exact = Seeded(300, 6, seed=2), make_features(6, 300, "relu+tanh", seed=2)
    np.save(tmp_path / "v.npy", seeded.rows(0, 300).numpy())
    w, q = gaussian(300), gaussian(6, 2, seed=1)
    for weights in (seeded, Mapped(tmp_path / "v.npy"), materialise(seeded)):
        features = RandomFeatures(weights, activation("relu+tanh"), block)
        same_products(features, exact, 1e-5, n=4)
        close(features.moment(w.float(), q.float()), exact.moment(w, q), 1e-5)
        resident = features.resident()
        assert torch.equal(resident.weights.tensor, seeded.rows(0, 300))
        assert resident.resident().weights.tensor is resident.weights.tensor


def test_a_cpu_may_round_the_factors_of_steps_where_v_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = make_features(64, 600, "relu", seed=2)
    stored = RandomFeatures(Stored(dense_v(exact).float()), activation("relu"))
    same_products(stored, exact, 1e-5)
    said, say = set[str](), torch.set_float32_matmul_precision
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda x: (said.add(x), say(x)))
    monkeypatch.setattr(random, "LARGE", 600 * 64)
    same_products(stored, exact, 1e-5, steps=2e-2)
    assert said == {"medium", "highest"}
    same_products(stored.exact(), exact, 1e-5)
    said.clear()
    x = on_sphere(4, 64).float()
    stored.exact().linearize(x).push(x, gaussian(4, 1))
    assert said == {"highest"}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("parts", [1, 2])
def test_half_precision_is_for_steps_only_and_does_not_mind_the_scale(
    size: float, parts: int
) -> None:
    exact = make_features(6, 300, "relu", seed=2)
    v = dense_v(exact).float()
    coarse = RandomFeatures(Stored(v, *split(v)[:parts]), activation("relu"), block=100)
    for m in (1, 2):
        same_products(coarse, exact, 1e-5, m=m, steps=1e-2)
    w, q = size * gaussian(300), size * gaussian(6, 2, seed=1)
    close(coarse.moment(w.float(), q.float()), exact.moment(w, q), 1e-2)
    t, a = size * gaussian(300, 2), gaussian(4, 2)
    got, expected = (f.linearize(on_sphere(4, 6)).pull(t.to(f.dtype), a) for f in (coarse, exact))
    close(got, expected, 1e-2)
    assert not torch.allclose(got.double(), expected, rtol=1e-6, atol=0)  # it was coarse


@needs_gpu
@pytest.mark.parametrize("name", ["relu", "relu+tanh"])
@pytest.mark.parametrize("stored", [False, True])
def test_gpu_and_cpu_agree(stored: bool, name: str) -> None:
    seeded, cuda = Seeded(3000, 20, seed=2), torch.device("cuda")
    drawn = seeded.to(cuda, torch.float32)
    assert torch.equal(drawn.rows(3, 999).cpu(), seeded.rows(3, 999)) and drawn.coarse
    for half, expected in zip(drawn.halves(3, 999), split(seeded.rows(3, 999)), strict=True):
        assert torch.equal(half.cpu(), expected)
    assert drawn.halves(3, 999, fine=False)[1] is None
    cpu = RandomFeatures(seeded, activation(name), block=700)
    gpu = cpu.to(cuda, torch.float32)
    gpu = gpu.resident() if stored else gpu
    assert (gpu.weights.half is not None) == (gpu.weights.low is not None) == stored
    for m in (1, 2):
        same_products(gpu, cpu.to(CPU, torch.float64), 1e-5, n=5, m=m, steps=1e-2)
    problem = case(30, 6, 4)
    assert fitted(problem.problem.to("cuda"), problem.inputs).value < 1e-12


ZERO = slice(468_600, 468_700)  # rows of seed 0 with a radius of zero, in column 12 of 468,617


@needs_gpu
@pytest.mark.parametrize("n", [1, 17, 100, 128, 129])
@pytest.mark.parametrize("rows", [slice(0, 3000), slice(140, 141), slice(130, 20_000), ZERO])
def test_what_kernels_multiply_as_they_draw_is_v(n: int, rows: slice) -> None:
    d = 64 if n == 128 else 2100  # of which nothing is padded, and which is added up in parts
    seeded = Seeded(500_000, d, seed=0 if rows is ZERO else 2**40 + 5)
    v, drawn = seeded.rows(rows.start, rows.stop).double(), seeded.to(torch.device("cuda"), F32)
    assert drawn.drawn(n) == (n < 129) and (rows is not ZERO or v[17, 12] == 0)
    left, right = gaussian(d, n).half().T, gaussian(n, rows.stop - rows.start, seed=1).half()
    rest, close_to = (1e-3 * gaussian(n, d, seed=2)).half(), partial(close, least=1.0)
    for part, first in ((drawn, 0), (Rows(drawn, slice(rows.start, 480_000)), rows.start)):
        at = rows.start - first, rows.stop - first
        rough, fine = part.across(*at, left.cuda()), part.across(*at, left.cuda(), rest.cuda())
        assert (rough.dtype, fine.dtype) == (torch.float16, torch.float32)
        close_to(rough, left.double() @ v.T, 2e-3)
        close_to(fine, (left.double() + rest.double()) @ v.T, 5e-6)
        close_to(part.along(*at, right.cuda()), right.double() @ v, 1e-3)


@needs_gpu
@pytest.mark.parametrize("m", [1, 2])
def test_a_graph_gives_the_products_that_kernels_one_by_one_give(
    m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = RandomFeatures(Seeded(3000, 20, seed=2), activation("relu"), block=700)
    problem = make_problem(features, gaussian(3000, m)).to("cuda", torch.float32)
    problem = replace(problem, features=problem.features.resident())
    for seed in range(3):  # the second and third are replayed
        fit = fitted(problem, on_sphere(5, 20, seed=seed))
        direction = gaussian(5, 20, seed=seed).float().cuda()
        whole = gauss_newton(fit, direction)
        with monkeypatch.context() as patch:
            patch.setattr("exhume.features.random.LAUNCHED", 0)
            close(whole, gauss_newton(fit, direction), 1e-3)
    assert len(problem.features.graphs.recorded) == 1


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 600), st.integers(0, 600), st.integers(30, 700))
def test_seeded_numbers_do_not_depend_on_how_they_are_read(a: int, b: int, size: int) -> None:
    start, stop = sorted((a, b))
    v = Seeded(600, 3, seed=5)
    whole = v.rows(0, 600)
    assert torch.equal(v.rows(start, stop), whole[start:stop])
    read = [v.rows(part.start, part.stop) for part in blocks(600, size)]
    assert torch.equal(torch.cat(read), whole)
    assert torch.equal(materialise(v, size).tensor, whole)


@pytest.mark.parametrize("generator", GENERATORS)
def test_seeded_entries_are_independent_normals(generator: str) -> None:
    d = 50
    v = Seeded(4 * TILE, d, 3, generator=generator).rows(0, 4 * TILE).double() * math.sqrt(d)
    assert stats.kstest(v.flatten().numpy(), "norm").pvalue > 1e-3
    other = Seeded(TILE, d, 4, generator=generator).rows(0, TILE).double() * math.sqrt(d)
    tiles = torch.cat([v.reshape(4, -1), other.reshape(1, -1)])  # streams of two seeds
    for rows in (tiles.T, v, v.T):
        correlations = rows.T @ rows / len(rows) - torch.eye(rows.shape[1])
        assert correlations.abs().max() < 5 * math.sqrt(2 / len(rows)) * (1 + d / len(rows))


def test_the_numbers_of_older_models_are_frozen() -> None:
    frozen = Seeded(TILE + 1, 3, seed=0, generator="tiles")
    first = [[-0.08621105, -0.79230708, 0.00454071], [-0.01342794, -0.04608301, 0.40077439]]
    close(frozen.rows(0, 2), torch.tensor(first), 1e-6)
    next_tile = [[-0.83697569, 0.79243547, -1.01824534]]
    close(frozen.rows(TILE, TILE + 1), torch.tensor(next_tile), 1e-6)


@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray])
def test_mapped_reads_what_was_saved(layout: Callable[..., np.ndarray], tmp_path: Path) -> None:
    v = gaussian(11, 4).numpy()
    np.save(tmp_path / "v.npy", layout(v))
    mapped = Mapped(tmp_path / "v.npy", dtype=torch.float64)
    assert mapped.shape == (11, 4)
    assert torch.equal(mapped.rows(3, 9), torch.from_numpy(v[3:9]))
    assert mapped.to(CPU, torch.float32).rows(0, 1).dtype == torch.float32


def truncated(path: Path) -> None:
    np.save(path, np.ones((30, 4)))
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "cannot be read"),
        (truncated, "cannot be read"),
        (lambda path: path.write_text("not numbers"), "cannot be read"),
        (lambda path: np.save(path, np.ones(5)), "expected a matrix"),
        (lambda path: np.save(path, np.array([[1j]])), "expected a matrix"),
        (lambda path: np.save(path, np.array([[object()]]), allow_pickle=True), "cannot be read"),
    ],
)
def test_a_bad_file_or_seed_is_named_before_any_work(
    write: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "v.npy")
    with pytest.raises(InputError, match=rf"v\.npy: {words}"):
        Mapped(tmp_path / "v.npy")
    with pytest.raises(InputError, match="seed: expected a whole number of at least 0"):
        Seeded(3, 3, seed=-1)
    with pytest.raises(InputError, match="seed: expected a whole number below 2⁶⁴"):
        Seeded(3, 3, seed=2**64)
    with pytest.raises(InputError, match="generator: expected one of philox, tiles, got 'dice'"):
        Seeded(3, 3, seed=0, generator="dice")
