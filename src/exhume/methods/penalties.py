"""The loss of the published penalty methods, over candidates x_j and multipliers λ_j.

‖t − (1/s) Σ_j A_jᵀ Φ(x_j)‖² + box · Σ_j ω_j Σ_i [relu(x_ji − high_i)² + relu(low_i − x_ji)²]
    + push · Σ_j ω_j relu(threshold − λ_j/ω_j)²
    + smoothness · Σ_j ω_j ‖x_j − blur(x_j)‖² + sparsity · Σ |λ_j|
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box, Domain, Sphere, SphereInBox
from exhume.equation.problem import Problem
from exhume.features import Linearization
from exhume.features.activations import smoothed_relu
from exhume.features.runs import Runs, Surrogate

ASSUMED = Box(-1.0, 1.0)  # if nothing is told: pixels of [0, 1] with their mean taken off


@dataclass(frozen=True)
class Hyperparameters:
    """One choice of all that a recipe leaves open; R of them, where tensors (R, 1, 1) say so."""

    rate: float | Tensor  # step size of the candidates
    multiplier_rate: float | Tensor  # step size of the multipliers
    scale: float  # standard deviation of the candidates at the start
    sharpness: Callable[[int], float]  # of what takes the place of ReLU, at a step
    surrogate: Surrogate = smoothed_relu  # what takes its place, of a sharpness
    threshold: float | Tensor = 0.0  # λ below which a multiplier is pushed up
    push: float = 0.0  # weight of that
    box: float = 1.0  # weight of leaving the box
    smoothness: float = 0.0  # weight of what a blur takes away; for images
    sparsity: float = 0.0  # weight of the multipliers' absolute values
    adam: bool = False  # steps by Adam; by momentum otherwise
    draw: Callable[..., Tensor] = torch.rand  # distribution of the multipliers at the start
    shift: float = 0.0  # added to them
    divisor: int = 1  # s for each candidate at the start


@dataclass(frozen=True, eq=False)
class Place:
    """Candidates and all that stands beside them in the loss; all tensors led by R for R runs.

    Two copies of a candidate, each with half its multiplier and share, leave the loss as it was.
    """

    candidates: Tensor  # X, (n, d)
    multipliers: Tensor  # λ, (n, q), with q = 1 for the rule MARGIN, else one for each entry of A_j
    labels: Tensor  # y, (n,), from `balanced_labels`; not looked at where coefficients are free
    shares: Tensor  # ω, (n,), 1 at the start
    divisor: float  # s, which stays what it was at the start


def balanced_labels(count: int, classes: int) -> Tensor:
    """Return fixed labels, as many of each: ±1 for one output, else the classes 0 … c−1.

    Example:
        >>> balanced_labels(4, 1).tolist(), balanced_labels(6, 3).tolist()
        ([-1, -1, 1, 1], [0, 0, 1, 1, 2, 2])
    """
    labels = torch.arange(count) * max(classes, 2) // count
    return 2 * labels - 1 if classes == 1 else labels


def margin_pattern(labels: Tensor, values: Tensor) -> Tensor:
    """Return A of λ = 1: y, (…, n, 1), or e_y − e_k, (…, n, c), k the runner-up among f(x_j).

    Example:
        >>> margin_pattern(torch.tensor([0]), torch.tensor([[3.0, 1.0, 2.0]])).tolist()
        [[1.0, 0.0, -1.0]]
    """
    classes = values.shape[-1]
    if classes == 1:
        return labels[..., None].to(values.dtype)
    each = torch.arange(classes, device=labels.device)  # as one_hot waits for the device
    own = labels[..., None] == each
    rival = values.masked_fill(own, -math.inf).argmax(-1, keepdim=True) == each
    return own.to(values.dtype) - rival.to(values.dtype)


def outputs(problem: Problem) -> int:
    """Return c, the outputs of the network; 1 where the features are those of a layer alone."""
    if problem.features.outputs:
        return problem.features.outputs
    predicted = problem.features.predict(problem.target.new_zeros(1, problem.dim))
    return 1 if predicted is None else predicted.shape[1]


def bounds(domain: Domain, like: Tensor) -> Tensor:
    """Return low and high, (2,) or (2, d): the box, the norm if that is all, or `ASSUMED`."""
    if isinstance(domain, Sphere):
        length = like.new_tensor(domain.length(like.shape[-1]))
        return torch.stack([-length, length])
    box = domain.box if isinstance(domain, SphereInBox) else domain
    return (box if isinstance(box, Box) else ASSUMED).bounds.like(like)


def roughness(candidates: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return what a 3×3 binomial blur with repeated edges takes away: linear and symmetric in x."""
    height, width = shape[-2:]
    images = candidates.reshape(-1, 1, height, width)
    padded = pad(images, (1, 1, 1, 1), mode="replicate")
    tall = (padded[..., :-2, :] + 2 * padded[..., 1:-1, :] + padded[..., 2:, :]) / 4
    blurred = (tall[..., :-2] + 2 * tall[..., 1:-1] + tall[..., 2:]) / 4
    return (images - blurred).reshape(candidates.shape)


@dataclass(frozen=True, eq=False)
class Scene:
    """What of a problem the loss is made of, beside its features."""

    target: Tensor  # t, (p, m)
    limits: Tensor  # from `bounds`
    shape: tuple[int, ...]  # of one input
    rule: Rule  # of the coefficients
    outputs: int  # c, see `outputs`


