"""Where a training stands, and the file that it can be continued from."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from exhume.errors import InputError
from exhume.files import read_metadata, read_tensors, write_tensors

SAVE_EVERY = 5.0
"""Seconds between two checkpoints: little is lost, and less than a twentieth spent on writing."""


@dataclass(frozen=True)
class Place:
    """A `Place` is the last good one of a training: all that is needed to go on from it.

    Attributes:
        tensors: weights, then moments; never written to.
        loss: there, without decay.
        bend: the curvature of the loss in the outputs there, see `Loss`.
        lowest: value of loss and decay so far.
        scale: what the rate is measured in: λ_max(JJᵀ)/n, or Adam's first rate.
        factor: the rate, relative to that.
        steps: so far.
        undone: of these.
        seconds: so far.
    """

    tensors: tuple[Tensor, ...]
    loss: float
    bend: float
    lowest: float
    scale: float
    factor: float
    steps: int = 0
    undone: int = 0
    seconds: float = 0.0


class Checkpoint:
    """A `Checkpoint` is the file with the place of one training."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Take the path, and what must be the same for a training to be continued, for JSON."""
        self.path, self.identity = path, dict(identity)
        self._due = time.monotonic() + SAVE_EVERY

    def write(self, place: Place) -> None:
        """Keep a place, in the stead of the one that was kept before."""
        numbers = {key: value for key, value in vars(place).items() if key != "tensors"}
        tensors = {f"{index:06d}": tensor for index, tensor in enumerate(place.tensors)}
        metadata = {"training": json.dumps(self.identity), "place": json.dumps(numbers)}
        write_tensors(self.path, tensors, metadata)

    def write_if_due(self, place: Place) -> None:
        """Keep a place now and then, more rarely where writing it takes long."""
        begun = time.monotonic()
        if begun > self._due:
            self.write(place)
            now = time.monotonic()
            self._due = now + max(SAVE_EVERY, 20 * (now - begun))

    def read(self, live: Sequence[Tensor]) -> Place | None:
        """Return the place kept, on the devices of the tensors it is for; None without a file.

        Raises:
            InputError: the file is damaged, or of another training.
        """
        if not self.path.exists():
            return None
        kept = read_tensors(self.path)
        try:
            metadata = read_metadata(self.path)
            theirs, numbers = json.loads(metadata["training"]), json.loads(metadata["place"])
            differing = [key for key in self.identity if theirs[key] != self.identity[key]]
            if not differing:
                tensors = (kept[f"{index:06d}"].to(t.device) for index, t in enumerate(live))
                return Place(tuple(tensors), **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.path}: is no checkpoint of a training ({error}); remove it or choose "
                "another."
            ) from error
        raise InputError(
            f"{self.path}: was left by a training with another {differing[0]}; give it the same "
            "again to finish it, or remove the file to begin anew."
        )

    def remove(self) -> None:
        """Delete the file, if there is one."""
        self.path.unlink(missing_ok=True)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a fingerprint of named tensors."""
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().numpy().data)
    return total.hexdigest()
