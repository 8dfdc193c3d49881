"""The numbers of `exhume.features.normals` in kernels for NVIDIA's GPUs.

`normals` writes them, to the same last bit. `across` and `along` multiply a matrix V of them that
is written nowhere: a tile is drawn in registers, rounded to float16 for the tensor cores, and
forgotten. There sums and products are fused, and quotient and root are to 1e-7, which is less than
what tensor cores lose as they add up.
"""

# Kernels are compiled by Triton, which has types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

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
# Columns of a tile that is written: 16 × 128 calls keep four words in the registers of 128 threads
COLUMNS = 128
MOST = 128  # rows of a factor that are multiplied at once: their sums fill the registers
# Columns of V at a time in `across` and `along`, and registers a thread: two programs share a
# processor, and while one waits for the tensor cores the other draws
DEEP, WIDE = tl.constexpr(32), tl.constexpr(64)
SHARED = {"num_warps": 8, "maxnreg": 128}
# Columns that `across` adds up at a time: tensor cores round sums towards zero, and three products
# with 1,024 columns, added up as one, lose as little as one with 3,072
PART = tl.constexpr(1024)
LONG = tl.constexpr(64)  # blocks of rows that a program of `along` adds up


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
def polar(words, scale, FUSED: tl.constexpr = False):
    """Two normal numbers a word, each operation rounded by itself (`enable_fp_fusion=False`)."""
    s = (words * GOLDEN).to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-31)
    bits = (words.to(tl.float32) + 0.5).to(tl.int32, bitcast=True) - (MIDDLE + (32 << 23))
    e = (bits >> 23).to(tl.float32)
    m = ((bits & 0x7FFFFF) + MIDDLE).to(tl.float32, bitcast=True)
    if FUSED:  # noqa: SIM108
        ratio = (m - 1.0) * inverse(m + 1.0)
    else:
        ratio = tl.div_rn(m - 1.0, m + 1.0)
    z = ratio * ratio
    square = ((z * L2 + L1) * z + L0) * ratio + e * -TWO_LOG_2
    if FUSED:  # noqa: SIM108
        r = root(square) * scale
    else:
        r = tl.sqrt_rn(square) * scale
    z = s * s
    cosine = ((((z * C5 + C4) * z + C3) * z + C2) * z + C1) * z + C0
    sine = (((((z * S5 + S4) * z + S3) * z + S2) * z + S1) * z + S0) * s
    return cosine * r, sine * r


@triton.jit
def inverse(x):
    """1/x to 1e-7 of it, in one instruction."""
    code: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def root(x):
    """√x to 1e-7 of it, in one instruction, and of zero, too."""
    code: tl.constexpr = "sqrt.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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
    if out.numel():
        draw[blocks(rows), triton.cdiv(d, COLUMNS)](
            *(out, rest, seed & source.LOW, seed >> 32, start, stop, d, scale),
            COLUMNS=COLUMNS,
            SPLIT=split,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out, rest


@triton.jit
def tile(block, k, low, high):
    """Those columns of a block of rows, (ROWS, columns)."""
    calls = (block * CALLS + tl.arange(0, CALLS)).to(tl.uint32)[:, None]
    columns = k.to(tl.uint32)[None, :]
    words = philox(columns, calls, calls * 0, columns * 0, low.to(tl.uint32), high.to(tl.uint32))
    a, b = polar(words[0], 1.0, FUSED=True)
    c, d = polar(words[1], 1.0, FUSED=True)
    e, f = polar(words[2], 1.0, FUSED=True)
    g, h = polar(words[3], 1.0, FUSED=True)
    upper, lower = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))
    rows = tl.permute(tl.join(upper, lower), (4, 3, 2, 0, 1))
    return tl.reshape(rows, (ROWS, k.shape[0]))


