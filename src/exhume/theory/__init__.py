"""What weights determine: identifiability of the training samples.

`identifiability` is for two-layer networks with a polynomial σ, `local_identifiability` for any
problem at a solution. What is known before any attack: `counting` (thresholds), `hermite` (kernels
and signs), `width` (where exact solutions are the samples), `privacy` (what it forbids).
"""

from exhume.theory import counting, hermite, privacy, width
from exhume.theory.identifiability import Identifiability, Recovered, identifiability, recover
from exhume.theory.local import LocalIdentifiability, local_identifiability
from exhume.theory.moments import fewest_neurons
from exhume.theory.width import WidthBound, width_bound

__all__ = [
    "Identifiability",
    "LocalIdentifiability",
    "Recovered",
    "WidthBound",
    "counting",
    "fewest_neurons",
    "hermite",
    "identifiability",
    "local_identifiability",
    "privacy",
    "recover",
    "width",
    "width_bound",
]
