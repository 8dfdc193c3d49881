"""What weights determine: identifiability of the training samples.

`identifiability` is for two-layer networks with a polynomial σ, `local_identifiability` for any
problem at a solution, `support` for what an attack found. What is known before any attack:
`counting` (thresholds), `hermite` (kernels and signs), `width` (where exact solutions are the
samples), `privacy` (what it forbids).
"""

from exhume.theory import counting, hermite, privacy, width
from exhume.theory.identifiability import Identifiability, Recovered, identifiability, recover
from exhume.theory.local import LocalIdentifiability, local_identifiability
from exhume.theory.moments import fewest_neurons
from exhume.theory.support import Support, support
from exhume.theory.width import WidthBound, width_bound

__all__ = [
    "Identifiability",
    "LocalIdentifiability",
    "Recovered",
    "Support",
    "WidthBound",
    "counting",
    "fewest_neurons",
    "hermite",
    "identifiability",
    "local_identifiability",
    "privacy",
    "recover",
    "support",
    "width",
    "width_bound",
]
