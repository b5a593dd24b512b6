"""All of a layer's backward pass within a stack of narrow ones, in one kernel: each product alone fills a GPU badly.

    dx = dy @ weight        dpreact = dx * gelu'(preact)        partial = column sums of dpreact by tile row
    dweight = dy.T @ x      dbias = sums over rows of `sums`, the partial of the layer behind's launch

dy (M, K) is this layer's own dpreact; x (M, N) is the act of the layer before, and preact, dpreact and partial belong
to that one. Nothing in one launch depends on another part of it.
"""

import triton
import triton.language as tl

from fusedmlp.kernels.gemm import _dgelu_tile, _load, _store, tile_position
from fusedmlp.kernels.pdl import follow
from fusedmlp.kernels.reduce import column_sum_block


@triton.jit
def _dweight_tile(
    dy, x, dweight, stride_dy, stride_x, pid_k, pid_n, M, N, K,
    PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tile (BLOCK_K, BLOCK_N) of dy.T @ x, in fp32 over all M rows."""
    k = pid_k * BLOCK_K
    n = pid_n * BLOCK_N
    acc = tl.zeros((BLOCK_K, BLOCK_N), dtype=tl.float32)
    for m in tl.range(0, M, STEP, num_stages=STAGES):
        dy_tile = _load(dy, stride_dy, m, k, M, K, USE_TMA, STEP, BLOCK_K)
        x_tile = _load(x, stride_x, m, n, M, N, USE_TMA, STEP, BLOCK_N)
        acc = tl.dot(dy_tile.T, x_tile, acc, input_precision=PRECISION)
    _store(dweight, acc, k, n, K, N, USE_TMA)


@triton.jit
def _stack_bwd_kernel(
    dy, weight, preact, dpreact, dx, partial_ptr, dy_columns, x, dweight, sums_ptr, dbias_ptr,
    stride_dy, stride_w, stride_x, M, N, K, P,
    APPROXIMATE: tl.constexpr, SUM_ROWS: tl.constexpr, PRECISION: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DWEIGHT_K: tl.constexpr, DWEIGHT_N: tl.constexpr, DWEIGHT_STEP: tl.constexpr, DWEIGHT_STAGES: tl.constexpr,
    DX_FIRST: tl.constexpr, SUM_BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """A program computes one tile of dx, dpreact and partial, or one tile of dweight, or SUM_BLOCK of dbias."""
    follow(PDL)
    pid = tl.program_id(0)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    num_dx = num_m * num_n
    dweight_k = tl.cdiv(K, DWEIGHT_K)
    dweight_n = tl.cdiv(N, DWEIGHT_N)
    num_dweight = dweight_k * dweight_n
    first_dx = 0 if DX_FIRST else num_dweight
    first_dweight = num_dx if DX_FIRST else 0
    if pid >= num_dx + num_dweight:
        first = (pid - num_dx - num_dweight) * SUM_BLOCK
        column_sum_block(sums_ptr, dbias_ptr, first, P, K, 32, SUM_BLOCK)
    elif (pid >= first_dx) & (pid < first_dx + num_dx):
        pid_m, pid_n = tile_position(pid - first_dx, num_m, num_n, GROUP_M)
        _dgelu_tile(
            dy, weight, preact, dpreact, dx, partial_ptr, stride_dy, stride_w, pid_m, pid_n, M, N, K,
            APPROXIMATE, False, SUM_ROWS, True, PRECISION, False, USE_TMA, BLOCK_M, BLOCK_N, BLOCK_K, True,
        )  # fmt: skip
    else:
        pid_k, pid_n = tile_position(pid - first_dweight, dweight_k, dweight_n, GROUP_M)
        _dweight_tile(
            dy_columns, x, dweight, stride_dy, stride_x, pid_k, pid_n, M, N, K, PRECISION, USE_TMA,
            DWEIGHT_K, DWEIGHT_N, DWEIGHT_STEP, DWEIGHT_STAGES,
        )  # fmt: skip
