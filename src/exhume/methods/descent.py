"""Steps of the published penalty methods: several runs of one recipe side by side.

Runs may differ in their starts, step sizes, thresholds and sharpness. Steps are functions of
tensors alone, so on a GPU a stride of them is one CUDA graph and the host waits once for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.problem import Problem
from exhume.features import Features
from exhume.features.runs import batched, most, runs_at
from exhume.methods.penalties import (
    Hyperparameters,
    PenalisedLoss,
    Place,
    Scene,
    losses_at,
    scene_of,
)

STRIDE = 10  # steps between looks at the residual: a look waits for the device
MOMENTUM = 0.9  # as published
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam, as published: torch's defaults
# Relative residual down to which several runs round the factors of features on a GPU, too: to 3e-4,
# a thirtieth of what is left of the target there. Products are most of their time, and one run that
# rounded them had the same mean cosine (docs/benchmarks.md). One run waits for launches, and stays
# as it was published. Answers are never rounded.
COARSE = 1e-4
DIALS = 4  # before the sharpness of steps, see `Program`

Memory = tuple[Tensor, ...]  # what steps need of a tensor, see `stepped`
Pair = tuple[Tensor, Tensor]  # of candidates, (n, d), and of their multipliers, (n, q)


@dataclass(frozen=True, eq=False)
class Moments:
    """What the optimiser remembers from step to step."""

    velocity: Pair  # of momentum, or the first moments of Adam
    square: Pair | None  # the second moments of Adam; None for momentum
    clock: int = 0  # how many steps it remembers

    @classmethod
    def at_rest(cls, place: Place, settings: Hyperparameters) -> "Moments":
        """Return the memory before the first step."""
        zeros = torch.zeros_like(place.candidates), torch.zeros_like(place.multipliers)
        return cls(zeros, zeros if settings.adam else None)


@dataclass(frozen=True, eq=False)
class Descent:
    """Where one run of the optimiser stands."""

    place: Place  # candidates and multipliers
    moments: Moments  # what the optimiser remembers
    trial: int  # whose hyperparameters it has
    began: float  # its residual at the start, of the network as it is
    residual: float  # the last that was looked at, with the surrogate
    steps: int = 0  # how many it has taken
    pace: float = 1.0  # factor of the multipliers' step size
    diverged: bool = False  # the last steps led to nothing finite: it stands where they began

    @property
    def products(self) -> int:
        """Each step takes the features' derivative once."""
        return self.steps

    @property
    def memory(self) -> tuple[Pair, ...]:
        """What steps change: candidates and multipliers, their velocity, and squares if any."""
        own = (self.place.candidates, self.place.multipliers), self.moments.velocity
        return own if self.moments.square is None else (*own, self.moments.square)

    def moved(self, memory: Sequence[Pair], residual: float, steps: int) -> "Descent":
        """Return the run after so many steps, or as it is where they led to nothing finite."""
        if not math.isfinite(residual):
            return replace(self, steps=self.steps + steps, diverged=True)
        (x, y), velocity, *square = memory
        place = replace(self.place, candidates=x, multipliers=y)
        moments = Moments(velocity, square[0] if square else None, self.moments.clock + steps)
        steps += self.steps
        return replace(self, place=place, moments=moments, residual=residual, steps=steps)


def stepped(memory: Memory, slope: Tensor, rate: Tensor, clock: Tensor) -> Memory:
    """Take a step of z: momentum, v ← βv + g, z ← z − ηv, or Adam, where squares are kept.

    The memory is (z, v) or (z, v, s); the clock, in float64, counts steps with this one.
    """
    z, v, *squares = memory
    if not squares:
        v = MOMENTUM * v + slope
        return z - rate.to(z) * v, v
    v, s = torch.lerp(slope, v, BETAS[0]), torch.lerp(slope.square(), squares[0], BETAS[1])
    first, second = (1 - beta**clock for beta in BETAS)
    return z - (rate / first).to(z) * v / ((s / second.to(z)).sqrt() + EPSILON), v, s


def smoothed(problem: Problem, settings: Hyperparameters, step: int) -> Problem:
    """Return the problem with that step's surrogate for ReLU."""
    surrogate = settings.surrogate(sharpness_at(settings, step))
    return replace(problem, features=problem.features.substituted(surrogate))


def sharpness_at(settings: Hyperparameters, step: int) -> float:
    """Return that of the surrogate, which changes from stride to stride."""
    return settings.sharpness(step - step % STRIDE)


