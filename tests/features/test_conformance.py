"""`check_features` over a dozen instances, and that it notices what is wrong."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exhume.features import Features
from exhume.features.activations import activation, softplus
from exhume.features.gradient import ParameterGradients
from exhume.features.random import RandomFeatures, RandomLinearization
from exhume.features.weights import Seeded, Stored
from exhume.testing import check_features
from nets import by_torch, make
from problems import Dense, gaussian, make_features


def of(name: str, parameters: str, point: str, **changes: object) -> Features:
    return make(name, **changes).problem(parameters, point).features


RELU_NET = {"activation": "relu"}
INSTANCES: dict[str, Callable[[], Features]] = {
    "random relu": lambda: make_features(5, 40, "relu"),
    "random with a bias": lambda: replace(make_features(5, 40, "tanh"), bias=gaussian(40)),
    "random from a seed": lambda: RandomFeatures(Seeded(40, 5, seed=0), activation("gelu"), 7),
    "surrogate": lambda: make_features(4, 20, "relu").substituted(softplus(4.0)),
    "of another make": lambda: Dense(lambda x: torch.tanh(gaussian(2, 12, 3) @ x), 3, 12),
    "last layer": lambda: of("mlp", "last", "both"),
    "last layer in chunks": lambda: replace(of("mlp", "last", "both", **RELU_NET), chunk=1),
    "gradients": lambda: by_torch(of("mlp", "all", "both")),
    "streamed gradients": lambda: by_torch(of("two_layer", "all", "both"), keep=False),
    "dense gradients": lambda: of("mlp", "all", "both"),
    "dense gradients of a block": lambda: of("two_layer", "first", "midpoint", **RELU_NET),
    "many axes": lambda: of("two_layer", "first", "midpoint", shape=[40], width=200),
    "residual network": lambda: of("resnet", "last", "both"),
    "transformer": lambda: of("vit", "all", "midpoint", shape=[2, 4]),
    "head of a transformer": lambda: of("vit", "last", "both", shape=[2, 4]),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_features_conform(name: str) -> None:
    features = INSTANCES[name]()
    check_features(features, dim=features.dim, samples=2, seed=1)


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
def test_one_wrong_method_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = BREAKAGES[method](getattr(RandomLinearization, method))
    monkeypatch.setattr(RandomLinearization, method, wrong)
    with pytest.raises(AssertionError, match=method):
        check_features(make_features(4, 20, "tanh"))


class Skewed(RandomFeatures):
    def moment(self, weights: Tensor, directions: Tensor) -> Tensor:
        return super().moment(weights, directions).roll(1, 0)


class Unrotated(RandomFeatures):
    def restrict(self, basis: Tensor) -> RandomFeatures:
        kept = self.weights.rows(0, self.width)[:, : basis.shape[1]]
        return replace(self, weights=Stored(kept))


class Undivided(RandomFeatures):
    def share(self, index: int, count: int) -> tuple[RandomFeatures, list[slice]]:
        return super().share(0, count)


class Weighed(RandomFeatures):
    """Φ with its i-th row times i: all products fit together, only the order matters."""

    def linearize(self, candidates: Tensor) -> RandomLinearization:
        here = super().linearize(candidates)
        place = torch.arange(1, len(candidates) + 1).to(candidates)[:, None]
        assert here._kept is not None
        here._kept = [b._replace(phi=place * b.phi, slope=place * b.slope) for b in here._kept]
        return here


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Skewed, "moment is not a symmetric matrix"),
        (Unrotated, "restrict: has other features"),
        (Undivided, "share: gram does not add up"),
        (Weighed, "depends on the order of the candidates"),
    ],
)
def test_one_wrong_kind_is_noticed(kind: type[RandomFeatures], words: str) -> None:
    right = make_features(4, 20, "tanh")
    with pytest.raises(AssertionError, match=words):
        check_features(kind(right.weights, right.activation, bias=gaussian(20)))


def test_a_wrong_slope_dimension_and_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    features = make_features(4, 20, "relu")
    with pytest.raises(AssertionError, match="push is not the derivative of combine"):
        check_features(features.leaky())
    with pytest.raises(AssertionError, match="dim: expected 3, the features say 4"):
        check_features(features, dim=3)
    right = ParameterGradients.all_rows

    def swapped(self: ParameterGradients, candidates: Tensor) -> Tensor:
        rows = right(self, candidates)  # all first rows before all second
        return rows.transpose(0, 1).reshape(rows.shape)

    monkeypatch.setattr(ParameterGradients, "all_rows", swapped)
    with pytest.raises(AssertionError, match=r"push is not the derivative of combine|order"):
        check_features(by_torch(of("two_layer", "all", "midpoint")))
