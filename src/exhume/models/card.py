"""Data cards: what an auditor is told of the inputs of a model, as a small YAML file.

`shape: [3, 32, 32]` is needed; `range: [0, 1]`, `mean: [0.49, 0.48, 0.45]`, `std: 0.25`,
`norm: sqrt_d` and `classes: 10` may follow, with input = (pixel − mean) / std. Rows of a table have
`shape: [2]`, `columns: [age, weight]`, and mean, std and range for each column, or for all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from exhume.checks import number, sizes, whole_number
from exhume.equation.domain import Box, Domain, Sphere, SphereInBox
from exhume.equation.pixels import Levels, Pixels
from exhume.errors import InputError
from exhume.files import read_yaml

ROOT = "sqrt_d"
Range = tuple[float, float] | tuple[tuple[float, float], ...]
NOT_TOLD = (
    "Inputs are rows of {} numbers, and nothing says where they lie; tell the range of "
    "their values (--range, or in a card that of each column), or their norm (--norm, which is "
    "sqrt_d where rows were rescaled to √d): at a norm that is not theirs, rows are not found."
)


@dataclass(frozen=True)
class DataCard:
    """What is known of the inputs, before any of them is.

    Example:
        >>> card = DataCard((3, 4, 4), range=(0, 1), mean=0.5, std=0.25)
        >>> card.domain().name, card.knows
        ('box [-2, 2]', ('the range of the pixels (0 to 1)', 'shift and scale of the pixels'))
    """

    shape: tuple[int, ...]  # of one input, channels first where it has three sizes
    range: Range | None = None  # lowest and highest value of a pixel, or a pair for each column
    mean: Levels = 0.0  # subtracted from the pixels; a number, or one for each channel or column
    std: Levels = 1.0  # what is left is divided by it; above 0, a number, or one for each
    norm: float | str | None = None  # of an input, where all have the same: a number, or "sqrt_d"
    classes: int | None = None  # how many there are
    columns: tuple[str, ...] | None = None  # names of the entries of a row, where inputs are rows

    def __post_init__(self) -> None:
        """Refuse what cannot be, and keep lists as tuples."""
        for word in ("shape", "range", "mean", "std", "columns"):
            value = getattr(self, word)
            if isinstance(value, list | tuple):  # one number for all channels is a number
                single = word in ("mean", "std") and len(value) == 1
                value = tuple(tuple(x) if isinstance(x, list) else x for x in value)
                object.__setattr__(self, word, value[0] if single else value)
        sizes("card: shape", self.shape)
        channels = 1 if len(self.shape) == 2 else self.shape[0]
        part = "columns" if self.rows else "channels"
        for word, above in (("mean", -math.inf), ("std", 0.0)):
            levels = _levels(getattr(self, word))
            if len(levels) not in (1, channels):
                each = f", or one for each of {channels} {part}" if channels != 1 else ""
                raise InputError(f"card: {word}: expected a number{each}, got {len(levels)}.")
            for level in levels:
                number(f"card: {word}", level, above=above)
        for ends in self._pairs:
            if not isinstance(ends, tuple) or len(ends) != 2:
                each = " (or one such pair for each column of a row)"
                raise InputError(f"card: range: expected [lowest, highest]{each}, got {ends!r}.")
            number("card: range", ends[1], above=number("card: range", ends[0]))
        names = self.columns
        if names is not None and (
            not isinstance(names, tuple)
            or not all(isinstance(name, str) for name in names)
            or self.shape != (len(set(names)),)
        ):
            one = f"one name for each entry of an input of shape {list(self.shape)}"
            raise InputError(f"card: columns: expected {one}, got {names!r}.")
        if isinstance(self.norm, str) and self.norm != ROOT:
            raise InputError(f"card: norm: expected a number or {ROOT}, got {self.norm!r}.")
        if self.norm not in (None, ROOT):
            number("card: norm", self.norm, above=0)
        if self.classes is not None:
            whole_number("card: classes", self.classes)

    @classmethod
    def of(cls, entries: Any, source: str = "card", shape: tuple[int, ...] | None = None) -> Self:
        """Return the card of a file's entries; the shape may be told apart from them."""
        known = [field.name for field in fields(cls)]
        if not isinstance(entries, Mapping):
            raise InputError(f"{source}: expected entries such as 'shape: [3, 32, 32]'.")
        if unknown := [str(key) for key in entries if key not in known]:
            raise InputError(f"{source}: unknown entry {unknown[0]!r}; use {', '.join(known)}.")
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
            differ = f"has shape {list(card.shape)}, but {list(shape)} was given"
            raise InputError(f"{source}: {differ}; leave one out.")
        return card

    @property
    def rows(self) -> bool:
        """Return whether inputs are rows of a table, or other vectors, and no images."""
        return len(self.shape) == 1

    @property
    def untold(self) -> bool:
        """Return whether inputs are no images, and nothing says where they lie."""
        return self.rows and not self.told

    @property
    def told(self) -> bool:
        """Return whether it is known where inputs lie."""
        return self.range is not None or self.norm is not None

    @property
    def table(self) -> tuple[tuple[str, ...], Pixels] | None:
        """Return the names of the columns, and how inputs become their values; None for others."""
        if not self.rows or not (self.columns or self._normalised):
            return None
        names = self.columns or tuple(str(1 + i) for i in range(self.dim))
        return names, Pixels(self.mean, self.std)

    @property
    def _pairs(self) -> tuple[Any, ...]:
        """Return lowest and highest value, once, or for each column of a row."""
        ends = self.range
        if ends is None:
            return ()
        each = self.rows and isinstance(ends, tuple) and len(ends) == self.dim
        return ends if each and all(isinstance(x, tuple) for x in ends) else (ends,)

    @property
    def dim(self) -> int:
        """Return d, the number of entries of one input."""
        return math.prod(self.shape)

    @property
    def _normalised(self) -> bool:
        return self.range is not None or (self.mean, self.std) != (0.0, 1.0)

    @property
    def display(self) -> Pixels | None:
        """Return how inputs become pixels from 0 to 1; None where not known, and for vectors."""
        if len(self.shape) < 2 or not self._normalised:
            return None
        low, high = self._pairs[0] if self._pairs else (0.0, 1.0)
        shift = tuple((mean - low) / (high - low) for mean in _levels(self.mean))
        scale = tuple(std / (high - low) for std in _levels(self.std))
        return Pixels(*(x if len(x) > 1 else x[0] for x in (shift, scale)))

    def domain(self) -> Domain:
        """Return where inputs may lie: a sphere, a box, or both; the sphere of √d unless told."""
        sphere = Sphere(self.norm if isinstance(self.norm, int | float) else None)
        if self.range is None:
            return sphere
        box = Box(*(self._input(ends) for ends in zip(*self._pairs, strict=True)))
        if self.norm is None:
            return box
        low, high = box.bounds.value.reshape(2, -1).expand(2, self.dim)
        nearest = torch.zeros_like(low).clamp(low, high).norm().item()
        farthest = torch.maximum(low.abs(), high.abs()).norm().item()
        if not nearest <= sphere.length(self.dim) <= farthest:
            raise InputError(
                f"card: no input of norm {sphere.length(self.dim):g} is in the range "
                f"{self._range}, where norms go from {nearest:g} to {farthest:g}; mend either."
            )
        return SphereInBox(sphere, box)

    def _input(self, pixels: tuple[float, ...]) -> float | Tensor:
        """Return what a pixel value, or that of each column, becomes: a number, or (d,)."""
        same = len(pixels) == len(_levels(self.mean)) == len(_levels(self.std)) == 1
        wide = torch.tensor([list(map(float, pixels))], dtype=torch.float64)
        wide = wide.expand(1, 1 if same else self.dim)
        values = Pixels(self.mean, self.std).to_inputs(wide)[0]
        return values.item() if same else values

    @property
    def _range(self) -> str:
        lowest, highest = min(low for low, _ in self._pairs), max(high for _, high in self._pairs)
        return f"{lowest:g} to {highest:g}"

    @property
    def knows(self) -> tuple[str, ...]:
        """Return what was told, for the threat model."""
        norm = f"{self.norm:g}" if isinstance(self.norm, int | float) else "√d"
        what = "values" if self.rows else "pixels"
        each = " of each column" if len(self._pairs) > 1 else f" of the {what}"
        told = {
            f"the range{each} ({self._range if self._pairs else ''})": self.range is not None,
            f"shift and scale of the {what}": self._normalised,
            "the names of the columns": self.columns is not None,
            f"the norm of the inputs ({norm})": self.norm is not None,
            "the number of classes": self.classes is not None,
        }
        return tuple(phrase for phrase, known in told.items() if known)

    @property
    def assumes(self) -> tuple[str, ...]:
        """Return what was not told, and is assumed in its place."""
        assumed = "inputs have norm √d: neither their norm nor their range was told"
        return () if self.told else (assumed,)


def read_card(path: Path, shape: tuple[int, ...] | None = None) -> DataCard:
    """Read a data card from a YAML file; `shape` where that is told apart from the card."""
    return DataCard.of(read_yaml(path), str(path), shape)


def _levels(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
