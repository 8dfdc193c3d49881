"""Random-features models: f(x) = σ(Vx)ᵀθ with V random and only θ trained, in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from exhume.checkpoint import random_features_problem
from exhume.coefficients import least_squares
from exhume.data import Data
from exhume.errors import InputError
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, Weights, blocks
from exhume.problem import Pixels
from exhume.victims import Victim

ROWS = 8192
"""Rows of V at a time; features are in float64 while θ is solved for."""


def random_features(
    data: Data,
    width: int,
    activation: str = "relu",
    seed: int = 0,
    loss: str = "squared",
    ridge: float = 0.0,
    weights: Weights | None = None,
    device: str = "cpu",
) -> Victim:
    """Train a random-features model on the data.

    Args:
        data: the training set.
        width: p, the number of random features.
        activation: σ, see `exhume.features.activations.activation`.
        seed: of V.
        loss: `squared` (minimum-norm least squares, or ridge regression) or `logistic` (each
            output a two-class problem by the sign of its target; needs a ridge).
        ridge: λ of λ|θ|², relative to the mean squared norm of the features.
        weights: V of your own instead of the seeded N(0, 1/d) one.
        device: where to compute.

    Returns:
        The victim; V is not stored but regenerated from the seed.
    """
    sigma = named_activation(activation)
    if width < data.samples:
        raise InputError(
            f"width {width} is below the number of samples, {data.samples}: the model cannot fit "
            f"its data, and gives none back. Choose a width of at least {data.samples}; "
            f"reconstruction starts near samples × dimension = {data.samples * data.dim:,}."
        )
    if not (math.isfinite(ridge) and ridge >= 0):
        raise InputError(f"ridge: expected a finite number of at least 0, got {ridge}.")
    v = weights or Seeded(width, data.dim, seed)
    if v.shape != (width, data.dim):
        raise InputError(f"weights: expected shape {(width, data.dim)}, got {v.shape}.")
    v = v.to(torch.device(device), torch.float32)
    inputs, targets = data.inputs.to(device), data.targets.to(device)

    def features(part: slice) -> Tensor:
        return sigma.value(inputs @ v.rows(part.start, part.stop).double().T)

    gram = inputs.new_zeros(data.samples, data.samples)
    for part in blocks(width, ROWS):
        phi = features(part)
        gram += phi @ phi.T
    penalty = ridge * gram.diagonal().mean()
    coefficients = _fit(gram, targets, penalty, loss)
    theta = torch.cat([features(part).T @ coefficients for part in blocks(width, ROWS)])
    fitted = gram @ coefficients
    training: dict[str, Any] = {
        "data": data.name,
        "loss": loss,
        "ridge": ridge,
        "seed": seed,
        "fit": (fitted - targets).square().mean().item(),
    }
    problem = random_features_problem(
        v,
        activation,
        theta,
        data.shape,
        Pixels(data.transform.shift, data.transform.scale) if len(data.shape) > 1 else None,
    )
    return Victim(problem, data, training)


def _fit(gram: Tensor, targets: Tensor, penalty: Tensor, loss: str) -> Tensor:
    """Coefficients A (n, m) with θ = ΦᵀA at the minimum of the training loss."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    if loss == "squared":
        return least_squares(gram + penalty * identity, targets)[0]
    if loss == "logistic":
        if penalty <= 0:
            raise InputError(
                "logistic regression without a ridge has no minimum on separable data; "
                "pass a ridge, for example 0.001."
            )
        columns = [logistic(gram, y, penalty.item()) for y in targets.sign().T]
        return torch.stack(columns, 1)
    raise InputError(f"unknown loss {loss!r}; known are squared, logistic.")


def logistic(gram: Tensor, labels: Tensor, penalty: float, steps: int = 100) -> Tensor:
    """A (n,) at the minimum of Σ log(1 + exp(−y f)) + ½ λ AᵀKA with f = KA, by Newton's method.

    Optimality in θ = ΦᵀA reads λA = y σ(−y f). One Newton step solves (K + λ W⁻¹) A = f + W⁻¹ g
    with g = y σ(−yf) and W = σ(f)(1 − σ(f)).

    Args:
        gram: K, (n, n) float64.
        labels: y, (n,) of ±1.
        penalty: λ > 0.
        steps: the most Newton steps.
    """
    coefficients = torch.zeros_like(labels)
    for _ in range(steps):
        fitted = gram @ coefficients
        pull = labels * torch.sigmoid(-labels * fitted)
        weight = (torch.sigmoid(fitted) * torch.sigmoid(-fitted)).clamp_min(1e-12)
        system = gram + penalty * torch.diag(1 / weight)
        updated = torch.linalg.solve(system, fitted + pull / weight)
        change = (updated - coefficients).abs().max()
        coefficients = updated
        if change <= 1e-13 * coefficients.abs().max():
            break
    return coefficients
