"""Features of any module: one dense float64 oracle, surrogates, fast paths, precision."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from exhume.features import NO_NORM, NO_SIGN
from exhume.features.activations import smoothed_relu, softplus
from exhume.features.gradient import ParameterGradients
from exhume.features.modules import LastLayer, probes, sum_over_blocks
from exhume.features.network import Elementwise, known_network
from exhume.features.random import RandomFeatures
from exhume.models.formulation import features_at
from nets import SIZES, by_torch, dense, make, names_of
from problems import close, gaussian, on_sphere, same_products


@pytest.mark.parametrize(("point", "chunk"), [("initial", 2), ("final", None), ("both", 2)])
def test_last_layer_products_against_the_dense_oracle(point: str, chunk: int | None) -> None:
    net = make("mlp")
    features = LastLayer(net.network, tuple(net.points(point)), "last", chunk=chunk)
    same_products(features, dense(net, point, None))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("name", "block", "names", "point", "chunk"),
    [
        ("two_layer", "all", slice(None), "both", 1),
        ("two_layer", "first", slice(2), "midpoint", None),
        ("two_layer", "3.*,1.bias", slice(1, None), "both", 2),
    ],
)
def test_gradient_products_against_the_dense_oracle(
    name: str, block: str, names: slice, point: str, chunk: int | None, keep: bool
) -> None:
    net = make(name)
    features = by_torch(net.problem(block, point).features, chunk=chunk, keep=keep)
    same_products(features, dense(net, point, names_of(net)[names]), n=2)


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_residual_networks_and_transformers_against_the_dense_oracle(parameters: str) -> None:
    """Torch differentiates the transformer's norm wrongly, so only its rows are compared here."""
    net, vit, x = make("resnet"), make("vit"), on_sphere(2, 16)
    names = None if parameters == "last" else names_of(net)
    same_products(net.problem(parameters, "both").features, dense(net, "both", names), 1e-9, n=2)
    phi = dense(vit, "both", None if names is None else names_of(vit)).linearize(x).phi
    here = vit.problem(parameters, "both").features.linearize(x)
    close(here.combine(torch.eye(len(phi)).double()).T, phi, 1e-9)


@pytest.mark.parametrize(("parameters", "outputs"), [("last", 0), ("all", 3)])
def test_outputs_are_those_of_the_last_point(parameters: str, outputs: int) -> None:
    net, x = make("mlp", outputs=3), on_sphere(2, 4)
    features = net.problem(parameters, "both").features
    assert features.outputs == outputs
    for factor in (1.0, 2.0):
        net.plain.load_state_dict({name: factor * w for name, w in net.trained.items()})
        close(features.predict(x, factor), net.plain(x.reshape(2, 2, 2)).detach())


def with_layers(*between: nn.Module) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A net of dense layers of 4 units, with those layers between, on inputs of shape (2, 2)."""
    torch.manual_seed(0)
    layers = [layer for middle in between for layer in (nn.Linear(4, 4), middle)]
    module = nn.Sequential(nn.Flatten(), *layers, nn.Linear(4, 2)).double().eval()
    return module, {key: w.detach() for key, w in module.state_dict().items()}


@pytest.mark.parametrize("kind", [LastLayer, ParameterGradients])
def test_substituted_features_are_those_of_another_network(kind: type) -> None:
    """ReLU layers of any make are swapped, also one that is used twice; others stay."""
    relu = nn.ReLU()
    module, weights = with_layers(relu, nn.Tanh(), relu, Elementwise("relu"))
    smooth = nn.Softplus(beta=3.0, threshold=1000.0)
    other, _ = with_layers(smooth, nn.Tanh(), smooth, smooth)
    block = {} if kind is LastLayer else {"block": tuple(weights)}
    networks = (known_network(each, (2, 2), 2) for each in (module, other))
    here, there = (kind(network, (weights,), "name", **block) for network in networks)
    swapped = here.substituted(softplus(3.0))
    same_products(swapped, there)
    own, before = (dict(m.named_parameters()) for m in (swapped.network.module, module))
    assert list(own) == list(before) and module[2] is relu
    assert all(own[name] is before[name] for name in own)  # no copy of the weights
    assert swapped.substituted(softplus(9.0)) is swapped  # no ReLU is left


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_a_surrogate_in_a_residual_network(parameters: str) -> None:
    """The values of the head's input stay; its derivative is that of the surrogate."""
    features = make("resnet").problem(parameters, "midpoint").features
    swapped, x = features.substituted(smoothed_relu(2.0)), on_sphere(2, 16)
    one, two = features.linearize(x), swapped.linearize(x)
    a, t = gaussian(len(one.gram()), 1), gaussian(features.width, 1)
    direction = gaussian(2, 16, seed=1)
    if parameters == "last":
        close(two.gram(), one.gram())
    assert not torch.allclose(two.pull(t, a), one.pull(t, a))
    assert two.bend(direction, t, a).abs().max() > 1e-3 and not one.bend(direction, t, a).any()


