"""Features of any module: products, objective and conformance against dense float64 oracles."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exhume.equation.objective import fitted, gauss_newton, gradient
from exhume.equation.problem import Problem
from exhume.features import Features
from exhume.features.activations import smoothed_relu, softplus
from exhume.features.gradient import ParameterGradients
from exhume.features.last_layer import LastLayer, LastLayerLinearization
from exhume.features.layers import Elementwise
from exhume.features.modules import ModuleFeatures, probes, sum_over_blocks
from exhume.features.network import known_network
from exhume.features.random import RandomFeatures
from exhume.models.formulation import features_at
from exhume.testing import check_features
from nets import SIZES, Net, dense_rows, dense_slopes, make, one_row, with_options
from problems import ACTIVATIONS, dense_complement, gaussian, on_sphere

fast = settings(max_examples=10, deadline=None)

DENSE = {
    "two_layer": ["1.weight", "1.bias", "3.weight", "3.bias"],
    "mlp": ["1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias"],
}


def close(got: Tensor, expected: Tensor, relative: float = 1e-10) -> None:
    size = max(expected.abs().max().item(), 1e-30)
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=0, atol=relative * size, check_stride=False
    )


def by_torch(features: Features) -> ParameterGradients:
    """The same gradients by derivatives of torch, without the fast path of dense layers."""
    assert isinstance(features, ParameterGradients)
    return ParameterGradients(
        features.network, features.points, features.title, block=features.block
    )


def check_products(
    features: object, phi: Tensor, slopes: Tensor, x: Tensor, m: int, relative: float = 1e-10
) -> None:
    """Every product of a linearisation against Φ (n·k, p) and ∂Φ/∂x (n, k, p, d)."""
    n, k, p, d = slopes.shape
    here = features.linearize(x)  # type: ignore[attr-defined]
    a, t, direction = gaussian(n * k, m, seed=1), gaussian(p, m, seed=2), gaussian(n, d, seed=3)
    jacobian = torch.einsum("ikpd,ikm->pmid", slopes, a.reshape(n, k, m))  # of ΦᵀA
    for _ in range(2):  # what is kept for the second time must be right, too
        close(here.gram(), phi @ phi.T)
        close(here.apply(t), phi @ t)
        close(here.combine(a), phi.T @ a)
        close(here.push(direction, a), torch.einsum("pmid,id->pm", jacobian, direction), relative)
        close(here.pull(t, a), torch.einsum("pmid,pm->id", jacobian, t), relative)
        t, direction = gaussian(p, m, seed=4), gaussian(n, d, seed=5)
    curvature = torch.einsum("pmid,pmjd->ij", jacobian, jacobian) / d
    close(here.curvature(a), curvature, relative)


# Products


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("point", ["initial", "final", "midpoint", "both"])
@pytest.mark.parametrize("name", ["two_layer", "mlp"])
def test_last_layer_products_against_the_dense_oracle(
    name: str, point: str, chunk: int | None, m: int
) -> None:
    net, x = make(name), on_sphere(3, 4)
    points = net.points(point)
    features = LastLayer(net.network, tuple(points), "last", chunk=chunk)
    phi = dense_rows(net, points, None, x)
    check_products(features, phi, dense_slopes(net, points, None, x), x, m)


@pytest.mark.parametrize(
    ("fast", "chunk", "keep"),
    [
        (True, None, None),
        (False, None, None),
        (False, 1, True),
        (False, None, False),
        (False, 2, False),
    ],
)
@pytest.mark.parametrize("point", ["midpoint", "both"])
@pytest.mark.parametrize(
    ("name", "block", "chosen"),
    [
        ("two_layer", "all", slice(None)),
        ("two_layer", "first", slice(2)),
        ("two_layer", "3.*,1.bias", slice(1, None)),
        ("mlp", "all", slice(None)),
        ("mlp", "3.weight", slice(2, 3)),
    ],
)
def test_gradient_products_against_the_dense_oracle(
    name: str,
    block: str,
    chosen: slice,
    point: str,
    fast: bool,
    chunk: int | None,
    keep: bool | None,
) -> None:
    net, x = make(name), on_sphere(3, 4)
    names, points = DENSE[name][chosen], net.points(point)
    features = net.problem(block, point).features
    if not fast:
        features = with_options(by_torch(features), chunk=chunk, keep=keep)
    phi = dense_rows(net, points, names, x)
    check_products(features, phi, dense_slopes(net, points, names, x), x, 2)


@pytest.mark.parametrize("point", ["midpoint", "both"])
@pytest.mark.parametrize("parameters", ["last", "first", "all"])
@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_products_of_images_against_finite_differences(
    name: str, parameters: str, point: str
) -> None:
    net, x, points = make(name), on_sphere(2, 16), make(name).points(point)
    every = [key for key, _ in net.plain.named_parameters()]
    stem = [key for key in every if key.startswith("1.")]
    names = {"last": None, "first": stem, "all": every}[parameters]
    phi = dense_rows(net, points, names, x)
    slopes = dense_slopes(net, points, names, x, exact=False)
    check_products(net.problem(parameters, point).features, phi, slopes, x, 2, relative=1e-6)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("point", ["midpoint", "both"])
@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("name", ["two_layer", "mlp", "resnet"])  # torch's norm would be wrong
def test_bend_against_double_backward(
    name: str, parameters: str, point: str, chunk: int | None
) -> None:
    """The Hessian of ⟨ΦᵀA, T⟩ in each candidate, times D."""
    net, points = make(name), make(name).points(point)
    fast = net.problem(parameters, point).features
    slow = by_torch(fast) if parameters == "all" else LastLayer(net.network, tuple(points), "")
    names = None if parameters == "last" else list(slow.block)  # type: ignore[union-attr]
    x, direction = on_sphere(2, fast.dim), gaussian(2, fast.dim, seed=3)
    k = len(points) * (1 if names is None else 2)
    a, t = gaussian(2 * k, 2, seed=1), gaussian(slow.width, 2, seed=2)

    weights = (a @ t.T).reshape(2, len(points), -1, slow.width)
    expected = torch.zeros_like(x)
    for i, at in itertools.product(range(2), range(len(points))):

        def product(row: Tensor, i: int = i, at: int = at) -> Tensor:
            return (one_row(net, points[at], names, row) * weights[i, at]).sum()

        expected[i] += torch.autograd.functional.hvp(product, x[i], direction[i])[1]
    for features in (fast, with_options(slow, chunk=chunk)):
        close(features.linearize(x).bend(direction, t, a), expected, 1e-9)


# Surrogates


def with_layers(*between: nn.Module) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A net of dense layers of 5 units, with those layers between, on inputs of shape (2, 2)."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(4, 5)]
    for middle in between:
        layers += [middle, nn.Linear(5, 5)]
    module = nn.Sequential(*layers[:-1], nn.Linear(5, 2)).double().eval()
    return module, {key: w.detach() for key, w in module.state_dict().items()}


@pytest.mark.parametrize("kind", [LastLayer, ParameterGradients])
def test_substituted_features_are_those_of_another_network(kind: type) -> None:
    """ReLU layers of any make are swapped, also one that is used twice; others stay."""
    relu = nn.ReLU()
    module, weights = with_layers(relu, nn.Tanh(), relu, Elementwise("relu"))
    smooth = nn.Softplus(beta=3.0, threshold=1000.0)
    other, _ = with_layers(smooth, nn.Tanh(), smooth, smooth)
    block = {} if kind is LastLayer else {"block": tuple(weights)}
    here = kind(known_network(module, (2, 2), 2), (weights,), "title", **block)
    there = kind(known_network(other, (2, 2), 2), (weights,), "title", **block)
    swapped = here.substituted(softplus(3.0))
    x = on_sphere(3, 4)
    one, two = swapped.linearize(x), there.linearize(x)
    a, t = gaussian(len(one.gram()), 1), gaussian(here.width, 1)
    direction = gaussian(3, 4, seed=1)
    close(one.gram(), two.gram())
    close(one.combine(a), two.combine(a))
    close(one.push(direction, a), two.push(direction, a))
    close(one.pull(t, a), two.pull(t, a))
    close(one.bend(direction, t, a), two.bend(direction, t, a))
    names = [name for name, _ in module.named_parameters()]
    own = swapped.network.module
    assert [name for name, _ in own.named_parameters()] == names
    pairs = zip(own.parameters(), module.parameters(), strict=True)
    assert all(swap is kept for swap, kept in pairs)  # no copy of the weights
    assert isinstance(module[2], nn.ReLU)
    assert module[2] is relu
    assert swapped.substituted(softplus(9.0)) is swapped  # no ReLU is left
    check_features(swapped, samples=2)


def test_substituted_features_where_there_is_no_relu() -> None:
    for name in ("mlp", "vit"):
        for parameters in ("last", "all"):
            features = make(name).problem(parameters, "both").features
            assert features.substituted(smoothed_relu(10.0)) is features


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_a_surrogate_in_a_residual_network(parameters: str) -> None:
    """The values of the head's input stay; its derivative is that of the surrogate."""
    net = make("resnet")
    features = net.problem(parameters, "midpoint").features
    swapped = features.substituted(smoothed_relu(2.0))
    x = on_sphere(2, 16)
    one, two = features.linearize(x), swapped.linearize(x)
    a, t = gaussian(len(one.gram()), 1), gaussian(features.width, 1)
    if parameters == "last":
        close(two.gram(), one.gram())
    direction, other = gaussian(2, 16, seed=1), gaussian(2, 16, seed=2)
    assert not torch.allclose(two.pull(t, a), one.pull(t, a))
    forth = (two.push(direction, a) * t).sum()
    assert forth.item() == pytest.approx((two.pull(t, a) * direction).sum().item(), rel=1e-9)
    bent = two.bend(direction, t, a)
    assert bent.abs().max() > 1e-3
    symmetric = (two.bend(other, t, a) * direction).sum(1)
    close((bent * other).sum(1), symmetric)
    assert not one.bend(direction, t, a).any()


