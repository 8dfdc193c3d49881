"""Where the rows of V come from: a tensor, a seed, or a file. All are read in blocks of rows."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from exhume import ranks
from exhume.checks import one_of, whole_number
from exhume.device import kernels
from exhume.errors import InputError, quoted
from exhume.features.normals import KERNELS, LIMIT, normals
from exhume.files import regular

CPU = torch.device("cpu")
TILE = 256  # rows of V that share one stream of `tiles`; another would change every such V
FINE = 2048.0  # by which what float16 rounds off, 2⁻¹¹ of a number, is as large as the number
GENERATORS = ("philox", "tiles")  # of V from a seed: that of new models, and the first there was


class Weights(Protocol):
    """Weights are a matrix V (p, d) that is read in blocks of rows."""

    device: torch.device  # where blocks are handed out
    dtype: torch.dtype  # in which precision
    half: Tensor | None = None  # a copy H in float16 for products on a GPU
    low: Tensor | None = None  # what H rounds off, V = H + L/`FINE`, in float16
    in_memory: bool = False  # whether reading rows costs nothing

    @property
    def coarse(self) -> bool:
        """Tell whether rows come in halves, too, for products on a GPU."""
        return self.half is not None

    @property
    def shape(self) -> tuple[int, int]:
        """Return (p, d)."""
        raise NotImplementedError

    def rows(self, start: int, stop: int) -> Tensor:
        """Return V[start:stop], (stop − start, d)."""
        raise NotImplementedError

    def halves(self, start: int, stop: int, fine: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return those rows of H, and of L if it is at hand and asked for."""
        assert self.half is not None
        low = self.low if fine else None
        return self.half[start:stop], None if low is None else low[start:stop]

    def drawn(self, count: int) -> bool:
        """Tell whether products with so many rows draw V on the way, and write it nowhere."""
        return False

    def across(self, start: int, stop: int, left: Tensor, rest: Tensor | None = None) -> Tensor:
        """Return LVᵀ for those rows and float16 L (n, d), or (L + R)Vᵀ in float32 with R, too.

        Without R, V is rounded to float16 first, and the product is.
        """
        if rest is None:
            return left @ self.halves(start, stop, fine=False)[0].T
        return (left.float() + rest.float()) @ self.rows(start, stop).T

    def along(self, start: int, stop: int, left: Tensor) -> Tensor:
        """Return LV in float32 for those rows, rounded to float16, and such L (n, stop − start)."""
        return mixed(left, self.halves(start, stop, fine=False)[0])

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same numbers, handed out elsewhere, without the copy in float16."""
        return replace(self, device=device, dtype=dtype)  # type: ignore[type-var]  # a dataclass


@dataclass(frozen=True, eq=False)
class Stored(Weights):
    """V as a tensor, on a GPU with a copy in two parts of float16 if there is room for them."""

    tensor: Tensor
    half: Tensor | None = None
    low: Tensor | None = None
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    in_memory = True

    def __post_init__(self) -> None:
        """Take device and precision from the tensor."""
        object.__setattr__(self, "device", self.tensor.device)
        object.__setattr__(self, "dtype", self.tensor.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Return (p, d)."""
        return (self.tensor.shape[0], self.tensor.shape[1])

    def rows(self, start: int, stop: int) -> Tensor:
        """Return V[start:stop], a view."""
        return self.tensor[start:stop]

    @cached_property
    def lengths(self) -> Tensor:
        """Return |v_k|²/d of every row, (p,)."""
        return lengths(self.tensor, self.dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the tensor moved, without the copy in float16."""
        return replace(self, tensor=self.tensor.to(device, dtype), half=None, low=None)


@dataclass(frozen=True)
class Seeded(Weights):
    """V with i.i.d. N(0, 1/d) entries, regenerated from a seed whenever it is read.

    The numbers depend on neither the block size nor the device. The generator is `philox`, where
    each entry is a function of seed, row and column (`exhume.features.normals`), or that of older
    models: `tiles`, which draws `TILE` rows from a stream of numpy's on the CPU.
    """

    width: int
    dim: int
    seed: int
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    generator: str = GENERATORS[0]

    def __post_init__(self) -> None:
        """Refuse what has no stream of numbers."""
        one_of("generator", self.generator, GENERATORS)
        if whole_number("seed", self.seed, least=0) >= LIMIT:
            raise InputError(f"seed: expected a whole number below 2⁶⁴, got {self.seed}.")

    @property
    def shape(self) -> tuple[int, int]:
        """Return (p, d)."""
        return (self.width, self.dim)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return V[start:stop], generated now."""
        scale = 1 / math.sqrt(self.dim)
        if self.generator == "tiles":
            return _tiles(self.seed, start, stop, self.dim, scale).to(self.device, self.dtype)
        part = slice(start, stop)
        return normals(self.seed, part, self.dim, self.device, self.dtype, scale)

    @property
    def coarse(self) -> bool:
        """Tell whether a kernel draws rows in halves, as a GPU can."""
        drawn = self.generator == "philox" and self.dtype == torch.float32
        return drawn and kernels(KERNELS, self.device) is not None

    def halves(self, start: int, stop: int, fine: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return rows of H, and of L if they are asked for, generated now."""
        given = self.seed, slice(start, stop), self.dim, self.device, torch.float16, self.dim**-0.5
        high, low = self._kernels.normals(*given, fine)
        return high, low if fine else None

    def drawn(self, count: int) -> bool:
        """Tell whether a kernel does that, as it can for so many rows."""
        most: int = self._kernels.MOST if self.coarse else 0
        return count <= most and most * self.dim < 2**31

    def across(self, start: int, stop: int, left: Tensor, rest: Tensor | None = None) -> Tensor:
        """Return the product; with R to 5e-6 of its norm, as tensor cores round towards zero."""
        if not self.drawn(len(left)):
            return super().across(start, stop, left, rest)
        part, dtype = slice(start, stop), left.dtype if rest is None else torch.float32
        given = self.seed, part, left, rest, dtype, self.dim**-0.5
        product: Tensor = self._kernels.across(*given)
        return product

    def along(self, start: int, stop: int, left: Tensor) -> Tensor:
        """Return the product."""
        if not self.drawn(len(left)):
            return super().along(start, stop, left)
        given = self.seed, slice(start, stop), left, self.dim, self.dim**-0.5
        product: Tensor = self._kernels.along(*given)
        return product

    @property
    def _kernels(self) -> ModuleType:
        own = kernels(KERNELS, self.device)
        assert own is not None
        return own


def _tiles(seed: int, start: int, stop: int, dim: int, scale: float) -> Tensor:
    """Draw rows of V as models of old have them, (stop − start, d)."""
    first, last = start // TILE, -(-stop // TILE)
    block = np.empty(((last - first) * TILE, dim), dtype=np.float32)

    def fill(tile: int) -> None:
        stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(tile,)))
        rows = block[(tile - first) * TILE :][:TILE]
        np.random.Generator(stream).standard_normal(dtype=np.float32, out=rows)
        rows *= np.float32(scale)  # here it is rounded the same for all

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(fill, range(first, last)))
    return torch.from_numpy(block[start - first * TILE : stop - first * TILE])


@dataclass(frozen=True)
class Mapped(Weights):
    """V read block by block from a memory-mapped ``.npy`` file."""

    path: Path
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Look at the header now, so that a bad file is named before any work starts."""
        array = self._array()
        if array.ndim != 2 or array.dtype not in (np.float32, np.float64, np.float16):
            found = f"{array.dtype} of shape {array.shape}"
            raise InputError(f"{self.path}: expected a matrix (p, d) of floats, found {found}.")

    def _array(self) -> np.ndarray:
        try:
            array: np.ndarray = np.lib.format.open_memmap(regular(self.path), mode="r")
        except Exception as error:  # a damaged file can break the reader anywhere
            why = f"({quoted(error)}); write it with numpy.save(path, V), V of shape (p, d)"
            raise InputError(f"{self.path}: cannot be read as .npy {why}.") from error
        return array

    @property
    def shape(self) -> tuple[int, int]:
        """Return (p, d)."""
        p, d = self._array().shape
        return (p, d)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return V[start:stop], read now."""
        return torch.from_numpy(np.array(self._array()[start:stop])).to(self.device, self.dtype)


@dataclass(frozen=True, eq=False)
class Rows(Weights):
    """Some of the rows of a V that is not in memory, and of which the others are never read."""

    whole: Weights
    range: slice
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        """Take device and precision from the whole."""
        object.__setattr__(self, "device", self.whole.device)
        object.__setattr__(self, "dtype", self.whole.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """Return how many rows there are, and d."""
        return (self.range.stop - self.range.start, self.whole.shape[1])

    def rows(self, start: int, stop: int) -> Tensor:
        """Return these of the rows."""
        return self.whole.rows(self.range.start + start, self.range.start + stop)

    @property
    def coarse(self) -> bool:
        """Tell whether the whole comes in halves."""
        return self.whole.coarse

    def halves(self, start: int, stop: int, fine: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return these of the rows in halves."""
        first = self.range.start
        return self.whole.halves(first + start, first + stop, fine)

    def drawn(self, count: int) -> bool:
        """Tell whether those of the whole are."""
        return self.whole.drawn(count)

    def across(self, start: int, stop: int, left: Tensor, rest: Tensor | None = None) -> Tensor:
        """Return the product with these of the rows."""
        first = self.range.start
        return self.whole.across(first + start, first + stop, left, rest)

    def along(self, start: int, stop: int, left: Tensor) -> Tensor:
        """Return the product with these of the rows."""
        first = self.range.start
        return self.whole.along(first + start, first + stop, left)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same numbers, handed out elsewhere."""
        return replace(self, whole=self.whole.to(device, dtype))


def share(width: int, index: int, count: int) -> slice:
    """Return the rows of one of `count` shares of about the same size.

    Example:
        >>> [share(10, index, 3) for index in range(3)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    return slice(width * index // count, width * (index + 1) // count)


def blocks(width: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of `size` rows that cover 0 … width."""
    for start in range(0, width, size):
        yield slice(start, min(start + size, width))


def materialise(weights: Weights, size: int = 65536) -> Stored:
    """Read V into memory on its device, block by block, unless it is there."""
    if isinstance(weights, Stored):
        return weights
    tensor = torch.empty(weights.shape, device=weights.device, dtype=weights.dtype)
    for part in blocks(weights.shape[0], size):
        tensor[part] = weights.rows(part.start, part.stop)
    return Stored(tensor)


def lengths(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |v_k|²/d of rows (p, d), (p,)."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return norms.square() / rows.shape[1]


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float16 H and L with values = H + L/`FINE`, to 2⁻²² of them: two products, not one.

    Example:
        >>> high, low = split(torch.tensor([1 / 3]))
        >>> abs(float(high + low.double() / FINE) - 1 / 3) < 2**-22 / 3
        True
    """
    high = values.half()
    low = torch.empty_like(high)
    for part in blocks(len(values), 65536):  # so that no other copy of V is made on the way
        low[part] = ((values[part] - high[part]) * FINE).half()
    return high, low


def mixed(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of float16 matrices in float32, which a GPU's tensor cores add up in."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def free_memory(device: torch.device) -> int:
    """Return how many bytes can be allocated on a device now."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not every system tells
        free = 8 * 2**30
    return free // ranks.beside_each_other()
