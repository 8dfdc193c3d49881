"""The only part of exhume that sees the truth: matching, metrics, controls, floors.

No attack imports it. An audit is finished before this package is asked how good it was.

    score = exhume.evaluate.score(result.samples, truth)
    exhume.evaluate.chance(truth, candidates=len(result.samples))
    exhume.evaluate.recognised(result.samples, truth, exhume.data.held_out(truth))
"""

from exhume.auditing.hindsight import verdict
from exhume.evaluate.controls import Chance, chance, wrong_prior
from exhume.evaluate.feature_space import (
    floors,
    outside,
    principal_angles,
    residual_at_truth,
    span_residual,
)
from exhume.evaluate.metrics import assign, distances
from exhume.evaluate.recognition import Recognised, ncc_distances, recognised
from exhume.evaluate.scoring import EXACT, RECOVERED, Score, score

__all__ = [
    "EXACT",
    "RECOVERED",
    "Chance",
    "Recognised",
    "Score",
    "assign",
    "chance",
    "distances",
    "floors",
    "ncc_distances",
    "outside",
    "principal_angles",
    "recognised",
    "residual_at_truth",
    "score",
    "span_residual",
    "verdict",
    "wrong_prior",
]
