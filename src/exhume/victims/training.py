"""Training of any network on a data set, and what has to be known of it afterwards.

    θ ← θ − rate · (∇L + decay · θ),    rate = c / λ,    λ = λ_max(JJᵀ) · max L″ + decay

c grows from 1 to `SAFE`; a window of steps in which the loss rose is undone and c halved. Where the
loss need not fall steadily c stays at 1 − momentum, and it may rise to `SPIKE` times the lowest.
"""

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import set_multithreading_enabled

from exhume.checks import number, one_of, whole_number
from exhume.data import Data
from exhume.device import tensor_cores, usable_device
from exhume.errors import InputError
from exhume.files import finite, read_metadata, read_tensors, write_tensors
from exhume.models.state import digest_of_tensors
from exhume.victims.descent import LOSSES, Descent, largest_eigenvalue

OPTIMIZERS = ("gd", "sgd", "adam")
ALL = slice(None)  # every sample, where there are no minibatches
WINDOW = 50  # steps between looks at the loss: rare enough that looking costs nothing beside them
SAFE = 1.8  # the largest c of rate = c/λ: descent is unstable from 2 on, and λ is an estimate
GROWTH = 1.05  # the factor of c after a window in which the loss fell: slow enough to follow λ
SPIKE = 10.0  # the loss may exceed its lowest value by this factor where it does not fall steadily
SMALLEST = 2.0**-40  # training ends at this part of the first rate: it achieves nothing more
LARGEST_ADAM = 1e-3  # the largest rate that is chosen for Adam, and the one its authors recommend
SAVE_EVERY = 5.0  # seconds between checkpoints: little is lost, less than a twentieth spent on them
Show = Callable[[int, float], None]  # called with the step and the loss now and then


@dataclass(frozen=True)
class Training:
    """A `Training` says everything, beside samples and first weights, that a result depends on."""

    # `squared`, the mean of (f − y)² over samples and outputs; `logistic`, the mean of log(1 +
    # exp(−y f)) with y = ±1 by the sign of the target; `cross_entropy` of the softmax, the class
    # being the largest target (with one output: `logistic`)
    loss: str = "squared"
    optimizer: str = "gd"  # `gd` with all samples at every step; `sgd` and `adam` with minibatches
    # of the steps, constant. None: chosen from the curvature, see above; for `adam`, what lowers
    # the loss by a tenth at first, at most 0.001
    rate: float | None = None
    momentum: float | None = None  # of `gd` (0 unless given) and `sgd` (0.9 unless given)
    batch: int | None = None  # samples in a minibatch of `sgd` and `adam`; None for all
    # of the weights, decay · θ: added to the gradient, and with `adam` to the step
    decay: float = 0.0
    until: float = 1e-8  # the loss, without decay, at which training stops
    steps: int = 100_000  # the most steps
    seed: int = 0  # of the order of minibatches
    # α of α(f_θ − f_θ₀), which is trained in place of f: the larger, the less the weights move
    # (Chizat et al. 2019). None for f itself
    lazy: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        one_of("loss", self.loss, LOSSES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        number("decay", self.decay, least=0)
        number("until", self.until, least=0)
        whole_number("steps", self.steps)
        whole_number("seed", self.seed, least=0)
        for word, value in (("rate", self.rate), ("lazy", self.lazy)):
            if value is not None:
                number(word, value, above=0)
        if self.batch is not None:
            whole_number("batch", self.batch)
        if self.momentum is not None and not number("momentum", self.momentum, least=0) < 1:
            raise InputError(f"momentum: expected a number below 1, got {self.momentum}.")
        if self.optimizer == "adam" and self.momentum is not None:
            raise InputError("momentum: adam has its own; leave it out, or choose sgd.")
        if self.optimizer == "gd" and self.batch is not None:
            raise InputError("batch: gd takes all samples at every step; choose sgd for batches.")

    @property
    def inertia(self) -> float:
        """Return the momentum that is meant."""
        usual = 0.9 if self.optimizer == "sgd" else 0.0
        return usual if self.momentum is None else self.momentum


class Trained(NamedTuple):
    """A `Trained` is a network before and after, on the CPU, in the precision of the training."""

    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    record: dict[str, Any]  # for JSON; `laziness` is |ΔW|/|W₀| of every weight and of the first


def train(
    module: nn.Module,
    data: Data,
    settings: Training | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    show: Show | None = None,
    checkpoint: Path | None = None,
) -> Trained:
    """Train a copy of a network from samples (n, *shape) to outputs (n, m), in float64 or float32.

    `show` is called after each window. The state is kept in the file `checkpoint` while training
    goes on, and continued from it if it is there; it is removed at the end.
    """
    settings = settings or Training()
    one_of("dtype", dtype, (torch.float32, torch.float64))
    network = copy.deepcopy(module).to(usable_device(device), dtype)
    initial = state_of(network)
    kept = None
    if checkpoint is not None:
        samples = {"inputs": data.inputs, "targets": data.targets}
        same = {"initial weights": digest_of_tensors(initial), "data": digest_of_tensors(samples)}
        kept = _Checkpoint(checkpoint, {**asdict(settings), "dtype": str(dtype), **same})
    with tensor_cores(False), set_multithreading_enabled(False):  # steps are short: one thread
        run = _Run(network, data, settings)
        place = run.to_the_end(show, kept)
    trained = state_of(network)
    record = {
        "settings": {**asdict(settings), "momentum": settings.inertia},
        "dtype": str(dtype).removeprefix("torch."),
        "loss": place.loss,
        "reached": place.loss <= settings.until,
        "steps": place.steps,
        "undone": place.undone,
        "rate": run.rate(place),
        "seconds": place.seconds,
        "laziness": laziness(initial, trained),
    }
    if kept is not None:
        kept.path.unlink(missing_ok=True)
    return Trained(initial, trained, finite(record))


def laziness(initial: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, float]:
    """Return |ΔW|/|W₀| of every weight, and of the first one by that name too."""
    sizes = {
        n: w.double().norm() for n, w in initial.items() if w.ndim > 1 and w.is_floating_point()
    }
    changes = {n: (trained[n] - initial[n]).double().norm() for n in sizes}
    moved = {n: (changes[n] / size).item() for n, size in sizes.items()}
    return {"first": next(iter(moved.values())), **moved} if moved else {}


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Return a copy of everything in a network, on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in network.state_dict().items()}


