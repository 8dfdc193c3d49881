"""The problem: what the auditor may see. It has no field that could hold the truth."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from exhume import ranks
from exhume.equation.coefficients import Rule
from exhume.equation.domain import Domain, Sphere
from exhume.equation.pixels import Pixels
from exhume.equation.tiles import Tiles
from exhume.errors import InputError
from exhume.features import Features, Linearization
from exhume.features.spread import Spread

SPHERE = Sphere()


class Premise(Enum):
    """The premise says why the target should be a combination of the samples' features.

    CHANGE: training moved the weights along the samples' gradients: Δ = θ − θ₀.
    MARGIN: training went on until the direction of the weights no longer changed: a homogeneous
        network θ itself is a combination, with coefficients as Rule.MARGIN allows; so is θ − θ₀,
        sooner, where the initial weights are known.
    DECAY: training with weight decay came to rest: θ itself is a combination, of either sign.
    REPLAY: training is known step by step: θ − θ₀ is what the same run makes of the samples.
    """

    CHANGE = "change"
    MARGIN = "margin"
    DECAY = "decay"
    REPLAY = "replay"

    @property
    def weights_alone(self) -> bool:
        """Tell whether trained weights will do, without initial ones and without a recipe."""
        return self in (Premise.MARGIN, Premise.DECAY)


@dataclass(frozen=True)
class ThreatModel:
    """The threat model says, for the report, what the attack assumes the attacker knows."""

    knows: tuple[str, ...]  # one phrase for each thing known
    assumes: tuple[str, ...] = ()  # one phrase for each thing assumed of the training


@dataclass(frozen=True, eq=False)
class FirstLayer:
    """A dense first layer before and after training; its change lies in the span of the samples.

    One that sees images tile by tile is dense in the tiles, (h, t), which then are the samples.
    """

    initial: Tensor  # W₁ before training, (h, d)
    trained: Tensor  # W₁ after it
    bias: Tensor | None = None  # what training added to its bias, (h,), where it has one
    tiles: Tiles | None = None  # how it cuts images, if it does
    places: Tensor | None = None  # what training added to the embedding of each place, (P, h)
    embedding: str = ""  # the name of the parameter whose last rows these are, if there are any

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Return singular values (r,) and right singular vectors (r, d) of what training added."""
        change = (self.trained.double() - self.initial.double()).cpu()
        _, sizes, directions = torch.linalg.svd(change, full_matrices=False)
        return sizes, directions

    def to(self, device: torch.device) -> "FirstLayer":
        """Return the same elsewhere, in the precision it was stored in."""
        bias, places = (x if x is None else x.to(device) for x in (self.bias, self.places))
        initial, trained = self.initial.to(device), self.trained.to(device)
        return FirstLayer(initial, trained, bias, self.tiles, places, self.embedding)


