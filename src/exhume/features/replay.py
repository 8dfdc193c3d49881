"""The training run as a map from samples to the change of the weights: θ − θ₀ = T(θ₀, X, y) − θ₀.

A step takes g = ∇θ ℓ(θ, X, y) of its batch and updates the state s = (θ, buffers) to U(s, g). A
direction in the samples is carried through the derivatives of the steps forward (push), one in the
weights backward (pull). The labels y stand where other features have coefficients.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from exhume.features import Features, Linearization
from exhume.features.graphs import Graphs
from exhume.features.kinks import Softened
from exhume.features.linear import Linear, Measured, linear
from exhume.features.modules import BlockFeatures, sum_over_blocks
from exhume.features.network import dense_chain, derivatives, patches_written_out
from exhume.features.weights import blocks, free_memory
from exhume.recipes import Recipe, State

PROBES = 4  # random directions for the mean curvature: it only preconditions, to a factor of two
# A Jacobian of at most so many numbers is kept: 128 MiB in float64, and faster than products
DENSE = 2**24
# The same where candidates have few coordinates, each of which costs as much as a product, at
# most so many; on a GPU, which takes hundreds of them as fast as one product, what memory allows
COORDINATES, WHOLE_BYTES = 64, 2**31
# Steps whose derivatives are all kept, if they fit into so many bytes, or half of a GPU's free
# memory; else the states that begin one of √steps segments are kept
KEPT, HELD = 64, 2**32
WHOLE = 2**19  # weights of the runs that are simulated at once: a few MiB, for the cache
CHUNK = 256  # directions that are pushed at once for it: more gain nothing
# On a GPU more do, up to so many numbers of a tensor of them (4 GiB in float32) and so many tensors
LARGE, TENSORS = 2**30, 8
SQUARED = {"cpu": 2**9, "cuda": 2**13}  # columns of J up to which JᵀJ takes less than its products
MADE = ("jacobian", "squared")  # what is made at most once for the same candidates and labels
SHARED = (
    "Batch norms that take the statistics of a batch see its samples relative to each other: where "
    "they come first, one shift and one scale of all samples stay open."
)
RATE_STEPS = 20  # most, of the search for a rate: it takes three to eight
RATE_GAIN = 1e-4  # share of the residual that a step has to promise: less is for later fits to find
SLOWEST = 1e-3  # share of the change that a first guess of the rate makes at least: never none


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingRun(BlockFeatures):
    """The map from n samples and labels to the change of the parameters that were trained.

    The points are θ₀, from which runs are simulated, and θ, where the true one ended.
    """

    recipe: Recipe  # how
    lazy: Features  # gradients of the same parameters, for a first guess
    labels: tuple[int, ...] | None = None  # classes of the samples, if they are known
    public: Tensor | None = None  # inputs of the same kind, (N, d), if there are any
    pooling: float = 0.0  # share of Adam's mean squares that a weight has from its row and column
    sharp: bool = False  # whether slopes of ReLU jump: near the samples no unit turns on or off
    span: Tensor | None = None  # orthonormal rows (c, d) that candidates combine, where that is so
    # whether the derivatives of all steps are kept, by recipe, p and shape of candidates
    keeps: dict[tuple[Recipe, int, torch.Size], bool] = field(default_factory=dict, repr=False)
    # whether the Jacobian is, by the shape of candidates and the number of a span's rows
    whole: dict[tuple[torch.Size, int], bool] = field(default_factory=dict, repr=False)
    # runs captured in CUDA graphs on a GPU, by recipe, pooling, sharpness, p and the same shape
    captured: dict[tuple[Recipe, float, bool, int, torch.Size], "Captured"] = field(
        default_factory=dict, repr=False
    )

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Say what all samples of a batch may share unseen; else whatever changes the run shows."""
        return (SHARED,) if self.network.batch_statistics else ()

    def to(self, device: torch.device, dtype: torch.dtype) -> "TrainingRun":
        """Return the same elsewhere."""
        public, span = (x if x is None else x.to(device, dtype) for x in (self.public, self.span))
        moved, lazy = super().to(device, dtype), self.lazy.to(device, dtype)
        moved = replace(moved, lazy=lazy, public=public, span=span)
        return replace(moved, captured={}, keeps={}, whole={})

    def within(self, rows: Tensor) -> "TrainingRun":
        """Return the run for candidates, and directions of them, that combine rows U (c, d).

        In a chain of dense layers the first then needs c inputs and not d: with x = Uᵀz it sees
        W₁x = (W₁Uᵀ)z, and a step moves W₁Uᵀ by −η δzᵀ as it moves W₁ by −η δxᵀ.
        """
        exact, chain = rows.to(self.device).double(), dense_chain(self.network)
        rows = exact.to(self.dtype)
        if chain is None or self.network.basis is not None:
            return replace(self, span=rows)
        first = f"{chain.names[0]}.weight"
        narrow = [(w[first].double() @ exact.T).to(rows) for w in self.points]  # rounded once
        points = tuple({**w, first: n} for w, n in zip(self.points, narrow, strict=True))
        network = replace(self.network, shape=(len(rows),), basis=rows)
        return replace(self, span=rows, points=points, network=network)

    @cached_property
    def change(self) -> Tensor:
        """θ − θ₀ of what was trained, (p,)."""
        before, after = self.points
        return torch.cat([(after[name] - before[name]).flatten() for name in self.block])

    @cached_property
    def kinked(self) -> bool:
        """Whether the network has slopes that jump."""
        one = self.change.new_zeros(1, self.dim)
        softened = Softened(one.sum())
        with torch.no_grad(), softened:
            self.network(self.points[0], one)
        return softened.met

    def begin(self) -> State:
        """Return the state before the first step."""
        theta = torch.cat([self.points[0][name].flatten() for name in self.block])
        return (theta, *(torch.zeros_like(theta) for _ in range(self.recipe.buffers)))

    def slopes(self, off: Tensor) -> AbstractContextManager[Any]:
        """Let slopes of ReLU change softly where the run is `off` from its end, unless sharp."""
        return nullcontext() if self.sharp else Softened(off)

    def loss(self, theta: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return ℓ(θ, X, y) of a batch, with θ (p,)."""
        sizes = [self.points[0][name].numel() for name in self.block]
        parts = zip(self.block, torch.split(theta, sizes), strict=True)
        own = {name: part.view_as(self.points[0][name]) for name, part in parts}
        return self.recipe.value(self.network({**self.points[0], **own}, inputs), labels)

    def update(self, step: int, rate: float | Tensor, state: State, gradient: Tensor) -> State:
        """Return the state after a step of the recipe, with mean squares pooled if they are."""
        pooled = self.pooled if self.pooling else None
        return self.recipe.update(step, rate, state, gradient, pooled)

    def pooled(self, squares: Tensor) -> Tensor:
        """Return (1 − s) v + s r cᵀ/mean(r) for mean squares v, (p,), and the pooling s.

        r and c are the means of v over the rows and columns of each weight, as Adafactor has them;
        of a bias v is averaged. Where a gradient passes zero, Adam's step jumps from one sign to
        the other; with these it is smooth, and elsewhere nearly the same.
        """
        shapes = [self.points[0][name].shape for name in self.block]
        means = []
        for part, shape in zip(
            torch.split(squares, [shape.numel() for shape in shapes]), shapes, strict=True
        ):
            matrix = part.view(shape[0], -1) if len(shape) > 1 else part[None]
            rows, columns = matrix.mean(1, keepdim=True), matrix.mean(0, keepdim=True)
            whole = matrix.mean()
            outer = rows * columns / torch.where(whole > 0, whole, 1.0)
            means.append((outer if len(shape) > 1 else whole.expand_as(matrix)).flatten())
        return torch.lerp(squares, torch.cat(means), self.pooling)

    def ends(self, sets: Tensor, labels: Tensor) -> Tensor:
        """Return the change of the weights for each of many sets of samples (k, n, d), (k, p).

        Labels are those of all sets, (n, c), or of each, (k, n, c).
        """
        at, own = Replayed(self, sets[0]), 0 if labels.dim() == 3 else None
        first = labels if own is None else labels[0]
        at.combine(first.reshape(-1, 1))  # finds a rate that is not known

        def end(candidates: Tensor, labels: Tensor) -> Tensor:
            at.candidates, at.labels = candidates, labels
            return at._simulated()

        many = vmap(end, in_dims=(0, own), chunk_size=max(1, WHOLE // self.width))
        with torch.no_grad(), derivatives(rounded=False):
            changes: Tensor = many(sets, labels.to(sets))
        return changes

    def dense(self, candidates: Tensor) -> bool:
        """Tell whether the Jacobian at n candidates (n, d) is kept, which makes products cheap."""
        cuda = candidates.device.type == "cuda"
        if self.span is None:
            return not cuda and self.width * candidates.numel() <= DENSE
        count = len(candidates) * len(self.span)
        needed = self.width * count * candidates.element_size()
        if cuda:  # decided once, whatever else is in memory later
            key = candidates.shape, len(self.span)
            making = TENSORS * CHUNK * self.width * candidates.element_size()
            room = 0.9 * free_memory(candidates.device)
            return self.whole.setdefault(key, needed + making <= room)
        return self.width * count <= DENSE or (count <= COORDINATES and needed <= WHOLE_BYTES)

    def linearize(self, candidates: Tensor) -> Linearization:
        """Return the run at n candidates (n, d); it is simulated once labels are given."""
        if candidates.device.type != "cuda":
            return Replayed(self, candidates)
        key = self.recipe, self.pooling, self.sharp, self.width, candidates.shape
        if key not in self.captured:
            self.captured[key] = Captured(Replayed(self, candidates))
        return Resumed(self, candidates, self.captured[key])


class Replayed:
    """Products with the Jacobian J (p, n·d) of a run at candidates X and labels A (n·c, 1).

    A rate that the recipe leaves open is eliminated: it is the best for X and A, and J the
    derivative of what is left, P⊥J with P⊥ = I − uuᵀ, where u is the unit vector along ∂T/∂rate.
    """

    def __init__(self, run: TrainingRun, candidates: Tensor) -> None:
        """Keep what is needed to simulate."""
        self.run, self.candidates = run, candidates
        self.batches = [b.to(candidates.device) for b in run.recipe.batches(len(candidates))]
        unit = replace(run.recipe, lr=None)
        self.pace = [unit.rate(k, len(self.batches)) for k in range(len(self.batches))]
        self.short = False  # whether the derivatives of all steps are kept
        self.labels = torch.empty(0, dtype=candidates.dtype)
        self.kept: list[Linear] = []  # the derivative of every step of a short run, once it is made
        self.marks: list[State] = []  # the state before each segment of a long one
        self.rate: float | Tensor = run.recipe.lr or 0.0  # before the schedule
        self.along: Tensor | None = None  # u, (p, 1), where the rate is not known
        self.off = candidates.new_zeros(())  # |Δ − T|/|Δ|, how far from the target the run ends
        self.borrowed = False  # whether the Jacobian is that of a run nearby

    def borrow(self, nearby: "Replayed") -> None:
        """Take JᵀJ of a run nearby for one's own, if it has one, and J; slopes are still its own.

        With J alone a product would be JᵀJ of two runs, which is not symmetric.
        """
        known = {name: nearby.__dict__.get(name) for name in MADE}
        self.borrowed = None not in known.values()
        self.__dict__.update(known if self.borrowed else {})
        self.short = self.short and not self.borrowed  # one slope a step, in little memory beside J

    def give_back(self) -> None:
        """Have a Jacobian of one's own again, once it is asked for."""
        self.borrowed = False
        for name in MADE:
            self.__dict__.pop(name, None)

    @property
    def recipe(self) -> Recipe:
        """The recipe with its rate, known or found."""
        return replace(self.run.recipe, lr=float(self.rate))

    def combine(self, coefficients: Tensor) -> Tensor:
        """Return T(θ₀, X, y) − θ₀, (p, 1)."""
        self.labels = coefficients.to(self.candidates).view(len(self.candidates), -1)
        self.give_back()
        self.kept = []
        with torch.no_grad(), derivatives(rounded=False):
            if self.run.recipe.lr is None:
                self.rate, slope = best_rate(self._quickened, self.run.change)
                self.along = (slope / slope.norm())[:, None]
            change = self._simulated()
            self.short = self._fits()
        self.off = (self.run.change - change).norm() / self.run.change.norm()
        return change[:, None]

    def push(self, direction: Tensor, coefficients: Tensor) -> Tensor:
        """Return J D, (p, 1)."""
        if self.jacobian is not None:
            return self.jacobian @ self._coordinates(direction).reshape(-1, 1)
        with torch.no_grad(), derivatives(rounded=False):
            return self._across(self._forward(direction)[:, None])

    def pull(self, target: Tensor, coefficients: Tensor) -> Tensor:
        """Return Jᵀ T, (n, d); J is not made for it, as who only pulls does so once."""
        if "jacobian" in self.__dict__ and self.jacobian is not None and not self.borrowed:
            pulled = (self.jacobian.T @ target).view(len(self.candidates), -1)
            return pulled if self.run.span is None else pulled @ self.run.span
        with torch.no_grad(), derivatives(rounded=False):
            return self._backward(self._across(target)[:, 0])

    def _coordinates(self, direction: Tensor) -> Tensor:
        """Of directions (n, d): their entries, or their parts along the rows of the span."""
        return direction if self.run.span is None else direction @ self.run.span.T

    def curvature(self, coefficients: Tensor) -> Tensor:
        """Return C_ij = tr(J_iᵀJ_j)/d, (n, n) float64: E⟨J_iᵀt, J_jᵀt⟩/d over random t (p,)."""
        n, d = self.candidates.shape
        if self.jacobian is not None and self.jacobian.numel() <= DENSE:
            d = self.jacobian.shape[1] // n
            j = self.jacobian.view(-1, n, d).transpose(0, 1).flatten(1).double()
            return j @ j.T / d
        d = d if self.run.span is None else len(self.run.span)
        generator = torch.Generator().manual_seed(0)
        probes = torch.randn(PROBES, self.run.width, 1, generator=generator, dtype=torch.float64)
        pulled = (self._coordinates(self.pull(t.to(self.candidates), coefficients)) for t in probes)
        rows = [part.double() for part in pulled]
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
        """J (p, n·d), or (p, n·c) along the rows of a span, from many directions at once.

        None where it is too large to keep. On a GPU its entries are rounded, as products may be.
        """
        if not self.run.dense(self.candidates):
            return None
        try:
            return self._columns()
        except torch.OutOfMemoryError:  # activations may take more than weights: products then
            torch.cuda.empty_cache()
            span = self.run.span
            self.run.whole[self.candidates.shape, 0 if span is None else len(span)] = False
            return None

    def _columns(self) -> Tensor:
        """J, some of its columns after the other."""
        like, (n, d) = self.candidates, self.candidates.shape
        rows = torch.eye(d).to(like) if self.run.span is None else self.run.span
        result = like.new_empty(self.run.width, n * len(rows))
        with torch.no_grad(), derivatives(rounded=True):
            for part in blocks(n * len(rows), self._at_once()):
                place = torch.arange(part.start, part.stop, device=like.device)
                along = like.new_zeros(len(place), n, d)
                along[torch.arange(len(place)), place // len(rows)] = rows[place % len(rows)]
                result[:, part] = self._across(vmap(self._carried, out_dims=1)(along))
        return result

    def _at_once(self) -> int:
        """How many directions are pushed at once."""
        like = self.candidates
        if not like.is_cuda:
            return CHUNK
        room = 0.9 * free_memory(like.device) / (TENSORS * like.element_size())
        return max(CHUNK, int(min(room, LARGE)) // self.run.width)

    @cached_property
    def squared(self) -> Tensor | None:
        """JᵀJ (m, m) where J is kept and has few columns, in float64, as squares round more."""
        most = SQUARED.get(self.candidates.device.type, 0)
        if self.jacobian is None or self.jacobian.shape[1] > most:
            return None
        return sum_over_blocks(self.jacobian.T, self.jacobian.T)

    def twice(self, direction: Tensor) -> Tensor | None:
        """Return JᵀJ D, (n, d), from one small matrix; None where that is not kept."""
        if self.squared is None:
            return None
        along = self._coordinates(direction).double().reshape(-1, 1)
        whole = (self.squared @ along).view(len(direction), -1).to(direction)
        return whole if self.run.span is None else whole @ self.run.span

    def _across(self, columns: Tensor) -> Tensor:
        """P⊥ of columns (p, m)."""
        return columns if self.along is None else columns - self.along @ (self.along.T @ columns)

    def _step(self, k: int, *given: Tensor) -> State:
        """The state after a step, given that before it, the candidates and the rate."""
        *state, inputs, rate = given
        batch = self.batches[k]
        slope = grad(self.run.loss)(state[0], inputs[batch], self.labels[batch])
        return self.run.update(k, rate * self.pace[k], tuple(state), slope)

    def _derivative(self, k: int, state: State, rate: float | Tensor | None = None) -> Linear:
        """The derivative of a step in the state before it, the candidates and the rate."""
        rate = self._tensor(self.rate if rate is None else rate)
        with self.run.slopes(self.off):
            return linear(partial(self._step, k), *state, self.candidates, rate)

    def _tensor(self, rate: float | Tensor) -> Tensor:
        like = self.candidates
        return torch.as_tensor(rate, dtype=like.dtype, device=like.device)

    @property
    def segment(self) -> int:
        """How many steps are simulated again at a time, for those before the last."""
        return math.isqrt(len(self.batches))

    def _fits(self) -> bool:
        """Whether the derivatives of all steps fit into memory, by what that of one step takes."""
        key = self.run.recipe, self.run.width, self.candidates.shape
        steps, cuda = len(self.batches), "cuda"
        if steps > KEPT:
            return False
        if key not in self.run.keeps:
            written_out = patches_written_out() if self.candidates.is_cuda else nullcontext()
            with Measured() as measured, written_out:  # as in the graphs that a GPU records
                self._derivative(0, self.run.begin())
            room = (
                torch.cuda.mem_get_info()[0] // 2 if self.candidates.device.type == cuda else HELD
            )
            self.run.keeps[key] = steps * measured.bytes <= room
        return self.run.keeps[key]

    def _simulated(self) -> Tensor:
        """The change of the weights, (p,); the states that `_backward` needs are kept."""
        state = first = self.run.begin()
        self.marks, rate = [], self._tensor(self.rate)
        for k in range(len(self.batches)):
            if k % self.segment == 0:
                self.marks.append(state)
            state = self._step(k, *state, self.candidates, rate)
        return state[0] - first[0]

    def _linearised(self) -> Tensor:
        """The same; the derivatives of all steps are kept."""
        self.kept = list(self._derivatives())
        return self.kept[-1].outputs[0].detach() - self.run.begin()[0]

    def _derivatives(self, rate: float | Tensor | None = None) -> Iterator[Linear]:
        """The derivative of each step, from the first to the last."""
        state = self.run.begin()
        for k in range(len(self.batches)):
            yield (step := self._derivative(k, state, rate))
            state = tuple(part.detach() for part in step.outputs)

    def _derivatives_back(self) -> Iterator[Linear]:
        """The derivative of each step from the last to the first, a segment simulated at a time."""
        for j in reversed(range(len(self.marks))):
            first, states, rate = j * self.segment, [self.marks[j]], self._tensor(self.rate)
            for k in range(first, min(first + self.segment, len(self.batches)) - 1):
                states.append(self._step(k, *states[-1], self.candidates, rate))
            for k, state in reversed(list(enumerate(states, first))):
                yield self._derivative(k, state)

    def _forward(self, direction: Tensor) -> Tensor:
        """The tangent of θ at the end, (p,), for samples that move along D."""
        if self.short and not self.kept:
            self._linearised()
        still = direction.new_zeros(())  # the rate
        tangent = tuple(torch.zeros_like(part) for part in self.run.begin())
        for step in self.kept if self.short else self._derivatives():
            tangent = step.push((*tangent, direction, still))
        return tangent[0]

    def _carried(self, direction: Tensor) -> Tensor:
        """The same in forward mode, which is faster for many directions at once."""
        state, rate = self.run.begin(), self._tensor(self.rate)
        tangent = tuple(torch.zeros_like(part) for part in state)
        with self.run.slopes(self.off):
            for k in range(len(self.batches)):
                inputs = *state, self.candidates, rate
                along = *tangent, direction, torch.zeros_like(rate)
                state, tangent = jvp(partial(self._step, k), inputs, along)[:2]
        return tangent[0]

    def _backward(self, target: Tensor) -> Tensor:
        """The slope of ⟨θ, T⟩ at the end in the samples, (n, d)."""
        if self.short and not self.kept:
            self._linearised()
        result = torch.zeros_like(self.candidates)
        back: State = (target, *(torch.zeros_like(target) for _ in range(self.run.recipe.buffers)))
        for step in reversed(self.kept) if self.short else self._derivatives_back():
            *before, outer, _ = step.pull(back)
            back, result = tuple(before), result + outer
        return result

    def _quickened(self, rate: float | Tensor) -> Tensor:
        """The change of the weights at a rate, and its derivative in the rate, (2, p)."""
        still, faster = torch.zeros_like(self.candidates), self.candidates.new_ones(())
        tangent = tuple(torch.zeros_like(part) for part in self.run.begin())
        for step in self._derivatives(rate):
            tangent = step.push((*tangent, still, faster))
        return torch.stack((step.outputs[0].detach() - self.run.begin()[0], tangent[0]))


def best_rate(run: Callable[[float | Tensor], Tensor], target: Tensor) -> tuple[float, Tensor]:
    """Return the rate η that minimises |Δ − T(η)|², and ∂T/∂η (p,), for a run of T and ∂T/∂η.

    Gauss-Newton on log η: from the η at which T, taken to be linear in it, is nearest to Δ, until a
    step would lower the square by less than a share of it.
    """
    aim = target.double()
    slope = run(0.0)[1].double()
    steepest = float(slope.norm())
    if steepest == 0:  # no sample moves the weights: any rate will do
        return 1.0, torch.ones_like(target)
    least = SLOWEST * float(aim.norm())
    rate = trial = max(float(slope @ aim) / steepest, least) / steepest
    best, step = math.inf, -1.0
    for _ in range(RATE_STEPS):
        change, moved = run(trial).double()
        left = aim - change
        if (value := float(left @ left)) < best:
            best, rate, slope = value, trial, moved
            along = trial * float(moved.norm())
            step = float(moved @ left) * trial / along**2
            if (step * along) ** 2 <= RATE_GAIN * value:
                break
            step = max(-1.0, min(1.0, step))
        else:  # also where the run diverged
            step /= 4
        trial = rate * math.exp(step)
    return rate, slope.to(target)


class Captured:
    """A run whose products are CUDA graphs: one for candidates of any value."""

    def __init__(self, run: Replayed) -> None:
        """Record nothing yet: each graph is made when it is first asked for."""
        self.run, self.graphs = run, Graphs()
        self.made: dict[str, Replayed] = {}  # what was simulated last, and for whom

    def __call__(self, name: str, at: Replayed, rate: float | Tensor, *given: Tensor) -> Tensor:
        """Return what the method of that name returns at candidates, labels and a rate."""
        self.run.short = at.short
        needed = "_linearised" if at.short else "_simulated"
        if name in ("_forward", "_backward") and self.made.get(needed) is not at:
            self(needed, at, rate)
        if name == "_simulated":
            self.made.clear()  # labels may be others
        self.made[name] = at
        function, inputs = partial(self._called, name), (at.candidates, at.labels)
        # Products of steps need few digits; a run that is simulated again for them needs all
        rounded = at.short and name in ("_forward", "_backward")
        given = *inputs, at._tensor(rate), at.off, *given
        return self.graphs(name, function, *given, rounded=rounded)

    def _called(
        self,
        name: str,
        candidates: Tensor,
        labels: Tensor,
        rate: Tensor,
        off: Tensor,
        *given: Tensor,
    ) -> Tensor:
        run = self.run
        run.candidates, run.labels, run.rate, run.off = candidates, labels, rate, off
        with patches_written_out():
            result: Tensor = getattr(run, name)(*given)
        return result


class Resumed(Replayed):
    """The same products from captured graphs."""

    def __init__(self, run: TrainingRun, candidates: Tensor, captured: Captured) -> None:
        """Keep the candidates; the graphs have a copy of their own."""
        super().__init__(run, candidates)
        self.captured = captured

    def _simulated(self) -> Tensor:
        return self.captured("_simulated", self, self.rate)

    def _quickened(self, rate: float | Tensor) -> Tensor:
        return self.captured("_quickened", self, rate, self._tensor(rate))

    def _forward(self, direction: Tensor) -> Tensor:
        return self.captured("_forward", self, self.rate, direction)

    def _backward(self, target: Tensor) -> Tensor:
        return self.captured("_backward", self, self.rate, target)
