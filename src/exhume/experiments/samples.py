"""Which training data a cell is about, and the checks that all cells share."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from exhume import data
from exhume.data import Data
from exhume.data.selection import DEFAULT_CLASSES
from exhume.errors import InputError

MOST_NUMBERS = 10**8
"""The most numbers of a set of samples, d·n, or of the parameters that are attacked, p·m."""


@dataclass(frozen=True)
class Samples:
    """Training data by name and sizes.

    Attributes:
        data: `sphere`, or a set of `exhume.data.load`.
        dim: d of sphere data; images have their own.
        rank: of sphere data: the samples lie in a random subspace of this dimension.
        size: of images: the side that they are shrunk to.
        classes: of images: a word of `exhume.data.load`; each set has its default.
        samples: n.
        seed: of everything random in the cell, the draw of the samples among it.
    """

    data: str = "sphere"
    dim: int | None = None
    rank: int | None = None
    size: int | None = None
    classes: str | None = None
    samples: int = 12
    seed: int = 0

    def check(self) -> None:
        """Refuse what could not be run, before any work.

        Raises:
            InputError: with the field, what it is, and what is expected.
        """
        check_word("data", self.data, ("sphere", *DEFAULT_CLASSES))
        check_whole("samples", self.samples, 1)
        check_whole("seed", self.seed, 0)
        for field in ("dim", "rank", "size"):
            if getattr(self, field) is not None:
                check_whole(field, getattr(self, field), 1)
        if self.data != "sphere":
            for field in ("dim", "rank"):
                check_absent(field, getattr(self, field), f"{self.data}; it is for sphere")
            return
        for field in ("size", "classes"):
            check_absent(field, getattr(self, field), "sphere; it is for images")
        if self.dim is None:
            raise InputError("dim: sphere data needs a dimension, for example 60.")
        if self.rank is not None and self.rank > self.dim:
            raise InputError(f"rank: expected at most the dimension, {self.dim}, got {self.rank}.")
        check_size("dim · samples", self.dim * self.samples)
        check_size("dim · rank", self.dim * (self.rank or 1))

    def known(self) -> Data:
        """The training data."""
        if self.data != "sphere":
            words = cast(Any, self.classes)
            return data.load(self.data, self.samples, self.seed, classes=words, size=self.size)
        if self.dim is None:
            raise InputError("dim: sphere data needs a dimension, for example 60.")
        return data.sphere(self.dim, self.samples, self.seed, rank=self.rank)


def check_word(field: str, value: object, known: Collection[str]) -> None:
    """Refuse a word that means nothing."""
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{field}: expected one of {', '.join(known)}, got {value!r}.")


def check_number(field: str, value: object) -> None:
    """Refuse what is no finite number above 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value > 0)
    ):
        raise InputError(f"{field}: expected a finite number above 0, got {value!r}.")


def check_whole(field: str, value: object, least: int) -> None:
    """Refuse what is no whole number of at least so many."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{field}: expected a whole number of at least {least}, got {value!r}.")


def check_size(what: str, numbers: int) -> None:
    """Refuse what no memory would hold, before any of it is made."""
    if numbers > MOST_NUMBERS:
        raise InputError(
            f"{what}: expected at most {MOST_NUMBERS:,} numbers, got {numbers:,}; take fewer."
        )


def check_absent(field: str, value: object, what: str) -> None:
    """Refuse a field that would be ignored."""
    if value is not None:
        raise InputError(f"{field}: got {value!r}, but it is not for {what}; leave it out.")
