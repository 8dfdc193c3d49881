"""What weights determine: identifiability of the training samples.

found = exhume.theory.identifiability(model)          # two-layer networks, polynomial σ
found.holds, found.margin, found.samples
exhume.theory.local_identifiability(problem, candidates)  # any problem, at a solution
"""

from exhume.theory.identifiability import (
    Identifiability,
    Recovered,
    fewest_neurons,
    identifiability,
    recover,
)
from exhume.theory.local import LocalIdentifiability, local_identifiability

__all__ = [
    "Identifiability",
    "LocalIdentifiability",
    "Recovered",
    "fewest_neurons",
    "identifiability",
    "local_identifiability",
    "recover",
]
