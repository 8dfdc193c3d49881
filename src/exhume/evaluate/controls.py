"""What a score has to be compared with: chance and look-alikes."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exhume.data import Data
from exhume.errors import InputError
from exhume.evaluate.matching import nearest
from exhume.evaluate.scoring import Score, measure, score, true_inputs

STREAM = 0xC4A7CE


@dataclass(frozen=True)
class Chance:
    """What the aggregates of a score are worth where nothing was recovered.

    Attributes:
        candidates: How many random candidates were drawn.
        trials: How often.
        seed: Of the draws.
        sphere: Each aggregate of `score` for random candidates, mean over the trials: uniform on
            the sphere with the mean norm of the true samples. On the sphere of radius √d the
            errors go to √2, the published error to √(2 − 4/π) ≈ 0.85 from below as d grows.
        neighbour: The same for the nearest other training sample in place of each one (leave one
            out, one may stand in for several). Images of a kind resemble each other, so this is
            the level to beat there. None with a single sample.
    """

    candidates: int
    trials: int
    seed: int
    sphere: dict[str, float | None]
    neighbour: dict[str, float | None] | None

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


def chance(truth: Data | Tensor, candidates: int, seed: int = 0, trials: int = 5) -> Chance:
    """Chance level of every aggregate on the same data.

    Args:
        truth: the training data, or its (n, d) inputs.
        candidates: how many there were in the score to compare with.
        seed: of the random candidates.
        trials: how many draws to average over.

    Returns:
        The level for random candidates, and for the nearest other training sample.
    """
    if candidates < 1 or trials < 1:
        raise InputError(f"candidates={candidates} and trials={trials} must both be at least 1")
    x, norms = true_inputs(truth)
    # A stream of its own: the data may have been drawn from the same seed.
    generator = np.random.default_rng([seed, STREAM])
    draws = [
        score(on_sphere(candidates, x.shape[1], float(norms.mean()), generator), truth)
        for _ in range(trials)
    ]
    others = measure(x, truth, nearest, others_only=True).summary() if len(x) > 1 else None
    return Chance(candidates, trials, seed, _mean_summary(draws), others)


def on_sphere(count: int, dim: int, radius: float, generator: np.random.Generator) -> Tensor:
    """Points uniform on a sphere, (count, dim) in float64.

    Example:
        >>> points = on_sphere(2, 5, 3.0, np.random.default_rng(0))
        >>> torch.allclose(points.norm(dim=1), torch.tensor(3.0).double())
        True
    """
    points = torch.from_numpy(generator.standard_normal((count, dim)))
    return radius * torch.nn.functional.normalize(points, dim=1)


def _mean_summary(draws: list[Score]) -> dict[str, float | None]:
    """Mean of each aggregate, None where a draw has none."""
    summaries = [draw.summary() for draw in draws]
    means: dict[str, float | None] = {}
    for name in summaries[0]:
        values = [value for summary in summaries if (value := summary[name]) is not None]
        means[name] = sum(values) / len(values) if len(values) == len(summaries) else None
    return means
