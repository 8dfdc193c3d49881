"""Which training data a cell is about."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from exhume import data
from exhume.checks import one_of, whole_number
from exhume.data import Data
from exhume.data.sets import DEFAULT_CLASSES
from exhume.errors import InputError

# The most numbers in a set of samples or in the parameters that are attacked: 800 MB in float64,
# where a larger number is more likely a slip than a wish.
MOST_NUMBERS = 10**8


@dataclass(frozen=True)
class Samples:
    """Samples are training data by name and sizes."""

    data: str = "sphere"  # `sphere`, or a set of `exhume.data.load`
    dim: int | None = None  # d of sphere data; images have their own
    rank: int | None = None  # of sphere data: the samples lie in a random subspace of so many
    size: int | None = None  # of images: the side that they are shrunk to
    classes: str | None = None  # of images: a word of `exhume.data.load`; each set has its default
    samples: int = 12  # n
    seed: int = 0  # of everything random in the cell, the draw of the samples among it

    def check(self) -> None:
        """Refuse what could not be run, before any work."""
        one_of("data", self.data, ("sphere", *DEFAULT_CLASSES))
        whole_number("samples", self.samples)
        whole_number("seed", self.seed, 0)
        self.check_given(whole_number, "dim", "rank", "size")
        if self.data != "sphere":
            self.check_absent(f"{self.data}; it is for sphere", "dim", "rank")
            return
        self.check_absent("sphere; it is for images", "size", "classes")
        if self.dim is None:
            raise InputError("dim: sphere data needs a dimension, for example 60.")
        if self.rank is not None and self.rank > self.dim:
            raise InputError(f"rank: expected at most the dimension, {self.dim}, got {self.rank}.")
        check_size("dim · samples", self.dim * self.samples)
        check_size("dim · rank", self.dim * (self.rank or 1))

    def check_given(self, check: Callable[..., Any], *fields: str, **options: Any) -> None:
        """Check fields that are not left out."""
        for field in fields:
            if (value := getattr(self, field)) is not None:
                check(field, value, **options)

    def check_absent(self, what: str, *fields: str) -> None:
        """Refuse fields that would be ignored."""
        for field in fields:
            if (value := getattr(self, field)) is not None:
                raise InputError(f"{field}: got {value!r}, but it is not for {what}; leave it out.")

    def known(self) -> Data:
        """Return the training data."""
        if self.data == "sphere":
            return data.sphere(self.dim or 0, self.samples, self.seed, rank=self.rank)
        words: Any = self.classes
        return data.load(self.data, self.samples, self.seed, classes=words, size=self.size)


def check_size(what: str, numbers: int) -> None:
    """Refuse what no memory would hold, before any of it is made."""
    if numbers > MOST_NUMBERS:
        most = f"at most {MOST_NUMBERS:,} numbers"
        raise InputError(f"{what}: expected {most}, got {numbers:,}; take fewer.")
