"""Where the rows of V come from: a tensor, a seed, or a file. All of them are read in blocks."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from exhume.errors import InputError

CPU = torch.device("cpu")
TILE = 256
"""Rows of V that share one stream of random numbers; part of what a seed means."""


class Weights(Protocol):
    """V (p, d), readable in blocks of rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """(p, d)."""
        ...

    @property
    def device(self) -> torch.device:
        """Where blocks are handed out."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """In which precision blocks are handed out."""
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """V[start:stop], (stop − start, d)."""
        ...

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """The same numbers, handed out elsewhere."""
        ...


@dataclass(frozen=True, eq=False)
class Stored:
    """V as a tensor, on a GPU with a half-precision copy for products if there is room for one.

    Attributes:
        tensor: V, (p, d).
        half: the same in float16, or None.
    """

    tensor: Tensor
    half: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(p, d)."""
        return (self.tensor.shape[0], self.tensor.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self.tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's own."""
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        """V[start:stop], a view."""
        return self.tensor[start:stop]

    def to(self, device: torch.device, dtype: torch.dtype) -> "Stored":
        """The tensor moved."""
        return Stored(self.tensor.to(device, dtype))


@dataclass(frozen=True)
class Seeded:
    """V with i.i.d. N(0, 1/d) entries, regenerated from a seed whenever it is read.

    Rows are drawn in tiles of `TILE`, each from its own counter-based (Philox) stream on the
    CPU, so the numbers depend on neither the block size nor the device.

    Example:
        >>> v = Seeded(width=1000, dim=5, seed=1)
        >>> torch.equal(v.rows(0, 700)[300:], v.rows(300, 700))
        True
    """

    width: int
    dim: int
    seed: int
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Refuse what has no stream of numbers."""
        if self.seed < 0:
            raise InputError(f"seed: expected a whole number of at least 0, got {self.seed}.")

    @property
    def shape(self) -> tuple[int, int]:
        """(p, d)."""
        return (self.width, self.dim)

    def rows(self, start: int, stop: int) -> Tensor:
        """V[start:stop], generated now."""
        first, last = start // TILE, -(-stop // TILE)
        block = np.empty(((last - first) * TILE, self.dim), dtype=np.float32)
        with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
            list(pool.map(lambda t: self._fill(block, t, first), range(first, last)))
        block = block[start - first * TILE : stop - first * TILE]
        return torch.from_numpy(block).to(self.device, self.dtype)

    def _fill(self, block: np.ndarray, tile: int, first: int) -> None:
        stream = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(tile,)))
        rows = block[(tile - first) * TILE :][:TILE]
        np.random.Generator(stream).standard_normal(dtype=np.float32, out=rows)
        rows *= np.float32(1 / math.sqrt(self.dim))  # here, where it is rounded the same for all

    def to(self, device: torch.device, dtype: torch.dtype) -> "Seeded":
        """The same numbers, handed out elsewhere."""
        return replace(self, device=device, dtype=dtype)


@dataclass(frozen=True)
class Mapped:
    """V read block by block from a memory-mapped ``.npy`` file."""

    path: Path
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Look at the header now, so that a bad file is named before any work starts."""
        array = self._array()
        if array.ndim != 2 or array.dtype not in (np.float32, np.float64, np.float16):
            raise InputError(
                f"{self.path}: expected a matrix (p, d) of floats, found {array.dtype} of shape "
                f"{array.shape}."
            )

    def _array(self) -> np.ndarray:
        try:
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
            if not isinstance(array, np.ndarray):
                raise ValueError("it holds several arrays")
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"{self.path}: cannot be read as a .npy file ({error}); write it with "
                "numpy.save(path, V), V of shape (p, d)."
            ) from error
        return array

    @property
    def shape(self) -> tuple[int, int]:
        """(p, d)."""
        p, d = self._array().shape
        return (p, d)

    def rows(self, start: int, stop: int) -> Tensor:
        """V[start:stop], read now."""
        block = torch.from_numpy(np.array(self._array()[start:stop]))
        return block.to(self.device, self.dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Mapped":
        """The same numbers, handed out elsewhere."""
        return replace(self, device=device, dtype=dtype)


def blocks(width: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows that cover 0 … width.

    Example:
        >>> list(blocks(5, 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, width, size):
        yield slice(start, min(start + size, width))


def materialise(weights: Weights, size: int = 65536) -> Stored:
    """V read once, block by block, into memory on its device."""
    tensor = torch.empty(weights.shape, device=weights.device, dtype=weights.dtype)
    for part in blocks(weights.shape[0], size):
        tensor[part] = weights.rows(part.start, part.stop)
    return Stored(tensor)


def with_half(weights: Stored) -> Stored:
    """The same with a half-precision copy, on a GPU with room for it."""
    tensor = weights.tensor
    if weights.half is not None or not tensor.is_cuda or tensor.dtype != torch.float32:
        return weights
    if tensor.nbytes / 2 > free_memory(tensor.device) / 2:
        return weights
    return Stored(tensor, tensor.half())


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        with open("/proc/meminfo") as lines:
            return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not every system tells
        return 8 * 2**30
