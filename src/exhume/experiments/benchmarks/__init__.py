"""Benchmarks are experiments without a claim: `exhume bench NAME` prints what they measured.

Speed is shown as ratios taken in one run.
"""

from exhume.experiments.benchmarks import (
    calibration,
    controls,
    finetuned,
    margin,
    polynomials,
    random_features,
    reach,
    speed,
    trained,
)

_MEASURED = (
    *(random_features.solvers, random_features.threshold, random_features.count),
    *(speed.speed, random_features.streaming, random_features.images, trained.networks),
    *(polynomials.identifiability, margin.kkt),
    *(finetuned.finetuned, reach.reach, finetuned.misinformed, calibration.calibration),
    controls.controls,
)
COMMANDS = {command.__name__: command for command in _MEASURED}
