"""Which images of a set to take, and what their targets are."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from exhume.data.formats import Rows, Source
from exhume.errors import InputError

Classes = Literal["all", "parity", "vehicles", "random"] | Sequence[int]
"""Labels, or a word for a choice of labels; `exhume.data.load` says what each means."""

VEHICLES = (0, 1, 8, 9)
"""Labels of CIFAR-10: aeroplane, automobile, ship, truck. The others are animals."""

SAME = 1e-3
"""Images closer than this are equal: one pixel that differs by one of 255 levels is 0.004."""

PART = 1000
"""Images of a source that are looked at together: their distances fit into memory."""

DEFAULT_CLASSES: dict[str, Classes] = {
    "digits": "all",
    "faces": "random",
    "photos": "random",
    "cifar10": (6, 9),
    "mnist": "parity",
    "fashion_mnist": "all",
    "tiny_imagenet": "random",
}


def groups(source: Source, classes: Classes, name: str) -> list[Rows]:
    """Return the rows of each class, in the order of the set; one group if labels are unused."""
    if classes == "random":
        return [np.arange(source.size)]
    if source.labels is None:
        raise InputError(f'{name} has no classes: leave classes out, or say "random"')
    if classes == "parity":
        return [np.flatnonzero(source.labels % 2 == remainder) for remainder in (0, 1)]
    if classes == "vehicles":
        if name != "cifar10":
            raise InputError(f'classes="vehicles" is a choice for cifar10, not for {name}')
        return [np.flatnonzero(np.isin(source.labels, VEHICLES) == side) for side in (False, True)]
    if isinstance(classes, str) and classes != "all":
        raise InputError(
            f'classes={classes!r}: expected labels, "all", "parity", "vehicles" or "random"'
        )
    labels = np.unique(source.labels).tolist() if classes == "all" else list(classes)
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise InputError(f"classes={labels} of {name}: expected two or more different labels")
    members = [np.flatnonzero(source.labels == label) for label in labels]
    for label, rows in zip(labels, members, strict=True):
        if rows.size == 0:
            raise InputError(f"{name} has no images with label {label}")
    return members


def in_turns(members: list[Rows], samples: int, name: str) -> Rows:
    """Return one row of each group in turn, from the first on.

    Example:
        >>> in_turns([np.array([5, 6]), np.array([7, 8])], 3, "example").tolist()
        [5, 7, 6]
    """
    count = len(members)
    most = min(count * len(rows) + turn for turn, rows in enumerate(members))
    if samples > most:
        parts = "" if count == 1 else f" in equal parts from {count} classes"
        raise InputError(f"{samples} samples asked for, but {name} has only {most}{parts}")
    return np.array([members[i % count][i // count] for i in range(samples)])


def targets(samples: int, groups: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return targets of samples taken in turn from groups: ±1, (n, 1), or one-hot, (n, groups).

    One group means that the labels are unused: then the ±1 are shuffled.
    """
    turns = np.arange(samples) % max(groups, 2)
    if groups == 1:
        turns = generator.permutation(turns)
    one_hot = np.eye(groups, dtype=np.float64)
    return one_hot[turns] if groups > 2 else np.where(turns, 1.0, -1.0)[:, None]


def look_up(source: Source, pixels: NDArray[np.float64], name: str) -> tuple[Rows, Rows]:
    """Find images in their source.

    Args:
        source: to look in, part by part.
        pixels: (n, d) values in [0, 1] of images that were drawn from it.
        name: of the source, for errors.

    Returns:
        A row number for each image, (n,), and all rows that hold one of them, doubles included.
    """
    found, taken = np.full(len(pixels), -1), []
    for start in range(0, source.size, PART):
        rows = np.arange(start, min(start + PART, source.size))
        part = source.pixels(rows).reshape(len(rows), -1)
        if part.shape[1] != pixels.shape[1]:
            raise InputError(
                f"{name} has images of {part.shape[1]} numbers, but these have {pixels.shape[1]}"
            )
        apart = torch.cdist(torch.from_numpy(pixels), torch.from_numpy(part))
        image, row = np.nonzero(apart.numpy() < SAME)
        found[image] = rows[row]
        taken.append(rows[row])
    if (found < 0).any():
        raise InputError(
            f"{(found < 0).sum()} of {len(found)} images are not in {name} as it is found here: "
            "was the set drawn from other files?"
        )
    return found, np.unique(np.concatenate(taken))
