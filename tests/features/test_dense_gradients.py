"""Factored gradients of dense layers: every product against those that torch differentiates."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from exhume.equation.objective import fitted, gauss_newton, gradient
from exhume.errors import InputError
from exhume.features import dense
from exhume.features.activations import Activation, activation, smoothed_relu, softplus
from exhume.features.dense import DenseGradients
from exhume.features.gradient import ParameterGradients
from exhume.features.layers import Elementwise, dense_chain
from exhume.features.network import Network, known_network
from exhume.models.formulation import features_at
from exhume.testing import check_features
from nets import make
from problems import gaussian, on_sphere

DIM = 6
CUBIC = "polynomial:0.5,1,-0.3,0.2"
BIASES: dict[str, Callable[[int], bool]] = {
    "none": lambda layer: False,
    "first": lambda layer: layer == 0,
    "all": lambda layer: True,
}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def close(got: Tensor, expected: Tensor, relative: float = 1e-10) -> None:
    size = max(expected.abs().max().item(), 1e-30)
    torch.testing.assert_close(
        got.double().cpu(), expected.double().cpu(), rtol=0, atol=relative * size
    )


def net_of(
    widths: list[int], outputs: int, activations: list[str], biases: str = "all", seed: int = 0
) -> tuple[Network, dict[str, Tensor]]:
    """A chain of dense layers of those widths, with random weights and biases."""
    sizes = [DIM, *widths, outputs]
    layers: list[nn.Module] = [nn.Flatten()]
    for k, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(before, after, BIASES[biases](k)))
        if k < len(widths):
            layers.append(Elementwise(activations[k % len(activations)]))
    module = nn.Sequential(*layers).double()
    weights = {
        name: gaussian(*w.shape, seed=seed + i) / (w.shape[1] if w.ndim == 2 else 4) ** 0.5
        for i, (name, w) in enumerate(module.state_dict().items())
    }
    return known_network(module, (2, 3), outputs), weights


def both_kinds(
    network: Network,
    weights: dict[str, Tensor],
    points: int = 1,
    block: tuple[str, ...] | None = None,
) -> tuple[DenseGradients, ParameterGradients]:
    """Factored, and as torch differentiates them."""
    other = {name: w + 0.3 * gaussian(*w.shape, seed=9) for name, w in weights.items()}
    arguments = (network, (weights, other)[:points], "title")
    block = tuple(weights) if block is None else block
    return (
        DenseGradients(*arguments, block=block),
        ParameterGradients(*arguments, block=block, keep=True),
    )


def same_products(
    fast: DenseGradients, slow: ParameterGradients, n: int = 4, m: int = 2, relative: float = 1e-10
) -> None:
    """Every product, one after the other and again."""
    assert (fast.width, fast.dim, fast.name, fast.dtype) == (
        slow.width,
        slow.dim,
        slow.name,
        slow.dtype,
    )
    x = on_sphere(n, slow.dim)
    one, other = fast.linearize(x), slow.linearize(x)
    gram = other.gram()
    close(one.gram(), gram, relative)
    for seed in (1, 5):
        a, t = gaussian(len(gram), m, seed=seed), gaussian(slow.width, m, seed=seed + 1)
        a, t = a.to(gram), t.to(gram)
        direction = gaussian(n, slow.dim, seed=seed + 2).to(gram)
        close(one.apply(t), other.apply(t), relative)
        close(one.combine(a), other.combine(a), relative)
        close(one.push(direction, a), other.push(direction, a), relative)
        close(one.pull(t, a), other.pull(t, a), relative)
        close(one.curvature(a), other.curvature(a), relative)
        bent = other.bend(direction, t, a)
        torch.testing.assert_close(
            one.bend(direction, t, a),
            bent,
            rtol=0,
            atol=relative * max(bent.abs().max().item(), other.pull(t, a).abs().max().item()),
        )


# Equality with what torch differentiates


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(
    ("widths", "activations"),
    [
        ([7], ["relu"]),
        ([7], ["gelu"]),
        ([5, 8], ["softplus"]),
        ([5, 8], ["relu", "tanh"]),
        ([5, 8], ["tanh", "relu"]),
        ([6, 4, 5], ["relu"]),
        ([6, 4, 5], [CUBIC]),
        ([6, 4, 5], ["gelu"]),
    ],
)
def test_products_are_those_of_parameter_gradients(
    widths: list[int], activations: list[str], outputs: int, biases: str, points: int
) -> None:
    same_products(*both_kinds(*net_of(widths, outputs, activations, biases), points))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 5), max_size=3),
    st.integers(1, 3),
    st.sampled_from(["relu", "tanh", "gelu", "softplus", CUBIC]),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_any_block_in_any_order(
    widths: list[int],
    outputs: int,
    name: str,
    points: int,
    n: int,
    m: int,
    random: "object",
) -> None:
    network, weights = net_of(widths, outputs, [name])
    names = list(weights)
    random.shuffle(names)  # type: ignore[attr-defined]
    block = tuple(names[: random.randint(1, len(names))])  # type: ignore[attr-defined]
    fast, slow = both_kinds(network, weights, points, block)
    same_products(fast, slow, n, m, relative=1e-9)


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_coordinates_in_a_subspace(name: str, points: int) -> None:
    """U need not be orthonormal, and may be given in two steps."""
    fast, slow = both_kinds(*net_of([5, 4], 2, [name]), points)
    outer, inner = gaussian(DIM, 4), gaussian(4, 3, seed=1)
    same_products(fast.restrict(outer), slow.restrict(outer))
    same_products(fast.restrict(outer).restrict(inner), slow.restrict(outer @ inner))


def test_more_axes_than_probes_have_the_same_estimate() -> None:
    module = nn.Sequential(nn.Linear(40, 9), nn.GELU(), nn.Linear(9, 2)).double()
    weights = {name: w.detach() for name, w in module.state_dict().items()}
    same_products(*both_kinds(known_network(module, (40,), 2), weights, 2))


def test_large_matrices_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = both_kinds(*net_of([5, 4], 3, ["tanh"]), 2)
    monkeypatch.setattr(dense, "ROWS", 7)  # two nodes of three rows
    monkeypatch.setattr(dense, "BATCH", 100)
    same_products(fast, slow, n=5)


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("activations", [["relu"], ["gelu"], [CUBIC, "relu"], ["softplus", "erf"]])
def test_dense_gradients_conform(activations: list[str], biases: str, points: int) -> None:
    fast, _ = both_kinds(*net_of([5, 4], 2, activations, biases), points)
    check_features(fast, dim=DIM, samples=2)


# Surrogates


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("sigma", [smoothed_relu(3.0), smoothed_relu(100.0), softplus(5.0)])
@pytest.mark.parametrize("activations", [["relu"], ["relu", "tanh"]])
def test_surrogates_are_those_that_torch_differentiates(
    activations: list[str], sigma: Activation, points: int
) -> None:
    fast, slow = both_kinds(*net_of([6, 4, 5], 2, activations, "first"), points)
    same_products(fast.substituted(sigma), slow.substituted(sigma), relative=1e-9)
    assert fast.substituted(sigma).chain.activations[0] is sigma
    assert fast.substituted(sigma).block == fast.block


def test_the_published_surrogate_by_hand() -> None:
    """Forward ReLU in h, backward sigmoid(αz) in δ: ∇W₁ = (W₂ ⊙ sigmoid(αz)) xᵀ, ∇W₂ = relu(z)."""
    network, weights = net_of([5], 1, ["relu"], "none")
    fast, _ = both_kinds(network, weights)
    first, last = weights.values()
    x = on_sphere(3, DIM)
    z = x @ first.T
    back = last * torch.sigmoid(7 * z)
    rows = torch.cat([(back[:, :, None] * x[:, None]).flatten(1), torch.relu(z)], 1)
    here = fast.substituted(smoothed_relu(7.0)).linearize(x)
    close(here.combine(torch.eye(3, dtype=torch.float64)).T, rows)
    close(here.gram(), rows @ rows.T)
    t = gaussian(fast.width, 2)
    close(here.apply(t), rows @ t)


def test_nothing_is_substituted_where_there_is_no_relu() -> None:
    fast, _ = both_kinds(*net_of([5, 4], 2, ["gelu"]))
    assert fast.substituted(smoothed_relu(3.0)) is fast


# Precision


def test_single_precision_factors_are_multiplied_in_double() -> None:
    """So that the Gram matrix of near duplicates is that of the features, to the last digits."""
    network, weights = net_of([30, 20], 2, ["gelu"])
    fast = DenseGradients(network, (weights,), "title", block=tuple(weights))
    fast = fast.to(torch.device("cpu"), torch.float32)
    x = on_sphere(1, DIM).repeat(3, 1) + 1e-4 * gaussian(3, DIM, seed=1)
    here = fast.linearize(x)
    (states,) = here.passes
    parts = []
    identity = torch.eye(2).expand(3, 2, 2)
    for h, delta in zip(
        states.inputs, [*(d.transpose(0, 1) for d in states.deltas), identity], strict=True
    ):
        left = delta.double()
        parts += [(left[..., None] * h.double()[:, None, None]).flatten(2), left]
    phi = torch.cat(parts, 2).flatten(0, 1)
    close(here.gram(), phi @ phi.T, 1e-14)
    t = gaussian(fast.width, 2)
    close(here.apply(t), phi @ t, 1e-14)
    a = gaussian(6, 2)
    assert here.gram().dtype == here.apply(t.float()).dtype == here.curvature(a).dtype
    assert here.gram().dtype == torch.float64
    direction = gaussian(3, DIM).float()
    for kept in (
        here.combine(a),
        here.push(direction, a),
        here.pull(t.float(), a),
        here.bend(direction, t.float(), a),
    ):
        assert kept.dtype == torch.float32
    double = DenseGradients(network, (weights,), "title", block=tuple(weights)).linearize(x)
    close(here.combine(a), double.combine(a), 1e-5)
    close(here.push(direction, a), double.push(direction.double(), a), 1e-4)
    close(here.pull(t.float(), a), double.pull(t, a), 1e-4)
    close(here.bend(direction, t.float(), a), double.bend(direction.double(), t, a), 1e-4)


def test_no_product_forms_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("rows were formed")

    for name in ("rows", "all_rows", "split"):
        monkeypatch.setattr(ParameterGradients, name, refuse)
    fast, _ = both_kinds(*net_of([5, 4], 2, ["relu"], "none"), 2)
    check_features(fast, samples=2)
    assert any("norm" in sentence for sentence in fast.undetermined)


# Where it applies


def chained(*layers: nn.Module, shape: tuple[int, ...] = (DIM,)) -> dense.Chain | None:
    return dense_chain(known_network(nn.Sequential(*layers), shape, 2))


def test_chains_are_recognised() -> None:
    shared = nn.Tanh()
    layers = [
        nn.Flatten(),
        nn.Linear(DIM, 5),
        shared,
        nn.Dropout(0.1),
        nn.Linear(5, 4, bias=False),
        nn.Identity(),
        shared,
        nn.Linear(4, 2),
    ]
    for shape in ((DIM,), (2, 3)):
        chain = chained(*layers, shape=shape)
        assert chain is not None
        assert chain.names == ("1", "4", "7")
        assert [sigma.name for sigma in chain.activations] == ["tanh", "tanh"]
    assert chained(nn.Linear(DIM, 2)) == (("0",), ())


def test_other_networks_are_left_to_torch() -> None:
    first, square, last = nn.Linear(DIM, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    relu = nn.ReLU()
    tied = nn.Linear(4, 4)
    tied.weight = square.weight
    assert chained(first, relu, square, relu, last) is not None
    for layers in (
        (first, relu, square, relu, square, relu, last),
        (first, relu, square, relu, tied, relu, last),
        (first, square, relu, last),
        (first, relu, relu, last),
        (first, relu, last, relu),
        (relu, first, relu, last),
        (first, nn.SiLU(), last),
        (first, nn.PReLU(), last),
        (first, nn.LayerNorm(4), last),
        (nn.Sequential(first, relu), last),
    ):
        assert chained(*layers) is None
    assert chained(nn.Flatten(0), first, relu, last) is None
    assert chained(nn.Linear(3, 4), relu, last, shape=(2, 3)) is None
    assert dense_chain(known_network(nn.Linear(DIM, 2), (DIM,), 2)) is None


def test_a_shared_activation_counts_each_time() -> None:
    """Of Sequential(W₁, tanh, tanh, W₂) the features are tanh(tanh(W₁x))."""
    tanh = nn.Tanh()
    module = nn.Sequential(nn.Linear(DIM, 5), tanh, tanh, nn.Linear(5, 2)).double()
    weights = {name: w.detach() for name, w in module.state_dict().items()}
    network, x = known_network(module, (DIM,), 2), on_sphere(3, DIM)
    features = features_at(network, weights, weights, "last", "final")
    close(
        features.linearize(x).combine(torch.eye(3, dtype=torch.float64)).T, module[:3](x).detach()
    )


def test_a_problem_takes_the_fast_path_where_there_is_one() -> None:
    for parameters in ("all", "first", "1.bias,5.weight"):
        features = make("mlp").problem(parameters, "both").features
        assert type(features) is DenseGradients
        assert f"gradients of {parameters} parameters" in features.name
    for name in ("resnet", "vit"):
        assert type(make(name).problem("all").features) is ParameterGradients
    wrong = DenseGradients(*vars_of(make("vit").problem("all").features))
    with pytest.raises(InputError, match="use ParameterGradients"):
        wrong.linearize(on_sphere(1, 16))


def vars_of(features: ParameterGradients) -> tuple[object, ...]:
    return (features.network, features.points, features.title)


def test_the_objective_is_the_same() -> None:
    problem = make("mlp", outputs=3).problem("all", "midpoint")
    features = problem.features
    slow = replace(problem, features=ParameterGradients(*vars_of(features), block=features.block))
    x, direction = on_sphere(3, 4), gaussian(3, 4, seed=1)
    one, other = fitted(problem, x), fitted(slow, x)
    assert one.value == pytest.approx(other.value, rel=1e-9)
    close(gradient(problem, one), gradient(slow, other), 1e-8)
    close(gauss_newton(one, direction), gauss_newton(other, direction), 1e-8)


def test_named_layers_and_a_mixed_net_of_torch() -> None:
    module = nn.Sequential()
    module.add_module("into", nn.Linear(DIM, 5))
    module.add_module("bend", nn.GELU())
    module.add_module("middle", nn.Linear(5, 4, bias=False))
    module.add_module("smooth", nn.Softplus())
    module.add_module("out", nn.Linear(4, 2))
    module.double()
    weights = {name: w.detach() for name, w in module.state_dict().items()}
    same_products(*both_kinds(known_network(module, (DIM,), 2), weights, 2))


# On a GPU


@needs_gpu
@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_products_on_a_gpu(name: str) -> None:
    network, weights = net_of([50, 40], 3, [name])
    fast, slow = both_kinds(network, weights, 2)
    cuda = torch.device("cuda")
    single = fast.to(cuda, torch.float32)
    there = fast.to(cuda, torch.float64)
    x, direction = on_sphere(5, DIM), gaussian(5, DIM, seed=1)
    one, exact, other = single.linearize(x), there.linearize(x), slow.linearize(x)
    a, t = gaussian(30, 2), gaussian(fast.width, 2)
    close(exact.gram(), other.gram())
    close(one.gram(), other.gram(), 1e-5)
    close(one.apply(t.cuda()), other.apply(t), 1e-5)
    close(one.combine(a.cuda()), other.combine(a), 1e-5)
    for got, reference, relative in (
        (exact, t.cuda(), 1e-10),
        (one, t.cuda().float(), 1e-2),  # steps may be rounded
    ):
        along = direction.to(reference)
        close(got.push(along, a.cuda()), other.push(direction, a), relative)
        close(got.pull(reference, a.cuda()), other.pull(t, a), relative)
        close(got.curvature(a.cuda()), other.curvature(a), relative)
        if name == "gelu":
            close(got.bend(along, reference, a.cuda()), other.bend(direction, t, a), relative)
    assert activation(name).second(torch.zeros(2, device="cuda")).is_cuda
