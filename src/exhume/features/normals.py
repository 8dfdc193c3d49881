"""Standard normal numbers that are a function of where they stand: any tile of V by itself.

The normal numbers of seed σ at row j and column k come from the 64-bit key σ and the counter
(k, h, 0, 0) of Philox4x32-10 (Salmon et al., 2011), h = 16 (j div 128) + j mod 16: one call, four
words of 32 bits, serves the eight rows j mod 16 + 16 s of 128. Word ⌊s/2⌋ is one point of a plane
by Box and Muller: radius √(−2 ln((w + ½)/2³²)), angle 2π wφ/2³² with wφ modulo 2³², cosine for
even s and sine for odd ones. φ is 2³² over the golden ratio, so that the 2³² pairs of radius and
angle are a lattice that fills the unit square as evenly as any, and tails reach 6.7.

Logarithm, cosine and sine are polynomials, to 10⁻⁶, of sums, products, one quotient and one root,
each rounded by itself: the numbers are the same to the last bit on any CPU and GPU. What is here is
for all times: V of a saved model is nothing but a seed.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exhume.device import kernels

ROWS, CALLS = 128, 16  # rows that are drawn together, and calls a column for them: eight rows each
KERNELS = "exhume.features.normals_triton"
LIMIT = 2**64  # seeds are below it: a key has 64 bits
MULTIPLIERS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of Philox, as published
LOW = 2**32 - 1  # the lower word
GOLDEN = STEPS[0]  # 2³² over the golden ratio, odd
MIDDLE = 0x3F3504F3  # √½ as the bits of a float32: mantissas are taken from √½ to √2
KEPT = 31 * 2**20  # bytes: freed once, glibc keeps memory up to this size (at most 32 MiB), which
# doubles the speed
CELLS = 2**15  # calls at a time on a CPU: six arrays of them stay in its caches
ON_GPU = 2**24  # and elsewhere: twelve arrays of them, of 8 bytes each, take 1.6 GB

# Minimax: −2 ln m by odd powers of (m − 1)/(m + 1), to 1.2e-7 of it; cos πs and sin πs over −1 … 1
# by even and odd powers of s, to 8e-7 and 1e-7.
LOGARITHM = (-4.000000474723666, -1.3330444702944217, -0.825927633409996)
COSINE = (
    *(0.999999223623858, -4.934745670052831, 4.058045641512067),
    *(-1.3323817208379038, 0.2296647289279757, -0.020582981789030695),
)
SINE = (
    *(3.141591409389426, -5.167677676273784, 2.549880753465299),
    *(-0.5982820519409202, 0.08047930263170745, -0.005991832625324195),
)


def normals(
    seed: int,
    rows: slice,
    d: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Tensor:
    """Return rows of a matrix of independent normal numbers, times a scale: (rows, d).

    Each depends on seed, row and column alone; they are drawn in float32 on any device, and then
    rounded to another dtype.
    """
    if (own := kernels(KERNELS, device)) is not None:
        at_once: Tensor = own.normals(seed, rows, d, device, dtype, scale)[0]
        return at_once
    first, last = rows.start // ROWS, -(-rows.stop // ROWS)
    shape = last - first, ROWS // CALLS, CALLS, d
    on_cpu = device.type == "cpu"
    np.empty(KEPT, np.uint8)  # made and freed
    drawn = torch.empty(shape, device=device)
    out: Any = drawn.numpy() if on_cpu else drawn
    deep = max(1, (CELLS if on_cpu else ON_GPU) // (CALLS * d))  # blocks at a time

    def count(start: int, stop: int) -> Any:
        wide = torch.arange(start, stop, device=device)
        return wide.numpy().view("uint64") if on_cpu else wide

    def fill(start: int) -> None:
        part = out[start : start + deep]
        calls = count((first + start) * CALLS, (first + start + len(part)) * CALLS)[:, None]
        for i, word in enumerate(philox((count(0, d), calls, 0, 0), (seed & LOW, seed >> 32))):
            for j, numbers in enumerate(polar(word, scale)):
                part[:, 2 * i + j] = numbers.reshape(len(part), CALLS, d)

    with ThreadPoolExecutor(max_workers=torch.get_num_threads() if on_cpu else 1) as pool:
        list(pool.map(fill, range(0, last - first, deep)))
    inside = slice(rows.start - first * ROWS, rows.stop - first * ROWS)
    return drawn.reshape(-1, d)[inside].to(dtype)


def philox(counter: tuple[Any, ...], key: tuple[int, int]) -> tuple[Any, ...]:
    """Return the four words of Philox4x32-10 for counters (c₀, c₁, c₂, c₃) that broadcast.

    A round takes them to (⌊c₂M₁/2³²⌋ ⊕ c₁ ⊕ k₀, c₂M₁, ⌊c₀M₀/2³²⌋ ⊕ c₃ ⊕ k₁, c₀M₀) modulo 2³², and
    adds a constant to each k. Counters are uint64 of numpy, or int64 of torch. Where c₀ is a row
    and c₁ a column, the first two rounds are of vectors.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for step in range(10):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = _high(right), _high(left)
        if step < 3:  # shapes are still to grow
            c0, c2 = c0 ^ (c1 ^ k0), c2 ^ (c3 ^ k1)
        else:  # in place: the memory that is at hand is in the cache
            c0 ^= c1
            c0 ^= k0
            c2 ^= c3
            c2 ^= k1
        right &= LOW
        left &= LOW
        c1, c3 = right, left
        k0, k1 = (k0 + STEPS[0]) & LOW, (k1 + STEPS[1]) & LOW
    return c0, c1, c2, c3


def polar(words: Any, scale: float) -> tuple[Any, Any]:
    """Return two independent normal numbers for each word, times a scale, in float32.

    With (w + ½)/2³² = 2ᵉm, m from √½ to √2: r² = −2e ln 2 − 2 ln m, and r cos πs, r sin πs.
    """
    words = _cast(words, "uint32") if isinstance(words, np.ndarray) else words
    turn = _cast(words * GOLDEN, "int32")
    s = _cast(turn, "float32")
    s *= 2.0**-31
    m = _cast(words, "float32")
    m += 0.5
    bits = m.view(turn.dtype)
    bits -= MIDDLE + (32 << 23)
    e = _cast(bits >> 23, "float32")
    e *= -2 * math.log(2)
    bits &= 0x7FFFFF
    bits += MIDDLE  # m is now what its name says
    ratio = m - 1
    m += 1
    ratio /= m
    r = _horner(ratio * ratio, LOGARITHM)
    r *= ratio
    r += e
    r = _root(r)
    r *= scale
    z = s * s
    cosine, sine = _horner(z, COSINE), _horner(z, SINE)
    sine *= s
    cosine *= r
    sine *= r
    return cosine, sine


def _root(array: Any) -> Any:
    """Return √x to the last bit, as numpy's is; torch's is not on all CPUs, but from float64."""
    return np.sqrt(array) if isinstance(array, np.ndarray) else array.double().sqrt().float()


def _horner(z: Any, coefficients: tuple[float, ...]) -> Any:
    total = z * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total += coefficient
        total *= z
    total += coefficients[0]
    return total


def _high(product: Any) -> Any:
    """Return the upper word of 64 bits, signed (torch has no others) or not."""
    return (product >> 32) & LOW if isinstance(product, Tensor) else product >> 32


def _cast(array: Any, dtype: str) -> Any:
    return array.astype(dtype) if isinstance(array, np.ndarray) else array.to(getattr(torch, dtype))
