"""Homogeneous networks trained to the margin, and dense networks held by weight decay.

Once every sample is on its side, a network that is homogeneous in its weights (f(sθ) = s^L f(θ))
lowers its logistic loss for ever by growing, and only the direction of θ still means something. So
the steps here follow the gradient of log Σ_i ℓ_i, which does not fade as ℓ does, and after each one
θ is shrunk until the least margin is log(1/level) again: what is left is the search for the least
norm at a given margin, and what the initial weights left in θ fades with every step. At rest

    θ ∝ Σ_i w_i y_i ∇f(x_i),    w_i = sigmoid(−y_i f(x_i)) > 0,

a KKT point but for samples just off the margin, whose multipliers are small and not zero.

ReLU has kinks, and descent comes to rest on them: one neuron in twenty or so ends with some sample
exactly on its edge, where the slope of ReLU is whatever between 0 and 1 balances the others. So two
numbers say how far the premise holds. `stationarity` is 1 − cos² of θ and the gradient averaged
over the last steps, which averages those slopes too. `violation` is the relative residual at the
samples with slopes of 0 or 1, as an attack has them that does not smooth ReLU; it does not vanish.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exhume.data import Data
from exhume.device import usable_device
from exhume.equation import objective
from exhume.equation.pixels import Pixels
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.models import architectures
from exhume.models.folder import NetworkModel
from exhume.victims import Victim
from exhume.victims.training import LOSSES, Loss, largest_eigenvalue

INERTIA = 0.95
STABLE = 0.5
"""Share of the largest stable step that is taken, while training moves."""

FINE = 0.05
"""The same at the end, so that neurons settle on their kinks."""

CAREFUL = 0.4
"""Share of either that is taken at the margin, where log Σ ℓ bends more than its estimate."""

LARGEST_STEP = 0.05
"""Beyond which no step goes while the weights are still tiny."""

FITTED = 1e-2
"""Mean loss at which every sample counts as fitted, and growing stops."""

WILD = 10.0
"""By what the loss may rise between two looks; beyond, the steps since are undone."""

LOOK = 20
"""Steps between two estimates of the curvature."""


def kkt_mlp(
    data: Data,
    widths: Sequence[int] = (500, 500),
    seed: int = 0,
    loss: str | None = None,
    decay: float | None = None,
    small: float = 1e-4,
    level: float = 1e-4,
    steps: int = 5000,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    show: Callable[[int, float], None] | None = None,
) -> Victim:
    """A dense ReLU network with a bias in the first layer alone, at a KKT point of its training.

    The first layer begins at `small` times N(0, 1), the others at U(−1, 1)/√(fan-in): the networks
    of Haim 2022 and Buzaglo 2023.

    Args:
        data: the training set; the signs of the targets are the labels, or the largest target.
        widths: of the hidden layers.
        seed: of the initial weights.
        loss: logistic for one output and cross_entropy for several, if None; with decay also
            squared, or logistic for several.
        decay: train with so much weight decay instead of to the margin.
        small: standard deviation of the first layer at the start.
        level: exp(−least margin) at which the weights are held.
        steps: after the samples are fitted.
        device: where to train.
        dtype: in which precision.
        show: called with the step and the loss now and then.
    """
    own = "logistic" if data.outputs == 1 else "cross_entropy"
    name = loss or own
    allowed = {own} if decay is None else {"squared", "logistic", own}
    if name not in allowed:
        held = "trained to the margin" if decay is None else "held by weight decay"
        raise InputError(
            f"loss: a network of {data.outputs} outputs {held} takes "
            f"{' or '.join(sorted(allowed))}, got {name!r}."
        )
    if decay is not None and not decay > 0:
        raise InputError(f"decay: expected a number above 0, got {decay}.")
    if not 0 < level < 1:
        raise InputError(f"level: expected a number between 0 and 1, got {level}.")
    arguments = {
        "shape": list(data.shape),
        "outputs": data.outputs,
        "widths": list(widths),
        "bias": "first",
    }
    module = architectures.build("mlp", arguments)
    _initialise(module, small, seed)
    initial = {key: w.to(dtype).clone() for key, w in module.state_dict().items()}
    device = usable_device(device)
    module = module.to(device, dtype)
    start = time.perf_counter()
    run = _Descent(module, data, LOSSES[name], decay, math.log(1 / level))
    done = run.to_rest(steps, show)
    trained = {key: w.detach().cpu().clone() for key, w in module.state_dict().items()}
    pixels = Pixels(data.transform.shift, data.transform.scale) if len(data.shape) > 1 else None
    model = NetworkModel.of("mlp", arguments, initial, trained, pixels)
    problem = model.problem(premise=Premise.MARGIN if decay is None else Premise.DECAY)
    at_truth = objective.fitted(problem.to(device, torch.float64), data.inputs)
    sizes = at_truth.shares.abs().amax(1)
    record = {
        "data": data.name,
        "seed": seed,
        "loss_name": name,
        "decay": decay,
        "premise": problem.premise.value,
        "dtype": str(dtype),
        "violation": at_truth.value,
        "active": int((sizes > 1e-3 * sizes.max()).sum()),
        "seconds": time.perf_counter() - start,
        **done,
    }
    return Victim(problem, data, record, initial, trained, model)


def _initialise(module: nn.Module, small: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if layer is layers[0]:
                    parameter.copy_(small * drawn)
                else:
                    drawn.uniform_(-1, 1, generator=generator)
                    parameter.copy_(drawn / math.sqrt(layer.in_features))


@dataclass
class _Descent:
    """Descent with momentum on log Σ ℓ at a fixed least margin, or on the loss with decay."""

    module: nn.Module
    data: Data
    loss: Loss
    decay: float | None
    margin: float

    def __post_init__(self) -> None:
        self.weights = [p for p in self.module.parameters() if p.requires_grad]
        like = self.weights[0]
        self.inputs = self.data.inputs.reshape(-1, *self.data.shape).to(like)
        self.labels = self.loss.labels(self.data.targets.to(like))
        self.velocity = [torch.zeros_like(w) for w in self.weights]
        self.latest, self.caution, self.kept = math.inf, 1.0, list[Tensor]()
        self._largest = LARGEST_STEP * (1 if self.decay is None else 10)  # of a loss that fades
        self.degree = sum(isinstance(part, nn.Linear) for part in self.module.modules())

    def to_rest(self, steps: int, show: Callable[[int, float], None] | None) -> dict[str, Any]:
        """Fit the samples, then so many steps more; what became of it."""
        step, fitted, rate = 0, None, 0.0
        mean = [torch.zeros_like(w) for w in self.weights]
        tail = max(1, steps // 10)
        while fitted is None or step < fitted + steps:
            outputs: Tensor = self.module(self.inputs)
            now = self.loss.value(outputs.detach(), self.labels)
            slope = self.loss.slope(outputs.detach(), self.labels)
            if self.decay is None:
                slope = slope / now.clamp_min(torch.finfo(now.dtype).tiny)
            gradient = torch.autograd.grad(outputs, self.weights, slope)
            if step % LOOK == 0:
                value = float(now)
                if not value <= WILD * max(self.latest, FITTED):  # also where it is not a number
                    self._go_back()
                    continue
                self._remember(value)
                if fitted is None and (value <= FITTED or self.decay is not None):
                    fitted = step
                if fitted is None and step > 20 * steps:
                    raise InputError(
                        f"training: the loss is {value:.2g} after {step} steps; the samples are "
                        "not fitted. Give wider layers, more steps, or fewer samples."
                    )
                late = fitted is not None and step >= fitted + 3 * steps // 4
                rate = self._rate(outputs.detach(), value, FINE if late else STABLE)
                if show is not None:
                    show(step, value)
            if fitted is not None and step >= fitted + steps - tail:
                for total, g in zip(mean, gradient, strict=True):
                    total.sub_(g / tail)
            self._move(gradient, rate)
            if fitted is not None and self.decay is None:
                self._shrink(outputs.detach())
            step += 1
        return {**self._measured(mean), "steps": step}

    def _remember(self, value: float) -> None:
        """Where it is good to be."""
        self.latest = value
        self.kept = [w.detach().clone() for w in self.weights]

    def _go_back(self) -> None:
        """To where the loss was lower, at rest, and with half the steps from now on."""
        self.caution /= 2
        if self.caution < 1e-6 or not self.kept:
            raise InputError(
                "training: the loss is not finite, or rises however small the steps are."
            )
        with torch.no_grad():
            for weight, velocity, kept in zip(self.weights, self.velocity, self.kept, strict=True):
                weight.copy_(kept)
                velocity.zero_()

    def _rate(self, outputs: Tensor, value: float, share: float) -> float:
        """A share of the stable step: 1/λ_max of the Gauss-Newton matrix of what descends."""
        bend = self._bend(outputs)
        scale = max(value, 1e-30) if self.decay is None else 1.0
        eigenvalue = largest_eigenvalue(self.module, self.inputs, 6, bend.sqrt()[:, None])
        curvature = eigenvalue / (len(outputs) * scale) + (self.decay or 0.0)
        rate = self.caution * min(share / max(curvature, 1e-30), self._largest)
        return rate * CAREFUL if self.decay is None else rate

    def _bend(self, outputs: Tensor) -> Tensor:
        """A bound on the curvature of each sample's loss in its outputs, (n,)."""
        if self.loss is LOSSES["squared"]:
            return torch.full_like(outputs[:, 0], 2 / outputs.shape[1])
        return torch.sigmoid(-margins(outputs, self.labels)).clamp_max(0.5) * 2

    def _move(self, gradient: Sequence[Tensor], rate: float) -> None:
        with torch.no_grad():
            for weight, velocity, g in zip(self.weights, self.velocity, gradient, strict=True):
                velocity.mul_(INERTIA).add_(g)
                if self.decay is not None:
                    velocity.add_(weight, alpha=self.decay)
                weight.sub_(velocity, alpha=rate)

    def _shrink(self, outputs: Tensor) -> None:
        """θ ← sθ with s^L = wanted over least margin, by no more than a fiftieth."""
        least = margins(outputs, self.labels).min()
        factor = (self.margin / least.clamp_min(1e-6)) ** (1 / self.degree)
        factor = torch.where(least > 0, factor, 1.0).clamp(0.98, 1.02)
        with torch.no_grad():
            for tensor in (*self.weights, *self.velocity):
                tensor.mul_(factor)

    def _measured(self, mean: Sequence[Tensor]) -> dict[str, Any]:
        with torch.no_grad():
            outputs = self.module(self.inputs)
            theta = torch.cat([w.flatten() for w in self.weights]).double()
            pull = torch.cat([g.flatten() for g in mean]).double()
            result: dict[str, Any] = {
                "loss": float(self.loss.value(outputs, self.labels)),
                "stationarity": float(
                    1 - torch.cosine_similarity(theta, pull, 0).clamp_min(0) ** 2
                ),
            }
            if self.loss is not LOSSES["squared"]:
                found = margins(outputs, self.labels)
                result["margins"] = [float(found.min()), float(found.max())]
        return result


def margins(outputs: Tensor, labels: Tensor) -> Tensor:
    """The least y f for labels ±1 (n, c), or f_y − max_{k≠y} f_k for one-hot ones, (n,).

    Example:
        >>> margins(torch.tensor([[2.0, 5.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]])).tolist()
        [3.0]
    """
    if outputs.shape[1] == 1:
        return (labels * outputs)[:, 0]
    each = labels * outputs
    ahead = each.sum(1) - outputs.masked_fill(labels > 0, -torch.inf).amax(1)
    return torch.where((labels < 0).any(), each.amin(1), ahead)
