"""Training of any network on a data set, and what has to be known of it afterwards.

Gradient descent here is the plain kind. Its rate may change with time but is one number for all
weights, so without decay the first layer moves within the span of the samples and nowhere else;
that is what an attack reads. Steps come in windows: after each one the loss is looked at, and
where no rate was given, the rate is made to fit.

    θ ← θ − rate · (∇L + decay · θ),    rate = c / λ,    λ = λ_max(JJᵀ) · max L″ + decay

J is the derivative of the outputs in the weights at the start, L″ the curvature of the loss in the
outputs as they are. Descent is stable for c < 2: c begins at 1 and grows to 1.8. A window in which
the loss rose is undone and c halved. With momentum β or minibatches c stays at 1 − β, and a window
is undone only if the loss has become ten times its lowest value; likewise with Adam.

Inside: `Training`, `Trained`, `train`, `Loss`, `LOSSES`, `largest_eigenvalue`.
"""

import copy
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import set_multithreading_enabled

from exhume.data import Data
from exhume.device import usable_device
from exhume.errors import InputError
from exhume.features.random import tensor_cores
from exhume.files import finite, read_metadata, read_tensors, write_tensors

WINDOW = 50
"""Steps between looks at the loss."""

SAFE = 1.8
"""The largest c of rate = c/λ; descent is unstable from 2 on."""

GROWTH = 1.05
"""By what c grows after a window in which the loss fell."""

SPIKE = 10.0
"""By what the loss may exceed its lowest value where it is not expected to fall steadily."""

SMALLEST = 2.0**-40
"""A chosen rate that was halved to this part of what it was can achieve nothing more."""

SAVE_EVERY = 5.0
"""Seconds between two checkpoints; more where writing one takes long."""

BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        loss: `squared`, the mean of (f − y)² over samples and outputs; `logistic`, the mean of
            log(1 + exp(−y f)) with y = ±1 by the sign of the target; `cross_entropy` of the
            softmax, the class being the largest target (with one output: `logistic`).
        optimizer: `gd` with all samples at every step; `sgd` and `adam` with minibatches.
        rate: of the steps, constant. None: chosen from the curvature, see above; for `adam`, what
            lowers the loss by a tenth at first, at most 0.001.
        momentum: of `gd` (0 unless given) and `sgd` (0.9 unless given).
        batch: samples in a minibatch of `sgd` and `adam`; None for all.
        decay: of the weights, decay · θ: added to the gradient, and with `adam` to the step.
        until: the loss, without decay, at which training stops.
        steps: the most steps.
        seed: of the order of minibatches.
        lazy: α of α(f_θ − f_θ₀), which is trained in place of f: the larger, the less the
            weights move (Chizat et al. 2019). None for f itself.
        tf32: let a GPU round the factors of float32 products to TF32.
    """

    loss: str = "squared"
    optimizer: str = "gd"
    rate: float | None = None
    momentum: float | None = None
    batch: int | None = None
    decay: float = 0.0
    until: float = 1e-8
    steps: int = 100_000
    seed: int = 0
    lazy: float | None = None
    tf32: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        if self.loss not in LOSSES:
            raise InputError(f"unknown loss {self.loss!r}; known are {', '.join(LOSSES)}.")
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise InputError(f"unknown optimizer {self.optimizer!r}; known are {known}.")
        for word in ("rate", "lazy"):
            value = getattr(self, word)
            if value is not None and not (_is_number(value) and value > 0):
                raise InputError(f"{word}: expected a number above 0, or none, got {value!r}.")
        for word in ("decay", "until"):
            value = getattr(self, word)
            if not (_is_number(value) and value >= 0):
                raise InputError(f"{word}: expected a number of at least 0, got {value!r}.")
        for word, least in (("steps", 1), ("seed", 0), ("batch", 1)):
            value = getattr(self, word)
            if word == "batch" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(
                    f"{word}: expected a whole number of at least {least}, got {value!r}."
                )
        if self.momentum is not None and not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            raise InputError(f"momentum: expected a number from 0 to below 1, got {self.momentum}.")
        if self.optimizer == "adam" and self.momentum is not None:
            raise InputError("momentum: adam has its own; leave it out, or choose sgd.")
        if self.optimizer == "gd" and self.batch is not None:
            raise InputError("batch: gd takes all samples at every step; choose sgd for batches.")

    @property
    def inertia(self) -> float:
        """The momentum that is meant."""
        if self.momentum is None:
            return 0.9 if self.optimizer == "sgd" else 0.0
        return self.momentum


@dataclass(frozen=True, eq=False)
class Trained:
    """A network before and after.

    Attributes:
        initial: its state at the start, on the CPU, in the precision of the training.
        trained: the same at the end.
        record: for JSON: `settings`, `dtype`, `loss` at the end, `reached` (whether that is what
            was asked for), `steps` taken, `undone` among them, `rate` at the end, `seconds`, and
            `laziness`: |ΔW|/|W₀| of every weight by name, and of the `first`.
    """

    initial: dict[str, Tensor]
    trained: dict[str, Tensor]
    record: dict[str, Any]


@dataclass(frozen=True)
class Loss:
    """A loss of outputs f (n, m) against labels (n, m), the mean over the samples.

    Attributes:
        labels: of the targets (n, m) of a data set.
        value: L, a scalar.
        slope: ∂L/∂f, (n, m).
        bend: n times a bound on the largest eigenvalue of ∂²L/∂f² at f, a scalar.
    """

    labels: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    bend: Callable[[Tensor, Tensor], Tensor]


def _signs(targets: Tensor) -> Tensor:
    return torch.where(targets > 0, 1.0, -1.0).to(targets)


def _one_hot(targets: Tensor) -> Tensor:
    return nn.functional.one_hot(targets.argmax(1), targets.shape[1]).to(targets)


def _softmax_slope(outputs: Tensor, labels: Tensor) -> Tensor:
    """(p − y)/n with p the softmax, without the cancellation of 1 − p where it is nearly 1."""
    wrong = outputs.softmax(1) * (1 - labels)
    return (wrong - labels * wrong.sum(1, keepdim=True)) / len(outputs)


def _softmax_bend(outputs: Tensor, labels: Tensor) -> Tensor:
    """Bounds λ_max(diag p − ppᵀ), over the samples, by ½ and by 2(1 − p) of the largest p."""
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
        labels=_signs,
        value=lambda f, y: nn.functional.softplus(-y * f).mean(),
        slope=lambda f, y: torch.sigmoid(-y * f) * (-y / f.numel()),
        bend=lambda f, y: (torch.sigmoid(f) * torch.sigmoid(-f)).max() / f.shape[1],
    ),
    "cross_entropy": Loss(
        labels=_one_hot,
        value=lambda f, y: (-y * f.log_softmax(1)).sum(1).mean(),
        slope=_softmax_slope,
        bend=_softmax_bend,
    ),
}
"""Losses by name."""

OPTIMIZERS = ("gd", "sgd", "adam")
"""Optimizers by name."""


def train(
    module: nn.Module,
    data: Data,
    settings: Training | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    show: Callable[[int, float], None] | None = None,
    checkpoint: Path | None = None,
) -> Trained:
    """Train a copy of a network; the module itself is left as it is.

    Args:
        module: takes samples (n, *shape), gives outputs (n, m); its weights are the start.
        data: the training set.
        settings: how; plain gradient descent on the squared loss unless given.
        device: where to compute.
        dtype: float64, or float32.
        show: called with the step and the loss after each window.
        checkpoint: a file that the state is kept in while training goes on, and is continued from
            if it is there; removed at the end.

    Raises:
        InputError: the network does not fit the data, the training diverged at the rate given, or
            the checkpoint is of another training.
    """
    settings = settings or Training()
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype: expected float32 or float64, got {dtype}.")
    with (
        tensor_cores(settings.tf32),
        _convolutions(settings.tf32),
        set_multithreading_enabled(False),  # steps are short: handing them over takes longer
    ):
        return _train(module, data, settings, usable_device(device), dtype, show, checkpoint)


@contextmanager
def _convolutions(tf32: bool) -> Iterator[None]:
    """Let convolutions on a GPU use TF32, or not; torch would by itself."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@dataclass(frozen=True)
class _Place:
    """The last good point of a training, everything that is needed to go on from it.

    Attributes:
        tensors: weights, then moments; never written to.
        loss: there, without decay.
        bend: the curvature of the loss in the outputs there, see `Loss`.
        lowest: value of loss and decay so far.
        scale: what the rate is measured in: λ_max(JJᵀ)/n, or Adam's first rate.
        factor: the rate, relative to that.
        steps: so far.
        undone: of these.
        seconds: so far.
    """

    tensors: tuple[Tensor, ...]
    loss: float
    bend: float
    lowest: float
    scale: float
    factor: float
    steps: int = 0
    undone: int = 0
    seconds: float = 0.0


