"""Samples unmixed from a dense first layer: images are the combinations of its rows with contours.

Every gradient adds Σ_i δ_i x_iᵀ to W₁, so the rows of its change are combinations of the samples
however long training went on, at what rate, and in which batches (not with Adam, which rescales
entries, and not with weight decay, which adds initial weights to the change); where initial weights
are not known but small, so are the rows of W₁. Which combinations of rows are images is found by
their contours (`search.contours`); Kariyappa et al. 2023 separate the inputs of one gradient in
federated learning so. No equation of training is solved. Sign and size come from the bias, which
gradients change by Σ_i δ_i, as if inputs ended in a 1; without it both stay open. Where the layer
sees images tile by tile, as a transformer does, tiles are unmixed and put together, if places have
embeddings of their own (`search.puzzle`).
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from exhume.equation.domain import Box, Domain, Span
from exhume.equation.objective import Fit, fitted
from exhume.equation.problem import FirstLayer, Problem
from exhume.errors import InputError
from exhume.features.modules import ModuleFeatures
from exhume.features.network import midpoint
from exhume.methods.progress import Progress, stream
from exhume.search.contours import above_noise, clear, contours, likelier, orthogonal, turned
from exhume.search.photographs import photographs
from exhume.search.puzzle import alike, explained, placed, rearranged, together
from exhume.solvers import Outcome
from exhume.solvers.budget import spent

STRIDE = 10  # turns a move: seconds for a hundred photographs of 32×32 on a CPU
# Turns of FastICA before the likelihood is raised: it finds images from anywhere, but only roughly,
# and the likelihood from too early stays where it is (of 125 photographs in the rows of 250 neurons
# 69 can be recognised after 300 turns, 61 after 100, 41 after 30)
TURNS = 300
# Differences of one kind for each component, below which they cannot be told apart: 20 digits of
# 8×8 (2.5) give nothing, 500 photographs of 32×32 (5.8) most that can be recognised
ENOUGH = 5
CLEAN = 1e-4  # share of the largest singular value up to which the least is that of rounding
# Noise that a row may have at most, of its square, for each difference of a kind that a row has:
# white noise has more contours than images, and noisy rows spoil the others unless pixels are many.
# (125 photographs with 5 to 6 differences a row: 69 can be recognised with this, 54 with all rows;
# in two classes 60 and 44)
NOISE = 0.02
DARK = 1e-8  # variance over the largest below which a combination has no contours
LEAST = 200  # of them in all: of three digits of 8×8 (49) none comes back, and one otherwise
FEW = 0.25  # share of the samples: where fewer rows stand out, the noise has hidden the samples
MISSED = (
    2e-3  # of a bias, at most, that rounding leaves outside the columns; a mean leaves 6e-3 or more
)
SIZE = 0.4  # of photographs less their mean, over the norm of noise that fills their box


@dataclass(frozen=True, eq=False)
class Turned:
    """Where the analysis stands."""

    components: Tensor  # (k, t), combinations of rows: they mean the same on every machine
    candidates: Tensor  # these as inputs: (k, d), with either sign (2k, d), or images of their own
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

    turns: int = 1500  # at most, with the steps of the likelihood
    # Gain of a component's mean log-likelihood in a move below which nothing more comes out
    tolerance: float = 1e-4
    name: str = "unmixed"

    def view(self, problem: Problem) -> Problem:
        """Return the problem; refuse one without a dense first layer, or whose inputs are none."""
        if _layer(problem) is None or len(problem.shape) not in (2, 3):
            raise InputError(
                "unmixed: takes images, (H, W) or (C, H, W), and a dense first layer that sees "
                f"them and was trained; inputs are {problem.shape}. Use the method 'exhume'."
            )
        return problem

    def applies(self, problem: Problem, samples: int | None) -> bool:
        """Tell whether rows stand out of the noise, and differences enough to tell them apart."""
        if (layer := _layer(problem)) is None or len(problem.shape) not in (2, 3):
            return False
        values, seen = _differences(problem), _seen(layer, samples)
        if seen < max(2, FEW * (samples or 0)) or values < max(LEAST, ENOUGH * seen):
            return False
        if layer.tiles is None:
            return True
        whole = seen % layer.tiles.places == 0
        right = samples is None or seen == samples * layer.tiles.places
        one = layer.spectrum[1][:1]
        known = layer.places is not None and _carried(layer, one, layer.places) is not None
        if not (whole and right and known):
            return False
        return len(_whitened(problem, samples)[0]) == seen  # one of a single colour would miss

    def init(self, problem: Problem, samples: int | None, seed: int) -> Unmixing:
        """Begin with a random turn of the whitened rows; refuse tiles that make no whole images."""
        if problem.first_layer is None and not self.applies(problem, samples):
            raise InputError(
                "unmixed: the tiles that the first layer sees cannot be put together: its change "
                "does not end after so many whole images, a tile has no contours, or places have "
                "no embeddings of their own. Use the method 'exhume'."
            )
        white, _ = _whitened(problem, samples)
        turn = torch.randn(len(white), len(white), generator=stream(seed, 0)).to(white)
        components = orthogonal(turn.double()).to(white) @ white
        state = Turned(components, _inputs(problem, components))
        return Unmixing(seed=seed, samples=samples, state=state)

    def advance(self, problem: Problem, progress: Unmixing) -> Unmixing:
        """Take some turns Q of the whitened rows M, then steps W; the components at hand are WM."""
        white, values = _whitened(problem, progress.samples)
        unmixing = progress.state.components.double() @ torch.linalg.pinv(white.double())
        steps, change, exact = progress.state.steps, 0.0, values.double()
        for _ in range(min(STRIDE, self.turns - steps)):
            steps += 1
            if steps <= TURNS:
                unmixing = turned(orthogonal(unmixing).to(white), values).double()
            else:
                unmixing, gain = likelier(unmixing, exact)
                change += gain
            if spent():
                break
        components = unmixing.to(white) @ white
        settled = change < self.tolerance and steps > TURNS and not spent()
        ended = Outcome.STALLED if settled else None
        ended = Outcome.BUDGET if ended is None and steps >= self.turns else ended
        state = Turned(components, _inputs(problem, components, ended is not None), steps)
        return replace(progress, state=state, outcome=ended)

    def finish(self, problem: Problem, progress: Unmixing) -> Fit:
        """Fit coefficients to the components as they are; tiles of a run cut short join now."""
        ended = progress.outcome is not None or problem.tiled is None
        components = progress.state.components
        return fitted(problem, progress.candidates if ended else _inputs(problem, components, True))


def start_of(problem: Problem, samples: int | None, seed: int) -> Tensor | None:
    """Return unmixed candidates, for a search to begin with; None where there can be none."""
    method = Unmixed()
    if not method.applies(problem, samples):
        return None
    progress = method.init(problem, samples, seed)
    while progress.outcome is None:
        progress = method.advance(problem, progress)
    return progress.candidates


def _layer(problem: Problem) -> FirstLayer | None:
    return problem.first_layer or problem.tiled


def _image(problem: Problem) -> tuple[int, ...]:
    """Return channels, height and width of what the first layer sees: an image or a tile."""
    if (layer := _layer(problem)) is not None and layer.tiles is not None:
        return layer.tiles.shape_of_one
    return problem.shape if len(problem.shape) == 3 else (1, *problem.shape)


def _differences(problem: Problem) -> int:
    """Return how many differences of one kind neighbouring pixels have."""
    channels, high, wide = _image(problem)
    return channels * (high - 1) * (wide - 1)


def _seen(layer: FirstLayer, samples: int | None) -> int:
    """Return how many directions of W₁'s rows stand out of the noise, one a sample or tile."""
    seen = max(1, above_noise(layer.spectrum[0], tuple(layer.trained.shape)))
    each = 1 if layer.tiles is None else layer.tiles.places
    return min((samples or seen) * each, seen)