@dataclass(frozen=True, eq=False)
class Program:
    """Steps of R runs side by side, as functions of tensors alone, which a GPU can record.

    They are given memories (2 or 3, R, n, ·), see `stepped`, of candidates and multipliers; labels
    and shares (R, n); dials (…, R, 1, 1), in float64: step size of candidates, of multipliers,
    threshold, clock, and the sharpness for each step and for the look after them.
    """

    features: Features
    scene: Scene
    settings: Hyperparameters  # of one run: what has no dial is the same for all
    divisor: float  # as in `Place`
    coarse: bool  # whether factors of features and residual may be rounded

    def __call__(self, name: str, *given: Tensor) -> Tensor:
        """Return what the method of that name does; on a GPU from a graph, for dense layers."""
        scene, chosen = self.scene, self.settings
        function, given = getattr(self, name), (*given, scene.target, scene.limits)
        features = batched(self.features, scene.target)
        if features is None or features.device.type != "cuda":
            result: Tensor = function(*given)
            return result
        weights = chosen.box, chosen.push, chosen.smoothness, chosen.sparsity, self.divisor
        kinds = name, self.coarse, chosen.surrogate.__name__, scene.rule, scene.shape
        return features.graphs(f"{kinds} {weights}", function, *given)

    def steps(self, first: Tensor, second: Tensor, *given: Tensor) -> Tensor:
        """Return both memories, (2 or 3, R, n, d + q), after steps with all sharpness but one."""
        dials, x, y = given[2], first.unbind(), second.unbind()
        for k in range(len(dials) - DIALS - 1):
            here = self._loss(x[0], y[0], *given, step=k)
            clock = dials[3] + k + 1
            x = stepped(x, here.slope, dials[0], clock)
            y = stepped(y, here.multiplier_slope, dials[1], clock)
        return torch.cat([torch.stack(x), torch.stack(y)], -1)

    def look(self, first: Tensor, second: Tensor, *given: Tensor) -> Tensor:
        """Return ‖R‖² of each run, (R,), with the last sharpness."""
        return self._loss(first[0], second[0], *given, step=-1).stationarity

    def _loss(
        self, x: Tensor, y: Tensor, labels: Tensor, shares: Tensor, *given: Tensor, step: int
    ) -> PenalisedLoss:
        dials, target, limits = given
        scene, numbers = replace(self.scene, target=target, limits=limits), dials.to(x)
        surrogate, sharpness = self.settings.surrogate, numbers[DIALS:][step]
        there = runs_at(self.features, surrogate, x, sharpness, target, self.coarse)
        place = Place(x, y, labels, shares, self.divisor)
        return losses_at(scene, replace(self.settings, threshold=numbers[2]), place, there)


def advanced(
    problem: Problem, settings: Sequence[Hyperparameters], runs: Sequence[Descent], steps: int
) -> list[Descent]:
    """Take so many steps of runs of one recipe side by side, and look at their residuals then."""
    result, size = list(runs), min(len(runs), most(problem.features, problem.target))
    for start in range(0, len(runs), size):
        start = min(start, len(runs) - size)  # as many each time, so that what is recorded serves
        part = slice(start, start + size)
        result[part] = _advanced(problem, settings[part], runs[part], steps)
    return result


def _advanced(
    problem: Problem, settings: Sequence[Hyperparameters], runs: Sequence[Descent], steps: int
) -> list[Descent]:
    places, scene = [run.place for run in runs], scene_of(problem)
    planes = [pair for plane in zip(*(run.memory for run in runs), strict=True) for pair in plane]
    both = (torch.stack(z) for z in zip(*planes, strict=True))
    memory = [z.view(-1, len(runs), *z.shape[1:]) for z in both]
    others = [torch.stack([getattr(p, name) for p in places]) for name in ("labels", "shares")]
    numbers = [
        [s.rate, run.pace * s.multiplier_rate, s.threshold, run.moments.clock]
        + [sharpness_at(s, run.steps + k) for k in range(steps + 1)]
        for s, run in zip(settings, runs, strict=True)
    ]
    dials = torch.tensor(numbers, dtype=torch.float64).T[..., None, None].to(scene.target.device)
    coarse = len(runs) > 1 and min(run.residual for run in runs) > COARSE
    program = Program(problem.features, scene, settings[0], places[0].divisor, coarse)
    moved = program("steps", *memory, *others, dials)
    memory = [z.contiguous() for z in moved.tensor_split([problem.dim], -1)]
    left = program("look", *memory, *others, dials)
    relative = (left / scene.target.double().square().sum()).tolist()
    parts = zip(*(z.unbind(1) for z in memory), strict=True)
    return [
        run.moved(list(zip(x, y, strict=True)), residual, steps)
        for run, (x, y), residual in zip(runs, parts, relative, strict=True)
    ]
