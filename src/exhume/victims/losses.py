"""The losses that networks are trained on, with the derivatives that choose a rate."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Loss:
    """A `Loss` compares outputs f (n, m) with labels (n, m); it is the mean over the samples.

    Attributes:
        labels: of the targets (n, m) of a data set.
        value: L, a scalar.
        slope: ∂L/∂f, (n, m).
        bend: n times a bound on the largest eigenvalue of ∂²L/∂f² at f, a scalar.
    """

    labels: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    bend: Callable[[Tensor, Tensor], Tensor]


def _signs(targets: Tensor) -> Tensor:
    return torch.where(targets > 0, 1.0, -1.0).to(targets)


def _one_hot(targets: Tensor) -> Tensor:
    return nn.functional.one_hot(targets.argmax(1), targets.shape[1]).to(targets)


def _softmax_slope(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return (p − y)/n with p the softmax, without the cancellation of 1 − p near p = 1."""
    wrong = outputs.softmax(1) * (1 - labels)
    return (wrong - labels * wrong.sum(1, keepdim=True)) / len(outputs)


def _softmax_bend(outputs: Tensor, labels: Tensor) -> Tensor:
    """Bound λ_max(diag p − ppᵀ) over the samples by ½ and by 2(1 − p) of the largest p."""
    smaller = outputs.softmax(1).sort(1).values[:, :-1]
    return (2 * smaller.sum(1)).max().clamp_max(0.5)


LOSSES = {
    "squared": Loss(
        labels=lambda y: y,
        value=lambda f, y: (f - y).square().mean(),
        slope=lambda f, y: (f - y) * (2 / f.numel()),
        bend=lambda f, y: f.new_tensor(2 / f.shape[1]),
    ),
    "logistic": Loss(
        labels=_signs,
        value=lambda f, y: nn.functional.softplus(-y * f).mean(),
        slope=lambda f, y: torch.sigmoid(-y * f) * (-y / f.numel()),
        bend=lambda f, y: (torch.sigmoid(f) * torch.sigmoid(-f)).max() / f.shape[1],
    ),
    "cross_entropy": Loss(
        labels=_one_hot,
        value=lambda f, y: (-y * f.log_softmax(1)).sum(1).mean(),
        slope=_softmax_slope,
        bend=_softmax_bend,
    ),
}
"""Losses by name."""