def _train(
    module: nn.Module,
    data: Data,
    settings: Training,
    device: str,
    dtype: torch.dtype,
    show: Callable[[int, float], None] | None,
    checkpoint: Path | None,
) -> Trained:
    network = copy.deepcopy(module).to(device, dtype)
    initial = _state(network)
    run = _Run(network, data, settings, device, dtype)
    identity = _identity(settings, dtype, initial, data) if checkpoint else {}
    if checkpoint and checkpoint.exists():
        place = _read_place(checkpoint, identity, run.live)
        run.go_to(place)
    else:
        place = run.begin()
    started, due = time.monotonic() - place.seconds, time.monotonic() + SAVE_EVERY
    try:
        while (
            place.loss > settings.until
            and place.steps < settings.steps
            and place.factor >= SMALLEST * run.first_factor
        ):
            place = replace(run.window(place), seconds=time.monotonic() - started)
            if show:
                show(place.steps, place.loss)
            if checkpoint and time.monotonic() > due:
                begun = time.monotonic()
                _write_place(checkpoint, identity, place)
                due = time.monotonic() + max(SAVE_EVERY, 20 * (time.monotonic() - begun))
    except KeyboardInterrupt:
        if checkpoint:
            _write_place(checkpoint, identity, place)
        raise
    trained = _state(network)
    record = {
        "settings": {**asdict(settings), "momentum": settings.inertia},
        "dtype": str(dtype).removeprefix("torch."),
        "loss": place.loss,
        "reached": place.loss <= settings.until,
        "steps": place.steps,
        "undone": place.undone,
        "rate": run.rate(place),
        "seconds": place.seconds,
        "laziness": _laziness(network, initial, trained),
    }
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    return Trained(initial, trained, finite(record))


