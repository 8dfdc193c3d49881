"""Networks that follow gradient flow until their loss is as small as that of published ones.

θ̇ = −∇L is followed by Euler steps: at first dt = 0.01, as published (Haim 2022: a million of them,
full batches), and dt = η/L once the loss is small. Its curvature falls with it, so that a thousand
steps or two get as far.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exhume.checks import number, whole_number
from exhume.data import Data
from exhume.errors import InputError
from exhume.victims.descent import LOSSES, Descent, margins
from exhume.victims.training import Show

SHARE = 0.5  # of 1/λ_max of the curvature: what is stiff halves in a step, all else follows closely
FIRST = 0.01  # dt at most while samples are not fitted: the way out of tiny weights depends on it
FITTED = 0.1  # mean loss from which on they are, and only the curvature limits a step
FALL = 0.2  # share of the loss that a step may take away: so it ends near what was asked for
LOOK = 20  # steps between two estimates of the curvature, each of which costs about twelve steps


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


class Flowing(Descent):
    """Full batches along θ̇ = −∇L, without momentum and without decay."""

    def __init__(self, module: nn.Module, data: Data, loss: str, how: Flow) -> None:
        """Put the samples beside the weights."""
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
            dt = dt if value <= FITTED else min(dt, FIRST)
            self.step(gradient, dt)
            time, latest = time + dt, value
        if not value <= self.until:
            missed = f"a loss of {value:.1e}, not {self.until:g}, after {step} steps along the flow"
            raise InputError(f"training: {missed}; give wider layers, fewer samples or more steps.")
        theta, ahead = (
            torch.cat([tensor.detach().flatten() for tensor in tensors]).double()
            for tensors in (self.weights, gradient)
        )
        cosine = torch.cosine_similarity(theta, -ahead, 0)
        off = float(1 - cosine.clamp_min(0) ** 2)
        reached = [float(m) for m in margins(here, self.labels).aminmax()]
        result = {"loss": value, "steps": step, "time": time, "risen": risen}
        return result | {"stationarity": off, "margins": reached}
