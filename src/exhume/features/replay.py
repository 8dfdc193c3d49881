"""The training run as a map from samples to the change of the weights: θ − θ₀ = T(θ₀, X, y) − θ₀.

A step takes g = ∇θ ℓ(θ, X, y) of its batch and updates the state s = (θ, buffers) to U(s, g). A
direction in the samples is carried through the steps forward (push), one in the weights backward
(pull). Both take the derivative of ∇ℓ along a direction and nothing else, since the Hessian of ℓ in
(θ, X) is symmetric. The labels y stand where other features have coefficients.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from exhume.features import Features, Linearization
from exhume.features.modules import ModuleFeatures
from exhume.features.network import derivatives
from exhume.recipes import Recipe, State

PROBES = 4  # random directions for the mean curvature: it only preconditions, to a factor of two
# A Jacobian of at most so many numbers is kept: 128 MiB in float64, and faster than products
DENSE = 2**24
CHUNK = 256  # directions that are pushed at once for it: more gain nothing


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingRun(ModuleFeatures):
    """The map from n samples and labels to the change of the parameters that were trained.

    The points are θ₀, from which runs are simulated, and θ, where the true one ended.
    """

    block: tuple[str, ...]  # names of what was trained, in the order of the target
    recipe: Recipe  # how
    lazy: Features  # gradients of the same parameters, for a first guess
    labels: tuple[int, ...] | None = None  # classes of the samples in any order, if they are known
    public: Tensor | None = None  # inputs of the same kind, (N, d), if there are any
    # runs captured in CUDA graphs, by the number of samples, on a GPU
    captured: dict[int, "Captured"] = field(default_factory=dict, repr=False)

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Say nothing: whatever changes the run shows."""
        return ()

    @property
    def width(self) -> int:
        """Return p, the number of trained parameters."""
        return sum(self.points[0][name].numel() for name in self.block)

    @property
    def outputs(self) -> int:
        """Return c, the outputs of the network: a label has as many entries."""
        return self.network.outputs

    def to(self, device: torch.device, dtype: torch.dtype) -> "TrainingRun":
        """Return the same elsewhere."""
        public = None if self.public is None else self.public.to(device, dtype)
        lazy = self.lazy.to(device, dtype)
        return replace(super().to(device, dtype), lazy=lazy, public=public, captured={})

    def begin(self) -> State:
        """Return the state before the first step."""
        theta = torch.cat([self.points[0][name].flatten() for name in self.block])
        return (theta, *(torch.zeros_like(theta) for _ in range(self.recipe.buffers)))

    def loss(self, theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return ℓ(θ, X, y) of a batch, with θ (p,)."""
        sizes = [self.points[0][name].numel() for name in self.block]
        parts = zip(self.block, torch.split(theta, sizes), strict=True)
        own = {name: part.view_as(self.points[0][name]) for name, part in parts}
        return self.recipe.value(self.network({**self.points[0], **own}, inputs), labels)

    def linearize(self, candidates: Tensor) -> Linearization:
        """Return the run at n candidates (n, d); it is simulated once labels are given."""
        if candidates.device.type != "cuda":
            return Replayed(self, candidates)
        if len(candidates) not in self.captured:
            self.captured[len(candidates)] = Captured(Replayed(self, candidates.clone()))
        return Resumed(self, candidates, self.captured[len(candidates)])


class Replayed:
    """Products with the Jacobian J (p, n·d) of a run at candidates X and labels A (n·c, 1)."""

    def __init__(self, run: TrainingRun, candidates: Tensor) -> None:
        """Keep what is needed to simulate."""
        self.run, self.candidates = run, candidates
        self.batches = [b.to(candidates.device) for b in run.recipe.batches(len(candidates))]
        self.segment = max(1, math.isqrt(len(self.batches)))
        self.labels = torch.empty(0, dtype=candidates.dtype)
        self.kept: list[State] = []  # the state before the first step of every segment

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return T(θ₀, X, y) − θ₀, (p, 1)."""
        self.labels = coefficients.to(self.candidates).view(len(self.candidates), -1)
        self.__dict__.pop("jacobian", None)
        state = first = self.run.begin()
        self.kept = []
        with torch.no_grad(), derivatives(rounded=False):
            for k in range(len(self.batches)):
                if k % self.segment == 0:
                    self.kept.append(state)
                state = self._step(k, state, self.candidates)
        return (state[0] - first[0])[:, None]

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return J D, (p, 1)."""
        if self.jacobian is not None:
            return self.jacobian @ direction.reshape(-1, 1)
        with torch.no_grad(), derivatives(rounded=False):
            return self._forward(direction)[:, None]

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Jᵀ T, (n, d); J is not made for it, as who only pulls does so once."""
        if "jacobian" in self.__dict__ and self.jacobian is not None:
            return (self.jacobian.T @ target).view_as(self.candidates)
        with torch.no_grad(), derivatives(rounded=False):
            return self._backward(target[:, 0])

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = tr(J_iᵀJ_j)/d, (n, n) float64: E⟨J_iᵀt, J_jᵀt⟩/d over random t (p,)."""
        n, d = self.candidates.shape
        if self.jacobian is not None:
            j = self.jacobian.view(-1, n, d).transpose(0, 1).flatten(1).double()
            return j @ j.T / d
        generator = torch.Generator().manual_seed(0)
        probes = torch.randn(PROBES, self.run.width, 1, generator=generator, dtype=torch.float64)
        rows = [self.pull(t.to(self.candidates), coefficients).double() for t in probes]
        return torch.stack([row @ row.T for row in rows]).mean(0) / d

    def gram(self) -> Tensor:
        """Refuse: a run has no rows, since it is not linear in the labels."""
        raise NotImplementedError

    def apply(self, target: Tensor) -> Tensor:
        """Refuse, as `gram` does."""
        raise NotImplementedError

    def bend(self, direction: Tensor, target: Tensor, coefficients: Tensor) -> Tensor:
        """Refuse: no method asks a run for second derivatives."""
        raise NotImplementedError

    @cached_property
    def jacobian(self) -> Tensor | None:
        """J (p, n·d), from many directions at once; None where it is too large to keep."""
        entries = self.candidates.numel()
        if self.run.width * entries > DENSE:
            return None
        units = torch.eye(entries, dtype=self.candidates.dtype, device=self.candidates.device)
        every = units.view(entries, *self.candidates.shape)
        with torch.no_grad(), derivatives(rounded=False):
            columns: Tensor = vmap(self._forward, out_dims=1, chunk_size=CHUNK)(every)
        return columns

    def _rate(self, k: int) -> float:
        return self.run.recipe.rate(k, len(self.batches))

    def _step(self, k: int, state: State, inputs: Tensor) -> State:
        batch = self.batches[k]
        slope = grad(self.run.loss)(state[0], inputs[batch], self.labels[batch])
        return self.run.recipe.update(k, self._rate(k), state, slope)

    def _states(self) -> Iterator[tuple[int, State]]:
        """The state before each step, from the last to the first, a segment simulated at a time."""
        for j in reversed(range(len(self.kept))):
            first = j * self.segment
            states = [self.kept[j]]
            for k in range(first, min(first + self.segment, len(self.batches)) - 1):
                states.append(self._step(k, states[-1], self.candidates))
            yield from reversed(list(enumerate(states, first)))

    def _forward(self, direction: Tensor) -> Tensor:
        """The tangent of θ at the end, (p,), for samples that move along D."""
        state = self.run.begin()
        tangent = tuple(torch.zeros_like(part) for part in state)
        for k in range(len(self.batches)):
            both = (tangent, direction)
            step = partial(self._step, k)
            state, tangent = jvp(step, (state, self.candidates), both)[:2]
        return tangent[0]

    def _backward(self, target: Tensor) -> Tensor:
        """The slope of ⟨θ, T⟩ at the end in the samples, (n, d)."""
        result = torch.zeros_like(self.candidates)
        back: State = (target, *(torch.zeros_like(target) for _ in range(self.run.recipe.buffers)))
        for k, state in self._states():
            batch = self.batches[k]
            inputs, labels = self.candidates[batch], self.labels[batch]
            slopes = grad(self.run.loss, argnums=(0, 1))
            update = partial(self.run.recipe.update, k, self._rate(k))
            slope, _ = slopes(state[0], inputs, labels)
            back, along = vjp(update, state, slope)[1](back)
            still = torch.zeros_like(inputs), torch.zeros_like(labels)
            inner, outer = jvp(slopes, (state[0], inputs, labels), (along, *still))[1]
            back = (back[0] + inner, *back[1:])
            result.index_add_(0, batch, outer)
        return result


class Captured:
    """A run and its products as CUDA graphs: thousands of small kernels, launched as one."""

    def __init__(self, run: Replayed) -> None:
        """Capture nothing yet: each graph is made when it is first asked for."""
        self.run, n = run, len(run.candidates)
        run.labels = run.candidates.new_zeros(n, run.run.outputs)
        self.direction = torch.zeros_like(run.candidates)
        self.target = run.candidates.new_zeros(run.run.width)
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def change(self) -> Tensor:
        """Simulate the run; the products simulate it again."""
        return self.run.combine(self.run.labels)

    def forward(self) -> Tensor:
        """Carry the direction forward."""
        return self.run._forward(self.direction)

    def backward(self) -> Tensor:
        """Simulate, and carry the target back."""
        self.run.combine(self.run.labels)
        return self.run._backward(self.target)

    def __call__(self, name: str, candidates: Tensor, labels: Tensor, along: Tensor) -> Tensor:
        """Return what the method of that name returns there."""
        self.run.candidates.copy_(candidates)
        self.run.labels.copy_(labels)
        (self.target if name == "backward" else self.direction).copy_(along)
        if name not in self.graphs:
            self.graphs[name] = self._capture(getattr(self, name))
        graph, result = self.graphs[name]
        graph.replay()
        return result.clone()

    def _capture(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run twice aside, as libraries set themselves up at first, then record."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), derivatives(rounded=False):
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                result = function()
        return graph, result


class Resumed(Replayed):
    """The same products from captured graphs."""

    def __init__(self, run: TrainingRun, candidates: Tensor, captured: Captured) -> None:
        """Keep the candidates; the graphs have a copy of their own."""
        super().__init__(run, candidates)
        self.captured = captured

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return T(θ₀, X, y) − θ₀, (p, 1)."""
        self.labels = coefficients.to(self.candidates).view(len(self.candidates), -1)
        self.__dict__.pop("jacobian", None)
        return self.captured("change", self.candidates, self.labels, self.candidates)

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return J D, (p, 1)."""
        return self.captured("forward", self.candidates, self.labels, direction)[:, None]

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Jᵀ T, (n, d)."""
        return self.captured("backward", self.candidates, self.labels, target[:, 0])

    jacobian = None