class _Run:
    """A network on its way: samples, labels and weights on the device, and how to move them."""

    def __init__(
        self, network: nn.Module, data: Data, settings: Training, device: str, dtype: torch.dtype
    ) -> None:
        self.network, self.settings = network, settings
        self.inputs = data.inputs.to(device, dtype).reshape(-1, *data.shape)
        name = "logistic" if data.outputs == 1 and settings.loss != "squared" else settings.loss
        self.loss = LOSSES[name]
        self.exact_labels = self.loss.labels(data.targets)
        self.labels = self.exact_labels.to(device, dtype)
        self.weights: list[Tensor] = [p for p in network.parameters() if p.requires_grad]
        if not self.weights:
            raise InputError("the network has no weights to train: none of them requires a grad.")
        count = 2 if settings.optimizer == "adam" else int(settings.inertia > 0)
        self.moments = [[torch.zeros_like(p) for p in self.weights] for _ in range(count)]
        self.batch = min(settings.batch or data.samples, data.samples)
        self.steady = settings.optimizer == "gd" and not settings.inertia  # the loss only falls
        self.first_factor = 1.0 - settings.inertia
        self.order = (-1, torch.empty(0))
        with torch.no_grad():
            self.start = self._check_outputs(data)

    def _check_outputs(self, data: Data) -> Tensor:
        """Outputs at the start, (n, m)."""
        try:
            outputs: Tensor = self.network(self.inputs)
        except RuntimeError as error:
            raise InputError(
                f"the network cannot take samples of shape {data.shape} ({error})."
            ) from error
        if outputs.shape != data.targets.shape:
            raise InputError(
                f"the network gives outputs of shape {tuple(outputs.shape)}, but the targets of "
                f"{data.name} are {tuple(data.targets.shape)}; make it with outputs={data.outputs}."
            )
        return outputs

    @property
    def live(self) -> list[Tensor]:
        """Weights, then moments, as they are written to."""
        return [*self.weights, *(tensor for moment in self.moments for tensor in moment)]

    def begin(self) -> _Place:
        """The start, with a rate chosen where none was given."""
        loss, value, bend = self._look()
        if not math.isfinite(value):
            raise InputError(f"the loss at the start is {value}; check the network's weights.")
        place = _Place(self._copy(), loss, bend, value, 1.0, self.first_factor)
        if self.settings.rate is not None:
            return place
        adam = self.settings.optimizer == "adam"
        return replace(place, scale=self._adam_rate(loss) if adam else self._sharpness())

    def go_to(self, place: _Place) -> None:
        """Put the weights back to a place."""
        with torch.no_grad():
            for tensor, kept in zip(self.live, place.tensors, strict=True):
                tensor.copy_(kept)

    def rate(self, place: _Place) -> float:
        """Of the next steps."""
        if self.settings.rate is not None:
            return self.settings.rate
        if self.settings.optimizer == "adam":
            return place.factor * place.scale
        steepness = place.scale * place.bend + self.settings.decay
        return place.factor / max(steepness, sys.float_info.min)

    def window(self, place: _Place) -> _Place:
        """Take some steps, look, and keep or undo them."""
        rate = self.rate(place)
        count = min(WINDOW, self.settings.steps - place.steps)
        for step in range(place.steps, place.steps + count):
            self._advance(step, step - place.undone, rate)
        loss, value, bend = self._look()
        steps = place.steps + count
        if self.settings.rate is not None and not math.isfinite(value):
            raise InputError(
                f"training diverged within {steps} steps at a rate of {rate:g}: the loss is "
                f"{loss}. Lower the rate, or leave it out to have one chosen."
            )
        limit = place.lowest * (1.0 if self.steady else SPIKE)
        if self.settings.rate is None and not value <= limit:
            self.go_to(place)
            return replace(place, factor=place.factor / 2, steps=steps, undone=place.undone + count)
        factor = min(place.factor * GROWTH, SAFE) if self.steady else place.factor
        return replace(
            place,
            tensors=self._copy(),
            loss=loss,
            bend=bend,
            lowest=min(value, place.lowest),
            factor=factor,
            steps=steps,
        )

    def _copy(self) -> tuple[Tensor, ...]:
        return tuple(tensor.detach().clone() for tensor in self.live)

    def _outputs(self, inputs: Tensor, start: Tensor) -> Tensor:
        outputs: Tensor = self.network(inputs)
        return outputs if self.settings.lazy is None else self.settings.lazy * (outputs - start)

    @torch.no_grad()
    def _look(self) -> tuple[float, float, float]:
        """Loss, loss with decay, and the curvature of the loss, over all samples, in float64."""
        outputs = self._outputs(self.inputs, self.start).cpu().double()
        loss = self.loss.value(outputs, self.exact_labels).item()
        bend = self.loss.bend(outputs, self.exact_labels).item()
        if not self.settings.decay or self.settings.optimizer == "adam":
            return loss, loss, bend
        squares = sum(p.square().sum().item() for p in self.weights)
        return loss, loss + self.settings.decay / 2 * squares, bend

    def _rows(self, step: int) -> Tensor | None:
        """The samples of a step, or None for all; each epoch has an order of its own."""
        samples = len(self.inputs)
        if self.batch == samples:
            return None
        epoch, turn = divmod(step, math.ceil(samples / self.batch))
        if self.order[0] != epoch:
            order = np.random.default_rng((self.settings.seed, epoch)).permutation(samples)
            self.order = (epoch, torch.from_numpy(order).to(self.inputs.device))
        return self.order[1][turn * self.batch : (turn + 1) * self.batch]

    def _gradient(self, rows: Tensor | None) -> tuple[Tensor, ...]:
        """∇L over some samples, without decay."""
        inputs, start, labels = self.inputs, self.start, self.labels
        if rows is not None:
            inputs, start, labels = inputs[rows], start[rows], labels[rows]
        with torch.enable_grad():
            outputs = self._outputs(inputs, start)
        slope = self.loss.slope(outputs.detach(), labels)
        return torch.autograd.grad(outputs, self.weights, slope, materialize_grads=True)

    @torch.no_grad()
    def _advance(self, step: int, before: int, rate: float) -> None:
        """One step, after `before` others that were not undone."""
        gradients, decay = self._gradient(self._rows(step)), self.settings.decay
        if self.settings.optimizer == "adam":
            if decay:
                torch._foreach_mul_(self.weights, 1 - rate * decay)
            first, second = self.moments
            torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
            torch._foreach_mul_(second, BETAS[1])
            torch._foreach_addcmul_(second, gradients, gradients, 1 - BETAS[1])
            size = torch._foreach_sqrt(second)
            torch._foreach_div_(size, math.sqrt(1 - BETAS[1] ** (before + 1)))
            torch._foreach_add_(size, EPSILON)
            length = rate / (1 - BETAS[0] ** (before + 1))
            torch._foreach_addcdiv_(self.weights, first, size, -length)
            return
        if decay:
            gradients = torch._foreach_add(gradients, self.weights, alpha=decay)
        for moment in self.moments:
            torch._foreach_mul_(moment, self.settings.inertia)
            torch._foreach_add_(moment, gradients)
            gradients = tuple(moment)
        torch._foreach_add_(self.weights, gradients, alpha=-rate)

    def _adam_rate(self, loss: float) -> float:
        """What lowers the loss by a tenth in the first step, which is rate · sign(∇L)."""
        slope = sum(g.abs().sum().item() for g in self._gradient(None))
        return min(1e-3, loss / (10 * slope)) if slope else 1e-3

    def _sharpness(self) -> float:
        """λ_max(JJᵀ)/b, the largest over some minibatches of b samples."""
        turns = min(8, math.ceil(len(self.inputs) / self.batch))
        parts = [self._rows(turn) for turn in range(turns)]
        found = max(
            largest_eigenvalue(self.network, self.inputs if rows is None else self.inputs[rows])
            / (self.batch if rows is None else len(rows))
            for rows in parts
        )
        if not (found > 0 and math.isfinite(found)):
            raise InputError(
                "no rate can be chosen: the outputs do not change with the weights at the start; "
                "initialise the network."
            )
        return found * (self.settings.lazy or 1.0) ** 2


