"""What every training here is made of: losses, steps of an optimiser, and a curvature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from exhume.data import Data
from exhume.errors import InputError

_sgd = partial(sgd, dampening=0.0, nesterov=False, maximize=False)
_adamw = partial(adamw, amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, maximize=False)


@dataclass(frozen=True)
class Loss:
    """A `Loss` compares outputs f (n, m) with labels y (n, m); it is the mean over the samples."""

    labels: Callable[[Tensor], Tensor]  # y of the targets (n, m) of a data set
    value: Callable[[Tensor, Tensor], Tensor]  # L, a scalar
    slope: Callable[[Tensor, Tensor], Tensor]  # ∂L/∂f, (n, m)
    bend: Callable[[Tensor, Tensor], Tensor]  # n times a bound on λ_max(∂²L/∂f²), a scalar


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
        labels=lambda y: torch.where(y > 0, 1.0, -1.0).to(y),
        value=lambda f, y: nn.functional.softplus(-y * f).mean(),
        slope=lambda f, y: torch.sigmoid(-y * f) * (-y / f.numel()),
        bend=lambda f, y: (torch.sigmoid(f) * torch.sigmoid(-f)).max() / f.shape[1],
    ),
    "cross_entropy": Loss(
        labels=lambda y: nn.functional.one_hot(y.argmax(1), y.shape[1]).to(y),
        value=lambda f, y: (-y * f.log_softmax(1)).sum(1).mean(),
        slope=_softmax_slope,
        bend=_softmax_bend,
    ),
}


class Descent:
    """A `Descent` is a network on its way, with its samples and labels beside it.

    Steps are taken by the functions behind torch.optim's SGD and AdamW, whose classes hide the
    moments, which a checkpoint has to keep, and import torch's compiler, which takes seconds.
    """

    def __init__(
        self,
        network: nn.Module,
        data: Data,
        loss: Loss,
        momentum: float = 0.0,
        decay: float = 0.0,
        adam: bool = False,
    ) -> None:
        """Put samples and labels beside the weights, and the moments at zero."""
        self.network, self.loss = network, loss
        self.momentum, self.decay, self.adam = momentum, decay, adam
        self.weights: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        if not self.weights:
            raise InputError("the network has no weights to train: none of them requires a grad.")
        like = self.weights[0]
        self.inputs = data.inputs.to(like).reshape(-1, *data.shape)
        self.labels = loss.labels(data.targets).to(like)
        # a velocity for each weight; or Adam's two means, and its number of steps
        count = 2 if adam else int(momentum > 0)
        self.moments = [[torch.zeros_like(w) for w in self.weights] for _ in range(count)]
        if adam:
            self.moments.append([torch.tensor(0.0) for _ in self.weights])

    def sharpness(self, outputs: Tensor) -> float:
        """Estimate λ_max of the loss's Gauss-Newton matrix at the outputs (n, c), without decay."""
        if self.loss is LOSSES["squared"]:
            bend = torch.full_like(outputs[:, 0], 2 / outputs.shape[1])
        else:
            bend = torch.sigmoid(-margins(outputs, self.labels)).clamp_max(0.5) * 2
        found = largest_eigenvalue(self.network, self.inputs, 6, bend.sqrt()[:, None])
        return found / len(outputs)

    @property
    def live(self) -> list[Tensor]:
        """Return weights, then moments: everything that a step writes into."""
        return [*self.weights, *(tensor for moment in self.moments for tensor in moment)]

    @torch.no_grad()
    def go_to(self, tensors: Sequence[Tensor]) -> None:
        """Put weights and moments back to copies of `live`."""
        for tensor, kept in zip(self.live, tensors, strict=True):
            tensor.copy_(kept)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Move the weights by one step of the optimiser, which adds the decay."""
        slopes, decay = list(gradients), self.decay
        if self.adam:
            first, second, count = self.moments
            _adamw(self.weights, slopes, first, second, [], count, lr=rate, weight_decay=decay)
        else:
            velocity: list[Tensor | None] = [*self.moments[0]] if self.moments else []
            velocity = velocity or [None] * len(slopes)
            momentum = self.momentum
            _sgd(self.weights, slopes, velocity, lr=rate, weight_decay=decay, momentum=momentum)


def margins(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the least y f for labels ±1 (n, c), or f_y − max_{k≠y} f_k for one-hot ones, (n,)."""
    each = labels * outputs
    if outputs.shape[1] == 1:
        return each[:, 0]
    ahead = each.sum(1) - outputs.masked_fill(labels > 0, -torch.inf).amax(1)
    return torch.where((labels < 0).any(), each.amin(1), ahead)


def largest_eigenvalue(
    network: nn.Module, inputs: Tensor, iterations: int = 12, scale: Tensor | None = None
) -> float:
    """Estimate λ_max(JJᵀ), J = scale · ∂f/∂θ with scale (n, 1) or (n, c), by power iteration."""
    weights = [p for p in network.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            outputs: Tensor = network(inputs)
            if scale is not None:
                outputs = outputs * scale
            probe = torch.zeros_like(outputs, requires_grad=True)
            # Jᵀu as a function of u; its derivative along g is Jg
            pulled = torch.autograd.grad(
                outputs, weights, probe, create_graph=True, materialize_grads=True
            )
        vector = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
        back = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
        for _ in range(iterations):
            vector = vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
            (vector,) = back(pulled, probe, back(outputs, weights, vector))
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(f"no rate can be chosen ({error}); give a rate.") from error
    return float(vector.norm())
