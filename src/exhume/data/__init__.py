"""Data sets to train on and to attack: synthetic, bundled, local folders, your own arrays.

A sample is a row of numbers, and a `Transform` says how its pixels became that row. Shift and scale
may be declared to an auditor. Norms and a mean image are truth, as they come from private samples:
they never leave with the `card`, and norms are never used unless handed over.
"""

from exhume.data.formats import read_images
from exhume.data.samples import Data, Transform, read, save
from exhume.data.sets import Classes, from_arrays, held_out, load, sphere, subspace

__all__ = [
    "Classes",
    "Data",
    "Transform",
    "from_arrays",
    "held_out",
    "load",
    "read",
    "read_images",
    "save",
    "sphere",
    "subspace",
]