@pytest.mark.parametrize(
    ("layer", "known"),
    [
        *((x, True) for x in (nn.ReLU(), nn.Tanh(), nn.GELU(), nn.Softplus(), Elementwise("erf"))),
        *((x, False) for x in (nn.GELU("tanh"), nn.Softplus(2), nn.SiLU(), nn.LeakyReLU())),
    ],
    ids=str,
)
def test_activations_of_torch_are_known_or_left_to_torch(layer: nn.Module, known: bool) -> None:
    parts = [nn.Flatten(), nn.Linear(4, 7), layer, nn.Dropout(0.5), nn.Linear(7, 2)]
    module = nn.Sequential(*parts).double().eval()
    weights = {key: w.detach() for key, w in module.state_dict().items()}
    network = known_network(module, (2, 2), 2)
    features = features_at(network, weights, weights, "last", "final")
    assert isinstance(features, RandomFeatures) == known
    same_products(features, LastLayer(network, (weights,), "last"))
    hidden = module[:-1](on_sphere(3, 4).reshape(3, 2, 2)).detach()
    close(features.linearize(on_sphere(3, 4)).combine(torch.eye(3).double()).T, hidden)


def test_the_fast_path_is_not_for_another_head() -> None:
    """With d = h nothing but the values would tell."""
    net, x = make("two_layer", outputs=4, width=4), on_sphere(3, 4)
    other = replace(net.network, head="1")
    features = features_at(other, net.initial, net.trained, "last", "final")
    close(features.linearize(x).combine(torch.eye(3, dtype=torch.float64)).T, x)


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("name", SIZES)
def test_single_precision_is_close_to_double(name: str, parameters: str) -> None:
    double = make(name).problem(parameters, "midpoint").features
    single = double.to(torch.device("cpu"), torch.float32)
    assert single.dtype == torch.float32
    same_products(single, double, 1e-3 if name == "vit" else 1e-4, n=2)
    if name == "mlp" and parameters == "all":
        same_products(by_torch(single, keep=False, chunk=1), double, 1e-4)


def test_random_probes_have_the_right_mean_and_sums_over_blocks_are_in_double() -> None:
    assert torch.equal(probes(torch.zeros(1, 5)), torch.eye(5))
    z = probes(torch.zeros(1, 50))
    close(z.square(), torch.full_like(z, 1 / 50), 1e-6)  # each |z| is 1: exact for multiples of I
    assert len(z) < 50
    left, right = gaussian(2, 1000).float(), gaussian(3, 1000, seed=1).float()
    close(sum_over_blocks(left, right, block=7), left.double() @ right.double().T, 1e-14)


@pytest.mark.parametrize("parameters", ["last", "all"])
def test_a_subspace_of_a_subspace_is_a_subspace(parameters: str) -> None:
    features = make("vit").problem(parameters, "midpoint").features
    outer, inner = gaussian(16, 4), gaussian(4, 2, seed=1)
    twice, once = features.restrict(outer).restrict(inner), features.restrict(outer @ inner)
    same_products(twice, once, 1e-9, n=2)


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize(
    ("activation", "bias", "said"),
    [("relu", False, NO_NORM), ("relu", True, ""), ("tanh", False, NO_SIGN), ("gelu", False, "")],
)
def test_what_is_not_left_is_said(activation: str, bias: bool, said: str, parameters: str) -> None:
    features = make("mlp", activation=activation, bias=bias).problem(parameters).features
    assert "".join(features.undetermined) == said