def test_gradients_of_a_two_layer_net_by_hand() -> None:
    """f = W₂ tanh(W₁x + b₁) + b₂, so ∇W₂ f_c = e_c tanhᵀ and ∇W₁ f_c = (W₂ᵀe_c ⊙ tanh′) xᵀ."""
    net, x = make("two_layer"), on_sphere(3, 4)
    (weights,) = net.points("midpoint")
    first, b, last = (weights[name].numpy() for name in ("1.weight", "1.bias", "3.weight"))
    rows = []
    for sample in x.numpy():
        hidden = np.tanh(first @ sample + b)
        for c in range(2):
            unit = np.eye(2)[c]
            back = last[c] * (1 - hidden**2)
            parts = [np.outer(back, sample), back, np.outer(unit, hidden), unit]
            rows.append(np.concatenate([part.ravel() for part in parts]))
    identity = torch.eye(6, dtype=torch.float64)
    fast = net.problem("all").features
    for features in (fast, *(with_options(by_torch(fast), keep=keep) for keep in (True, False))):
        close(features.linearize(x).combine(identity).T, torch.from_numpy(np.array(rows)))


def test_a_network_of_one_linear_layer_has_its_input_for_features() -> None:
    module = nn.Linear(4, 2).double()
    weights = {key: w.detach() for key, w in module.state_dict().items()}
    network = known_network(module, (4,), 2)
    x = on_sphere(3, 4)
    here = LastLayer(network, (weights,), "last").linearize(x)
    close(here.gram(), x @ x.T)
    close(here.combine(torch.eye(3, dtype=torch.float64)), x.T)


