"""dpreact and the bias gradient in one pass, and sums over rows in a fixed order.

A bias gradient is a sum over M rows. Strips of rows are summed in parallel into `partial` (strips, N) in fp32, and a
second kernel adds the strips from first to last: no atomics, so the same inputs give the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmlp.kernels import prepared
from fusedmlp.kernels.gelu import gelu_grad
from fusedmlp.kernels.pdl import follow


class Strips(NamedTuple):
    """Rows that a program sums, and rows and columns of the blocks in which it reads them."""

    rows: int
    block_m: int
    block_n: int


# Long strips for less partial sums; where those would leave most of a GPU idle, blocks that are read at once.
LONG, SHORT = Strips(128, 16, 256), Strips(64, 64, 32)
# Rows of one launch, a multiple of a strip's: the kernel numbers them in 32 bits.
MOST_ROWS = 2**30


@triton.jit
def _dgelu_dbias_kernel(
    dy_ptr, preact_ptr, dpreact_ptr, partial_ptr, stride_dm, stride_dn, M, N,
    APPROXIMATE: tl.constexpr, SUM_ROWS: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """A strip of STRIP rows and BLOCK_N columns: dpreact = dy * gelu'(preact), and its column sums."""
    follow(PDL)
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    strip = pid // num_n
    offs_n = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for m in range(0, STRIP, BLOCK_M):
        offs_m = (strip * STRIP + m + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (offs_m < M) & (offs_n < N)
        dy = tl.load(dy_ptr + offs_m * stride_dm + offs_n * stride_dn, mask=mask, other=0.0).to(tl.float32)
        preact = tl.load(preact_ptr + offs_m * N + offs_n, mask=mask, other=0.0).to(tl.float32)
        dpreact = dy * gelu_grad(preact, APPROXIMATE)
        tl.store(dpreact_ptr + offs_m * N + offs_n, dpreact.to(dpreact_ptr.dtype.element_ty), mask=mask)
        if SUM_ROWS:
            sums += dpreact
    if SUM_ROWS:
        columns = (pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(partial_ptr + strip.to(tl.int64) * N + columns, tl.sum(sums, axis=0), mask=columns < N)


@triton.jit
def column_sum_block(partial_ptr, out_ptr, first, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[first : first + BLOCK_N] = column sums of partial (P, N)."""
    offs_n = first + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for p in range(0, P, BLOCK_P):
        offs_p = (p + tl.arange(0, BLOCK_P)).to(tl.int64)[:, None]
        mask = (offs_p < P) & (offs_n < N)[None, :]
        sums += tl.load(partial_ptr + offs_p * N + offs_n[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + offs_n, tl.sum(sums, axis=0).to(out_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit(do_not_specialize=["P"])
def _column_sum_kernel(
    partial_ptr, out_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr = False
):
    """out (N,) = column sums of partial (P, N); a program sums BLOCK_N columns."""
    follow(PDL)
    column_sum_block(partial_ptr, out_ptr, tl.program_id(0) * BLOCK_N, P, N, BLOCK_P, BLOCK_N)


def dgelu_dbias(dy: Tensor, preact: Tensor, approximate: str, need_dbias: bool) -> tuple[Tensor, Tensor]:
    """dpreact = dy * gelu'(preact) and, if needed, dbias = its sum over rows.

    Args:
        dy: (M, N), any strides.  preact: (M, N), contiguous, dtype of dy.
    Returns: dpreact (M, N) and dbias (N,), or (0,) if not needed; dtype of preact, the sum accumulated in fp32.
    """
    M, N = preact.shape
    dpreact = torch.empty_like(preact)
    if M == 0 or N == 0:
        return dpreact, preact.new_zeros(N if need_dbias else 0)
    num_long = triton.cdiv(M, LONG.rows) * triton.cdiv(N, LONG.block_n)
    strips = LONG if num_long >= 512 else SHORT
    num_m, num_n = triton.cdiv(M, strips.rows), triton.cdiv(N, strips.block_n)
    partial = preact.new_empty((num_m, N), dtype=torch.float32) if need_dbias else preact
    constants = (approximate, need_dbias, *strips)
    if M <= MOST_ROWS:
        _launch_strips((dy, preact, dpreact, partial), num_m * num_n, constants)
    else:
        for first in range(0, M, MOST_ROWS):
            dy_part, preact_part, dpreact_part = (t[first : first + MOST_ROWS] for t in (dy, preact, dpreact))
            num_m = triton.cdiv(preact_part.shape[0], strips.rows)
            partial_part = partial[first // strips.rows :]
            _launch_strips((dy_part, preact_part, dpreact_part, partial_part), num_m * num_n, constants)
    return dpreact, column_sum(partial, preact.dtype) if need_dbias else preact.new_empty(0)


def _launch_strips(tensors: tuple[Tensor, ...], programs: int, constants: tuple) -> None:
    dy, preact, *_ = tensors
    prepared.launch(_dgelu_dbias_kernel, tensors, programs, (*dy.stride(), *preact.shape), constants, num_warps=4)


def column_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the rows of `partial` (P, N), fp32 and contiguous, from first to last, rounded to `dtype`."""
    P, N = partial.shape
    out = partial.new_empty(N, dtype=dtype)
    prepared.launch(_column_sum_kernel, (partial, out), triton.cdiv(N, 32), (P, N), (32, 32), num_warps=4)
    return out