def largest_eigenvalue(
    network: nn.Module, inputs: Tensor, iterations: int = 12, scale: Tensor | None = None
) -> float:
    """λ_max(JJᵀ), J the derivative of the outputs in the weights, by power iteration.

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


def _state(network: nn.Module) -> dict[str, Tensor]:
    """A copy of everything in a network, on the CPU."""
    return {name: t.detach().cpu().clone() for name, t in network.state_dict().items()}


def _laziness(
    network: nn.Module, initial: Mapping[str, Tensor], trained: Mapping[str, Tensor]
) -> dict[str, float]:
    """|ΔW|/|W₀| of every weight by name, vectors left out, and of the first."""
    result = {
        name: ((trained[name] - initial[name]).double().norm() / initial[name].double().norm())
        for name, parameter in network.named_parameters()
        if parameter.ndim > 1
    }
    ratios = {name: ratio.item() for name, ratio in result.items()}
    return {"first": next(iter(ratios.values())), **ratios} if ratios else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Checkpoints


def _identity(
    settings: Training, dtype: torch.dtype, initial: Mapping[str, Tensor], data: Data
) -> dict[str, Any]:
    """What must be the same for a training to be continued."""
    samples = {"inputs": data.inputs, "targets": data.targets}
    return {
        **asdict(settings),
        "dtype": str(dtype),
        "initial weights": _digest(initial.items()),
        "data": _digest(samples.items()),
    }


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A fingerprint of named tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _write_place(path: Path, identity: Mapping[str, Any], place: _Place) -> None:
    numbers = {key: value for key, value in vars(place).items() if key != "tensors"}
    tensors = {f"{index:06d}": tensor for index, tensor in enumerate(place.tensors)}
    metadata = {"training": json.dumps(dict(identity)), "place": json.dumps(numbers)}
    write_tensors(path, tensors, metadata)


def _read_place(path: Path, identity: Mapping[str, Any], live: list[Tensor]) -> _Place:
    """The place that `_write_place` kept, if it is one of this training."""
    kept = read_tensors(path)
    try:
        metadata = read_metadata(path)
        theirs, numbers = json.loads(metadata["training"]), json.loads(metadata["place"])
        differing = [key for key in identity if theirs[key] != identity[key]]
        tensors = tuple(kept[f"{index:06d}"].to(t.device) for index, t in enumerate(live))
        place = _Place(tensors, **numbers) if not differing else None
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: is no checkpoint of a training ({error}); remove it or choose another."
        ) from error
    if place is None:
        raise InputError(
            f"{path}: was left by a training with another {differing[0]}; give it the same again "
            "to finish it, or remove the file to begin anew."
        )
    return place
