"""exhume: recover the training data that is buried in a model's weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from exhume.errors import InputError
from exhume.version import VERSION as __version__

if TYPE_CHECKING:
    from exhume import data, evaluate, ranks, recipes, theory, victims
    from exhume.auditing.audit import Audit, audit
    from exhume.equation.problem import Problem, ThreatModel
    from exhume.methods import Reconstruction, reconstruct
    from exhume.models.card import DataCard
    from exhume.solvers import Outcome

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
    "ranks",
    "recipes",
    "reconstruct",
    "theory",
    "victims",
]

MODULES = ("data", "evaluate", "experiments", "ranks", "recipes", "sweep", "theory", "victims")
PLACES = {
    "Audit": "auditing.audit",
    "audit": "auditing.audit",
    "DataCard": "models.card",
    "Outcome": "solvers",
    "Problem": "equation.problem",
    "ThreatModel": "equation.problem",
    "Reconstruction": "methods",
    "reconstruct": "methods",
}
"""Where names live: they are imported when first asked for, so that `--version` needs no torch."""


def __getattr__(name: str) -> Any:
    """`exhume.audit` and the others, without an import of their own."""
    if name in MODULES:
        return import_module(f"exhume.{name}")
    if name in PLACES:
        return getattr(import_module(f"exhume.{PLACES[name]}"), name)
    raise AttributeError(f"module 'exhume' has no attribute {name!r}")
