"""Runs side by side: the products of one step for the candidates of R runs, (R, n, d), at once.

Where features are a chain of dense layers, runs stand where `passes` has columns, each with a
sharpness of its own; others go one by one. A is (R, n·k, m) and T is (R, p, m).
"""

from collections.abc import Callable
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from exhume.features import Features
from exhume.features.activations import Activation
from exhume.features.dense import DenseGradients
from exhume.features.network import derivatives
from exhume.features.passes import Back, Pass, PerLayer, Split

Surrogate = Callable[[float | Tensor], Activation]  # of a sharpness, or of one for each run
TOGETHER = 2**28  # entries of residuals that runs may have together: 1 GiB in float32
_last: WeakKeyDictionary[Features, tuple[str, Features]] = WeakKeyDictionary()  # with a surrogate


def batched(features: Features, target: Tensor) -> DenseGradients | None:
    """Return the features where runs go side by side: dense layers, a target of one column."""
    dense = isinstance(features, DenseGradients) and target.shape[1] == 1
    return cast(DenseGradients, features) if dense else None


def most(features: Features, target: Tensor) -> int:
    """Return how many runs may be given at once."""
    return max(1, TOGETHER // len(target)) if batched(features, target) else 1


def runs_at(
    features: Features,
    surrogate: Surrogate,
    candidates: Tensor,
    sharpness: Tensor,
    target: Tensor,
    coarse: bool = False,
) -> "Runs":
    """Return products at candidates (R, n, d), each run with a sharpness of its own (R, 1, 1).

    Coarse ones may round the factors of features and residual, too, as those of derivatives.
    """
    if dense := batched(features, target):
        return DenseRuns(dense, surrogate(sharpness), candidates, coarse)
    return OneRun(_substituted(features, surrogate(sharpness.item())), candidates)


def _substituted(features: Features, surrogate: Activation) -> Features:
    name, kept = _last.get(features, ("", features))
    if name != surrogate.name:
        kept = features.substituted(surrogate)
        if kept is not features:  # which it would keep alive
            _last[features] = surrogate.name, kept
    return kept


class OneRun:
    """A run alone."""

    def __init__(self, features: Features, candidates: Tensor) -> None:
        """Linearise at the candidates, (1, n, d)."""
        self.features, self.candidates = features, candidates
        self.linearization = features.linearize(candidates[0])

    def predict(self) -> Tensor | None:
        """Return f(x), (1, n, c)."""
        predicted = self.features.predict(self.candidates[0])
        return None if predicted is None else predicted[None]

    def left(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Δ − ΦᵀA."""
        return (target - self.linearization.combine(coefficients[0]))[None]

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT."""
        return self.linearization.apply(target[0])[None]

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ A · ∂φ(x_i)ᵀ T."""
        return self.linearization.pull(target[0], coefficients[0])[None]


class DenseRuns:
    """All runs at once, through a chain of dense layers, for targets of one column.

    ΦT is the tangent of the outputs for weights along T, so `apply` takes what `pull` needs as
    well and is rounded as that is; passes are made once for the same A or T.
    """

    def __init__(
        self, features: DenseGradients, surrogate: Activation, x: Tensor, coarse: bool
    ) -> None:
        """Make one forward pass a point, with the surrogate for every ReLU."""
        known = features.chain.activations
        activations = [surrogate if sigma.name == "relu" else sigma for sigma in known]
        self.features, self.candidates, self.coarse = features, x, coarse
        with torch.no_grad(), derivatives(rounded=coarse):
            self.passes = [Pass(layers, activations, x) for layers in features.layers]
        self._weighed: tuple[Tensor, list[Back]] | None = None
        self._moved: tuple[Tensor, Split, list[PerLayer]] | None = None

    def predict(self) -> Tensor:
        """Return f(x), (R, n, c)."""
        with torch.no_grad(), derivatives(rounded=self.coarse):
            return linear(self.passes[-1].inputs[-1], *self.features.layers[-1][-1])

    def left(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Δ − ΦᵀA, (R, p, 1): from each layer's T_l go v_lᵀ h_{l−1}, and the sum of v_l."""
        runs = len(self.candidates)
        result = target.T.repeat(runs, 1)
        with torch.no_grad(), derivatives(rounded=self.coarse):
            for here, (_, v) in zip(self.passes, self._backward(coefficients), strict=True):
                for k, (weight, bias) in enumerate(self.features.places):
                    if weight is not None:
                        h = self.features.lifted(k, here.inputs[k])
                        part = result[:, weight].view(runs, -1, h.shape[-1])
                        part.baddbmm_(v[k].mT, h, alpha=-1)
                    if bias is not None:
                        result[:, bias] -= v[k].sum(1)
        return result[..., None]

    def apply(self, target: Tensor) -> Tensor:
        """Return ΦT = q_L, (R, n·k, 1)."""
        nothing = self.candidates.new_zeros(*self.candidates.shape[:2], self.features.outputs)
        last = [nothing if q[-1] is None else q[-1] for q in self._tangents(target)[1]]
        return torch.stack(last, 2).flatten(1)[..., None]

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Σ_c A_ic · ∂φ(x_i)ᵀ T, (R, n, d)."""
        split, tangents = self._tangents(target)
        result = torch.zeros_like(self.candidates)
        with torch.no_grad(), derivatives(rounded=True):
            each = zip(self.passes, self._backward(coefficients), tangents, strict=True)
            for here, back, q in each:
                pulled = here.pulled(split, back, q)
                result = result if pulled is None else result + pulled
        return result

    def _backward(self, coefficients: Tensor) -> list[Back]:
        """u_l and v_l of each point."""
        if self._weighed is None or self._weighed[0] is not coefficients:
            shape = (*self.candidates.shape[:2], len(self.passes), self.features.outputs)
            parts = coefficients.reshape(shape).unbind(2)
            made = [here.backward(a) for here, a in zip(self.passes, parts, strict=True)]
            self._weighed = coefficients, made
        return self._weighed[1]

    def _tangents(self, target: Tensor) -> tuple[Split, list[PerLayer]]:
        """T by layer, and q_l of all layers at each point."""
        if self._moved is None or self._moved[0] is not target:
            with torch.no_grad(), derivatives(rounded=True):
                split = self.features.by_layer(target[..., 0].T)
                made = [here.shifted(split, len(here.weights)) for here in self.passes]
            self._moved = target, split, made
        return self._moved[1:]


Runs = OneRun | DenseRuns
