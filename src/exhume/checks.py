"""Checks of what a caller hands over: each returns the value, or raises an `InputError`."""

import math
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from exhume.errors import InputError

T = TypeVar("T")

# Numbers in one input, at most: 256 MB in float32, of which an attack needs several
LARGEST = 1 << 26
# A count, at most: up to here every whole number is a float too
MOST = 1 << 53


def whole_number(name: str, value: object, least: int = 1) -> int:
    """Return a whole number of at least `least`; True and False are no numbers.

    Example:
        >>> whole_number("samples", 3)
        3
        >>> whole_number("samples", 0)
        Traceback (most recent call last):
        exhume.errors.InputError: samples: expected a whole number of at least 1, got 0.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: expected a whole number of at least {least}, got {value!r}.")
    return int(value)


def number(name: str, value: Any, above: float = -math.inf, least: float = -math.inf) -> float:
    """Return a finite number that is greater than `above` and at least `least`."""
    if not (_is(value, float) and value > above and value >= least):
        bound = f" above {above:g}" if above > -math.inf else ""
        bound = bound or (f" of at least {least:g}" if least > -math.inf else "")
        raise InputError(
            f"{name}: expected a{'' if bound else ' finite'} number{bound}, got {value!r}."
        )
    return float(value)


def one_of(name: str, value: T, known: Collection[T]) -> T:
    """Return one of the known values."""
    if value not in known:
        words = ", ".join(str(word) for word in known)
        raise InputError(f"{name}: expected one of {words}, got {value!r}.")
    return value


def sizes(name: str, values: object, most: float = LARGEST) -> tuple[int, ...]:
    """Return the shape of one input: whole numbers, and not too many entries to be held.

    Example:
        >>> sizes("shape", [10**6, 10**6])
        Traceback (most recent call last):
        exhume.errors.InputError: shape: [1000000, 1000000] is more than 67,108,864 numbers.
    """
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"{name}: expected sizes as in [3, 32, 32], got {values!r}.")
    found = tuple(whole_number(name, value) for value in values)
    if math.prod(found) > most:
        raise InputError(f"{name}: {list(found)} is more than {most:,} numbers.")
    return found


def count(name: str, value: object, least: int = 0) -> int:
    """Return how many of something there are, as a file says it."""
    if (found := whole_number(name, value, least)) > MOST:
        raise InputError(f"{name}: expected at most 2⁵³, got {value!r}.")
    return found


Form = Mapping[str, Any] | Sequence[Any] | Callable[[str, Any], object] | Any


def shaped(name: str, value: Any, form: Form) -> Any:
    """Return what a file holds, if it has the form that is expected.

    A form is a type as in an annotation; a check of this module; a list with the form of each item;
    or a mapping with the form of each entry, which may be missing where its name ends in `?`.
    Other entries may be there too. Numbers must be finite.

    Example:
        >>> shaped("card", {"sizes": [1, "x"]}, {"sizes": [int], "name?": str})
        Traceback (most recent call last):
        exhume.errors.InputError: sizes of card: expected int, got 'x'.
    """
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise InputError(f"{name} should be a JSON object, found a {kind}.")
        if missing := [key for key in form if key[-1] != "?" and key not in value]:
            keys = ", ".join(missing)
            raise InputError(f"{name} has no {keys}: was it written by another version?")
        for key, inner in form.items():
            if (word := key.removesuffix("?")) in value:
                shaped(f"{word} of {name}", value[word], inner)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise InputError(f"{name}: expected a list, got {_short(value)}.")
        for item in value:
            shaped(name, item, form[0])
    elif isinstance(form, types.FunctionType):
        form(name, value)
    elif not any(_is(value, kind) for kind in _kinds(form)):
        kinds = " or ".join(getattr(kind, "__name__", str(kind)) for kind in _kinds(form))
        raise InputError(f"{name}: expected {kinds}, got {_short(value)}.")
    return value


def _kinds(form: Any) -> tuple[Any, ...]:
    return get_args(form) if get_origin(form) in (Union, types.UnionType) else (form,)


def _is(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind that annotations know; no NaN is a number."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind in (int, float):
        right = (int,) if kind is int else (int, float)
        fits = isinstance(value, right) and not isinstance(value, bool)
        return fits and abs(value) <= sys.float_info.max
    return kind is Any or isinstance(value, get_origin(kind) or kind)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}…"
