"""What a score has to be compared with: chance, look-alikes, a prior that is wrong."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from exhume.checks import whole_number
from exhume.data import Data
from exhume.equation.domain import Box, SphereInBox
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate.metrics import nearest
from exhume.evaluate.scoring import measure, score, true_inputs

# Chance draws from a stream of its own, as the data may have been drawn from the same seed
STREAM = 0xC4A7CE


@dataclass(frozen=True)
class Chance:
    """A chance level says what the aggregates of a score are where nothing was recovered."""

    candidates: int  # How many random candidates were drawn
    trials: int  # How often
    seed: int  # The seed of the draws
    # Each aggregate of `score` for random candidates, mean over the trials: uniform on the sphere
    # with the mean norm of the true samples. On the sphere of radius √d the errors go to √2, the
    # published error to √(2 − 4/π) ≈ 0.85 from below as d grows
    sphere: dict[str, float | None]
    # The same for the nearest other training sample in place of each one (leave one out, one may
    # stand in for several). Images of a kind resemble each other, so this is the level to beat
    # there. None with a single sample
    neighbour: dict[str, float | None] | None


def chance(truth: Data | Tensor, candidates: int, seed: int = 0, trials: int = 5) -> Chance:
    """Return the chance level of every aggregate on the same data, for as many candidates."""
    whole_number("candidates", candidates)
    whole_number("trials", trials)
    x, norms = true_inputs(truth)
    generator = np.random.default_rng([seed, STREAM])
    draws = []
    for _ in range(trials):
        points = torch.from_numpy(generator.standard_normal((candidates, x.shape[1])))
        drawn = float(norms.mean()) * torch.nn.functional.normalize(points, dim=1)
        draws.append(score(drawn, truth).summary())
    means: dict[str, float | None] = {}
    for name in draws[0]:  # None where a draw has none
        values = [value for draw in draws if (value := draw[name]) is not None]
        means[name] = sum(values) / trials if len(values) == trials else None
    others = measure(x, truth, nearest, others_only=True).summary() if len(x) > 1 else None
    return Chance(candidates, trials, seed, means, others)


def wrong_prior(problem: Problem, shift: float) -> Problem:
    """Return the same problem with the box of the inputs in the wrong place.

    Weights do not depend on the box. What a search finds in the right one and no longer in a wrong
    one, at as small a residual, it owed to the box and not to the weights. The shift is added to
    the bounds of every entry; random starts inside the box move along.
    """

    def moved(box: Box) -> Box:
        return Box(*(box.bounds.value + shift))

    domain = problem.domain
    if isinstance(domain, Box):
        return replace(problem, domain=moved(domain))
    if isinstance(domain, SphereInBox):
        return replace(problem, domain=replace(domain, box=moved(domain.box)))
    raise InputError(f"wrong prior: shifts the bounds of a box; inputs lie in: {domain.name}.")