def scene_of(problem: Problem) -> Scene:
    """Return it."""
    limits = bounds(problem.domain, problem.target.new_empty(0, problem.dim))
    return Scene(problem.target, limits, problem.shape, problem.rule, outputs(problem))


@dataclass(frozen=True, eq=False)
class PenalisedLoss:
    """The loss at one place, with its parts and slopes, each taken when it is asked for.

    Tensors are led by R where the place is that of R runs.
    """

    scene: Scene  # what it is of
    settings: Hyperparameters  # the weights of the penalties
    place: Place  # where it is taken
    pattern: Tensor | None  # of the rule MARGIN, (n, c), or None where coefficients are free
    linearization: Linearization | Runs  # features and derivatives at X
    coefficients: Tensor  # A, (n·k, m), with 1/s inside
    residual: Tensor  # R = t − ΦᵀA, (p, m)

    @property
    def value(self) -> float:
        """The loss."""
        return (self.stationarity + self.prior).item()

    @property
    def relative(self) -> float:
        """‖R‖²/‖t‖²."""
        return (self.stationarity / self.scene.target.double().square().sum()).item()

    @cached_property
    def stationarity(self) -> Tensor:
        """‖R‖²."""
        norm: Tensor = vector_norm(self.residual, dim=(-2, -1), dtype=torch.float64)
        return norm.square()

    @property
    def prior(self) -> Tensor:
        """All penalties."""
        place, settings = self.place, self.settings
        outside = (place.shares * self._excess.double().square().sum(1)).sum()
        below = (place.shares * self._shortfall.double().square().sum(1)).sum()
        total = settings.box * outside + settings.push * below
        if settings.smoothness:
            rough = roughness(place.candidates, self.scene.shape).double().square().sum(1)
            total = total + settings.smoothness * (place.shares * rough).sum()
        if settings.sparsity:
            total = total + settings.sparsity * place.multipliers.double().abs().sum()
        return total

    @cached_property
    def slope(self) -> Tensor:
        """∂L/∂X = −2 pull(R, A) + …, (n, d)."""
        candidates, shape = self.place.candidates, self.scene.shape
        pulled = self.linearization.pull(self.residual, self.coefficients).to(candidates.dtype)
        weight = 2 * self.place.shares[..., None]
        slope = -2 * pulled + self.settings.box * weight * self._excess
        if self.settings.smoothness:
            rough = roughness(roughness(candidates, shape), shape)
            slope = slope + self.settings.smoothness * weight * rough
        return slope

    @cached_property
    def multiplier_slope(self) -> Tensor:
        """∂L/∂λ = −(2/s) (Φ R, along the pattern) + …, (n, q)."""
        multipliers = self.place.multipliers
        slope = self.linearization.apply(self.residual).reshape(*multipliers.shape[:-1], -1)
        if self.pattern is not None:
            slope = (slope * self.pattern).sum(-1, keepdim=True)
        slope = -2 / self.place.divisor * slope
        if self.settings.push:
            slope = slope - 2 * self.settings.push * self._shortfall
        if self.settings.sparsity:
            slope = slope + self.settings.sparsity * multipliers.sign()
        return slope.to(multipliers.dtype)

    @property
    def prior_curvature(self) -> Tensor:
        """∂²/∂x_ji² of the box penalty, (n, d), which is all of its Hessian."""
        return 2 * self.settings.box * self.place.shares[..., None] * (self._excess != 0)

    @cached_property
    def _excess(self) -> Tensor:
        """By how much entries are above the box, or below it (negative), (n, d)."""
        x = self.place.candidates
        low, high = self.scene.limits
        return torch.relu(x - high) - torch.relu(low - x)

    @cached_property
    def _shortfall(self) -> Tensor:
        """relu(threshold − λ/ω), (n, q)."""
        multipliers, shares = self.place.multipliers, self.place.shares[..., None]
        return torch.relu(self.settings.threshold - multipliers / shares)


def loss_at(problem: Problem, settings: Hyperparameters, place: Place) -> PenalisedLoss:
    """Return the loss at a place, for a problem with the surrogate in place or as it is."""
    there, scene = problem.features.linearize(place.candidates), scene_of(problem)
    predicted = problem.features.predict(place.candidates) if scene.outputs > 1 else None
    pattern, coefficients = weighed(scene, place, predicted)
    residual = scene.target - there.combine(coefficients)
    return PenalisedLoss(scene, settings, place, pattern, there, coefficients, residual)


def losses_at(scene: Scene, settings: Hyperparameters, place: Place, there: Runs) -> PenalisedLoss:
    """Return the losses of R runs, with products at their candidates."""
    predicted = there.predict() if scene.outputs > 1 else None
    pattern, coefficients = weighed(scene, place, predicted)
    residual = there.left(scene.target, coefficients)
    return PenalisedLoss(scene, settings, place, pattern, there, coefficients, residual)


def weighed(scene: Scene, place: Place, predicted: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Return the pattern of the margin, where that is the rule, and A, (…, n·k, m)."""
    pattern, multipliers = None, place.multipliers
    if scene.rule is Rule.MARGIN:  # of one output, labels are the pattern, whatever it is
        pattern = margin_pattern(
            place.labels, place.candidates[..., :1] if predicted is None else predicted
        )
        multipliers = multipliers * pattern
    shape = *multipliers.shape[:-2], -1, scene.target.shape[1]
    return pattern, (multipliers / place.divisor).reshape(shape)
