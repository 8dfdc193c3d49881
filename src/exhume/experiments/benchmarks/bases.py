"""These networks are trained as people do it: on many samples first, then on a few others."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from exhume import data
from exhume.data import Data, Transform
from exhume.device import tensor_cores
from exhume.equation.domain import Box
from exhume.equation.problem import Problem
from exhume.features.network import Network
from exhume.models.architectures import vit
from exhume.models.formulation import Known, Told, network_problem, replay_problem
from exhume.models.prepare import prepare
from exhume.recipes import Recipe
from exhume.victims.training import Trained, Training, train
from exhume.victims.victim import follow
from exhume.wording import finite

PUBLIC = 400  # inputs of the same kind that the auditor has: as many as people collect in an hour
FITTED = 0.05  # the loss at which fine-tuning has done its work
# Descent on 100(f − f₀): the weights move a hundredth as far
LAZY = Training(lazy=100.0, until=1e-8)

Base = tuple[int, Recipe]  # on how many samples a network is pretrained, and how
DIGITS: Base = 500, Recipe("adam", lr=3e-3, steps=60)  # a second's work


class Skip(nn.Module):
    """This is the basic block of ResNet-18, σ(body(z) + short(z)), with batch norms."""

    def __init__(
        self, before: int, after: int, stride: int, sigma: type[nn.Module] = nn.ReLU
    ) -> None:
        """Go from maps of `before` channels to `after`, a `stride`-th as large."""
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        first = conv(before, after, stride=stride), nn.BatchNorm2d(after), sigma()
        self.body = nn.Sequential(*first, conv(after, after), nn.BatchNorm2d(after))
        self.short: nn.Module = nn.Identity()
        if (before, stride) != (after, 1):
            across = nn.Conv2d(before, after, 1, stride, bias=False)
            self.short = nn.Sequential(across, nn.BatchNorm2d(after))
        self.last = sigma()

    def forward(self, z: Tensor) -> Tensor:
        """Map (n, before, h, w) to (n, after, h/stride, w/stride)."""
        result: Tensor = self.last(self.body(z) + self.short(z))
        return result


def mnist_example(smooth: bool = False) -> nn.Module:
    """Return the network of PyTorch's MNIST example at a quarter of its size, for 8×8.

    The smooth kind has GELU for ReLU, and a stride in the place of the largest of four.
    """
    sigma = nn.GELU if smooth else nn.ReLU
    first = nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 8, 3), sigma()
    pooled = nn.Conv2d(8, 16, 3), sigma(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 32)
    strided = nn.Conv2d(8, 16, 3, 2, 1), sigma(), nn.Flatten(), nn.Linear(144, 32)
    return nn.Sequential(*first, *(strided if smooth else pooled), sigma(), nn.Linear(32, 10))


def convolutions(side: int, *channels: int) -> nn.Module:
    """Return convolutions that halve an image each, from and to so many channels, and a head."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, side))] if channels[0] == 1 else []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GELU()]
        side //= 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * side**2, 10))


def transformer() -> nn.Module:
    """Return a small vision transformer of 16×16 patches, with positions as torch's Embedding has.

    With positions near zero, samples come back with their patches in any order.
    """
    network = vit((3, 32, 32), patch=16, dim=256, outputs=10)
    nn.init.normal_(network.get_parameter("1.positions"))
    return network


