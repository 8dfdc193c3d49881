"""Factored gradients of dense layers: every product against those that torch differentiates."""

import itertools
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from exhume.errors import InputError
from exhume.features import dense
from exhume.features.activations import Activation, smoothed_relu, softplus
from exhume.features.dense import DenseGradients
from exhume.features.gradient import ParameterGradients
from exhume.features.network import Chain, Elementwise, dense_chain, known_network
from exhume.testing import check_features
from nets import by_torch, make
from problems import close, gaussian, on_sphere, same_products

DIM = 6
CUBIC = "polynomial:0.5,1,-0.3,0.2"

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gradients(
    widths: list[int], outputs: int, activations: list[str], points: int = 1, biases: int = 9
) -> DenseGradients:
    """Dense layers of those widths, the first of them with biases, with random weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for k, (before, after) in enumerate(itertools.pairwise([DIM, *widths, outputs])):
        sigma = Elementwise(activations[k % len(activations)])
        layers += [nn.Linear(before, after, k < biases), sigma]
    module = nn.Sequential(*layers[:-1]).double()
    weights = {
        name: gaussian(*w.shape, seed=i) / (w.shape[1] if w.ndim == 2 else 4) ** 0.5
        for i, (name, w) in enumerate(module.state_dict().items())
    }
    other = {name: w + 0.3 * gaussian(*w.shape, seed=9) for name, w in weights.items()}
    network = known_network(module, (2, 3), outputs)
    return DenseGradients(network, (weights, other)[:points], "name", block=tuple(weights))


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 5), max_size=3),
    st.integers(1, 3),
    st.lists(st.sampled_from(["relu", "tanh", "gelu", CUBIC]), min_size=1, max_size=2),
    st.integers(0, 4),
    st.integers(1, 2),
    st.randoms(use_true_random=False),
)
def test_products_of_any_block_in_any_order(
    widths: list[int], outputs: int, names: list[str], biases: int, points: int, random: Random
) -> None:
    fast = gradients(widths, outputs, names, points, biases)
    block = random.sample(fast.block, random.randint(1, len(fast.block)))
    fast = DenseGradients(fast.network, fast.points, "name", block=tuple(block))
    same_products(fast, by_torch(fast), relative=1e-9)


def test_products_of_a_deep_net_at_two_points_and_in_subspaces() -> None:
    fast = gradients([6, 4, 5], 3, [CUBIC, "relu", "gelu"], points=2)
    slow = by_torch(fast)
    same_products(fast, slow)
    outer, inner = gaussian(DIM, 4), gaussian(4, 3, seed=1)  # not orthonormal
    same_products(fast.restrict(outer), slow.restrict(outer))
    same_products(fast.restrict(outer).restrict(inner), slow.restrict(outer @ inner))


def test_more_axes_than_probes_and_matrices_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = make("mlp", outputs=3, shape=[40], widths=[9]).problem("all", "both").features
    same_products(fast, by_torch(fast))
    monkeypatch.setattr(dense, "ROWS", 7)  # two nodes of three rows
    monkeypatch.setattr(dense, "BATCH", 100)
    same_products(fast, by_torch(fast))


@pytest.mark.parametrize("sigma", [smoothed_relu(3.0), smoothed_relu(100.0), softplus(5.0)])
def test_surrogates_are_those_that_torch_differentiates(sigma: Activation) -> None:
    fast = gradients([6, 4, 5], 2, ["relu", "tanh"], points=2, biases=1)
    swapped = fast.substituted(sigma)
    same_products(swapped, by_torch(fast).substituted(sigma), relative=1e-9)
    assert swapped.chain.activations[0] is sigma and swapped.block == fast.block


def test_single_precision_factors_are_multiplied_in_double() -> None:
    """So that the Gram matrix of near duplicates is that of the features, to the last digits."""
    fast = gradients([30, 20], 2, ["gelu"]).to(torch.device("cpu"), torch.float32)
    here = fast.linearize(on_sphere(1, DIM).repeat(3, 1) + 1e-4 * gaussian(3, DIM, seed=1))
    (states,) = here.passes
    parts = []
    for h, delta in zip(states.inputs, states.deltas, strict=True):
        left = delta.transpose(0, 1).double()
        parts += [(left[..., None] * h.double()[:, None, None]).flatten(2), left]
    phi, t = torch.cat(parts, 2).flatten(0, 1), gaussian(fast.width, 2)
    close(here.gram(), phi @ phi.T, 1e-14)
    close(here.apply(t), phi @ t, 1e-14)


def test_no_product_forms_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rows_at", "all_rows", "split"):
        monkeypatch.setattr(ParameterGradients, name, None)
    fast = gradients([5, 4], 2, ["relu"], points=2, biases=0)
    check_features(fast, samples=2)
    assert any("norm" in sentence for sentence in fast.undetermined)


@needs_gpu
def test_products_on_a_gpu() -> None:
    fast, cuda = gradients([50, 40], 3, ["gelu"], points=2), torch.device("cuda")
    same_products(fast.to(cuda, torch.float64), by_torch(fast))
    same_products(fast.to(cuda, torch.float32), by_torch(fast), 1e-5, steps=1e-2)


def chained(*layers: nn.Module, shape: tuple[int, ...] = (DIM,)) -> Chain | None:
    return dense_chain(known_network(nn.Sequential(*layers), shape, 2))


FIRST, SQUARE, LAST, TIED = nn.Linear(DIM, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
TIED.weight = SQUARE.weight
RELU, TANH = nn.ReLU(), nn.Tanh()


def test_chains_are_recognised_and_a_problem_takes_the_fast_path() -> None:
    layers = [nn.Flatten(), FIRST, TANH, nn.Dropout(0.1), SQUARE, nn.Identity(), TANH, LAST]
    for shape in ((DIM,), (2, 3)):
        chain = chained(*layers, shape=shape)
        assert chain is not None and chain.names == ("1", "4", "7")
        assert [sigma.name for sigma in chain.activations] == ["tanh", "tanh"]
    assert chained(nn.Linear(DIM, 2)) == (("0",), ())
    for parameters in ("all", "first", "1.bias,5.weight"):
        features = make("mlp").problem(parameters, "both").features
        assert type(features) is DenseGradients
        assert f"gradients of {parameters} parameters" in features.name
    slow = make("vit").problem("all").features
    assert type(slow) is ParameterGradients
    with pytest.raises(InputError, match="use ParameterGradients"):
        DenseGradients(slow.network, slow.points, slow.name).linearize(on_sphere(1, 16))


@pytest.mark.parametrize(
    "layers",
    [
        (FIRST, RELU, SQUARE, RELU, SQUARE, RELU, LAST),
        (FIRST, RELU, SQUARE, RELU, TIED, RELU, LAST),
        (FIRST, SQUARE, RELU, LAST),
        (FIRST, RELU, RELU, LAST),
        (FIRST, RELU, LAST, RELU),
        (RELU, FIRST, RELU, LAST),
        (FIRST, nn.SiLU(), LAST),
        (FIRST, nn.LayerNorm(4), LAST),
        (nn.Sequential(FIRST, RELU), LAST),
        (nn.Flatten(0), FIRST, RELU, LAST),
        (nn.Linear(DIM // 2, 4), RELU, LAST),
    ],
)
def test_other_networks_are_left_to_torch(layers: tuple[nn.Module, ...]) -> None:
    assert chained(*layers) is None
