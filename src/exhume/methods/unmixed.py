"""Samples unmixed from a dense first layer: images are the combinations of its rows with contours.

Every gradient adds Σ_i δ_i x_iᵀ to W₁, so the rows of its change are combinations of the samples
however long training went on, at what rate, and in which batches (not with Adam, which rescales
entries, and not with weight decay, which adds initial weights to the change); where initial weights
are not known but small, so are the rows of W₁. Which combinations of rows are samples? Neighbouring
pixels of an image differ little but at its contours, so their differences have a sharp peak and
long tails; those of a mixture of images are nearer to normal. Independent component analysis finds
the combinations farthest from normal: FastICA (Hyvärinen 1999). Kariyappa et al. 2023 separate the
inputs of one gradient in federated learning so. No equation of training is solved. Sign and size
come from the bias, which gradients change by Σ_i δ_i, as if inputs ended in a 1; without it both
stay open.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.methods.progress import Progress, stream
from exhume.solvers import Outcome

STRIDE = 10  # turns a move: a fifth of a second for a hundred photographs of 32×32 on a CPU
ROUNDING = 1e-6  # share of the largest singular value that the rounding of float32 may leave
# Differences for each component below which they cannot be told apart: 20 digits of 8×8 (13) give
# nothing, 500 photographs of 32×32 (29) two fifths that can be recognised
ENOUGH = 25
DARK = 1e-8  # variance over the largest below which a combination has no contours
LEAST = 1000  # of them in all: of three digits of 8×8 (257) none comes back, and one otherwise
FEW = 0.25  # share of the samples: where fewer rows stand out, the noise has hidden the samples
MISSED = 1e-2  # of a bias, at most, that rounding leaves outside the columns; a mean leaves a tenth
SIZE = 0.4  # of photographs less their mean, over the norm of noise that fills their box


@dataclass(frozen=True, eq=False)
class Turned:
    """Where the analysis stands."""

    components: Tensor  # (k, d), combinations of rows: they mean the same on every machine
    candidates: Tensor  # these as inputs, (k, d), or with either sign, (2k, d)
    steps: int = 0  # turns taken
    products: int = 0  # none is a pass over the features' derivative


@dataclass(frozen=True, eq=False, kw_only=True)
class Unmixing(Progress):
    """The progress of the analysis."""

    state: Turned
    phase: str = "unmix"

    @property
    def candidates(self) -> Tensor:
        """The components so far as inputs."""
        return self.state.candidates

    @property
    def residual(self) -> float:
        """Nothing of the target is explained before coefficients are fitted at the end."""
        return 1.0


@dataclass(frozen=True)
class Unmixed:
    """Independent component analysis of the first layer's rows, for images."""

    turns: int = 300  # at most: components that are noise never stay
    tolerance: float = 1e-4  # 1 − |cosine| of a component in two turns, below which all stay
    name: str = "unmixed"

    def view(self, problem: Problem) -> Problem:
        """Return the problem; refuse one without a dense first layer, or whose inputs are none."""
        if problem.first_layer is None or len(problem.shape) not in (2, 3):
            raise InputError(
                "unmixed: takes images, (H, W) or (C, H, W), and a dense first layer that sees "
                f"them and was trained; inputs are {problem.shape}. Use the method 'exhume'."
            )
        return problem

    def applies(self, problem: Problem, samples: int | None) -> bool:
        """Tell whether rows stand out of the noise, and differences enough to tell them apart."""
        if problem.first_layer is None or len(problem.shape) not in (2, 3):
            return False
        *channels, high, wide = problem.shape
        values, rows = 5 * math.prod(channels) * (high - 1) * (wide - 1), _rows(problem, samples)
        if len(rows) < max(2, FEW * (samples or 0)):
            return False
        return values >= max(LEAST, ENOUGH * len(rows))

    def init(self, problem: Problem, samples: int | None, seed: int) -> Unmixing:
        """Begin with a random turn of the whitened rows."""
        white, _ = _whitened(problem, samples)
        turn = torch.randn(len(white), len(white), generator=stream(seed, 0)).to(white)
        components = orthogonal(turn.double()).to(white) @ white
        state = Turned(components, _inputs(problem, components))
        return Unmixing(seed=seed, samples=samples, state=state)

    def advance(self, problem: Problem, progress: Unmixing) -> Unmixing:
        """Take some turns Q of the whitened rows M; the components at hand are QM."""
        white, values = _whitened(problem, progress.samples)
        turn = orthogonal(progress.state.components.double() @ torch.linalg.pinv(white.double()))
        turn, steps, moved = turn.to(white), progress.state.steps, math.inf
        last = min(steps + STRIDE, self.turns)
        while steps < last and moved > self.tolerance:
            before, turn, steps = turn, turned(turn, values), steps + 1
            moved = float((1 - (turn * before).sum(1).abs()).max())
        state = Turned(turn @ white, _inputs(problem, turn @ white), steps)
        ended = Outcome.STALLED if moved <= self.tolerance else None
        ended = Outcome.BUDGET if ended is None and steps >= self.turns else ended
        return replace(progress, state=state, outcome=ended)

    def finish(self, problem: Problem, progress: Unmixing) -> Fit:
        """Fit coefficients to the components as they are."""
        return fitted(problem, progress.candidates)


def start_of(problem: Problem, samples: int | None, seed: int) -> Tensor | None:
    """Return unmixed candidates, for a search to begin with; None where there can be none."""
    method = Unmixed()
    if not method.applies(problem, samples):
        return None
    progress = method.init(problem, samples, seed)
    while progress.outcome is None:
        progress = method.advance(problem, progress)
    return progress.candidates