def resnet18() -> nn.Module:
    """Return ResNet-18 as it is used on 32×32: a first convolution of 3×3, no pooling after it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(), Skip(64, 64, 1), Skip(64, 64, 1)]
    for before, after in ((64, 128), (128, 256), (256, 512)):
        layers += [Skip(before, after, 2), Skip(after, after, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


@dataclass(frozen=True)
class Case:
    """A case says which network is fine-tuned, on what and how."""

    network: Callable[[], nn.Module]
    recipe: Recipe | None = Recipe(lr=0.2, steps=20)  # noqa: RUF009 (it is frozen); None: lazily
    samples: int = 4
    base: Base = DIGITS
    rates: tuple[float, ...] = ()  # tried in turn where the recipe has none
    source: str = "digits"  # or cifar10, or table
    standardised: bool = False  # by one mean and one deviation: no pixel is zero then

    def pool(self) -> Data:
        """Load all samples that the case takes some of."""
        return loaded(self.source, self.base[0] + self.samples + PUBLIC, self.standardised)


@dataclass(frozen=True, eq=False)
class Tuned:
    """A fine-tuned network is posed as a problem here, with the truth beside it."""

    network: Network
    weights: Trained  # before and after fine-tuning, and a record of it
    truth: Data  # what it was fine-tuned on, for the evaluation only
    recipe: Recipe | None  # how, if by steps that are known
    public: Tensor  # inputs of the same kind, (N, d)
    told: Told  # the range of the inputs

    def change(self, parameters: str = "all") -> Problem:
        """Return the lazy problem, with features at the midpoint."""
        before, after, _ = self.weights
        return network_problem(self.network, before, after, parameters, told=self.told)

    def replay(self, public: bool = True, labels: bool = True) -> Problem:
        """Return the problem of the training run; labels are told in the order of the samples."""
        classes = tuple(self.truth.targets.argmax(1).tolist())
        known = Known(self.recipe, classes if labels else None, self.public if public else None)
        return replay_problem(self.network, *self.weights[:2], known, self.told)


@cache
def loaded(name: str, count: int, standardised: bool) -> Data:
    """Load images of all classes, as pixels from 0 to 1 or standardised by one mean and spread.

    The table is all of scikit-learn's breast cancer set, standardised by column.
    """
    if name == "table":
        from sklearn.datasets import load_breast_cancer

        rows, classes = load_breast_cancer(return_X_y=True)
        rows = (rows - rows.mean(0)) / rows.std(0)
        targets = one_hot(torch.from_numpy(classes).long(), 2)
        return data.from_arrays(rows, targets, normalise=False, standardise=False, name=name)
    images = data.load(name, count, classes="all", normalise=False)
    if standardised:
        return images
    return replace(images, inputs=images.images().flatten(1), transform=Transform())


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return a network with torch's own initial weights of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def split(pool: Data, base: int, samples: int, seed: int) -> tuple[Data, Data, Data]:
    """Return what a base is pretrained on, so many private samples, and public ones."""
    order = torch.randperm(pool.samples, generator=torch.Generator().manual_seed(seed))
    rows = order.tensor_split((base, base + samples, base + samples + PUBLIC))
    first, private, public = (
        replace(pool, inputs=pool.inputs[part], targets=pool.targets[part]) for part in rows[:3]
    )
    return first, private, public


def known_of(pool: Data, others: Tensor) -> Told:
    """Return what the auditor is told: the range of pixels, or of columns of others (N, d)."""
    low, high = others.amin(0), others.amax(0)
    if pool.display is not None:
        low, high = pool.display.to_inputs(torch.tensor([[0.0], [1.0]], dtype=torch.float64))[:, 0]
    return Told(Box(low, high), knows=("the range of the inputs",))


def tuned(case: Case, seed: int, device: str = "cpu") -> Tuned:
    """Pretrain a network on some samples of a pool, and fine-tune it on others, in float32.

    The first rate is taken that brings the loss down to `FITTED`, or else the best. Without a
    recipe it is descent so slow that the features stay.
    """
    pool, how = case.pool(), case.recipe
    first, truth, public = split(pool, case.base[0], case.samples, seed)
    recipes = [] if how is None else [how] if how.lr else [replace(how, lr=r) for r in case.rates]
    tried: list[tuple[Trained, Recipe | None]] = []
    with tensor_cores(False):
        module = seeded(case.network, seed).eval()
        module.load_state_dict(follow(module, first, case.base[1], device).trained)
        for recipe in recipes:
            tried.append((follow(module, truth, recipe, device), recipe))
            if tried[-1][0].record["loss"] < FITTED:
                break
        tried = tried or [(train(module, truth, LAZY, device), None)]
    weights, followed = min(tried, key=lambda one: finite(one[0].record["loss"]) or math.inf)
    network = prepare(module, pool.shape).network
    told = known_of(pool, torch.cat((first.inputs, public.inputs)))
    return Tuned(network, weights, truth, followed, public.inputs, told)
