"""Random-features models: f(x) = σ(Vx)ᵀθ with V random and only θ trained, in float64."""

import torch
from torch import Tensor

from exhume.checks import number, one_of
from exhume.data import Data
from exhume.equation.coefficients import least_squares
from exhume.errors import InputError
from exhume.features.activations import activation as named_activation
from exhume.features.weights import Seeded, Weights, blocks
from exhume.models.folder import random_features_problem
from exhume.victims.descent import LOSSES
from exhume.victims.victim import Victim

ROWS = 8192  # rows of V at a time: their features are in float64, and must fit beside V
NEWTON = 200  # most Newton steps of logistic regression: it takes ten or twenty, crowded ones more
ROUNDING = 1e-14  # of a loss in float64: near the minimum steps may raise it by as much


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
    """Train a random-features model; its V is not stored but regenerated from the seed.

    The loss is `squared` (minimum-norm least squares, or ridge regression) or `logistic` (each
    output a two-class problem, positive targets against the rest; needs a ridge). The ridge is λ of
    λ|θ|², relative to the mean squared norm of the features; `weights` are a V (p, d) of your own
    instead of the seeded N(0, 1/d) one.
    """
    sigma = named_activation(activation)
    if width < data.samples:
        start = f"reconstruction starts near samples × dimension = {data.samples * data.dim:,}"
        raise InputError(f"width {width} is below the {data.samples} samples; {start}.")
    number("ridge", ridge, least=0)
    one_of("loss", loss, ("squared", "logistic"))
    v = weights or Seeded(width, data.dim, seed)
    if v.shape != (width, data.dim):
        raise InputError(f"weights: expected shape {(width, data.dim)}, got {v.shape}.")
    v = v.to(torch.device(device), torch.float32)
    inputs = data.inputs.to(device)
    labels = LOSSES[loss].labels(data.targets.to(device))

    def features(part: slice) -> Tensor:
        return sigma.value(inputs @ v.rows(part.start, part.stop).double().T)

    gram = inputs.new_zeros(data.samples, data.samples)
    for part in blocks(width, ROWS):
        phi = features(part)
        gram += phi @ phi.T
    penalty = ridge * gram.diagonal().mean()
    if loss == "squared":
        coefficients = least_squares(gram + penalty * torch.eye(data.samples).to(gram), labels)[0]
    elif penalty <= 0:
        raise InputError("ridge: logistic regression needs one, for example 0.001.")
    else:
        coefficients = torch.stack([logistic(gram, y, penalty.item()) for y in labels.T], 1)
    theta = torch.cat([features(part).T @ coefficients for part in blocks(width, ROWS)])
    fit = LOSSES[loss].value(gram @ coefficients, labels).item()
    record = {"data": data.name, "loss": loss, "ridge": ridge, "seed": seed, "fit": fit}
    problem = random_features_problem(v, activation, theta, data.shape, data.display)
    return Victim(problem, data, record, trained={"last": theta})


def logistic(gram: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Return A (n,) at the minimum of F = Σ log(1 + exp(−y f)) + ½ λ AᵀKA with f = KA, y = ±1.

    Optimality in θ = ΦᵀA reads λA = g, g = y σ(−y f). The Newton point solves
    (K + λ W⁻¹) A = f + W⁻¹ g with W = σ(f)(1 − σ(f)); steps towards it are halved until F falls.
    """

    def loss(coefficients: Tensor) -> Tensor:
        fitted = gram @ coefficients
        fit = torch.nn.functional.softplus(-labels * fitted).sum()
        return fit + penalty / 2 * (coefficients @ fitted)

    coefficients = torch.zeros_like(labels)
    value = loss(coefficients)
    for _ in range(NEWTON):
        fitted = gram @ coefficients
        pull = labels * torch.sigmoid(-labels * fitted)
        if (penalty * coefficients - pull).abs().max() <= 1e-12 * pull.abs().max():
            return coefficients
        weight = (torch.sigmoid(fitted) * torch.sigmoid(-fitted)).clamp_min(1e-12)
        system = gram + penalty * torch.diag(1 / weight)
        step = torch.linalg.solve(system, fitted + pull / weight) - coefficients
        length = 1.0
        most = value * (1 + ROUNDING)
        while (trial := loss(coefficients + length * step)) > most and length > 1e-9:
            length /= 2
        if trial > most:  # to rounding, this is the minimum
            return coefficients
        coefficients, value = coefficients + length * step, trial
    return coefficients
