"""What every training here is made of: samples and weights on one device, steps, a curvature."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from exhume.data import Data
from exhume.errors import InputError
from exhume.victims.losses import Loss

_sgd = partial(sgd, dampening=0.0, nesterov=False, maximize=False)
_adamw = partial(adamw, amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8, maximize=False)


class Descent:
    """A `Descent` is a network on its way, with its samples and labels beside it.

    Steps are taken by the functions behind torch.optim's SGD and AdamW. The classes around these
    functions hide the moments, which a checkpoint has to keep, and import torch's compiler, which
    takes seconds.

    Attributes:
        weights: the parameters that are trained; steps write into them.
        moments: what the optimiser remembers, one list over the weights for each quantity: the
            velocity of momentum, or Adam's two means and its number of steps.
        inputs: the samples, (n, *shape), in the precision of the weights.
        labels: of the samples, as the loss wants them.
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
        count = 2 if adam else int(momentum > 0)
        self.moments = [[torch.zeros_like(w) for w in self.weights] for _ in range(count)]
        if adam:
            self.moments.append([torch.tensor(0.0) for _ in self.weights])

    @property
    def live(self) -> list[Tensor]:
        """Return weights, then moments: everything that a step writes into."""
        return [*self.weights, *(tensor for moment in self.moments for tensor in moment)]

    def copy(self) -> tuple[Tensor, ...]:
        """Return copies of weights and moments, for `go_to`."""
        return tuple(tensor.detach().clone() for tensor in self.live)

    @torch.no_grad()
    def go_to(self, tensors: Sequence[Tensor]) -> None:
        """Put weights and moments back to what `copy` returned."""
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
            velocity: list[Tensor | None] = [None] * len(slopes)
            if self.moments:
                velocity = [*self.moments[0]]
            momentum = self.momentum
            _sgd(self.weights, slopes, velocity, lr=rate, weight_decay=decay, momentum=momentum)


def largest_eigenvalue(
    network: nn.Module, inputs: Tensor, iterations: int = 12, scale: Tensor | None = None
) -> float:
    """Estimate λ_max(JJᵀ), J the derivative of the outputs in the weights, by power iteration.

    Args:
        network: its weights that require a gradient are those that count.
        inputs: as it takes them.
        iterations: each one a product with Jᵀ and one with J.
        scale: of the rows of J, (n, 1) or (n, c); 1 if None.
    """
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
        for _ in range(iterations):
            vector = vector / vector.norm().clamp_min(torch.finfo(vector.dtype).tiny)
            moved = torch.autograd.grad(
                outputs, weights, vector, retain_graph=True, materialize_grads=True
            )
            (vector,) = torch.autograd.grad(
                pulled, probe, moved, retain_graph=True, materialize_grads=True
            )
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"no rate can be chosen for this network ({error}); give a rate."
        ) from error
    return float(vector.norm())