@triton.jit(do_not_specialize=["low", "high", "n", "scale"])
def draw_across(
    out, left, rest, low, high, start, stop, n, d, scale, COUNT: tl.constexpr, SPLIT: tl.constexpr
):
    """Write Σ_k l_ik v_jk for all i and a block of rows j of V, (n, stop − start).

    With SPLIT, l and v have two parts each, of which the small ones are not multiplied, and the sum
    is over PART columns k.
    """
    block = start // ROWS + tl.program_id(0)
    part = tl.program_id(1)
    i = tl.arange(0, COUNT)
    total = tl.zeros((ROWS, COUNT), tl.float32)
    last = tl.minimum((part + 1) * PART, d) if SPLIT else d
    for first in range(part * PART, last, DEEP):
        k = first + tl.arange(0, DEEP)
        place = i[None, :] * d + k[:, None]
        factor = tl.load(left + place)
        v = tile(block, k, low, high)
        rounded = v.to(tl.float16)
        if SPLIT:
            total = tl.dot((v - rounded.to(tl.float32)).to(tl.float16), factor, total)
            total = tl.dot(rounded, tl.load(rest + place), total)
        total = tl.dot(rounded, factor, total)
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = (part * n + i).to(tl.int64)[None, :] * (stop - start) + (row - start)[:, None]
    inside = (i < n)[None, :] & ((row >= start) & (row < stop))[:, None]
    tl.store(out + place, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["low", "high", "n", "scale"])
def draw_along(out, left, low, high, start, stop, n, d, scale, COUNT: tl.constexpr):
    """Write Σ_j l_ij v_jk over LONG blocks of rows j of V, (n, d)."""
    k = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    i = tl.arange(0, COUNT)
    total = tl.zeros((COUNT, WIDE), tl.float32)
    part = tl.program_id(1)
    blocks = tl.cdiv(stop, ROWS) - start // ROWS
    for step in range(part * LONG, tl.minimum((part + 1) * LONG, blocks)):
        block = start // ROWS + step
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (i < n)[:, None] & ((row >= start) & (row < stop))[None, :]
        place = i.to(tl.int64)[:, None] * (stop - start) + (row - start)[None, :]
        factor = tl.load(left + place, mask=inside, other=0.0)
        total = tl.dot(factor, tile(block, k, low, high).to(tl.float16), total)
    place = (part * n + i).to(tl.int64)[:, None] * d + k[None, :]
    tl.store(out + place, total * scale, mask=(i < n)[:, None] & (k < d)[None, :])


def across(
    seed: int, rows: slice, left: Tensor, rest: Tensor | None, dtype: torch.dtype, scale: float
) -> Tensor:
    """Return (L + R) Vᵀ, times a scale, for those rows of V and float16 L and R (n, d): (n, b).

    Without R, V is rounded to float16, too.
    """
    (n, d), count = left.shape, padded(len(left))
    deep = triton.cdiv(d, DEEP.value) * DEEP.value
    parts = 1 if rest is None else triton.cdiv(deep, PART.value)
    wide = pad(left, (0, deep - d, 0, count - n)).contiguous()
    more = wide if rest is None else pad(rest, (0, deep - d, 0, count - n)).contiguous()
    out = torch.empty(parts, n, rows.stop - rows.start, device=left.device, dtype=dtype)
    given = seed & source.LOW, seed >> 32, rows.start, rows.stop, n, deep, scale
    shape = {"COUNT": count, "SPLIT": rest is not None}
    draw_across[blocks(rows), parts](out, wide, more, *given, **shape, **SHARED)
    return out[0] if parts == 1 else out.sum(0)


def along(seed: int, rows: slice, left: Tensor, d: int, scale: float) -> Tensor:
    """Return L V, times a scale, for those rows of V (b, d), in float16, and L (n, b): (n, d)."""
    n, parts = len(left), triton.cdiv(blocks(rows), LONG.value)
    out = torch.empty(parts, n, d, device=left.device)
    given = seed & source.LOW, seed >> 32, rows.start, rows.stop, n, d, scale
    grid = triton.cdiv(d, WIDE.value), parts
    draw_along[grid](out, left.contiguous(), *given, COUNT=padded(n), **SHARED)
    return out.sum(0)


def blocks(rows: slice) -> int:
    """Return how many blocks of rows hold them."""
    first, last = rows.start // source.ROWS, -(-rows.stop // source.ROWS)
    return int(last - first)


def padded(n: int) -> int:
    """Return how many rows a factor of n is given, at most MOST: as tensor cores take them."""
    return max(16, 1 << (n - 1).bit_length())