def _rows(problem: Problem, samples: int | None) -> Tensor:
    """Return directions (r, t) of W₁'s rows that are hardly noise, without most of what they have.

    A direction of which c² is no noise is a photograph with noise of 1/c² − 1 times its variance.
    All pass the filter of the median of these: with one for each, what they have of other images
    than a component's would no longer cancel.
    """
    layer = _layer(problem)
    assert layer is not None
    sizes, directions = layer.spectrum
    rows = directions[: _seen(layer, samples)]
    if not _noisy(problem):
        return rows
    shares = clear(sizes, tuple(layer.trained.shape))[: len(rows)]
    kept = int((1 - shares < NOISE * _differences(problem) / len(rows)).sum())
    images = photographs(_image(problem), rows)
    if kept == 0 or images is None:
        return rows[:1]
    return images.filtered(rows[:kept], float((1 / shares[:kept] - 1).median()))


def _whitened(problem: Problem, samples: int | None) -> tuple[Tensor, Tensor]:
    """Return combinations of rows (k, t) whose contours Z (k, T) are white, ZZᵀ/T = 1; and Z."""
    rows = _rows(problem, samples).to(problem.target.device)
    values = contours(rows.reshape(-1, *_image(problem)), 2 if _noisy(problem) else 3)
    sizes, vectors = torch.linalg.eigh(values @ values.T / values.shape[1])
    seen = sizes > DARK * sizes[-1]
    white = (vectors[:, seen] / sizes[seen].sqrt()).T
    return (white @ rows).to(problem.target), (white @ values).to(problem.target)


