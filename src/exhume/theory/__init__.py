"""What weights determine: identifiability of the training samples.

found = exhume.theory.identifiability(model)          # two-layer networks, polynomial σ
found.holds, found.margin, found.samples
exhume.theory.local_identifiability(problem, candidates)  # any problem, at a solution

What theory knows before any attack is in modules of its own: `counting` (thresholds), `hermite`
(coefficients of activations, kernels, signs), `width` (from which width exact solutions are the
samples), `privacy` (what differential privacy forbids).
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
