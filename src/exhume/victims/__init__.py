"""Victims: models to attack, trained here so that the truth is known."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exhume.checkpoint import TRUTH, write_model
from exhume.data import Data, save
from exhume.files import new_folder
from exhume.problem import Problem


@dataclass(frozen=True)
class Victim:
    """A trained model.

    Attributes:
        problem: what the auditor may see.
        truth: the training data, for the evaluation only.
        training: how it was trained, for the card.
    """

    problem: Problem
    truth: Data
    training: dict[str, Any]

    def save(self, folder: Path, store: bool = False) -> None:
        """Write model and truth to a new folder, the truth in a file of its own.

        Args:
            folder: must not exist, or be empty.
            store: write V itself where a seed, or a file elsewhere, would do.
        """
        with new_folder(folder) as temporary:
            write_model(temporary, self.problem, self.training, store)
            save(self.truth, temporary / TRUTH)


from exhume.victims.random_features import random_features  # noqa: E402

__all__ = ["Victim", "random_features"]
