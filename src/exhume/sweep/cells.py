"""Cells, and grids of them."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

from exhume.errors import InputError

MOST = 100_000
"""The most cells of a sweep: each is a file, and a folder with more of them is slow to read."""


class Cell(Protocol):
    """A cell is a frozen dataclass of plain JSON values; what `run` gives depends on no more.

    A cell may have a method `check`, which refuses fields that make no sense with an InputError;
    it is called for all cells before the first one runs. Workers must be able to import its class.
    """

    def run(self, device: str) -> dict[str, Any]:
        """Return the results by name, plain JSON values."""
        ...


@dataclass(frozen=True)
class Grid:
    """A grid holds a cell for each combination of the values of some fields.

    Attributes:
        cell: the dataclass.
        axes: by field, one value, or a list, tuple or range of values.

    Example:
        >>> @dataclass(frozen=True)
        ... class Place:
        ...     x: int
        ...     y: str = "a"
        >>> grid = Grid(Place, {"x": range(2), "y": ["a", "b"]})
        >>> len(grid), [(place.x, place.y) for place in grid]
        (4, [(0, 'a'), (0, 'b'), (1, 'a'), (1, 'b')])
    """

    cell: Callable[..., Cell]
    axes: Mapping[str, Any]

    def __len__(self) -> int:
        """Count the cells without making them."""
        return math.prod(len(values) for values in self._values().values())

    def __iter__(self) -> Iterator[Cell]:
        """Make the cells, the last axis fastest."""
        values = self._values()
        for chosen in itertools.product(*values.values()):
            yield self.cell(**dict(zip(values, chosen, strict=True)))

    def _values(self) -> dict[str, Sequence[Any]]:
        return {
            name: values if isinstance(values, list | tuple | range) else (values,)
            for name, values in self.axes.items()
        }


def cells_of(grid: Grid | Sequence[Cell]) -> list[Cell]:
    """Return the cells of a grid, each of which has checked itself."""
    if isinstance(grid, Grid):
        _check_axes(grid)
    try:
        count = len(grid)
    except OverflowError:
        count = 2**63
    if count > MOST:
        raise InputError(
            f"grid: has {count:,} cells or more, and a sweep has {MOST:,} at most; choose fewer "
            "values."
        )
    if count == 0:
        raise InputError("grid: is empty; give every axis one value at least.")
    try:
        cells = list(grid)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"grid: a cell cannot be made ({error}).") from error
    for cell in cells:
        if not callable(getattr(cell, "run", None)):
            raise InputError(f"{cell!r}: a cell of a sweep needs a method run(device).")
        getattr(cell, "check", lambda: None)()
    return cells


def _check_axes(grid: Grid) -> None:
    """Refuse a cell that is no dataclass, fields that it lacks, and axes without values."""
    if not isinstance(grid.cell, type) or not is_dataclass(grid.cell):
        raise InputError(f"grid: cell must be a dataclass, and is {grid.cell!r}.")
    names = [field.name for field in fields(grid.cell) if field.init]
    for name, values in grid.axes.items():
        if name not in names:
            raise InputError(
                f"grid: {grid.cell.__name__} has no field {name!r}; it has {', '.join(names)}."
            )
        if isinstance(values, list | tuple | range) and not values:
            raise InputError(f"grid: the axis {name!r} is empty; give it one value at least.")
