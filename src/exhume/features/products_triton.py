"""Passes over arrays of candidates × rows of V, each in one kernel for NVIDIA's GPUs.

Matrix products of cuBLAS are as fast as V can be read; what is done with their results entry by
entry costs as much again if each operation reads and writes them by itself.
"""

# Kernels are compiled by Triton, which has types of its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from exhume.features import weights

FINE = tl.constexpr(weights.FINE)
CANDIDATES, ROWS = 8, 512  # of a tile: 128 threads have 32 entries each, read 16 bytes at a time
LONG = 2048  # rows of a tile that are added up


@triton.jit(do_not_specialize=["n"])  # numbers of candidates vary: one compilation for all
def add_products(out, left, right, n, b, CANDIDATES: tl.constexpr, ROWS: tl.constexpr):
    """Write Σ_i l_ik r_ik for ROWS of the b columns k."""
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((CANDIDATES, ROWS), tl.float32)
    for first in range(0, n, CANDIDATES):
        i = first + tl.arange(0, CANDIDATES)
        inside = (i < n)[:, None] & (k < b)[None, :]
        place = i.to(tl.int64)[:, None] * b + k[None, :]
        one = tl.load(left + place, mask=inside, other=0.0)
        other = tl.load(right + place, mask=inside, other=0.0)
        total += one.to(tl.float32) * other.to(tl.float32)
    tl.store(out + k, tl.sum(total, 0), mask=k < b)


@triton.jit(do_not_specialize=["n"])  # numbers of candidates vary: one compilation for all
def add_rows(out, left, right, n, b, CANDIDATES: tl.constexpr, LONG: tl.constexpr):
    """Write Σ_k l_ik r_k over LONG of the b columns k, for all i."""
    part = tl.program_id(0).to(tl.int64)
    k = part * LONG + tl.arange(0, LONG)
    other = tl.load(right + k, mask=k < b, other=0.0)[None, :]
    for first in range(0, n, CANDIDATES):
        i = first + tl.arange(0, CANDIDATES)
        inside = (i < n)[:, None] & (k < b)[None, :]
        one = tl.load(left + i.to(tl.int64)[:, None] * b + k[None, :], mask=inside, other=0.0)
        tl.store(out + part * n + i, tl.sum(one * other, 1), mask=i < n)


@triton.jit(do_not_specialize=["n"])  # numbers of candidates vary: one compilation for all
def add_halves(high, rest, low, slope, size, n, b, CANDIDATES: tl.constexpr, ROWS: tl.constexpr):
    """Write σ(z) over what is low, and σ'(z), for z_ik = s_i (h_ik + (r_ik + l_ik)/FINE)."""
    i = tl.program_id(1) * CANDIDATES + tl.arange(0, CANDIDATES)
    k = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (i < n)[:, None] & (k < b)[None, :]
    place = i.to(tl.int64)[:, None] * b + k[None, :]
    below = tl.load(rest + place, mask=inside, other=0.0)
    below += tl.load(low + place, mask=inside, other=0.0)
    z = tl.load(high + place, mask=inside, other=0.0) + below / FINE
    z *= tl.load(size + i, mask=i < n, other=0.0)[:, None]
    tl.store(low + place, tl.maximum(z, 0.0), mask=inside)
    tl.store(slope + place, (z > 0).to(tl.float16), mask=inside)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Return Σ_i l_ik r_ik in float32 for contiguous matrices (n, b) of float16."""
    n, b = left.shape
    out = torch.empty(b, device=left.device)
    shape = {"CANDIDATES": CANDIDATES, "ROWS": ROWS, "num_warps": 4}
    add_products[(triton.cdiv(b, ROWS),)](out, left, right, n, b, **shape)
    return out


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of a contiguous matrix (n, b) with a vector (b,) of float32, in float64.

    cuBLAS has a few candidates' long rows added up by a few of the processors.
    """
    n, b = left.shape
    parts = torch.empty(triton.cdiv(b, LONG), n, device=left.device)
    shape = {"CANDIDATES": CANDIDATES, "LONG": LONG, "num_warps": 8}
    add_rows[(len(parts),)](parts, left, right, n, b, **shape)
    return parts.sum(0, dtype=torch.float64)


def rectified(high: Tensor, low: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return ReLU(z) and its slope in float16, (n, b) each, from products of halves.

    high (2n, b) and low (n, b) are contiguous, of float32; low is overwritten. See `add_halves`.
    """
    n, b = low.shape
    slope = torch.empty(n, b, dtype=torch.float16, device=low.device)
    grid = triton.cdiv(b, ROWS), triton.cdiv(n, CANDIDATES)
    shape = {"CANDIDATES": CANDIDATES, "ROWS": ROWS, "num_warps": 4}
    add_halves[grid](high[:n], high[n:], low, slope, size, n, b, **shape)
    return low, slope
