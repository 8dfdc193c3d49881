"""Experiments: cells, tables of what they measured, claims that the tables are held against.

Cells see the truth, as the evaluation does; the attack inside each cell does not. `law`, `claims`
and `benchmarks` are what `exhume law`, `exhume reproduce` and `exhume bench` show.
"""

from exhume.experiments.cells.attack import UNDETERMINED, Attack
from exhume.experiments.cells.fitting import Failure, LabelFit

__all__ = ["UNDETERMINED", "Attack", "Failure", "LabelFit"]