@dataclass(frozen=True)
class _Place:
    """All that is needed to go on from a window that was kept."""

    tensors: tuple[Tensor, ...]  # weights, then moments; never written to
    loss: float  # without decay
    bend: float  # the curvature of the loss in the outputs
    lowest: float  # value of loss and decay so far
    scale: float  # of the rate: λ_max(JJᵀ)/n, or Adam's first rate
    factor: float  # c, or what is left of Adam's first rate
    steps: int = 0  # so far, undone ones included
    undone: int = 0
    seconds: float = 0.0


class _Checkpoint:
    """The file with the place of one training, and what must be the same to continue it."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, identity
        self.due = time.monotonic() + SAVE_EVERY

    def write(self, place: _Place) -> None:
        """Keep a place, and another one in some seconds: more where writing takes long."""
        begun = time.monotonic()
        numbers = {key: value for key, value in vars(place).items() if key != "tensors"}
        tensors = {f"{index:06d}": tensor for index, tensor in enumerate(place.tensors)}
        metadata = {"training": json.dumps(self.identity), "place": json.dumps(numbers)}
        write_tensors(self.path, tensors, metadata)
        now = time.monotonic()
        self.due = now + max(SAVE_EVERY, 20 * (now - begun))

    def read(self, live: list[Tensor]) -> _Place | None:
        """Return the place kept, on the devices of the tensors it is for; None without a file."""
        if not self.path.exists():
            return None
        kept = read_tensors(self.path)
        try:
            metadata = read_metadata(self.path)
            theirs, numbers = json.loads(metadata["training"]), json.loads(metadata["place"])
            differing = [key for key in self.identity if theirs[key] != self.identity[key]]
            if not differing:
                tensors = (kept[f"{index:06d}"].to(t.device) for index, t in enumerate(live))
                return _Place(tuple(tensors), **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.path}: is no checkpoint ({error}); remove it.") from error
        words = (
            f"was left by a training with another {differing[0]}; give it the same, or remove it"
        )
        raise InputError(f"{self.path}: {words}.")


class _Run(Descent):
    """One training: it looks at the loss after each window of steps, and keeps or undoes them."""

    def __init__(self, network: nn.Module, data: Data, settings: Training) -> None:
        name = "logistic" if data.outputs == 1 and settings.loss != "squared" else settings.loss
        adam = settings.optimizer == "adam"
        super().__init__(network, data, LOSSES[name], settings.inertia, settings.decay, adam)
        self.settings = settings
        self.exact_labels = self.loss.labels(data.targets)
        self.batch = min(settings.batch or data.samples, data.samples)
        self.steady = settings.optimizer == "gd" and not settings.inertia  # the loss only falls
        self.first_factor = 1.0 - settings.inertia
        self.smallest = SMALLEST * self.first_factor
        self.order = (-1, torch.empty(0))
        try:
            with torch.no_grad():
                self.start: Tensor = network(self.inputs)
        except RuntimeError as error:
            words = f"the network cannot take samples of shape {data.shape} ({error})."
            raise InputError(words) from error
        found, expected = tuple(self.start.shape), tuple(data.targets.shape)
        if found != expected:
            words = f"outputs {found} for targets {expected}; make it with outputs={data.outputs}."
            raise InputError(f"the network gives {words}")

    def to_the_end(self, show: Show | None, checkpoint: _Checkpoint | None) -> _Place:
        """Train from the checkpoint, or from the start, and return the last place."""
        place = checkpoint.read(self.live) if checkpoint is not None else None
        if place is None:
            loss, value, bend = self._look()
            if not math.isfinite(value):
                raise InputError(f"the loss at the start is {value}; check the network's weights.")
            scale = self._first_scale(loss) if self.settings.rate is None else 1.0
            place = _Place(self._copy(), loss, bend, value, scale, self.first_factor)
        else:
            self.go_to(place.tensors)
        begun = time.monotonic() - place.seconds
        until, steps = self.settings.until, self.settings.steps
        try:
            while place.loss > until and place.steps < steps and place.factor >= self.smallest:
                place = replace(self._window(place), seconds=time.monotonic() - begun)
                if show is not None:
                    show(place.steps, place.loss)
                if checkpoint is not None and time.monotonic() > checkpoint.due:
                    checkpoint.write(place)
        except KeyboardInterrupt:
            if checkpoint is not None:
                checkpoint.write(place)
            raise
        return place

    def rate(self, place: _Place) -> float:
        """Return the rate of the steps that follow a place."""
        if self.settings.rate is not None:
            return self.settings.rate
        if self.adam:
            return place.factor * place.scale
        steepness = place.scale * place.bend + self.decay
        return place.factor / max(steepness, sys.float_info.min)

    def _window(self, place: _Place) -> _Place:
        """Take some steps, look at the loss, and keep or undo them."""
        rate = self.rate(place)
        steps = min(place.steps + WINDOW, self.settings.steps)
        for step in range(place.steps, steps):
            self.step(self._gradient(self._rows(step)), rate)
        loss, value, bend = self._look()
        if self.settings.rate is not None and not math.isfinite(value):
            words = f"the loss is {loss} after {steps} steps. Lower the rate, or leave it out."
            raise InputError(f"training diverged at a rate of {rate:g}: {words}")
        limit = place.lowest * (1.0 if self.steady else SPIKE)
        if self.settings.rate is None and not value <= limit:
            self.go_to(place.tensors)
            undone = place.undone + steps - place.steps
            return replace(place, factor=place.factor / 2, steps=steps, undone=undone)
        factor = min(place.factor * GROWTH, SAFE) if self.steady else place.factor
        lowest, tensors = min(value, place.lowest), self._copy()
        return _Place(tensors, loss, bend, lowest, place.scale, factor, steps, place.undone)

    def _copy(self) -> tuple[Tensor, ...]:
        return tuple(tensor.detach().clone() for tensor in self.live)

    def _outputs(self, inputs: Tensor, start: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        return outputs if self.settings.lazy is None else self.settings.lazy * (outputs - start)

    @torch.no_grad()
    def _look(self) -> tuple[float, float, float]:
        """Return loss, loss with decay, and curvature of the loss, over all samples, in float64."""
        outputs = self._outputs(self.inputs, self.start).cpu().double()
        loss = self.loss.value(outputs, self.exact_labels).item()
        bend = self.loss.bend(outputs, self.exact_labels).item()
        if not self.decay or self.adam:
            return loss, loss, bend
        squares = sum(p.square().sum().item() for p in self.weights)
        return loss, loss + self.decay / 2 * squares, bend

    def _rows(self, step: int) -> Tensor | slice:
        """Return the samples of a step, where each epoch has an order of its own."""
        samples = len(self.inputs)
        if self.batch == samples:
            return ALL
        epoch, turn = divmod(step, math.ceil(samples / self.batch))
        if self.order[0] != epoch:
            order = np.random.default_rng((self.settings.seed, epoch)).permutation(samples)
            self.order = (epoch, torch.from_numpy(order).to(self.inputs.device))
        return self.order[1][turn * self.batch : (turn + 1) * self.batch]

    def _gradient(self, rows: Tensor | slice) -> tuple[Tensor, ...]:
        """Return ∇L over some samples, without decay."""
        with torch.enable_grad():
            outputs = self._outputs(self.inputs[rows], self.start[rows])
        slope = self.loss.slope(outputs.detach(), self.labels[rows])
        return torch.autograd.grad(outputs, self.weights, slope, materialize_grads=True)

    def _first_scale(self, loss: float) -> float:
        """Return λ_max(JJᵀ)/b, the largest over some minibatches of b samples, or Adam's rate."""
        if self.adam:  # a first step of rate · sign(∇L) is to lower the loss by a tenth
            slope = sum(g.abs().sum().item() for g in self._gradient(ALL))
            return min(LARGEST_ADAM, loss / (10 * slope)) if slope else LARGEST_ADAM
        turns = range(min(8, math.ceil(len(self.inputs) / self.batch)))
        parts = [self.inputs[self._rows(turn)] for turn in turns]
        found = max(largest_eigenvalue(self.network, part) / len(part) for part in parts)
        if not (found > 0 and math.isfinite(found)):
            raise InputError("no rate can be chosen: outputs do not change with the weights.")
        return found * (self.settings.lazy or 1.0) ** 2
