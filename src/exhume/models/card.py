"""Data cards: what an auditor is told of the inputs of a model, as a small YAML file.

    shape: [3, 32, 32]          # of one input, channels first
    range: [0, 1]               # of the pixels
    mean: [0.49, 0.48, 0.45]    # input = (pixel − mean) / std, a number or one for each channel
    std: [0.25, 0.24, 0.26]
    norm: sqrt_d                # of one input, where all have the same: a number, or √d
    classes: 10

Only the shape is needed.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from exhume.equation.domain import Box, Domain, Sphere, SphereInBox
from exhume.equation.pixels import Pixels
from exhume.errors import InputError

ROOT = "sqrt_d"


@dataclass(frozen=True)
class DataCard:
    """What is known of the inputs, before any of them is.

    Attributes:
        shape: of one input, channels first where it has three sizes.
        range: lowest and highest value of a pixel.
        mean: subtracted from the pixels; a number, or one for each channel.
        std: what is left is divided by it; likewise, above 0.
        norm: of an input, where all have the same: a number, or "sqrt_d".
        classes: how many there are.

    Example:
        >>> card = DataCard((3, 4, 4), range=(0, 1), mean=0.5, std=0.25)
        >>> card.domain().name, card.knows
        ('box [-2, 2]', ('the range of the pixels (0 to 1)', 'shift and scale of the pixels'))
    """

    shape: tuple[int, ...]
    range: tuple[float, float] | None = None
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    norm: float | str | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be; lists become tuples."""
        shape = tuple(self.shape) if isinstance(self.shape, list | tuple) else ()
        if not shape or not all(_whole(size) and size > 0 for size in shape):
            raise InputError(
                "card: shape: expected the sizes of one input, such as [3, 32, 32], got "
                f"{reprlib.repr(self.shape)}."
            )
        object.__setattr__(self, "shape", shape)
        if self.range is not None:
            ends = tuple(self.range) if isinstance(self.range, list | tuple) else ()
            if len(ends) != 2 or not all(map(_number, ends)) or not ends[0] < ends[1]:
                raise InputError(
                    "card: range: expected the lowest and the highest value of a pixel, such as "
                    f"[0, 1], got {reprlib.repr(self.range)}."
                )
            object.__setattr__(self, "range", ends)
        for word in ("mean", "std"):
            object.__setattr__(self, word, self._by_channel(word))
        if min(_numbers(self.std)) <= 0:
            raise InputError(f"card: std: expected numbers above 0, got {reprlib.repr(self.std)}.")
        if self.norm not in (None, ROOT) and not (_number(self.norm) and (self._radius or 0) > 0):
            raise InputError(
                f"card: norm: expected a number above 0, or {ROOT}, got {reprlib.repr(self.norm)}."
            )
        if self.classes is not None and not (_whole(self.classes) and self.classes > 0):
            raise InputError(
                f"card: classes: expected a whole number, got {reprlib.repr(self.classes)}."
            )

    def _by_channel(self, word: str) -> float | tuple[float, ...]:
        value = getattr(self, word)
        numbers = tuple(value) if isinstance(value, list | tuple) else (value,)
        channels = self.shape[0] if len(self.shape) == 3 else 1
        if len(numbers) not in (1, channels) or not all(map(_number, numbers)):
            each = f", or one for each of {channels} channels" if channels > 1 else ""
            raise InputError(f"card: {word}: expected a number{each}, got {reprlib.repr(value)}.")
        return numbers if len(numbers) > 1 else numbers[0]

    @classmethod
    def of(
        cls,
        entries: Any,
        source: str = "card",
        shape: tuple[int, ...] | None = None,
    ) -> "DataCard":
        """A card from what a file holds.

        Args:
            entries: by name.
            source: where they come from, for errors.
            shape: of one input, where that is told apart from the card.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(entries, Mapping):
            raise InputError(f"{source}: expected entries such as 'shape: [3, 32, 32]'.")
        if unknown := [str(key) for key in entries if key not in known]:
            raise InputError(
                f"{source}: unknown entry {unknown[0]!r}; a data card may have {', '.join(known)}."
            )
        given = {key: value for key, value in entries.items() if value is not None}
        if shape is not None:
            given.setdefault("shape", shape)
        if "shape" not in given:
            raise InputError(f"{source}: holds no shape of one input, such as [3, 32, 32].")
        try:
            card = cls(**given)
        except InputError as error:
            raise InputError(f"{source}: {str(error).removeprefix('card: ')}") from error
        if shape is not None and card.shape != shape:
            raise InputError(
                f"{source}: has shape {list(card.shape)}, but the input shape was given as "
                f"{list(shape)}; leave one out."
            )
        return card

    @property
    def dim(self) -> int:
        """d, the number of entries of one input."""
        return math.prod(self.shape)

    @property
    def _normalised(self) -> bool:
        return self.range is not None or (self.mean, self.std) != (0.0, 1.0)

    @property
    def display(self) -> Pixels | None:
        """How inputs become pixels from 0 to 1; None where that is not known, or for vectors.

        Pixels are taken to range from 0 to 1 where there are mean and std, but no range.
        """
        if len(self.shape) < 2 or not self._normalised:
            return None
        low, high = self.range or (0.0, 1.0)
        return Pixels(
            _each(self.mean, lambda value: (value - low) / (high - low)),
            _each(self.std, lambda value: value / (high - low)),
        )

    @property
    def _radius(self) -> float | None:
        """None stands for √d."""
        return None if self.norm is None or isinstance(self.norm, str) else self.norm

    def domain(self) -> Domain:
        """Where inputs may lie: on a sphere, in a box, or both; on the sphere of √d unless told."""
        sphere = Sphere(self._radius)
        if self.range is None:
            return sphere
        box = Box(*(self._input(end) for end in self.range))
        if self.norm is None:
            return box
        low, high = box.bounds.value.reshape(2, -1).expand(2, self.dim)
        nearest = torch.zeros_like(low).clamp(low, high).norm().item()
        farthest = torch.maximum(low.abs(), high.abs()).norm().item()
        if not nearest <= sphere.length(self.dim) <= farthest:
            raise InputError(
                f"card: no input of norm {sphere.length(self.dim):g} has pixels in the range "
                f"{list(self.range)}: their norms go from {nearest:g} to {farthest:g}. Leave out "
                "the norm or the range, or mend mean and std."
            )
        return SphereInBox(sphere, box)

    def _input(self, pixel: float) -> float | Tensor:
        """What a pixel value becomes: a number, or one for each entry (d,)."""
        mean, std = (torch.tensor(_numbers(x), dtype=torch.float64) for x in (self.mean, self.std))
        values = (pixel - mean) / std
        if len(values) == 1:
            return values.item()
        return values.repeat_interleave(self.dim // len(values))

    @property
    def knows(self) -> tuple[str, ...]:
        """What was told, for the threat model."""
        told = []
        if self.range is not None:
            told.append(f"the range of the pixels ({self.range[0]:g} to {self.range[1]:g})")
        if self._normalised:
            told.append("shift and scale of the pixels")
        if self.norm is not None:
            norm = "√d" if self._radius is None else format(self._radius, "g")
            told.append(f"the norm of the inputs ({norm})")
        if self.classes is not None:
            told.append("the number of classes")
        return tuple(told)

    @property
    def assumes(self) -> tuple[str, ...]:
        """What was not told, and is assumed in its place."""
        if self.range is None and self.norm is None:
            return ("inputs have norm √d: neither their norm nor their range was told",)
        return ()


def read_card(path: Path, shape: tuple[int, ...] | None = None) -> DataCard:
    """A data card from a YAML file.

    Args:
        path: the file.
        shape: of one input, where that is told apart from the card.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file.") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: cannot be read as YAML ({reason}).") from error
    return DataCard.of(entries, str(path), shape)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300  # neither infinite, nor not a number, nor too long for a float


def _numbers(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,)


def _each(
    value: float | tuple[float, ...], function: Callable[[float], float]
) -> float | tuple[float, ...]:
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)
