"""The only part of exhume that sees the truth: matching, metrics, controls, floors.

No attack imports it. An audit is finished before this package is asked how good it was.

    score = exhume.evaluate.score(result.samples, truth)
    exhume.evaluate.chance(truth, candidates=len(result.samples))
"""

from exhume.auditing.evidence import verdict
from exhume.evaluate.controls import Chance, Contrast, OtherData, chance, other_data, wrong_prior
from exhume.evaluate.feature_space import (
    floors,
    outside,
    principal_angles,
    residual_at_truth,
    span_residual,
)
from exhume.evaluate.metrics import assign, distances
from exhume.evaluate.published import PublishedScore, chance_level, ncc_distances, published_score
from exhume.evaluate.scoring import EXACT, RECOVERED, Score, score

__all__ = [
    "EXACT",
    "RECOVERED",
    "Chance",
    "Contrast",
    "OtherData",
    "PublishedScore",
    "Score",
    "assign",
    "chance",
    "chance_level",
    "distances",
    "floors",
    "ncc_distances",
    "other_data",
    "outside",
    "principal_angles",
    "published_score",
    "residual_at_truth",
    "score",
    "span_residual",
    "verdict",
    "wrong_prior",
]