def _noisy(problem: Problem) -> bool:
    """Whether rows have more noise than rounding: that of initial weights, if these are unknown."""
    layer = _layer(problem)
    assert layer is not None
    return bool(layer.spectrum[0][-1] > CLEAN * layer.spectrum[0][0])


def _inputs(problem: Problem, components: Tensor, last: bool = False) -> Tensor:
    """Return components (k, t) as inputs: of the size that the bias says, (k, d).

    Else they have a usual size and either sign, (2k, d). Tiles are put together, with more care if
    they are the last.
    """
    unit, layer = normalize(components), _layer(problem)
    assert layer is not None
    if layer.tiles is not None:
        return problem.domain.project(_assembled(problem, layer, unit, last))
    ones = None if layer.bias is None else _carried(layer, unit, layer.bias[None])
    if ones is not None:
        return problem.domain.project(unit / _not_zero(ones))
    drawn = _unspanned(problem).start(8, problem.dim, stream(0, 0))
    middle, spread = float(drawn.mean()), float(drawn.std())
    if abs(middle) > spread / 4:  # brightness of an unknown sign would be cut off there
        unit = normalize(unit - unit.mean(1, keepdim=True))
    unit = unit * (SIZE * spread * math.sqrt(problem.dim))
    return problem.domain.project(middle + torch.cat([unit, -unit]))


def _unspanned(problem: Problem) -> Domain:
    """Return where inputs lie, and not the span that confines them: noise has no size in it."""
    return problem.domain.within if isinstance(problem.domain, Span) else problem.domain


def _assembled(problem: Problem, layer: FirstLayer, unit: Tensor, last: bool) -> Tensor:
    """Return the images (k/P, d) of tiles (k, t), whose places and sizes their embeddings say."""
    cut, added = layer.tiles, layer.places
    assert cut is not None and added is not None
    carried = _carried(layer, unit, added)
    assert carried is not None
    places = placed(carried / _not_zero(carried.sum(1, keepdim=True)))
    tiles = unit / _not_zero(carried[torch.arange(len(unit)), places][:, None])
    domain = _unspanned(problem)
    tiles = domain.shrunk(tiles) if isinstance(domain, Box) else tiles
    change = (layer.trained.double() - layer.initial.double()).to(tiles.device)
    moved = (torch.linalg.pinv(tiles.double()).T @ change.T).to(tiles)  # δ of each tile, (k, h)
    images = torch.stack([(places == p).nonzero()[:, 0] for p in range(cut.places)], 1)
    if last:  # before, no two of them need belong together
        images = together(alike(tiles, places, moved, cut), places, stream(0, 0))
        features = cast(ModuleFeatures, problem.features)
        weights = midpoint(features.points[0], features.points[-1])

        def share(chosen: Tensor) -> Tensor:
            chosen = chosen.to(tiles.device)
            whole, own = cut.joined(tiles[chosen]), moved[chosen].flatten(1)
            return explained(features.network, weights, layer.embedding, whole, own)

        images = rearranged(images, share)
    return cut.joined(tiles[images.to(tiles.device)])


def _not_zero(values: Tensor) -> Tensor:
    least = torch.finfo(values.dtype).eps  # so that nothing is divided by nothing
    return torch.where(values.abs() < least, least, values)


def _carried(layer: FirstLayer, rows: Tensor, added: Tensor) -> Tensor | None:
    """Return what stands in combinations of rows of W₁'s change (k, t) where inputs have ones.

    Gradients add Σ_i δ_i to a bias, and to the embedding of a place that of the tiles there: with a
    change Δ = USVᵀ and such vectors b added (q, h), a row x of the span is xVS⁻¹Uᵀ · (Δ, b). None
    where one is no combination of Δ's columns, as a bias is not for inputs less their mean.
    """
    if not added.any():
        return None
    sizes, directions = layer.spectrum
    seen = above_noise(sizes, tuple(layer.trained.shape))
    change = (layer.trained.double() - layer.initial.double()).cpu()
    sizes, directions, ones = sizes[:seen], directions[:seen], added.double().cpu().T
    weights = (directions @ (change.T @ ones)) / sizes.square()[:, None]  # S⁻¹Uᵀb, along V
    missed = (ones - change @ (directions.T @ weights)).norm() / ones.norm()
    return None if missed > MISSED else (rows.double().cpu() @ directions.T @ weights).to(rows)
