"""A module as a function of its weights: blocks by name, points on the way, the first layer."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exhume.errors import InputError
from exhume.features import network
from exhume.features.network import (
    conv2d,
    derivatives,
    known_network,
    midpoint,
    moved,
    named_block,
    patches_written_out,
)
from nets import SIZES, make
from odd_modules import Written
from problems import gaussian, on_sphere

NAMES = ("a.0.weight", "a.0.bias", "b.scale", "b.shift", "head.weight", "head.bias")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("all", NAMES),
        ("first", NAMES[:2]),
        ("last", NAMES[4:]),
        ("*.weight", ("a.0.weight", "head.weight")),
        ("head.*,a.*", ("a.0.weight", "a.0.bias", "head.weight", "head.bias")),
        (" b.s* , head.bias ", ("b.scale", "b.shift", "head.bias")),
        ("[ab].*s", ("a.0.bias",)),
        ("head.bias,head.*,", ("head.weight", "head.bias")),
    ],
)
def test_blocks_are_in_the_order_of_the_model(pattern: str, expected: tuple[str, ...]) -> None:
    assert named_block(NAMES, pattern) == expected
    names = ("token", "a.weight", "a.bias")  # a parameter without a layer is one of its own
    assert (named_block(names, "first"), named_block(names, "last")) == (names[:1], names[1:])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("head.weight,tail.*", "'tail.*' names none of the model's: "),
        ("HEAD.*", "'HEAD.*' names none of the model's: "),
        ("firs", "Write all, first, last"),
        (" , ", "expected some of a.0.weight"),
    ],
)
def test_a_name_of_nothing_is_refused(pattern: str, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        named_block(NAMES, pattern)
    assert ", ".join(NAMES) in str(caught.value)


def test_integers_are_neither_halved_nor_converted() -> None:
    initial, trained = ({"w": gaussian(3, seed=k), "count": torch.tensor(k)} for k in (1, 3))
    half, there = midpoint(initial, trained), moved(trained, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(half["w"], (initial["w"] + trained["w"]) / 2)
    assert half["count"] == there["count"] == 3 and there["w"].dtype == torch.float32
    assert half["count"].dtype == there["count"].dtype == torch.int64


TILED = {"stride": (2, 3)}
CONVOLUTIONS: list[tuple[dict[str, Any], bool]] = [
    (TILED, True),
    (TILED | {"padding": "valid"}, True),
    ({"stride": 2}, False),  # tiles that overlap
    (TILED | {"padding": 1}, False),
    (TILED | {"dilation": (1, 2)}, False),
    (TILED | {"groups": 2}, False),
]


@pytest.mark.parametrize(("options", "product"), CONVOLUTIONS)
@pytest.mark.parametrize("shape", [(2, 4, 6, 9), (4, 6, 9), (2, 4, 7, 9)])
def test_a_convolution_of_tiles_is_a_product_and_any_other_is_torchs(
    shape: tuple[int, ...], options: dict[str, Any], product: bool
) -> None:
    x, bias = gaussian(*shape).requires_grad_(), gaussian(5 - 5 % options.get("groups", 1), seed=1)
    weight = gaussian(len(bias), 4 // options.get("groups", 1), 2, 3, seed=2).requires_grad_()
    made = [conv(x, weight, bias, **options) for conv in (F.conv2d, conv2d)]
    torch.testing.assert_close(*made)
    assert made[1].is_contiguous()
    last = made[1].grad_fn.name()
    assert ("Convolution" not in last and "Squeeze" not in last) == (
        product and len(shape) == 4 and shape[2] == 6
    )
    slopes = [torch.autograd.grad(y.sin().sum(), (x, weight)) for y in made]
    torch.testing.assert_close(*slopes)


PATCHES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"stride": 2, "padding": (1, 2)}, True),
    ({"stride": (2,), "padding": [1]}, True),
    ({"padding": "valid"}, False),
    ({"dilation": 2}, False),
]


@pytest.mark.parametrize(("options", "written"), PATCHES)
def test_convolutions_that_write_patches_out_are_torchs(
    options: dict[str, Any], written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = gaussian(3, 4, 7, 9).requires_grad_(), gaussian(5, 4, 2, 3, seed=2).requires_grad_()

    def derived(conv: Callable[..., Tensor]) -> list[Tensor]:
        y = conv(x, weight, gaussian(5, seed=1), **options)
        assert y.is_contiguous()
        first = torch.autograd.grad(y.sin().sum(), (x, weight), create_graph=True)
        whole = torch.stack([slope.square().sum() for slope in first]).sum()
        return [y, *first, *torch.autograd.grad(whole, (x, weight))]

    spied = Mock(wraps=network._patched)
    monkeypatch.setattr(network, "_patched", spied)
    with patches_written_out():
        found = derived(conv2d)
    torch.testing.assert_close(found, derived(F.conv2d))
    assert spied.called == written
    monkeypatch.setattr(network, "WRITTEN", x[0, 0].numel())  # of an image that is too large
    spied.reset_mock()
    with patches_written_out():
        conv2d(x, weight, **options)
    assert not spied.called


@pytest.mark.parametrize("name", SIZES)
def test_a_network_is_its_module_with_weights_of_the_callers(name: str) -> None:
    net = make(name)
    x = on_sphere(3, net.network.dim)
    with torch.no_grad():
        for parameter in net.network.module.parameters():
            parameter.fill_(torch.nan)  # the module's own are not used
    for weights in (net.initial, net.trained):
        net.plain.load_state_dict(weights)
        shaped = x.reshape(3, *net.network.shape)
        torch.testing.assert_close(net.network(weights, x), net.plain(shaped).detach())
        hidden = net.plain[:-1](shaped).detach()
        torch.testing.assert_close(net.network.hidden(weights, x), hidden)
    head = str(len(net.plain) - 1)
    assert (net.network.head, net.network.head_weight) == (head, f"{head}.weight")
    first = None if name == "resnet" else "1.weight"  # that of a transformer sees tiles
    assert net.network.first_dense(net.trained) == first


def test_hidden_values_are_the_inputs_of_the_head_and_no_hook_stays_after_an_error() -> None:
    module, x = nn.Linear(3, 2).double(), gaussian(4, 3)  # is all head
    network, weights = known_network(module, (3,), 2), module.state_dict()
    assert network.head_weight == network.first_dense(weights) == "weight"
    assert torch.equal(network.hidden(weights, x), x)
    net = make("mlp")
    net.network.hidden(net.trained, on_sphere(2, 4))
    with pytest.raises(RuntimeError):
        net.network.hidden(net.trained, on_sphere(2, 5))
    with pytest.raises(RuntimeError):
        net.network.first_dense({**net.trained, "1.weight": gaussian(3, 3)})
    assert not any(part._forward_pre_hooks for part in net.network.module.modules())
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_layer_that_forward_makes_itself_is_no_part_of_the_network() -> None:
    class Makes(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.LayerNorm(3, dtype=x.dtype)(x))

    module = Makes(nn.Linear(3, 2)).double()
    assert known_network(module, (3,), 2).first_dense(module.state_dict()) is None


def test_precision_settings_come_back() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for rounded in (True, False):
        with pytest.raises(ZeroDivisionError), derivatives(rounded):
            assert torch.get_float32_matmul_precision() == ("high" if rounded else "highest")
            assert torch.backends.cudnn.allow_tf32 is rounded
            raise ZeroDivisionError
        now = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        assert now == before


def through(function: Callable[..., Tensor]) -> nn.Module:
    """A dense head after what a function makes of the input and two layers registered backwards."""
    sizes = {"head": 2, "later": 12, "sooner": 12}
    parts = {name: nn.Linear(12, size) for name, size in sizes.items()}
    return Written(lambda net, x: net.head(function(net, x.flatten(1))), **parts)


SKIPPING = through(lambda net, x: x + net.later(net.sooner(x).tanh()).tanh())
SCALED = through(lambda net, x: net.sooner(x / 255).tanh())
TOKEN = through(lambda net, x: net.sooner(x * net.gain).tanh())
TOKEN.gain = nn.Parameter(torch.full((12,), 2.0))
ONES = through(lambda net, x: net.sooner(x * net.gain).tanh())
ONES.gain = nn.Parameter(torch.ones(12))
PLACED = through(lambda net, x: (net.sooner(x) + net.gain).tanh())
PLACED.gain = nn.Parameter(torch.ones(12))
RECURRENT = through(lambda net, x: net.sooner(net.sooner(x).tanh()).tanh())


def dense(*before: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *before, nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (dense(), "1.weight"),
        (dense(nn.Dropout(0.3)), "2.weight"),
        (nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(12, 2))), "0.1.weight"),
        (SKIPPING, "sooner.weight"),  # the input is used again further on, as it is
        (nn.Sequential(nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(2, 2)), None),  # tiles overlap
        (dense(nn.LayerNorm(12)), None),
        (dense(nn.LayerNorm(12, elementwise_affine=False)), None),
        (dense(nn.BatchNorm1d(12, affine=False)), None),
        (dense(nn.Tanh()), None),
        (SCALED, None),
        (TOKEN, None),  # a parameter that the input is multiplied by
        (ONES, None),  # also where it happens to be 1
        (PLACED, "sooner.weight"),  # one that is added after the layer, as positions are
        (RECURRENT, None),  # the second input of the layer is no sample
        # patches: the layer sees a part of the input at a time
        (nn.Sequential(nn.Unfold(1), nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 2)), None),
    ],
)
def test_a_first_layer_is_dense_and_sees_the_input(module: nn.Module, expected: str | None) -> None:
    module = module.double().eval()
    weights = {name: w.detach() for name, w in module.state_dict().items()}
    network = known_network(module, (3, 2, 2), 2)
    assert network.first_dense(weights) == expected
    assert not any(part._forward_pre_hooks for part in module.modules())


def tiling(*before: nn.Module, kernel: int | tuple[int, int] = 2, **options: Any) -> nn.Sequential:
    """A convolution that cuts an image into tiles, unless the options say otherwise, and a head."""
    first = nn.Conv2d(3, 6, kernel, **{"stride": kernel} | options)
    return nn.Sequential(*before, first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


TWICE = Written(
    lambda net, x: net.last(net.body(x) + net.body(-x)), body=tiling()[:3], last=tiling()[3]
)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (tiling(), "0.weight"),
        (tiling(nn.Identity(), kernel=(4, 3)), "1.weight"),
        (tiling(padding="valid"), "0.weight"),
        (tiling(padding=1), None),
        (tiling(stride=1), None),  # tiles overlap
        (tiling(stride=(2, 1)), None),
        (tiling(kernel=1, stride=2), None),  # some pixels are not seen
        (tiling(kernel=(2, 4)), None),  # nor are the last two columns
        (tiling(dilation=2, stride=2), None),
        (tiling(groups=3), None),
        (tiling(nn.Tanh()), None),
        (tiling(nn.BatchNorm2d(3)), None),
        (tiling(nn.Conv2d(3, 3, 1, stride=1)), "0.weight"),
        (TWICE, None),
    ],
)  # fmt: skip
def test_a_first_layer_may_see_tiles_that_cover_the_image(
    module: nn.Module, expected: str | None
) -> None:
    module = module.double().eval()
    weights = {name: w.detach() for name, w in module.state_dict().items()}
    network = known_network(module, (3, 4, 6), 2)
    assert network.first_dense(weights) == expected
    coordinates = replace(network, basis=torch.eye(72).double())  # which have no tiles
    assert coordinates.first_dense(weights) is None
