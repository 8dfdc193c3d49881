"""From two sets of weights to a problem, and the equation that the whole attack rests on."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exhume.equation.objective import fitted
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.features.gradient import ParameterGradients
from exhume.features.modules import LastLayer
from exhume.features.network import known_network
from exhume.features.random import RandomFeatures
from exhume.models.formulation import (
    POINTS,
    features_at,
    first_layer,
    network_problem,
    weights_problem,
)
from nets import SIZES, Net, make, names_of
from odd_modules import class_token
from problems import gaussian, on_sphere


@pytest.mark.parametrize("name", SIZES)
def test_the_target_is_the_change_of_the_last_weight_or_of_a_block(name: str) -> None:
    net = make(name, outputs=3)
    names, head = names_of(net), net.network.head_weight
    change = {key: net.trained[key] - net.initial[key] for key in names}
    last = net.problem("last")
    assert torch.equal(last.target, change[head].T) and last.target.is_contiguous()
    assert last.features.width == change[head].shape[1] and last.shape == net.network.shape
    picked = ",".join(reversed(names[:2]))  # however the user orders them
    for parameters, block in (("all", names), (picked, names[:2])):
        column = torch.cat([change[key].flatten() for key in block])[:, None]
        assert torch.equal(net.problem(parameters).target, column)
        assert net.problem(parameters).features.width == len(column)
    layer = last.first_layer
    assert (layer is None) == (name in ("resnet", "vit"))
    if layer is not None:
        assert layer.initial is net.initial["1.weight"] and layer.trained is net.trained["1.weight"]
    assert first_layer(net.network, net.initial, net.initial) is None


@pytest.mark.parametrize(
    ("made", "shape", "names"),
    [
        (lambda: make("vit", outputs=3, dim=8).plain, (4, 4), ("1.weight", "2.positions")),
        (lambda: make("vit", outputs=3, dim=8, shape=[3, 4, 6]).plain, (3, 4, 6),
         ("0.weight", "1.positions")),
        (lambda: class_token().double(), (3, 4, 4), ("0.weight", "1.places")),
    ],
    ids=["grey", "colour", "class token"],
)  # fmt: skip
def test_a_first_layer_that_sees_tiles_has_a_change_for_each_place(
    made: Callable[[], nn.Module], shape: tuple[int, ...], names: tuple[str, str]
) -> None:
    module, (weight, places) = made(), names
    network, image = known_network(module, shape, 3), gaussian(1, *shape)
    module(image)[0, 1].backward()
    before = {key: w.detach() for key, w in module.named_parameters()}
    after = {key: w.detach() - 0.1 * w.grad for key, w in module.named_parameters()}
    problem = network_problem(network, before, after)
    layer = problem.tiled
    assert problem.first_layer is None and layer is not None and layer.tiles is not None
    assert layer.places is not None and layer.embedding == places
    assert layer.trained.shape == (len(before[weight]), layer.tiles.entries)
    assert torch.equal(layer.trained, after[weight].flatten(1))
    torch.testing.assert_close(layer.bias, layer.places.sum(0))
    # For one sample the layer's change is the sum over places of what moved there times the tile
    change = layer.places.T @ layer.tiles.cut(image.flatten(1))[0]
    torch.testing.assert_close(layer.trained - layer.initial, change)
    moved = problem.to("cpu", torch.float32).tiled
    assert moved is not None and (moved.tiles, moved.embedding) == (layer.tiles, places)
    still = first_layer(network, before, {**after, places: before[places]})
    assert still is not None and still.tiles == layer.tiles and still.places is None
    assert weights_problem(network, after, Premise.DECAY).tiled is None  # no change is known


@pytest.mark.parametrize("parameters", ["last", "all", "first"])
def test_the_resolution_is_what_rounding_leaves(parameters: str) -> None:
    net, x = make("mlp", step=1e-3), on_sphere(2, 4)
    exact = net.problem(parameters, "initial")
    here, names = exact.features.linearize(x), names_of(net)
    change = here.combine(gaussian(len(here.gram()), exact.target.shape[1])) * 1e-3
    block = {"last": ["5.weight"], "all": names, "first": names[:2]}[parameters]
    parts = torch.split(change.T.flatten(), [net.initial[key].numel() for key in block])
    own = {key: net.initial[key] for key in block}
    moved = {k: w + p.view_as(w) for (k, w), p in zip(own.items(), parts, strict=True)}
    initial, trained = (
        {key: w.float() for key, w in state.items()} for state in (net.initial, net.initial | moved)
    )
    rounded = network_problem(net.network, initial, trained, parameters, "initial")
    left = fitted(rounded.to("cpu", torch.float64), x).value
    assert rounded.resolution / 30 < left < rounded.resolution * 30
    assert exact.resolution < 1e-16 * rounded.resolution * 30


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("point", POINTS)
def test_features_are_taken_where_the_user_says(point: str, parameters: str) -> None:
    net = make("mlp", step=0.5)
    features = net.problem(parameters, point).features
    assert isinstance(features, LastLayer if parameters == "last" else ParameterGradients)
    what = "last layer, features" if parameters == "last" else "gradients of all parameters"
    assert features.name.startswith(f"{what} at the {point}"[:-5])
    for weights, by_hand in zip(features.points, net.points(point), strict=True):
        for key, w in by_hand.items():
            torch.testing.assert_close(weights[key], w, rtol=1e-15, atol=1e-15)


def test_what_did_not_change_is_left_out_and_what_names_nothing_refused() -> None:
    net = make("mlp")
    frozen = {**net.trained, "1.weight": net.initial["1.weight"], "1.bias": net.initial["1.bias"]}
    still = replace(net, trained=frozen)
    left = still.problem("all")  # what was frozen has gradients, but no trace of them
    assert torch.equal(left.target, net.problem("3.*,5.*").target)
    assert left.features.width == len(left.target)
    assert still.problem("last").first_layer is None
    headless = replace(net, trained={**net.trained, "5.weight": net.initial["5.weight"]})
    for pose, words in (
        (lambda: still.problem("first"), r"'first' \(1.weight, 1.bias\) did not change"),
        (lambda: headless.problem("last"), "did not change in training"),  # its bias did
        (lambda: net.problem("7.*"), r"'7\.\*' names none of the model's: 1.weight"),
        (lambda: net.problem("last", "middle"), "point: expected one of initial, final, midpoint"),
    ):
        with pytest.raises(InputError, match=words):
            pose()


def test_one_hidden_layer_takes_the_fast_path() -> None:
    net = make("two_layer")
    for point in ("initial", "final", "midpoint"):
        features = features_at(net.network, net.initial, net.trained, "last", point)
        assert isinstance(features, RandomFeatures) and features.name.endswith(", tanh")
        spread = net.points(point)[0]["1.weight"].square().mean().sqrt().item()
        assert features.spread == pytest.approx(spread, rel=1e-12)
    assert isinstance(net.problem("last", "both").features, LastLayer)
    assert isinstance(net.problem("3.weight", "final").features, ParameterGradients)


LOSSES = {
    "squared": F.mse_loss,
    "logistic": lambda f, y: F.binary_cross_entropy_with_logits(f, (y > 0).to(f)),
    "cross_entropy": lambda f, y: F.cross_entropy(f, y.argmax(1)),
}


def descended(name: str, loss: str, rate: float, x: Tensor, labels: Tensor) -> tuple[Net, Tensor]:
    """A network after a few steps of descent, and A = −rate · Σ_t ∂L/∂f, (n, c)."""
    net, coefficients = make(name, outputs=labels.shape[1]), torch.zeros_like(labels)
    net.plain.load_state_dict(net.initial)
    parameters = list(net.plain.parameters())
    for _ in range(4):
        outputs = net.plain(x.reshape(len(x), *net.network.shape))
        value = LOSSES[loss](outputs, labels)
        back, *gradients = torch.autograd.grad(value, [outputs, *parameters])
        with torch.no_grad():
            for parameter, change in zip(parameters, gradients, strict=True):
                parameter -= rate * change
        coefficients -= rate * back
    trained = {key: w.detach().clone() for key, w in net.plain.state_dict().items()}
    return replace(net, trained=trained), coefficients


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("parameters", ["last", "first", "all", "*.bias"])
@pytest.mark.parametrize("name", ["two_layer", "mlp", "vit"])
def test_the_change_is_a_sum_of_gradients_to_second_order_in_the_step(
    name: str, parameters: str, loss: str
) -> None:
    """|Δθ − Σ A ∇f| falls by four when the step is halved, and Δθ itself by two."""
    x, labels = on_sphere(3, make(name).network.dim), gaussian(3, 2, seed=1)
    errors: dict[str, list[float]] = {point: [] for point in POINTS}
    sizes, values = [], []
    for rate in (2e-3, 1e-3):
        net, coefficients = descended(name, loss, rate, x, labels)
        a = coefficients[:, None] if parameters == "last" else coefficients[..., None]
        for point in POINTS:
            problem, ends = net.problem(parameters, point), 2 if point == "both" else 1
            halves = torch.cat([a / ends] * ends, 1).flatten(0, 1)  # half of it at either end
            combined = problem.features.linearize(x).combine(halves)
            errors[point].append((problem.target - combined).norm().item())
        sizes.append(problem.target.norm().item())
        values.append(fitted(net.problem(parameters), x).value)
    assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.1)
    for point in POINTS:
        assert errors[point][1] < 0.05 * sizes[1]
        assert errors[point][0] / errors[point][1] == pytest.approx(4, rel=0.1)
    assert errors["midpoint"][1] < min(errors["initial"][1], errors["final"][1]) / 2
    assert values[1] <= (errors["midpoint"][1] / sizes[1]) ** 2 * (1 + 1e-6)
    if name == "two_layer" and parameters != "*.bias":  # other samples do not explain the change
        assert fitted(net.problem(parameters), on_sphere(3, 4, seed=9)).value > 1e-2 > values[1]
