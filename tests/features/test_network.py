"""A module as a function of its weights: blocks by name, points on the way, the first layer."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from exhume.errors import InputError
from exhume.features.network import (
    Network,
    derivatives,
    known_network,
    midpoint,
    moved,
    named_block,
)
from exhume.models.prepare import prepare
from nets import SIZES, make
from problems import gaussian, on_sphere

NAMES = ("a.0.weight", "a.0.bias", "b.scale", "b.shift", "head.weight", "head.bias")
ALL = {name: torch.zeros(1) for name in (*NAMES, "b.count")}


# Blocks


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("all", NAMES),
        ("first", NAMES[:2]),
        ("last", NAMES[4:]),
        ("head.weight", ("head.weight",)),
        ("*.weight", ("a.0.weight", "head.weight")),
        ("head.*,a.*", ("a.0.weight", "a.0.bias", "head.weight", "head.bias")),
        (" b.s* , head.bias ", ("b.scale", "b.shift", "head.bias")),
        ("b.sh?ft", ("b.shift",)),
        ("[ab].*s", ("a.0.bias",)),
        ("head.bias,head.*,", ("head.weight", "head.bias")),
    ],
)
def test_blocks_are_in_the_order_of_the_model_and_each_once(
    pattern: str, expected: tuple[str, ...]
) -> None:
    assert named_block(ALL, NAMES, pattern) == expected


@pytest.mark.parametrize("pattern", ["tail.*", "head.weight,tail.*", "b.count", "HEAD.*", "firs"])
def test_a_name_of_nothing_is_refused_with_the_names_there_are(pattern: str) -> None:
    with pytest.raises(InputError) as caught:
        named_block(ALL, NAMES, pattern)
    sentence = str(caught.value)
    wrong = pattern.rpartition(",")[2]
    assert repr(wrong) in sentence
    assert all(name in sentence for name in NAMES)
    assert "b.count" not in sentence.replace(repr(wrong), "")  # a buffer is no parameter


@pytest.mark.parametrize("pattern", ["", " ", ",", " , "])
def test_no_name_at_all_is_refused(pattern: str) -> None:
    with pytest.raises(InputError, match="names none; write all, first, last"):
        named_block(ALL, NAMES, pattern)


def test_a_parameter_without_a_layer_is_a_layer_of_its_own() -> None:
    names = ("token", "a.weight", "a.bias")
    assert named_block(ALL, names, "first") == ("token",)
    assert named_block(ALL, names, "last") == ("a.weight", "a.bias")


# Points


def test_the_midpoint_leaves_integers_alone() -> None:
    module = nn.BatchNorm1d(3).double()
    initial = copy.deepcopy(module.state_dict())
    module(gaussian(5, 3))
    module(gaussian(5, 3, seed=1))
    trained = module.state_dict()
    half = midpoint(initial, trained)
    assert list(half) == list(trained)
    assert half["num_batches_tracked"].dtype == torch.int64
    assert half["num_batches_tracked"] == trained["num_batches_tracked"] == 2
    for name in ("running_mean", "running_var", "weight", "bias"):
        torch.testing.assert_close(half[name], (initial[name] + trained[name]) / 2)
    assert not torch.equal(half["running_mean"], trained["running_mean"])


def test_moving_weights_keeps_integers() -> None:
    weights = {"w": gaussian(2), "n": torch.tensor(3)}
    there = moved(weights, torch.device("cpu"), torch.float32)
    assert there["w"].dtype == torch.float32
    assert there["n"].dtype == torch.int64


# Values


@pytest.mark.parametrize("name", SIZES)
def test_a_network_is_its_module_with_weights_of_the_callers(name: str) -> None:
    net = make(name)
    x = on_sphere(3, net.network.dim)
    for weights in (net.initial, net.trained):
        net.plain.load_state_dict(weights)
        shaped = x.reshape(3, *net.network.shape)
        torch.testing.assert_close(net.network(weights, x), net.plain(shaped).detach())
        hidden = net.plain[:-1](shaped).detach()
        torch.testing.assert_close(net.network.hidden(weights, x), hidden)
    assert not torch.equal(net.network.hidden(net.initial, x), net.network.hidden(net.trained, x))


def test_the_modules_own_weights_are_not_used() -> None:
    net = make("mlp")
    x = on_sphere(2, 4)
    before = net.network.hidden(net.trained, x), net.network(net.trained, x)
    with torch.no_grad():
        for parameter in net.network.module.parameters():
            parameter.fill_(torch.nan)
    assert torch.equal(net.network.hidden(net.trained, x), before[0])
    assert torch.equal(net.network(net.trained, x), before[1])


def test_hidden_values_leave_no_hook_behind_also_after_an_error() -> None:
    net = make("mlp")
    head = net.network.module.get_submodule(net.network.head)
    net.network.hidden(net.trained, on_sphere(2, 4))
    with pytest.raises(RuntimeError):
        net.network.hidden(net.trained, on_sphere(2, 5))
    with pytest.raises(RuntimeError):
        net.network.first_dense({**net.trained, "1.weight": gaussian(3, 3)})
    assert not head._forward_pre_hooks
    assert not any(part._forward_pre_hooks for part in net.network.module.modules())


def test_hidden_values_go_through_forward_derivatives_and_vmap() -> None:
    net = make("mlp")
    x, direction = on_sphere(3, 4), gaussian(3, 4, seed=1)
    with derivatives(rounded=False):
        along = jvp(lambda t: net.network.hidden(net.trained, t), (x,), (direction,))[1]
        one_by_one = vmap(lambda row: net.network.hidden(net.trained, row[None])[0])(x)
    h = 1e-6
    ahead, behind = (net.network.hidden(net.trained, x + s * h * direction) for s in (1, -1))
    torch.testing.assert_close(along, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(one_by_one, net.network.hidden(net.trained, x))


def test_inputs_may_be_coordinates_in_a_basis() -> None:
    net = make("mlp")
    basis = torch.linalg.qr(gaussian(4, 2)).Q
    inside = Network(net.network.module, net.network.shape, 2, net.network.head, basis)
    z = gaussian(3, 2, seed=1)
    assert (net.network.dim, inside.dim) == (4, 2)
    torch.testing.assert_close(
        inside(net.trained, z), net.network(net.trained, z @ basis.T), rtol=1e-12, atol=1e-12
    )


def test_precision_settings_come_back() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for rounded in (True, False):
        with pytest.raises(ZeroDivisionError), derivatives(rounded):
            assert torch.get_float32_matmul_precision() == ("high" if rounded else "highest")
            assert torch.backends.cudnn.allow_tf32 is rounded
            raise ZeroDivisionError
        now = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        assert now == before


# The first layer


class Scaled(nn.Module):
    """Inputs divided by a constant before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(12, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.dense(x.flatten(1) / 255)))