def contours(images: Tensor) -> Tensor:
    """Return first and second differences of neighbouring pixels, (k, C, H, W) → (k, T).

    Colours are taken along the principal axes of all images, and every kind of difference of every
    colour is divided by its root mean square, so that brightness does not drown the others.
    """
    flat = images.transpose(0, 1).flatten(1)
    axes = torch.linalg.eigh(flat @ flat.T)[1]
    parts, least = [], ROUNDING * flat.square().mean().sqrt()
    for colour in torch.einsum("co,kchw->okhw", axes, images):
        across, down = colour.diff(dim=2), colour.diff(dim=1)
        for kind in (across, down, across.diff(dim=2), down.diff(dim=1), across.diff(dim=1)):
            size = kind.square().mean().sqrt()
            parts += [kind.flatten(1) / size] if size > least else []
    if not parts:
        raise InputError("unmixed: the rows of the first layer are images without any contours.")
    return torch.cat(parts, 1)


def turned(turn: Tensor, values: Tensor) -> Tensor:
    """Return one step of FastICA: Q ← orthogonal(E[g(QZ) Zᵀ] − E[g'(QZ)] Q), g(s) = s·exp(−s²/2).

    Z (k, T) are whitened values. That g belongs to contours: it disregards the long tails, whose
    few values would decide, and asks for a sharp peak.
    """
    s = turn @ values
    bell = torch.exp(-s.square() / 2)
    mean = (s * bell) @ values.T / values.shape[1]
    slope = ((1 - s.square()) * bell).mean(1, keepdim=True)
    return orthogonal((mean - slope * turn).double()).to(turn)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix, (MMᵀ)^{−½} M."""
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    root = values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt()
    nearest: Tensor = (vectors * root) @ vectors.T @ matrix
    return nearest


def above_noise(sizes: Tensor, sides: tuple[int, ...]) -> int:
    """Return how many singular values of a matrix, largest first, are not those of noise.

    Noise of sides a ≥ b has them between σ(√a − √b) and σ(√a + √b) (Marchenko and Pastur), and the
    smallest of all is taken for its least. Each of the c values above the others takes a row and a
    column of the noise away, so that c is found by and by.
    """
    long, short = max(sides), min(sides)
    count, found = -1, 0
    while found > count:
        count = found
        a, b = math.sqrt(long - count), math.sqrt(max(0, short - count))
        edge = sizes[-1] * (a + b) / (a - b) if a > b else sizes[-1]
        found = int((sizes > edge.clamp_min(ROUNDING * sizes[0])).sum())
    return count


def _rows(problem: Problem, samples: int | None) -> Tensor:
    """Return an orthonormal basis (r, d) of W₁'s rows, without noise: at most one a sample."""
    assert problem.first_layer is not None
    sizes, directions = problem.first_layer.spectrum
    seen = max(1, above_noise(sizes, tuple(problem.first_layer.trained.shape)))
    return directions[: min(samples or seen, seen)]


def _whitened(problem: Problem, samples: int | None) -> tuple[Tensor, Tensor]:
    """Return combinations of rows (k, d) whose contours Z (k, T) are white, ZZᵀ/T = 1; and Z."""
    rows = _rows(problem, samples).to(problem.target.device)
    channels = problem.shape if len(problem.shape) == 3 else (1, *problem.shape)
    values = contours(rows.reshape(-1, *channels))
    sizes, vectors = torch.linalg.eigh(values @ values.T / values.shape[1])
    seen = sizes > DARK * sizes[-1]
    white = (vectors[:, seen] / sizes[seen].sqrt()).T
    return (white @ rows).to(problem.target), (white @ values).to(problem.target)


def _inputs(problem: Problem, components: Tensor) -> Tensor:
    """Return components (k, d) as inputs: of the size that the bias says, (k, d).

    Else they have a usual size and either sign, (2k, d).
    """
    unit = torch.nn.functional.normalize(components)
    ones = _ones(problem, unit)
    if ones is not None:
        least = torch.finfo(ones.dtype).eps  # so that none is divided by nothing
        ones = torch.where(ones.abs() < least, least, ones)
        return problem.domain.project(unit / ones[:, None])
    drawn = problem.domain.start(8, problem.dim, stream(0, 0))
    middle, spread = float(drawn.mean()), float(drawn.std())
    if abs(middle) > spread / 4:  # brightness of an unknown sign would be cut off there
        unit = torch.nn.functional.normalize(unit - unit.mean(1, keepdim=True))
    unit = unit * (SIZE * spread * math.sqrt(problem.dim))
    return problem.domain.project(middle + torch.cat([unit, -unit]))


def _ones(problem: Problem, rows: Tensor) -> Tensor | None:
    """Return what stands in combinations of rows of W₁'s change (k, d) where inputs have their 1.

    With a change Δ = USVᵀ and that of the bias b, a row x of the span is xVS⁻¹Uᵀ · (Δ, b). None
    where b is no combination of Δ's columns, as it is not for inputs less their mean.
    """
    layer = problem.first_layer
    if layer is None or layer.bias is None or not layer.bias.any():
        return None
    sizes, directions = layer.spectrum
    seen = above_noise(sizes, tuple(layer.trained.shape))
    change = (layer.trained.double() - layer.initial.double()).cpu()
    sizes, directions, bias = sizes[:seen], directions[:seen], layer.bias.double().cpu()
    weights = (directions @ (change.T @ bias)) / sizes.square()  # S⁻¹Uᵀb, along V
    missed = (bias - change @ (directions.T @ weights)).norm() / bias.norm()
    return None if missed > MISSED else (rows.double().cpu() @ directions.T @ weights).to(rows)
