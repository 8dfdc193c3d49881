"""A trained model with the truth beside it, and the folder that it is kept in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from exhume.data import Data, save
from exhume.equation.problem import Premise, Problem
from exhume.files import new_folder
from exhume.models.folder import TRUTH, NetworkModel, write_model, write_network
from exhume.models.formulation import premise_named


@dataclass(frozen=True)
class Victim:
    """A `Victim` is a trained model with the truth beside it."""

    problem: Problem  # what the auditor may see
    truth: Data  # the training data, for the evaluation only
    training: dict[str, Any]  # how it was trained, for the card
    # the weights before training, by name; empty where a seed stands for them
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    trained: Mapping[str, Tensor] = field(default_factory=dict)  # the weights after it
    # the network and what is told of it; None for random features
    model: NetworkModel | None = None

    def posed(
        self,
        parameters: str = "last",
        point: str = "midpoint",
        premise: Premise | str = Premise.CHANGE,
    ) -> Problem:
        """Return the problem that other parameters, another point or another premise poses.

        Names are those of `exhume audit`; for margin and decay all weights are the target.
        """
        if self.model is None:
            return self.problem
        return self.model.problem(parameters, point, premise_named(premise))

    def save(self, folder: Path, store: bool = False) -> None:
        """Write model and truth to a new or empty folder, the truth in a file of its own.

        With `store`, V itself is written where a seed, or a file elsewhere, would do.
        """
        with new_folder(folder) as temporary:
            if self.model is not None:
                write_network(temporary, self.model, self.training)
            else:
                write_model(temporary, self.problem, self.training, store)
            save(self.truth, temporary / TRUTH)