class Skipping(nn.Module):
    """The input is used again further on, as it is; the layers are registered backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.later, self.sooner = nn.Linear(12, 2), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(x + torch.tanh(self.later(torch.tanh(self.sooner(x)))))


class Recurrent(nn.Module):
    """One dense layer that runs twice: its second input is no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x.flatten(1)))
        return self.head(torch.tanh(self.dense(x)))


class Token(nn.Module):
    """A parameter of its own beside a dense layer; it might do anything to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((12,), 2.0))
        self.dense, self.head = nn.Linear(12, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.dense(x.flatten(1) * self.gain)))


def dense(*before: nn.Module) -> nn.Sequential:
    return nn.Sequential(*before, nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (dense(nn.Flatten()), "1.weight"),
        (dense(nn.Flatten(), nn.Dropout(0.3)), "2.weight"),
        (dense(nn.Flatten(), nn.Identity()), "2.weight"),
        (nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))), "0.1.weight"),
        (Skipping(), "sooner.weight"),
        (nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 2)), None),
        (dense(nn.Flatten(), nn.LayerNorm(12)), None),
        (dense(nn.Flatten(), nn.LayerNorm(12, elementwise_affine=False)), None),
        (dense(nn.Flatten(), nn.BatchNorm1d(12)), None),
        (dense(nn.Flatten(), nn.BatchNorm1d(12, affine=False)), None),
        (dense(nn.Flatten(), nn.Tanh()), None),
        (Scaled(), None),
        (Token(), None),
        (Recurrent(), None),
        (  # patches: the layer sees a part of the input at a time
            nn.Sequential(nn.Unfold(1), nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 2)),
            None,
        ),
    ],
)
def test_a_first_layer_is_dense_and_sees_the_input_itself(
    module: nn.Module, expected: str | None
) -> None:
    module = module.double().eval()
    weights = {name: w.detach() for name, w in module.state_dict().items()}
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    network = Network(module, (3, 2, 2), 2, linear[-1])
    assert network.first_dense(weights) == expected
    assert not any(part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize(("name", "expected"), [("two_layer", "1.weight"), ("mlp", "1.weight")])
def test_dense_networks_have_a_first_layer(name: str, expected: str) -> None:
    net = make(name)
    assert net.network.first_dense(net.trained) == expected


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_networks_for_images_have_none(name: str) -> None:
    net = make(name)
    assert net.network.first_dense(net.trained) is None


def test_the_gradient_of_a_first_layer_is_made_of_the_sample() -> None:
    """What `first_dense` stands for: rows of ∇W₁ f(x) are multiples of x, for whom it says so."""
    x = gaussian(1, 12)
    for module, holds in ((dense(nn.Flatten()), True), (Skipping(), True), (Recurrent(), False)):
        network = known_network(module.double().eval(), (3, 2, 2), 2)
        name = "1.weight" if isinstance(module, nn.Sequential) else "sooner.weight"
        name = "dense.weight" if isinstance(module, Recurrent) else name
        parameters = dict(module.named_parameters())
        output = functional_call(module, parameters, (x.reshape(1, 3, 2, 2),)).sum()
        rows = torch.autograd.grad(output, parameters[name])[0]
        outside = rows - (rows @ x.T) @ x / x.square().sum()
        assert (outside.norm() < 1e-10 * rows.norm()) == holds
        weights = {key: w.detach() for key, w in parameters.items()}
        assert (network.first_dense(weights) is not None) == holds


# The head


def test_the_head_of_a_known_network_is_its_last_layer() -> None:
    for name in SIZES:
        net = make(name)
        assert net.network.head == str(len(net.plain) - 1)
        assert net.network.head_weight == f"{len(net.plain) - 1}.weight"


def test_a_module_that_is_all_head_has_the_inputs_for_hidden_values() -> None:
    module = nn.Linear(3, 2).double()
    network = known_network(module, (3,), 2)
    weights = {name: w.detach() for name, w in module.state_dict().items()}
    x = gaussian(4, 3)
    assert network.head_weight == "weight"
    assert torch.equal(network.hidden(weights, x), x)
    assert network.first_dense(weights) == "weight"


def test_a_prepared_module_and_a_known_one_are_the_same_function() -> None:
    for name, seed in itertools.product(("mlp", "vit"), range(2)):
        net = make(name, seed=seed)
        ready = prepare(net.plain, net.network.shape)
        other = Network(ready.module, net.network.shape, ready.outputs, ready.head)
        x = on_sphere(2, other.dim)
        torch.testing.assert_close(other(net.trained, x), net.network(net.trained, x))
        assert other.head == net.network.head
