"""exhume: recover the training data that is buried in a model's weights."""

from importlib.metadata import PackageNotFoundError, version

from exhume import data, evaluate, victims
from exhume.auditing import Audit, audit
from exhume.data_card import DataCard
from exhume.errors import InputError
from exhume.methods import Reconstruction, reconstruct
from exhume.problem import Problem, ThreatModel
from exhume.solvers import Outcome

try:
    __version__ = version("exhume")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0.1.0+source"

__all__ = [
    "Audit",
    "DataCard",
    "InputError",
    "Outcome",
    "Problem",
    "Reconstruction",
    "ThreatModel",
    "__version__",
    "audit",
    "data",
    "evaluate",
    "reconstruct",
    "victims",
]
