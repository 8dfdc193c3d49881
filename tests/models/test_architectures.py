"""Networks by name: their shapes, their weights at the start, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exhume.errors import InputError
from exhume.models import architectures
from exhume.models.architectures import build, initialise, mlp, resnet, two_layer, vit
from problems import gaussian

DENSE = {"shape": [4], "width": 4}

PRECISIONS = (torch.float64, torch.float64, torch.float32, torch.float64)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters()}


def test_dense_networks_against_the_formula() -> None:
    network, x = initialise(two_layer((3, 4), 20, 2, "tanh").double()), gaussian(5, 3, 4)
    first, last = weights(network).values()
    torch.testing.assert_close(network(x), (x.reshape(5, 12) @ first.T).tanh() @ last.T)
    network, x = initialise(mlp((6,), [20, 10], 2, bias=True).double()), gaussian(5, 6)
    for parameter in network.parameters():
        parameter.data += gaussian(*parameter.shape)
    v, a, w, b, u, c = weights(network).values()
    expected = torch.relu(torch.relu(x @ v.T + a) @ w.T + b) @ u.T + c
    torch.testing.assert_close(network(x), expected)
    first = weights(mlp((6,), [20, 10], bias="first"))
    assert [key for key in first if "bias" in key] == ["1.bias"]


def test_the_residual_network_is_the_published_one() -> None:
    network = resnet((3, 32, 32), 5)
    shapes = [tuple(p.shape) for p in network.parameters()]
    assert shapes == [(5, 3, 28, 28), *[(5, 5, 3, 3)] * 8, (1, 49 * 5)]
    assert network[0](torch.zeros(1, 3, 32, 32)).shape == (1, 5, 7, 7)
    for side in (5, 8, 28):
        assert resnet((side, side), 2, blocks=1)[-1].in_features == 49 * 2
    block, z = architectures.Residual(3).double(), gaussian(2, 3, 7, 7)
    first, second = weights(block).values()
    inner = torch.relu(nn.functional.conv2d(z, first, padding=1))
    expected = torch.relu(z + nn.functional.conv2d(inner, second, padding=1))
    torch.testing.assert_close(block(z), expected)


def test_a_transformer_attends_as_torch_does_and_knows_where_a_patch_is() -> None:
    block, z = initialise(architectures.Block(12, 3).double()), gaussian(2, 5, 12)
    oracle = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    assert oracle.in_proj_weight is not None
    with torch.no_grad():
        oracle.in_proj_weight.copy_(block.query_key_value.weight)
        oracle.out_proj.weight.copy_(block.mix.weight)
    normed = block.norm_attention(z)
    after = z + oracle(normed, normed, normed)[0]
    torch.testing.assert_close(block(z), after + block.layers(block.norm_layers(after)))
    network, x = initialise(vit((4, 4), 2, 8, 1, 2).double()), gaussian(1, 4, 4)
    swapped = torch.cat([x[:, 2:], x[:, :2]], 1)
    assert (network(x) - network(swapped)).abs() > 1e-4
    network[2].positions.data.zero_()
    torch.testing.assert_close(network(x), network(swapped))


@pytest.mark.parametrize(
    ("make", "deviations"),
    [
        (lambda: two_layer((400,), 300, 40), [400**-0.5, 300**-0.5]),
        (lambda: resnet((3, 32, 32), 48, 10, 1), [3072**-0.5, *[432**-0.5] * 2, 2352**-0.5]),
        (lambda: vit((3, 16, 16), 4, 64, 1, 4, 40), [48**-0.5, 0.02, *[1 / 8] * 3, 1 / 16, 1 / 8]),
    ],
)
def test_weights_are_normal_and_scaled_by_the_fan_in(
    make: Callable[[], nn.Module], deviations: list[float]
) -> None:
    network = make().double()
    for parameter in network.parameters():
        parameter.data.fill_(7)
    initialise(network, 3)
    matrices = [p for p in weights(network).values() if p.ndim > 1]
    for weight, deviation in zip(matrices, deviations, strict=True):
        error = 1 / math.sqrt(weight.numel())
        assert abs(weight.mean() / deviation) < 5 * error
        assert abs(weight.std() / deviation - 1) < 5 * error
        assert abs((weight / deviation).pow(4).mean() - 3) < 50 * error
    for name, weight in weights(network).items():  # biases are zero and norms the identity
        assert weight.ndim > 1 or (weight == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize(
    ("make", "shape", "sizes"),
    [
        (two_layer, (3, 4), {"width": 20}),
        (mlp, (2, 3, 4), {"widths": [20, 10], "activation": "tanh", "bias": True}),
        (resnet, (8, 8), {"width": 3, "blocks": 2}),
        (resnet, (3, 9, 8), {"width": 4, "blocks": 1, "kernel": 5}),
        (vit, (8, 8), {"patch": 4, "dim": 12, "heads": 3}),
        (vit, (3, 4, 6), {"patch": 2, "dim": 8, "depth": 1}),
    ],
)
def test_a_seed_is_the_same_network_in_any_precision(
    make: Callable[..., nn.Module], shape: tuple[int, ...], sizes: dict[str, Any]
) -> None:
    networks = [make(shape, outputs=2, **sizes).to(kind) for kind in PRECISIONS]
    assert initialise(networks[0])(gaussian(6, *shape)).shape == (6, 2)
    before = torch.get_rng_state()
    seeds = zip(networks, (5, 5, 5, 6), strict=True)
    exact, again, rounded, other = (weights(initialise(net, seed)) for net, seed in seeds)
    assert torch.equal(before, torch.get_rng_state()), "the generator of everyone is left alone"
    drawn = [w.flatten()[:4] for w in exact.values() if w.ndim > 1]
    assert not torch.equal(drawn[0] / drawn[0][0], drawn[-1] / drawn[-1][0]), "none share numbers"
    for name, weight in exact.items():
        assert torch.equal(weight, again[name]) and torch.equal(weight.float(), rounded[name])
        assert weight.ndim == 1 or not torch.equal(weight, other[name])


def test_large_tensors_are_drawn_in_blocks_and_shared_ones_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tied, plain = mlp((6,), [6, 6]), initialise(mlp((6,), [6]))
    tied[3].weight = tied[1].weight
    initialise(tied)
    assert torch.equal(tied[1].weight, plain[1].weight)
    assert torch.equal(tied[5].weight, plain[3].weight)
    monkeypatch.setattr(architectures, "LARGE", 1000)
    monkeypatch.setattr(architectures, "BLOCK", 448)
    exact, rounded = (initialise(two_layer((50,), 100).to(t)) for t in (torch.float64, torch.float))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([torch.randn(count, generator=generator) for count in [448] * 11 + [72]])
    expected = drawn.mul(50**-0.5).reshape(100, 50)
    assert torch.equal(weights(rounded)["1.weight"], expected)
    assert torch.equal(weights(exact)["1.weight"], expected.double())
    assert weights(exact)["3.weight"].std() < 0.2


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("lstm", {}, "lstm two_layer vit"),
        ("mlp", [1, 2], "mlp mapping"),
        ("two_layer", {"shape": [4]}, "two_layer width"),
        ("two_layer", {"width": 4}, "two_layer shape"),
        ("two_layer", {**DENSE, "depth": 2}, "depth activation"),
        ("two_layer", {**DENSE, "width": 0}, "width 0"),
        ("two_layer", {**DENSE, "width": True}, "width True"),
        ("two_layer", {**DENSE, "outputs": -1}, "outputs -1"),
        ("two_layer", {**DENSE, "bias": 1}, "bias 1"),
        ("two_layer", {**DENSE, "activation": "swish"}, "activation relu"),
        ("two_layer", {**DENSE, "shape": []}, "shape []"),
        ("two_layer", {**DENSE, "shape": 4}, "shape 4"),
        ("two_layer", {"shape": [2**20], "width": 2**40}, "two_layer large"),
        ("two_layer", {**DENSE, "shape": [2**40]}, "shape 67,108,864"),
        ("mlp", {"shape": [4], "widths": []}, "widths []"),
        ("mlp", {"shape": [4], "widths": [3, None]}, "widths None"),
        ("resnet", {"shape": [64], "width": 4}, "shape [64] mlp"),
        ("resnet", {"shape": [4, 4], "width": 4}, "kernel 4×4"),
        ("resnet", {"shape": [8, 8], "width": 4, "kernel": 11}, "kernel 11 10"),
        ("resnet", {"shape": [8, 8], "width": 4, "blocks": 1001}, "blocks 1000"),
        ("vit", {"shape": [8, 8], "patch": 3}, "patch 8×8 3"),
        ("vit", {"shape": [8, 8], "dim": 10, "heads": 4}, "heads 10 4"),
        ("vit", {"shape": [64]}, "shape [64]"),
        ("vit", {"shape": [8, 8], "depth": 0}, "depth 0"),
    ],
    ids=str,
)
def test_cards_that_describe_no_network(name: Any, arguments: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        build(name, arguments)
    assert all(word in str(caught.value) for word in words.split()), caught.value


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, 2**64])
def test_what_cannot_be_drawn(seed: Any) -> None:
    with pytest.raises(InputError, match="seed"):
        initialise(two_layer((3,), 3), seed)
    with pytest.raises(InputError, match=r"'1\.weight' of a PReLU"):
        initialise(nn.Sequential(nn.Linear(3, 3), nn.PReLU()))
