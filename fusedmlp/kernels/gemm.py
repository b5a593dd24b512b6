"""Persistent GEMM with GELU in its epilogue, in plain Triton: every card, dtype and size.

    forward:  preact = a @ b + bias, act = gelu(preact)
    backward: dpreact = (a @ b) * gelu'(preact), act = gelu(preact) or the product a @ b itself, partial = column sums
              of dpreact by tile row

`M` rows, `N` columns of the result, `K` summed over. a is (M, K) with contiguous rows; b is (K, N), stored as (N, K)
where B_IS_NK, else as (K, N), with contiguous rows either way; results have contiguous rows of N. With USE_TMA the
matrices are tensor descriptors (rows of a multiple of 16 bytes), else pointers with 64-bit offsets and masks.

A program computes every num_programs-th tile, accumulating in fp32; or, with READ_FIRST, just one. The
compiler makes the same code whatever it knows of num_programs, so it is told nothing: less to compile.
"""

import triton
import triton.language as tl

from fusedmlp.kernels.gelu import gelu, gelu_and_grad
from fusedmlp.kernels.pdl import follow


@triton.jit
def tile_position(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile: GROUP_M tile rows are walked column by column, so that their operands stay in L2."""
    width = GROUP_M * num_n
    group = tile // width
    first_m = group * GROUP_M
    rows = tl.minimum(num_m - first_m, GROUP_M)
    within = tile - group * width
    return first_m + within % rows, within // rows


@triton.jit
def _rows_and_columns(a, stride, first_row, first_column, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Pointers to a block of a row-major matrix, and where it is inside."""
    offs_r = (first_row + tl.arange(0, R))[:, None]
    offs_c = (first_column + tl.arange(0, C))[None, :]
    return a + offs_r.to(tl.int64) * stride + offs_c, (offs_r < rows) & (offs_c < columns)


@triton.jit
def _load(a, stride, first_row, first_column, rows, columns, USE_TMA: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Block (R, C) of a row-major matrix, zero outside."""
    if USE_TMA:
        return a.load([first_row, first_column])
    else:
        a_ptrs, mask = _rows_and_columns(a, stride, first_row, first_column, rows, columns, R, C)
        return tl.load(a_ptrs, mask=mask, other=0.0)


@triton.jit
def _store(a, value, first_row, first_column, rows, columns, USE_TMA: tl.constexpr):
    """Write a block to a matrix with contiguous rows of `columns`."""
    if USE_TMA:
        a.store([first_row, first_column], value.to(a.dtype))
    else:
        a_ptrs, mask = _rows_and_columns(
            a, columns, first_row, first_column, rows, columns, value.shape[0], value.shape[1]
        )
        tl.store(a_ptrs, value.to(a.dtype.element_ty), mask=mask)


@triton.jit
def _product(
    a, b, stride_a, stride_b, first_m, first_n, M, N, K,
    PRECISION: tl.constexpr, B_IS_NK: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile (BLOCK_M, BLOCK_N) of a @ b in fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a_tile = _load(a, stride_a, first_m, k, M, K, USE_TMA, BLOCK_M, BLOCK_K)
        if B_IS_NK:
            b_tile = _load(b, stride_b, first_n, k, N, K, USE_TMA, BLOCK_N, BLOCK_K).T
        else:
            b_tile = _load(b, stride_b, k, first_n, K, N, USE_TMA, BLOCK_K, BLOCK_N)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _read_bias(bias_ptr, n, N, BLOCK_N: tl.constexpr):
    offs_n = n + tl.arange(0, BLOCK_N)
    return tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)


@triton.jit
def _linear_gelu_tile(
    x, weight, act, preact, bias_ptr, stride_x, stride_w, pid_m, pid_n, M, N, K,
    APPROXIMATE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr, PRECISION: tl.constexpr,
    B_IS_NK: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, READ_FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of act, and of preact if asked for."""
    m = pid_m * BLOCK_M
    n = pid_n * BLOCK_N
    if HAS_BIAS and READ_FIRST:
        bias = _read_bias(bias_ptr, n, N, BLOCK_N)
    acc = _product(x, weight, stride_x, stride_w, m, n, M, N, K, PRECISION, B_IS_NK, USE_TMA, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        if not READ_FIRST:
            bias = _read_bias(bias_ptr, n, N, BLOCK_N)
        acc += bias.to(tl.float32)[None, :]
    if STORE_PREACT:
        _store(preact, acc, m, n, M, N, USE_TMA)
    _store(act, gelu(acc, APPROXIMATE), m, n, M, N, USE_TMA)


@triton.jit(do_not_specialize=["num_programs"])
def _linear_gelu_fwd_kernel(
    x, weight, act, preact, bias_ptr, stride_x, stride_w, M, N, K, num_programs,
    APPROXIMATE: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_PREACT: tl.constexpr, PRECISION: tl.constexpr,
    B_IS_NK: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    READ_FIRST: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """act = gelu(x @ weight + bias), and preact if asked for.

    With READ_FIRST there is a program for every tile, and it reads the tile's bias before the products.
    """
    follow(PDL)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    if READ_FIRST:
        pid_m, pid_n = tile_position(tl.program_id(0), num_m, num_n, GROUP_M)
        _linear_gelu_tile(
            x, weight, act, preact, bias_ptr, stride_x, stride_w, pid_m, pid_n, M, N, K, APPROXIMATE, HAS_BIAS,
            STORE_PREACT, PRECISION, B_IS_NK, USE_TMA, BLOCK_M, BLOCK_N, BLOCK_K, True,
        )  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), num_m * num_n, num_programs, flatten=USE_TMA):
            pid_m, pid_n = tile_position(tile, num_m, num_n, GROUP_M)
            _linear_gelu_tile(
                x, weight, act, preact, bias_ptr, stride_x, stride_w, pid_m, pid_n, M, N, K, APPROXIMATE, HAS_BIAS,
                STORE_PREACT, PRECISION, B_IS_NK, USE_TMA, BLOCK_M, BLOCK_N, BLOCK_K, False,
            )  # fmt: skip


@triton.jit
def _load_early(a, first_row, first_column, rows, columns, USE_TMA: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Block (R, C) of a matrix with contiguous rows, zero outside, on its way to registers while the program goes on.

    By pointers: a block that came through TMA would wait in shared memory, where operands could be. With USE_TMA, rows
    are multiples of 16 bytes, and the compiler knows.
    """
    if USE_TMA:
        VECTOR: tl.constexpr = 128 // a.dtype.element_ty.primitive_bitwidth
        columns = columns // VECTOR * VECTOR
    a_ptrs, mask = _rows_and_columns(a, columns, first_row, first_column, rows, columns, R, C)
    return tl.load(a_ptrs, mask=mask, other=0.0)


@triton.jit
def _dgelu_tile(
    dy, weight, preact, dpreact, second, partial_ptr, stride_dy, stride_w, pid_m, pid_n, M, N, K,
    APPROXIMATE: tl.constexpr, STORE_ACT: tl.constexpr, SUM_ROWS: tl.constexpr, STORE_PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr, B_IS_NK: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, READ_FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of dpreact, and of act or the product and the column sums if asked for."""
    m = pid_m * BLOCK_M
    n = pid_n * BLOCK_N
    if READ_FIRST:
        z = _load_early(preact, m, n, M, N, USE_TMA, BLOCK_M, BLOCK_N)
    acc = _product(
        dy, weight, stride_dy, stride_w, m, n, M, N, K, PRECISION, B_IS_NK, USE_TMA, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if not READ_FIRST:
        z = _load(preact, N, m, n, M, N, USE_TMA, BLOCK_M, BLOCK_N)
    if STORE_PRODUCT:
        _store(second, acc, m, n, M, N, USE_TMA)
    act, grad = gelu_and_grad(z.to(tl.float32), APPROXIMATE)
    acc *= grad
    _store(dpreact, acc, m, n, M, N, USE_TMA)
    if STORE_ACT:
        _store(second, act, m, n, M, N, USE_TMA)
    if SUM_ROWS:
        # A row beyond M is zero times b, which is NaN where b is not finite.
        inside = (m + tl.arange(0, BLOCK_M) < M)[:, None]
        offs_n = n + tl.arange(0, BLOCK_N)
        sums = tl.sum(tl.where(inside, acc, 0.0), axis=0)
        tl.store(partial_ptr + pid_m.to(tl.int64) * N + offs_n, sums, mask=offs_n < N)


@triton.jit(do_not_specialize=["num_programs"])
def _dgelu_kernel(
    dy, weight, preact, dpreact, second, partial_ptr, stride_dy, stride_w, M, N, K, num_programs,
    APPROXIMATE: tl.constexpr, STORE_ACT: tl.constexpr, SUM_ROWS: tl.constexpr, STORE_PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr, B_IS_NK: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    READ_FIRST: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """dpreact = (dy @ weight) * gelu'(preact); if asked for, second = gelu(preact) (STORE_ACT) or dy @ weight
    (STORE_PRODUCT), and partial_ptr (cdiv(M, BLOCK_M), N) in fp32.

    With READ_FIRST there is a program for every tile, and it reads the tile's preact before the products: where all
    programs run at once, nothing else hides that read. Else preact is a descriptor like the others.
    """
    follow(PDL)
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    if READ_FIRST:
        pid_m, pid_n = tile_position(tl.program_id(0), num_m, num_n, GROUP_M)
        _dgelu_tile(
            dy, weight, preact, dpreact, second, partial_ptr, stride_dy, stride_w, pid_m, pid_n, M, N, K, APPROXIMATE,
            STORE_ACT, SUM_ROWS, STORE_PRODUCT, PRECISION, B_IS_NK, USE_TMA, BLOCK_M, BLOCK_N, BLOCK_K, True,
        )  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), num_m * num_n, num_programs, flatten=USE_TMA):
            pid_m, pid_n = tile_position(tile, num_m, num_n, GROUP_M)
            _dgelu_tile(
                dy, weight, preact, dpreact, second, partial_ptr, stride_dy, stride_w, pid_m, pid_n, M, N, K,
                APPROXIMATE, STORE_ACT, SUM_ROWS, STORE_PRODUCT, PRECISION, B_IS_NK, USE_TMA,
                BLOCK_M, BLOCK_N, BLOCK_K, False,
            )  # fmt: skip
