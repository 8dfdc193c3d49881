"""Results of the sources as named experiments: `exhume reproduce NAME`.

An experiment is a claim, the cells that put it to the test, and rules that judge the results; see
`Experiment`. `EXPERIMENTS` is all of them, in the order of docs/reproduction.md.
"""

from exhume.reproduce.document import document, publish, stored
from exhume.reproduce.experiment import Experiment, Finding, Scale, Verdict
from exhume.reproduce.law import LAW_EXPERIMENTS
from exhume.reproduce.networks import NETWORK_EXPERIMENTS
from exhume.reproduce.running import missing, perform
from exhume.reproduce.splitting import SPLITTING_EXPERIMENTS
from exhume.reproduce.subspace import SUBSPACE_EXPERIMENTS

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *LAW_EXPERIMENTS,
        *NETWORK_EXPERIMENTS,
        *SUBSPACE_EXPERIMENTS,
        *SPLITTING_EXPERIMENTS,
    )
}

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Finding",
    "Scale",
    "Verdict",
    "document",
    "missing",
    "perform",
    "publish",
    "stored",
]
