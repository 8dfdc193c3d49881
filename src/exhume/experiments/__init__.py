"""Experiments: grids of cells, each one victim and what is measured on it.

They see the truth, as the evaluation does; the attack inside each cell does not.
"""

from exhume.experiments.attack import UNDETERMINED, Attack
from exhume.experiments.fitting import Fit
from exhume.experiments.law import Law, summarise

__all__ = ["UNDETERMINED", "Attack", "Fit", "Law", "summarise"]
