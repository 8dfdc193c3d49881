"""Homogeneous networks on their way to the margin, or there, and those held by weight decay.

Along gradient flow θ̇ = −∇L they go by Euler steps: at first dt = 0.01, as published (Haim 2022: a
million of them, full batches), and dt = η/L once the loss is small. Its curvature falls with it, so
that a thousand steps or two get as far. To rest, they follow the gradient of log Σ_i ℓ_i, and after
each step θ is scaled to a fixed least margin. It rests on the kinks of ReLU, so two numbers say how
far the premise holds: `stationarity`, 1 − cos² of θ and the gradient averaged over the last steps,
with the slopes at the kinks; and `violation`, the relative residual at the samples with slopes of 0
or 1, which does not vanish.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from exhume.checks import number, one_of, whole_number
from exhume.data import Data
from exhume.device import usable_device
from exhume.equation import objective
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.models import architectures
from exhume.models.folder import NetworkModel
from exhume.victims.descent import LOSSES, Descent, margins
from exhume.victims.training import Show, state_of
from exhume.victims.victim import Victim

MOMENTUM = 0.95  # of every step: the way to rest is long and flat
STABLE = 0.5  # share of the largest stable step that is taken while training moves
FINE = 0.05  # the same share over the last quarter of the steps: neurons settle on their kinks
CAREFUL = 0.4  # share of either at the margin, where log Σ ℓ bends more than its estimate
LARGEST_STEP = 0.05  # no step goes beyond it while weights are tiny and curvature says nothing
FITTED = 1e-2  # mean loss at which every sample counts as fitted, and growing stops
WILD = 10.0  # the loss may rise by this factor between two looks; beyond, steps since are undone
LOOK = 20  # steps between two estimates of the curvature, each of which costs about twelve steps

# Along gradient flow
SHARE = 0.5  # of 1/λ_max of the curvature: what is stiff halves in a step, all else follows closely
FIRST = 0.01  # dt at most while samples are not fitted: the way out of tiny weights depends on it
SMALL = 0.1  # mean loss from which on they are, and only the curvature limits a step
FALL = 0.2  # share of the loss that a step may take away: so it ends near what was asked for


@dataclass(frozen=True)
class ToRest:
    """A `ToRest` says how a network is trained until the direction of its weights stays."""

    loss: str | None = None  # logistic for one output, cross_entropy for several; with decay more
    decay: float | None = None  # so much weight decay, instead of training to the margin
    small: float = 1e-4  # standard deviation of the first layer at the start
    level: float = 1e-4  # exp(−least margin) at which the weights are held
    steps: int = 5000  # after the samples are fitted

    def loss_for(self, outputs: int) -> str:
        """Return the name of the loss of a network with so many outputs, or refuse."""
        if self.decay is not None:
            number("decay", self.decay, above=0)
        if not 0 < self.level < 1:
            raise InputError(f"level: expected a number between 0 and 1, got {self.level}.")
        own = "logistic" if outputs == 1 else "cross_entropy"
        allowed = {own} if self.decay is None else {"squared", "logistic", own}
        name = self.loss or own
        if name not in allowed:
            held = "at the margin" if self.decay is None else "with decay"
            words = f"{outputs} outputs {held} take {' or '.join(sorted(allowed))}"
            raise InputError(f"loss: {words}, got {name!r} (see decay).")
        return name


@dataclass(frozen=True)
class Flow:
    """A `Flow` says how far a network follows gradient flow from its initial weights."""

    loss: str | None = None  # logistic for one output, cross_entropy for several
    small: float = 1e-4  # standard deviation of the first layer at the start, as published
    until: float = 3e-6  # mean loss at which it ends; published networks are at 2e-6 to 4e-6
    steps: int = 100_000  # at most; a thousand or two are enough for those of the bench

    def loss_for(self, outputs: int) -> str:
        """Return the name of the loss of a network with so many outputs, or refuse."""
        number("until", self.until, above=0)
        whole_number("steps", self.steps)
        own = "logistic" if outputs == 1 else "cross_entropy"
        if self.loss not in (None, own):
            raise InputError(f"loss: {outputs} outputs along the flow take {own}, not {self.loss}.")
        return own


def kkt_mlp(
    data: Data,
    widths: Sequence[int] = (500, 500),
    training: str = "rest",
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    show: Show | None = None,
    **options: Any,
) -> Victim:
    """Train a dense ReLU network with a bias in the first layer alone towards a KKT point.

    The first layer begins at `small` times N(0, 1), the others at U(−1, 1)/√(fan-in): the networks
    of Haim 2022 and Buzaglo 2023. The signs of the targets are the labels, or the largest target.
    With the training `flow` it follows gradient flow as those did, and deeper layers keep much of
    their start; with `rest` it goes on until the direction of all weights stays. Options are the
    fields of `Flow` (loss, small, until, steps) or of `ToRest` (loss, decay, small, level, steps).
    The record has, beside the loss, how well the premise holds: see `_held`.
    """
    kind = {"flow": Flow, "rest": ToRest}[one_of("training", training, ("flow", "rest"))]
    if wrong := options.keys() - (known := [field.name for field in fields(kind)]):
        raise InputError(f"{min(wrong)}: training {training} takes {', '.join(known)}.")
    how: Flow | ToRest = kind(**options)
    name, device = how.loss_for(data.outputs), usable_device(device)
    arguments = {"shape": list(data.shape), "outputs": data.outputs, "widths": list(widths)}
    arguments["bias"] = "first"
    module = architectures.build("mlp", arguments)
    _initialise(module, how.small, seed)
    module = module.to(device, dtype)
    initial, start = state_of(module), time.perf_counter()
    decay = how.decay if isinstance(how, ToRest) else None
    if isinstance(how, Flow):
        done = _Flowing(module, data, name, how).reach(show)
    else:
        done = _Rest(module, data, name, how).reach(show)
    trained = state_of(module)
    model = NetworkModel("mlp", arguments, initial, trained, data.display)
    problem = model.problem(premise=Premise.MARGIN if decay is None else Premise.DECAY)
    record = {"data": data.name, "seed": seed, "training": training, "loss_name": name}
    record |= {"decay": decay, "premise": problem.premise.value, "dtype": str(dtype), **done}
    record |= _held(model, problem.premise, data, device)
    record["seconds"] = time.perf_counter() - start
    return Victim(problem, data, record, initial, trained, model)


def _held(model: NetworkModel, premise: Premise, data: Data, device: str) -> dict[str, Any]:
    """Say how well a premise holds at the samples, over all weights and layer by layer.

    `violation` is what the samples leave of the weights, ‖θ − ΦᵀA‖²/‖θ‖², and `active` how many of
    them have a coefficient. For each layer there is the same, `residual`; the same of what
    training changed, `change`; `left`, how much of its start W₀ is left, ⟨W, W₀⟩/‖W₀‖²; and
    `start`, which share of it that is, cos²(W, W₀).
    """
    whole, change = (
        objective.fitted(
            model.problem(premise=premise, target=target).to(device, torch.float64), data.inputs
        )
        for target in ("weights", "change")
    )
    shares = whole.shares.abs().amax(1)
    layers, begin = {}, 0
    for name, after in model.trained.items():
        rows, before = slice(begin, begin + after.numel()), model.initial[name].double()
        after, begin = after.double(), rows.stop
        left, size = (after * before).sum() / before.square().sum(), after.square().sum()
        own = {"left": float(left), "start": float(left**2 * before.square().sum() / size)}
        own["residual"] = float(whole.residual[rows].square().sum() / size)
        moved = (after - before).square().sum()
        own["change"] = float(change.residual[rows].square().sum() / moved)
        layers[name] = own
    held = {"violation": whole.value, "active": int((shares > 1e-3 * shares.max()).sum())}
    return held | {"layers": layers}


@torch.no_grad()
def _initialise(module: nn.Module, small: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    for layer in layers:
        for parameter in layer.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if layer is layers[0]:
                parameter.copy_(small * drawn)
            else:
                drawn.uniform_(-1, 1, generator=generator)
                parameter.copy_(drawn / math.sqrt(layer.in_features))


def _off(weights: Sequence[Tensor], ahead: Sequence[Tensor]) -> float:
    """Return 1 − cos² of θ and a direction; 1 where they point away from each other."""
    theta, along = (torch.cat([x.detach().flatten() for x in parts]) for parts in (weights, ahead))
    cosine = torch.cosine_similarity(theta.double(), along.double(), 0)
    return float(1 - cosine.clamp_min(0) ** 2)


class _Flowing(Descent):
    """Full batches along θ̇ = −∇L, without momentum and without decay."""

    def __init__(self, module: nn.Module, data: Data, loss: str, how: Flow) -> None:
        super().__init__(module, data, LOSSES[loss])
        self.until, self.steps = how.until, how.steps

    def reach(self, show: Show | None) -> dict[str, Any]:
        """Follow the flow to its end, and return where that is; the loss may not rise on the way.

        `stationarity` is 1 − cos² of θ and −∇L there, `time` the sum of all dt.
        """
        time, share, eta, latest, risen = 0.0, SHARE, 0.0, math.inf, 0
        for step in range(self.steps + 1):
            outputs = self.network(self.inputs)
            here = outputs.detach()
            value = float(self.loss.value(here, self.labels))
            slope = self.loss.slope(here, self.labels)
            gradient = torch.autograd.grad(outputs, self.weights, slope)
            if value <= self.until or not math.isfinite(value):
                break
            if value > latest:
                share, risen = share / 2, risen + 1
            if value > latest or step % LOOK == 0:
                eta = value * share / max(self.sharpness(here), 1e-30)
                if show is not None:
                    show(step, value)
            slope_squared = float(sum(g.square().sum() for g in gradient))
            dt = min(eta / value, FALL * value / max(slope_squared, 1e-30))
            dt = dt if value <= SMALL else min(dt, FIRST)
            self.step(gradient, dt)
            time, latest = time + dt, value
        if not value <= self.until:
            missed = f"a loss of {value:.1e}, not {self.until:g}, after {step} steps along the flow"
            raise InputError(f"training: {missed}; give wider layers, fewer samples or more steps.")
        off = _off(self.weights, [-g for g in gradient])
        reached = [float(m) for m in margins(here, self.labels).aminmax()]
        result = {"loss": value, "steps": step, "time": time, "risen": risen}
        return result | {"stationarity": off, "margins": reached}


class _Rest(Descent):
    """Descent with momentum on log Σ ℓ at a fixed least margin, or on the loss with decay."""

    def __init__(self, module: nn.Module, data: Data, loss: str, how: ToRest) -> None:
        super().__init__(module, data, LOSSES[loss], MOMENTUM, how.decay or 0.0)
        self.to_margin, self.steps = how.decay is None, how.steps
        self.least = math.log(1 / how.level)
        self.squared = loss == "squared"
        self.latest, self.caution, self.kept = math.inf, 1.0, list[Tensor]()
        self.largest = LARGEST_STEP * (1 if self.to_margin else 10)  # the loss itself fades
        self.degree = sum(isinstance(part, nn.Linear) for part in module.modules())

    def reach(self, show: Show | None) -> dict[str, Any]:
        """Fit the samples, take the steps after that, and return what became of them."""
        step, fitted, rate = 0, None, 0.0
        mean = [torch.zeros_like(w) for w in self.weights]
        tail = max(1, self.steps // 10)
        while fitted is None or step < fitted + self.steps:
            outputs: Tensor = self.network(self.inputs)
            now = self.loss.value(outputs.detach(), self.labels)
            slope = self.loss.slope(outputs.detach(), self.labels)
            if self.to_margin:
                slope = slope / now.clamp_min(torch.finfo(now.dtype).tiny)
            gradient = torch.autograd.grad(outputs, self.weights, slope)
            if step % LOOK == 0:
                value = float(now)
                if not value <= WILD * max(self.latest, FITTED):  # also where it is not a number
                    self._go_back()
                    continue
                self.latest, self.kept = value, [w.detach().clone() for w in self.weights]
                if fitted is None and (value <= FITTED or not self.to_margin):
                    fitted = step
                if fitted is None and step > 20 * self.steps:
                    words = f"not fitted after {step} steps, with a loss of {value:.2g}"
                    raise InputError(f"training: {words}; give wider layers, or fewer samples.")
                late = fitted is not None and step >= fitted + 3 * self.steps // 4
                rate = self._rate(outputs.detach(), value, FINE if late else STABLE)
                if show is not None:
                    show(step, value)
            if fitted is not None and step >= fitted + self.steps - tail:
                for total, g in zip(mean, gradient, strict=True):
                    total.sub_(g / tail)
            self.step(gradient, rate)
            if fitted is not None and self.to_margin:
                self._shrink(outputs.detach())
            step += 1
        outputs = self.network(self.inputs).detach()
        loss, off = float(self.loss.value(outputs, self.labels)), _off(self.weights, mean)
        result: dict[str, Any] = {"loss": loss, "stationarity": off, "steps": step}
        if not self.squared:
            result["margins"] = [float(m) for m in margins(outputs, self.labels).aminmax()]
        return result

    @torch.no_grad()
    def _go_back(self) -> None:
        """Return to where the loss was lower, at rest, and halve all steps from now on."""
        self.caution /= 2
        if self.caution < 1e-6 or not self.kept:
            raise InputError("training: the loss is not finite, or rises however small the steps.")
        self.go_to([*self.kept, *(torch.zeros_like(kept) for kept in self.kept)])

    def _rate(self, outputs: Tensor, value: float, share: float) -> float:
        """Return a share of the stable step: 1/λ_max of the Gauss-Newton matrix of the descent."""
        scale = max(value, 1e-30) if self.to_margin else 1.0
        curvature = self.sharpness(outputs) / scale + self.decay
        rate = self.caution * min(share / max(curvature, 1e-30), self.largest)
        return rate * CAREFUL if self.to_margin else rate

    @torch.no_grad()
    def _shrink(self, outputs: Tensor) -> None:
        """Scale θ to sθ with s^L = wanted over least margin, by no more than a fiftieth."""
        least = margins(outputs, self.labels).min()
        factor = (self.least / least.clamp_min(1e-6)) ** (1 / self.degree)
        factor = torch.where(least > 0, factor, 1.0).clamp(0.98, 1.02)
        for tensor in self.live:
            tensor.mul_(factor)