@dataclass(frozen=True, eq=False)
class Problem:
    """Find inputs X and coefficients A with Δ ≈ Φ(X)ᵀA."""

    target: Tensor  # Δ, (p, m), what the weights show
    features: Features  # candidates → Φ
    threat_model: ThreatModel  # what is known and assumed
    shape: tuple[int, ...]  # of one input, for pictures; (d,) if it is a vector
    domain: Domain = SPHERE  # where candidates may lie
    display: Pixels | None = None  # how inputs become pixels, where the auditor is told
    resolution: float = 0.0  # relative residual that rounding of stored weights leaves at the truth
    drift: float = 0.0  # the most left there because features moved in training; 0 if none did
    first_layer: FirstLayer | None = None  # where that is dense and its change is known
    premise: Premise = Premise.CHANGE  # why the target should combine the samples' features
    start: Tensor | None = None  # θ₀, (p, 1), where margin or decay has θ − θ₀ for a target
    whole: int | None = None  # rows of all ranks together, where this has one rank's share of them
    tiled: FirstLayer | None = None  # the first layer where it sees images tile by tile

    def __post_init__(self) -> None:
        """Refuse what no attack could use."""
        p, entries = self.features.width, math.prod(self.shape)
        if entries != self.dim:
            raise InputError(
                f"input shape {self.shape} has {entries} entries, but the features take {self.dim}."
            )
        if self.target.ndim != 2 or self.target.shape[0] != p or self.target.shape[1] < 1:
            raise InputError(f"target: expected shape ({p}, m), got {tuple(self.target.shape)}.")
        if not self.target.isfinite().all():
            raise InputError("target: holds NaN or infinite entries; the weights are damaged.")
        if self.whole is None and not self.target.any():  # which a share may be
            raise InputError("target: is zero everywhere, so it holds no trace of any sample.")
        if self.target.dtype != self.features.dtype:
            raise InputError(
                f"target: is {self.target.dtype}, but the features are {self.features.dtype}; "
                "move both with problem.to(device, dtype)."
            )

    @property
    def rule(self) -> Rule:
        """Return which coefficients are allowed."""
        return Rule.MARGIN if self.premise is Premise.MARGIN else Rule.FREE

    @property
    def dim(self) -> int:
        """Return d, the number of entries of one input."""
        return self.features.dim

    @cached_property
    def size(self) -> Tensor:
        """Return ‖Δ‖², float64."""
        return self.total(self.target.double().square().sum())

    def total(self, part: Tensor) -> Tensor:
        """Return a sum over the rows of the target: that of all ranks, where they are spread."""
        return part if self.whole is None else ranks.total(part)

    def linearize(self, candidates: Tensor) -> tuple[Tensor, Linearization]:
        """Return candidates (n, d) where the features are, and features and derivatives there.

        All ranks take the first one's candidates, so that they cannot drift apart.
        """
        candidates = candidates.to(self.features.device, self.features.dtype)
        if self.whole is None:
            return candidates, self.features.linearize(candidates)
        candidates = ranks.first_of(candidates)
        return candidates, Spread(self.features.linearize(candidates))

    def moment(self, weights: Tensor, directions: Tensor) -> Tensor | None:
        """Return `Features.moment`, M Q (d, k): a mean over rows, that of all ranks."""
        own = self.features.moment(weights, directions)
        if own is None or self.whole is None:
            return own
        return ranks.total(own * (self.features.width / self.whole))

    def ratio(self, samples: int) -> float:
        """Return p·m/(d·n), equations over unknowns; below 1 nothing can be recovered."""
        rows, columns = self.target.shape
        return (self.whole or rows) * columns / (self.dim * samples)

    def spread(self) -> "Problem":
        """Return the problem with this rank's share of its rows; itself where there are no ranks.

        Its sums over the rows are then those of all ranks; those of its features are its own.
        """
        index, count, width = ranks.rank(), ranks.count(), self.features.width
        if count == 1:
            return self
        if width < count:
            raise InputError(f"ranks: {count} are more than the {width} rows of the target.")
        if (share := self.features.share(index, count)) is None:
            raise InputError(
                f"{self.features.name}: cannot be spread over ranks, as random features, last "
                "layers and gradients of dense layers can; use one rank, without torchrun."
            )
        part, rows = share
        target = torch.cat([self.target[own] for own in rows])
        start = None if self.start is None else torch.cat([self.start[own] for own in rows])
        return replace(self, features=part, target=target, start=start, whole=width)

    def describe(self) -> dict[str, Any]:
        """Return its sizes, for a report."""
        return {
            "name": self.features.name,
            "dim": self.dim,
            "width": self.features.width,
            "outputs": self.target.shape[1],
            "shape": list(self.shape),
            "domain": self.domain.name,
        }

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Problem":
        """Return the same problem elsewhere."""
        device = torch.device(device)
        target, features = self.target.to(device, dtype), self.features.to(device, dtype)
        layer, tiled = (own and own.to(device) for own in (self.first_layer, self.tiled))
        start = None if self.start is None else self.start.to(device, dtype)
        moved = replace(self, target=target, features=features, start=start)
        return replace(moved, first_layer=layer, tiled=tiled)
