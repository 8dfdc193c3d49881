"""`check_features` over a dozen instances, and that it notices what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from exhume.features import Features
from exhume.features.activations import Activation, activation, softplus
from exhume.features.gradient import ParameterGradients
from exhume.features.last_layer import LastLayerLinearization
from exhume.features.modules import ModuleFeatures
from exhume.features.random import RandomFeatures, RandomLinearization
from exhume.features.weights import Seeded, Stored
from exhume.testing import check_features
from nets import by_torch, make
from problems import gaussian, make_features


@dataclass(frozen=True)
class TwoRows:
    """Features of someone else's: two rows a candidate, tanh(Vx) and tanh(Wx), and no moment."""

    v: Tensor
    w: Tensor
    name = "two rows"
    device = torch.device("cpu")

    @property
    def dim(self) -> int:
        return self.v.shape[1]

    @property
    def width(self) -> int:
        return self.v.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.v.dtype

    def linearize(self, candidates: Tensor) -> "TwoRowsLinearization":
        return TwoRowsLinearization(self, candidates)

    def moment(self, weights: Tensor, directions: Tensor) -> None:
        return None

    def to(self, device: torch.device, dtype: torch.dtype) -> "TwoRows":
        return TwoRows(self.v.to(device, dtype), self.w.to(device, dtype))

    def restrict(self, basis: Tensor) -> "TwoRows":
        return TwoRows(self.v @ basis, self.w @ basis)

    def substituted(self, activation: Activation) -> "TwoRows":
        return self

    def resident(self) -> "TwoRows":
        return self


@dataclass(frozen=True)
class TwoRowsLinearization:
    features: TwoRows
    candidates: Tensor

    def phi(self, x: Tensor) -> Tensor:
        rows = torch.stack([x @ self.features.v.T, x @ self.features.w.T], dim=1)
        return torch.tanh(rows).flatten(0, 1)

    def gram(self) -> Tensor:
        return self.phi(self.candidates) @ self.phi(self.candidates).T

    def apply(self, target: Tensor) -> Tensor:
        return self.phi(self.candidates) @ target

    def combine(self, coefficients: Tensor) -> Tensor:
        return self.phi(self.candidates).T @ coefficients

    def jacobian(self, a: Tensor) -> Tensor:
        return torch.func.jacrev(lambda x: self.phi(x).T @ a)(self.candidates)

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        return torch.einsum("pmnd,nd->pm", self.jacobian(coefficients), direction)

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        return torch.einsum("pmnd,pm->nd", self.jacobian(coefficients), target)

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return (self.phi(x).T @ coefficients * target).sum()

        def along(x: Tensor) -> Tensor:
            return (torch.func.grad(product)(x) * direction).sum()

        return torch.func.grad(along)(self.candidates)  # the Hessian is symmetric

    def curvature(self, coefficients: Tensor) -> Tensor:
        j = self.jacobian(coefficients)
        return torch.einsum("pmid,pmjd->ij", j, j) / self.features.dim


def of(name: str, parameters: str, point: str, **changes: object) -> Features:
    return make(name, **changes).problem(parameters, point).features


RELU_NET = {"activation": "relu"}
INSTANCES: dict[str, Callable[[], Features]] = {
    "random relu": lambda: make_features(5, 40, "relu"),
    "random with a bias": lambda: replace(make_features(5, 40, "tanh"), bias=gaussian(40)),
    "random from a seed": lambda: RandomFeatures(Seeded(40, 5, seed=0), activation("gelu"), 7),
    "surrogate": lambda: make_features(4, 20, "relu").substituted(softplus(4.0)),
    "two rows": lambda: TwoRows(gaussian(12, 3), gaussian(12, 3, seed=1)),
    "last layer": lambda: of("mlp", "last", "both"),
    "last layer in chunks": lambda: replace(of("mlp", "last", "both", **RELU_NET), chunk=1),
    "gradients": lambda: by_torch(of("mlp", "all", "both")),
    "streamed gradients": lambda: by_torch(of("mlp", "all", "both", **RELU_NET), keep=False),
    "dense gradients": lambda: of("mlp", "all", "both"),
    "dense gradients of a block": lambda: of("two_layer", "first", "midpoint", **RELU_NET),
    "many axes": lambda: of("two_layer", "first", "midpoint", shape=[40], width=200),
    "residual network": lambda: of("resnet", "last", "both"),
    "transformer": lambda: of("vit", "all", "both"),
    "head of a transformer": lambda: of("vit", "last", "midpoint"),
}


@pytest.mark.parametrize("name", INSTANCES)
def test_features_conform(name: str) -> None:
    features = INSTANCES[name]()
    check_features(features, dim=features.dim, samples=2, seed=1)


# That it notices


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


class Forgetful(RandomFeatures):
    def restrict(self, basis: Tensor) -> RandomFeatures:
        return replace(super().restrict(basis), bias=None)


class Weighed(RandomFeatures):
    """Φ with its i-th row times i: all products fit together, only the order matters."""

    def linearize(self, candidates: Tensor) -> RandomLinearization:
        here = super().linearize(candidates)
        place = torch.arange(1, len(candidates) + 1).to(candidates)[:, None]
        assert here._kept is not None
        here._kept = [replace(b, phi=place * b.phi, slope=place * b.slope) for b in here._kept]
        return here


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Skewed, "moment is not a symmetric matrix"),
        (Unrotated, "restrict: has other features"),
        (Forgetful, "restrict: has other features"),
        (Weighed, "depends on the order of the candidates"),
    ],
)
def test_one_wrong_kind_is_noticed(kind: type[RandomFeatures], words: str) -> None:
    right = make_features(4, 20, "tanh")
    with pytest.raises(AssertionError, match=words):
        check_features(kind(right.weights, right.activation, bias=gaussian(20)))


def test_a_wrong_slope_and_a_wrong_dimension_are_noticed() -> None:
    features = make_features(4, 20, "relu")
    with pytest.raises(AssertionError, match="push is not the derivative of combine"):
        check_features(features.leaky())
    with pytest.raises(AssertionError, match="dim: expected 3, the features say 4"):
        check_features(features, dim=3)


def swapped_rows(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """All first rows before all second rows, in place of row after row of each candidate."""

    def wrong(self: ParameterGradients, candidates: Tensor) -> Tensor:
        rows = right(self, candidates)
        return rows.transpose(0, 1).reshape(rows.shape)

    return wrong


def test_rows_in_the_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = swapped_rows(ParameterGradients.all_rows)
    monkeypatch.setattr(ParameterGradients, "all_rows", wrong)
    with pytest.raises(AssertionError, match=r"push is not the derivative of combine|order"):
        check_features(by_torch(of("two_layer", "all", "midpoint")))


@pytest.mark.parametrize("parameters", ["last", "all"])
@pytest.mark.parametrize("factor", [-1, 2])
def test_a_wrong_restriction_of_a_module_is_noticed(
    parameters: str, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ModuleFeatures.restrict
    monkeypatch.setattr(ModuleFeatures, "restrict", lambda self, u: right(self, factor * u))
    with pytest.raises(AssertionError, match="restrict"):
        check_features(of("mlp", parameters, "midpoint"))


def test_a_point_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LastLayerLinearization.__init__

    def one_point(self: LastLayerLinearization, *arguments: object) -> None:
        right(self, *arguments)
        self.functions = [self.functions[0] for _ in self.functions]

    monkeypatch.setattr(LastLayerLinearization, "__init__", one_point)
    check_features(of("mlp", "last", "midpoint"))  # there is one point
    with pytest.raises(AssertionError, match="push is not the derivative of combine"):
        check_features(of("mlp", "last", "both"))