# The fast path of one hidden layer


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(ACTIVATIONS), st.booleans(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_one_hidden_layer_has_the_same_features_on_the_fast_path(
    name: str, bias: bool, n: int, m: int, draw: st.DataObject
) -> None:
    seed = draw.draw(st.integers(0, 10**6))
    net = make("two_layer", m, seed, activation=name, bias=bias)
    for point in ("initial", "final", "midpoint"):
        quick = features_at(net.network, net.initial, net.trained, "last", point)
        slow = LastLayer(net.network, tuple(net.points(point)), "last")
        assert isinstance(quick, RandomFeatures)
        assert (quick.width, quick.dim, quick.dtype) == (slow.width, slow.dim, slow.dtype)
        x, direction = on_sphere(n, 4, seed), gaussian(n, 4, seed=seed)
        a, t = gaussian(n, m, seed=seed), gaussian(7, m, seed=seed)
        one, other = quick.linearize(x), slow.linearize(x)
        close(one.gram(), other.gram())
        close(one.apply(t), other.apply(t))
        close(one.combine(a), other.combine(a))
        close(one.push(direction, a), other.push(direction, a))
        close(one.pull(t, a), other.pull(t, a))
        close(one.curvature(a), other.curvature(a))


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.Tanh(), "tanh"),
        (nn.GELU(), "gelu"),
        (nn.Softplus(), "softplus"),
        (nn.GELU(approximate="tanh"), None),
        (nn.Softplus(beta=2), None),
        (nn.SiLU(), None),
        (nn.LeakyReLU(), None),
    ],
)
def test_activations_of_torch_are_recognised_or_left_to_torch(
    layer: nn.Module, name: str | None
) -> None:
    parts = [nn.Flatten(), nn.Linear(4, 7), layer, nn.Dropout(0.5), nn.Linear(7, 2)]
    module = nn.Sequential(*parts).double().eval()
    weights = {key: w.detach() for key, w in module.state_dict().items()}
    features = features_at(known_network(module, (2, 2), 2), weights, weights, "last", "final")
    assert isinstance(features, RandomFeatures) == (name is not None)
    x = on_sphere(3, 4)
    hidden = module[:-1](x.reshape(3, 2, 2)).detach()
    close(features.linearize(x).combine(torch.eye(3, dtype=torch.float64)).T, hidden)


