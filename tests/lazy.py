"""A dense network trained a little on samples that the tests know."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from exhume import data

State = dict[str, Tensor]


def dense(width: int = 600) -> nn.Module:
    """One hidden layer on 16 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))


class Lazy:
    """A module, its weights before and after training, and the truth."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        """Train on three samples of a shape."""
        self.truth = data.sphere(math.prod(shape), 3)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.model = make().double()
        self.initial: State = copy.deepcopy(dict(self.model.state_dict()))
        x = self.truth.inputs.reshape(-1, *shape)
        optimiser = torch.optim.SGD(self.model.parameters(), lr=2e-3)
        for _ in range(300):
            optimiser.zero_grad()
            (self.model(x) - self.truth.targets).square().mean().backward()
            optimiser.step()
        self.trained: State = copy.deepcopy(dict(self.model.state_dict()))

    def error(self, samples: Tensor) -> float:
        """The largest distance from a true sample to a candidate, over its norm."""
        x = self.truth.inputs
        return float((torch.cdist(x, samples.flatten(1)).amin(1) / x.norm(dim=1)).max())
