"""Benchmarks are experiments without a claim: `exhume bench NAME` prints what they measured.

Speed is shown as ratios taken in one run.
"""

from exhume.experiments.benchmarks.margin import kkt
from exhume.experiments.benchmarks.polynomials import identifiability
from exhume.experiments.benchmarks.random_features import (
    count,
    images,
    solvers,
    streaming,
    threshold,
)
from exhume.experiments.benchmarks.splits import splitting
from exhume.experiments.benchmarks.trained import networks

COMMANDS = {
    command.__name__: command
    for command in (
        solvers, threshold, count, streaming, images, networks, identifiability, kkt, splitting,
    )
}  # fmt: skip