def test_the_fast_path_is_not_for_another_head() -> None:
    """With d = h nothing but the values would tell."""
    net = make("two_layer", outputs=4, width=4)
    other = replace(net.network, head="1")
    features = features_at(other, net.initial, net.trained, "last", "final")
    x = on_sphere(3, 4)
    close(features.linearize(x).combine(torch.eye(3, dtype=torch.float64)).T, x)


# Conformance


@pytest.mark.parametrize("point", ["midpoint", "both"])
@pytest.mark.parametrize("parameters", ["last", "all", "first"])
@pytest.mark.parametrize("name", SIZES)
def test_every_network_conforms(name: str, parameters: str, point: str) -> None:
    features = make(name).problem(parameters, point).features
    check_features(features, dim=math.prod(SIZES[name]["shape"]), samples=2)


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_streamed_features_and_relu_conform(parameters: str) -> None:
    net = make("mlp", activation="relu")
    features = net.problem(parameters, "both").features
    if parameters == "last":
        check_features(with_options(features, chunk=1))
    else:
        check_features(with_options(by_torch(features), chunk=1, keep=False))


def test_more_axes_than_probes_leave_an_estimate() -> None:
    features = make("two_layer", shape=[40], width=300).problem("first").features
    check_features(features, samples=2)  # allows half of its size
    x, a = on_sphere(2, 40), gaussian(4, 1)
    estimate = features.linearize(x).curvature(a)
    assert torch.linalg.eigvalsh(estimate).min() >= 0


def test_random_probes_have_the_right_mean() -> None:
    like = torch.zeros((), dtype=torch.float64)
    assert torch.equal(probes(5, like), torch.eye(5, dtype=torch.float64))
    z = probes(50, like)
    close(z.square(), torch.full_like(z, 1 / 50))  # each |z| is 1: exact for multiples of I
    assert len(z) < 50


