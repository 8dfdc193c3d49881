"""The only part of exhume that sees the truth: matching, metrics, controls, floors.

No attack imports it. An audit is finished before this package is asked how good it was.

    score = exhume.evaluate.score(result.samples, truth)
    score.recovered, score.exact, score.error
    exhume.evaluate.chance(truth, candidates=len(result.samples))
"""

from exhume.evaluate.controls import Chance, chance
from exhume.evaluate.feature_space import floors, residual_at_truth, span_residual
from exhume.evaluate.matching import assign, distances
from exhume.evaluate.scoring import EXACT, RECOVERED, Score, score
from exhume.evaluate.subspace import outside, principal_angles
from exhume.evaluate.verdicts import verdict

__all__ = [
    "EXACT",
    "RECOVERED",
    "Chance",
    "Score",
    "assign",
    "chance",
    "distances",
    "floors",
    "outside",
    "principal_angles",
    "residual_at_truth",
    "score",
    "span_residual",
    "verdict",
]
