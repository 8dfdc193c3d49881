"""The numbers of `exhume.features.normals` in a kernel for NVIDIA's GPUs, to the same last bit."""

# Kernels are compiled by Triton, which has types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from exhume.features import normals as source
from exhume.features import weights

M0, M1 = (tl.constexpr(x) for x in source.MULTIPLIERS)
W0, W1 = (tl.constexpr(x) for x in source.STEPS)
GOLDEN, MIDDLE = tl.constexpr(source.GOLDEN), tl.constexpr(source.MIDDLE)
L0, L1, L2 = (tl.constexpr(x) for x in source.LOGARITHM)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(x) for x in source.COSINE)
S0, S1, S2, S3, S4, S5 = (tl.constexpr(x) for x in source.SINE)
TWO_LOG_2 = tl.constexpr(1.3862943611198906)  # 2 ln 2
FINE = tl.constexpr(weights.FINE)
ROWS, CALLS = tl.constexpr(source.ROWS), tl.constexpr(source.CALLS)
COLUMNS = 128  # of a tile: 16 × 128 calls keep four words in the registers of 128 threads


@triton.jit
def philox(c0, c1, c2, c3, low, high):
    """Four words for a counter, uint32 that broadcast, and a key."""
    for _ in tl.static_range(10):
        left, right = c0.to(tl.uint64) * M0, c2.to(tl.uint64) * M1  # one instruction each
        c0, c2 = (right >> 32).to(tl.uint32) ^ (c1 ^ low), (left >> 32).to(tl.uint32) ^ (c3 ^ high)
        c1, c3 = right.to(tl.uint32), left.to(tl.uint32)
        low, high = low + W0, high + W1
    return c0, c1, c2, c3


@triton.jit
def polar(words, scale):
    """Two normal numbers a word, each operation rounded by itself (`enable_fp_fusion=False`)."""
    s = (words * GOLDEN).to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-31)
    bits = (words.to(tl.float32) + 0.5).to(tl.int32, bitcast=True) - (MIDDLE + (32 << 23))
    e = (bits >> 23).to(tl.float32)
    m = ((bits & 0x7FFFFF) + MIDDLE).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(m - 1.0, m + 1.0)
    z = ratio * ratio
    square = ((z * L2 + L1) * z + L0) * ratio + e * -TWO_LOG_2
    r = tl.sqrt_rn(square) * scale
    z = s * s
    cosine = ((((z * C5 + C4) * z + C3) * z + C2) * z + C1) * z + C0
    sine = (((((z * S5 + S4) * z + S3) * z + S2) * z + S1) * z + S0) * s
    return cosine * r, sine * r


@triton.jit(do_not_specialize=["low", "high", "start", "stop", "scale"])
def draw(out, rest, low, high, start, stop, d, scale, COLUMNS: tl.constexpr, SPLIT: tl.constexpr):
    """Write rows start … stop of the matrix, (stop − start, d): a block of rows a program.

    With SPLIT, what `out` rounds off is written, too, times FINE.
    """
    block = (start // ROWS + tl.program_id(0)).to(tl.int64)
    r = tl.arange(0, CALLS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    calls, columns = (block * CALLS + r).to(tl.uint32)[:, None], k.to(tl.uint32)[None, :]
    key = low.to(tl.uint32), high.to(tl.uint32)
    words = philox(columns, calls, calls * 0, columns * 0, key[0], key[1])
    for i in tl.static_range(4):
        pair = polar(words[i], scale)
        for j in tl.static_range(2):
            row = block * ROWS + (2 * i + j) * CALLS + r
            inside = ((row >= start) & (row < stop))[:, None] & (k < d)[None, :]
            place = (row - start)[:, None] * d + k[None, :]
            rounded = pair[j].to(out.dtype.element_ty)
            tl.store(out + place, rounded, mask=inside)
            if SPLIT:
                fine = (pair[j] - rounded.to(tl.float32)) * FINE
                tl.store(rest + place, fine.to(out.dtype.element_ty), mask=inside)


def normals(
    seed: int,
    rows: slice,
    d: int,
    device: torch.device,
    dtype: torch.dtype,
    scale: float,
    split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return rows of a matrix of independent normal numbers, times a scale: (rows, d).

    Beside them is what float16 rounds off, as of `exhume.features.weights.split`, if asked for.
    """
    start, stop = rows.start, rows.stop
    out = torch.empty(stop - start, d, device=device, dtype=dtype)
    rest = torch.empty_like(out) if split else out
    blocks = -(-stop // source.ROWS) - start // source.ROWS
    if out.numel():
        draw[blocks, triton.cdiv(d, COLUMNS)](
            *(out, rest, seed & source.LOW, seed >> 32, start, stop, d, scale),
            COLUMNS=COLUMNS,
            SPLIT=split,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out, rest