def swapped_rows(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """All first rows before all second rows, in place of row after row of each candidate."""

    def wrong(self: ParameterGradients, candidates: Tensor) -> Tensor:
        rows = right(self, candidates)
        return rows.transpose(0, 1).reshape(rows.shape)

    return wrong


def test_check_features_notices_rows_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    features = by_torch(make("two_layer").problem("all").features)
    check_features(features)
    wrong = swapped_rows(ParameterGradients.all_rows)
    monkeypatch.setattr(ParameterGradients, "all_rows", wrong)
    with pytest.raises(AssertionError, match=r"push is not the derivative of combine|order"):
        check_features(features)


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda self, basis: self, "restrict"),
        (lambda self, basis: ModuleFeatures.restrict(self, -basis), "restrict: has other features"),
        (lambda self, basis: ModuleFeatures.restrict(self, 2 * basis), "restrict"),
    ],
)
def test_check_features_notices_a_wrong_restriction(
    parameters: str, wrong: Callable[..., object], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make("mlp")
    features = net.problem(parameters).features
    monkeypatch.setattr(type(features), "restrict", wrong)
    with pytest.raises((AssertionError, RuntimeError), match=f"{sentence}|shape"):
        check_features(features)


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("factor", [0.999, 16.0])
def test_check_features_notices_a_wrong_curvature(
    parameters: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = make("mlp").problem(parameters, "both").features
    kind = type(features.linearize(on_sphere(1, 4)))
    right = kind.curvature
    monkeypatch.setattr(kind, "curvature", lambda self, a: factor * right(self, a))
    with pytest.raises(AssertionError, match="curvature"):
        check_features(features)


def test_check_features_notices_a_point_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_point(self: LastLayerLinearization) -> list[Callable[[Tensor], Tensor]]:
        weights = self.features.points[0]
        return [lambda x: self.features.network.hidden(weights, x) for _ in self.features.points]

    monkeypatch.setattr(LastLayerLinearization, "_functions", one_point)
    check_features(make("mlp").problem("last", "midpoint").features)  # there is one point
    with pytest.raises(AssertionError, match="push is not the derivative of combine"):
        check_features(make("mlp").problem("last", "both").features)


# Invariances


@fast
@given(
    st.sampled_from(list(SIZES)),
    st.sampled_from(["last", "all"]),
    st.sampled_from(["midpoint", "both"]),
    st.permutations(range(4)),
    st.integers(0, 1000),
)
def test_candidates_in_another_order_give_the_same(
    name: str, parameters: str, point: str, order: list[int], seed: int
) -> None:
    problem = make(name, seed=seed).problem(parameters, point)
    x = on_sphere(4, problem.dim, seed)
    one, other = fitted(problem, x), fitted(problem, x[order])
    k = one.rows
    rows = [i * k + j for i in order for j in range(k)]
    gram = one.linearization.gram()
    close(other.linearization.gram(), gram[rows][:, rows])
    t = gaussian(*problem.target.shape, seed=seed)
    close(other.linearization.apply(t), one.linearization.apply(t)[rows])
    a = gaussian(4 * k, t.shape[1], seed=seed + 1)
    close(other.linearization.combine(a[rows]), one.linearization.combine(a))
    close(other.linearization.pull(t, a[rows]), one.linearization.pull(t, a)[order])
    curvature = one.linearization.curvature(a)
    close(other.linearization.curvature(a[rows]), curvature[order][:, order])
    assert other.value == pytest.approx(one.value, rel=1e-6, abs=1e-7)
    assert one.shares.shape == (4, k * t.shape[1])


@fast
@given(st.sampled_from(list(SIZES)), st.sampled_from(["last", "all"]), st.integers(0, 1000))
def test_single_precision_is_close_to_double(name: str, parameters: str, seed: int) -> None:
    double = make(name, seed=seed).problem(parameters, "both")
    single = double.to("cpu", torch.float32)
    assert single.features.dtype == single.target.dtype == torch.float32
    x, direction = on_sphere(2, double.dim, seed), gaussian(2, double.dim, seed=seed)
    one, other = double.features.linearize(x), single.features.linearize(x)
    k = len(one.gram()) // 2
    t = gaussian(*double.target.shape, seed=seed).float().double()
    a = gaussian(2 * k, t.shape[1], seed=seed).float().double()
    rounding = 3e-3 if name == "vit" else 1e-5  # a norm of four numbers can be ill-conditioned
    close(other.gram(), one.gram(), rounding)
    close(other.apply(t), one.apply(t), rounding)
    close(other.combine(a), one.combine(a), rounding)
    close(other.push(direction.float(), a), one.push(direction, a), 10 * rounding)
    close(other.pull(t.float(), a), one.pull(t, a), 10 * rounding)
    close(other.curvature(a), one.curvature(a), 10 * rounding)
    for got in (other.gram(), other.apply(t), other.curvature(a)):
        assert got.dtype == torch.float64
    for got in (other.combine(a), other.push(direction.float(), a), other.pull(t.float(), a)):
        assert got.dtype == torch.float32


@pytest.mark.parametrize("keep", [True, False])
def test_single_precision_gradients_may_be_streamed(keep: bool) -> None:
    double = make("mlp").problem("all", "both")
    single = by_torch(double.to("cpu", torch.float32).features)
    features = with_options(single, keep=keep, chunk=1)
    x = on_sphere(2, 4)
    one, other = double.features.linearize(x), features.linearize(x)
    a, t = gaussian(8, 2), gaussian(features.width, 2)
    close(other.gram(), one.gram(), 1e-5)
    close(other.apply(t), one.apply(t), 1e-5)
    close(other.combine(a), one.combine(a), 1e-5)
    assert other.gram().dtype == other.apply(t).dtype == torch.float64


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("name", ["two_layer", "vit"])
def test_a_subspace_of_a_subspace_is_a_subspace(name: str, parameters: str) -> None:
    features = make(name).problem(parameters, "both").features
    d = features.dim
    outer = torch.linalg.qr(gaussian(d, d - 1)).Q
    inner = torch.linalg.qr(gaussian(d - 1, 2, seed=1)).Q
    twice, once = features.restrict(outer).restrict(inner), features.restrict(outer @ inner)
    assert twice.dim == once.dim == 2
    z = gaussian(3, 2, seed=2)
    rows = len(features.linearize(z @ (outer @ inner).T).gram())
    a, t = gaussian(rows, 1), gaussian(features.width, 1)
    full = features.linearize(z @ (outer @ inner).T)
    for reduced in (twice, once):
        here = reduced.linearize(z)
        close(here.combine(a), full.combine(a))
        close(here.pull(t, a), full.pull(t, a) @ outer @ inner)
        assert here.curvature(a).shape == (3, 3)


def test_sums_over_blocks_are_in_double() -> None:
    left, right = gaussian(2, 1000).float(), gaussian(3, 1000, seed=1).float()
    got = sum_over_blocks(left, right, block=7)
    close(got, left.double() @ right.double().T, 1e-14)


# What features cannot show


@pytest.mark.parametrize(
    ("activation", "bias", "words"),
    [
        ("relu", False, ["norm"]),
        ("relu", True, []),
        ("tanh", False, ["negative"]),
        ("softplus", False, []),
    ],
)
@pytest.mark.parametrize("parameters", ["last", "all"])
def test_what_a_sample_does_not_leave_is_said(
    activation: str, bias: bool, words: list[str], parameters: str
) -> None:
    net = make("mlp", activation=activation, bias=bias)
    said = net.problem(parameters).features.undetermined
    assert len(said) == len(words)
    assert all(word in sentence for word, sentence in zip(words, said, strict=True))


# One n×n system for all outputs


@fast
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(["two_layer", "mlp"]))
def test_the_last_layer_needs_no_jacobian_of_all_outputs(c: int, n: int, name: str) -> None:
    """The Jacobian of c outputs in W_L has rows e_c ⊗ φ(x); its Gram matrix is I ⊗ ΦΦᵀ."""
    net, x = make(name, outputs=c), on_sphere(n, 4)
    problem = net.problem("last")
    head = f"{len(net.plain) - 1}.weight"
    phi = dense_rows(net, net.points("midpoint"), [head], x)  # (n·c, c·h), by autograd
    change = (net.trained[head] - net.initial[head]).flatten()
    left = dense_complement(phi) @ change
    point = fitted(problem, x)
    assert point.value == pytest.approx((left @ left / (change @ change)).item(), rel=1e-7)
    assert point.coefficients.shape == (n, c)
    close(point.residual.T.flatten(), left, 1e-7)
    full = fitted(net.problem(head), x)  # as a block of parameters
    assert full.coefficients.shape == (n * c, 1)
    assert full.value == pytest.approx(point.value, rel=1e-7)
    close(full.shares, point.shares, 1e-6)
    close(gradient(net.problem(head), full), gradient(problem, point), 1e-7)
    direction = gaussian(n, 4, seed=3)
    close(gauss_newton(full, direction), gauss_newton(point, direction), 1e-7)


# The objective with several rows a candidate


OBJECTIVES = [
    ("two_layer", "all", "midpoint"),
    ("two_layer", "first", "both"),
    ("mlp", "last", "both"),
    ("mlp", "all", "both"),
]


def dense_parts(
    name: str, parameters: str, point: str, seed: int = 0
) -> tuple[Net, Problem, list[str] | None, list[dict[str, Tensor]]]:
    net = make(name, seed=seed)
    names = {"last": None, "first": DENSE[name][:2], "all": DENSE[name]}[parameters]
    return net, net.problem(parameters, point), names, net.points(point)


def dense_value(
    net: Net, names: list[str] | None, points: list[dict[str, Tensor]], t: Tensor, x: Tensor
) -> float:
    left = dense_complement(dense_rows(net, points, names, x)) @ t
    return (left.square().sum() / t.square().sum()).item()


@pytest.mark.parametrize(("name", "parameters", "point"), OBJECTIVES)
def test_the_objective_and_its_gradient_with_several_rows(
    name: str, parameters: str, point: str
) -> None:
    net, problem, names, points = dense_parts(name, parameters, point)
    x = on_sphere(2, 4)
    here = fitted(problem, x)
    assert here.rows > 1
    assert 0.01 < here.value < 0.99
    assert here.value == pytest.approx(dense_value(net, names, points, problem.target, x), 1e-8)
    slope, h = gradient(problem, here), 1e-5
    for seed in range(3):
        direction = gaussian(2, 4, seed=10 + seed)
        ahead, behind = (
            dense_value(net, names, points, problem.target, x + s * h * direction) for s in (1, -1)
        )
        expected = (ahead - behind) / (2 * h)
        assert (slope * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("name", "parameters", "point"), OBJECTIVES)
def test_gauss_newton_with_several_rows_against_the_dense_matrix(
    name: str, parameters: str, point: str
) -> None:
    net, problem, names, points = dense_parts(name, parameters, point)
    x, m = on_sphere(2, 4), problem.target.shape[1]
    here = fitted(problem, x)
    slopes = dense_slopes(net, points, names, x)
    a = here.coefficients.reshape(2, here.rows, m)
    jacobian = torch.einsum("ikpd,ikm->pmid", slopes, a)
    direction = gaussian(2, 4, seed=7)
    pushed = torch.einsum("pmid,id->pm", jacobian, direction)
    outside = dense_complement(dense_rows(net, points, names, x)) @ pushed
    close(gauss_newton(here, direction), torch.einsum("pmid,pm->id", jacobian, outside), 1e-7)
