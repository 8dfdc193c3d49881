"""exhume: recover the training data that is buried in a model's weights."""

from importlib import import_module
from types import ModuleType

from exhume import data, evaluate, recipes, theory, victims
from exhume.auditing.audit import Audit, audit
from exhume.equation.problem import Problem, ThreatModel
from exhume.errors import InputError
from exhume.methods import Reconstruction, reconstruct
from exhume.models.card import DataCard
from exhume.solvers import Outcome
from exhume.version import VERSION as __version__

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
    "recipes",
    "reconstruct",
    "theory",
    "victims",
]

LATE = ("experiments", "sweep")
"""Modules that are imported when they are first asked for: what they rest on is not for attacks."""


def __getattr__(name: str) -> ModuleType:
    """`exhume.sweep` without an import of its own."""
    if name in LATE:
        return import_module(f"exhume.{name}")
    raise AttributeError(f"module 'exhume' has no attribute {name!r}")
