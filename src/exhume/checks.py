"""Checks of what a caller hands over: each returns the value, or raises an `InputError`."""

import math
import sys
from collections.abc import Collection
from typing import TypeVar

from exhume.errors import InputError

T = TypeVar("T")


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Return a whole number of at least `least`; True and False are no numbers.

    Example:
        >>> whole_number("samples", 3)
        3
        >>> whole_number("samples", 0)
        Traceback (most recent call last):
        exhume.errors.InputError: samples: expected a whole number of at least 1, got 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, got {value!r}.")
    return value


def number(name: str, value: object, above: float = -math.inf, least: float = -math.inf) -> float:
    """Return a finite number that is greater than `above` and at least `least`.

    Example:
        >>> number("rate", 0.0, above=0)
        Traceback (most recent call last):
        exhume.errors.InputError: rate: expected a number above 0, got 0.0.
    """
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= sys.float_info.max
        or not value > above
        or not value >= least
    ):
        bound = f" above {above:g}" if above > -math.inf else ""
        bound = bound or (f" of at least {least:g}" if least > -math.inf else "")
        raise InputError(
            f"{name}: expected a{'' if bound else ' finite'} number{bound}, got {value!r}."
        )
    return float(value)


def one_of(name: str, value: T, known: Collection[T]) -> T:
    """Return one of the known values.

    Example:
        >>> one_of("engine", "slurm", ("loky", "dask"))
        Traceback (most recent call last):
        exhume.errors.InputError: engine: expected one of loky, dask, got 'slurm'.
    """
    if value not in known:
        words = ", ".join(str(word) for word in known)
        raise InputError(f"{name}: expected one of {words}, got {value!r}.")
    return value
