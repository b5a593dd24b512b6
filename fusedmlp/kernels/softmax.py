"""Softmax over rows, forward and backward: the launchers, and the kernels for rows that one program can hold.

    y = exp(x - max(x)) / sum(exp(x - max(x)))        dx = y * (dy - sum(y * dy))

M: n_rows, all dimensions but one, flattened. N: n_cols, the dimension that sums to one.

A narrow row is read once and held in registers by one program, several rows at a time where they are short. Wider rows
are shared by several programs (`softmax_team.py`), still wider ones read in chunks (`softmax_wide.py`).

Infinities need no guard here: a row of -inf, or one with +inf or NaN, becomes NaN by itself (-inf - -inf, inf - inf),
as in torch.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmlp.kernels import prepared
from fusedmlp.kernels.row_vectors import elements_per_vector
from fusedmlp.kernels.softmax_team import TeamConfig, max_parts, team_bwd, team_fwd
from fusedmlp.kernels.softmax_wide import WideConfig, wide_bwd, wide_fwd


@triton.jit
def _in_vectors(n, VECTOR: tl.constexpr):
    """n, a multiple of VECTOR, and the compiler knows."""
    return n // VECTOR * VECTOR


@triton.jit
def _softmax_fwd_kernel(
    x_ptr, y_ptr, stride_xm, stride_ym, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program reads BLOCK_M whole rows of x and writes their softmax."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < n_rows)[:, None] & (offs_n < _in_vectors(n_cols, VECTOR))[None, :]
    x_ptrs = x_ptr + offs_m[:, None] * _in_vectors(stride_xm, VECTOR) + offs_n[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * _in_vectors(stride_ym, VECTOR) + offs_n[None, :]
    x = tl.load(x_ptrs, mask=mask, other=float("-inf")).to(tl.float32)  # (M, N)
    e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * 1.4426950408889634)
    y = e * (1.0 / tl.sum(e, axis=1))[:, None]
    tl.store(y_ptrs, y, mask=mask)


@triton.jit
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, stride_dym, stride_ym, stride_dxm, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program reads BLOCK_M whole rows of dy and y and writes dx."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < n_rows)[:, None] & (offs_n < _in_vectors(n_cols, VECTOR))[None, :]
    dy_ptrs = dy_ptr + offs_m[:, None] * _in_vectors(stride_dym, VECTOR) + offs_n[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * _in_vectors(stride_ym, VECTOR) + offs_n[None, :]
    dx_ptrs = dx_ptr + offs_m[:, None] * _in_vectors(stride_dxm, VECTOR) + offs_n[None, :]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)  # (M, N)
    dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
    dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
    tl.store(dx_ptrs, dx, mask=mask)


@dataclass(frozen=True)
class RowsConfig:
    """Rows in a block, columns of a block (a power of two, at least N), and warps of a program."""

    block_m: int
    block_n: int
    num_warps: int


def rows_fwd(x: Tensor, y: Tensor, config: RowsConfig) -> None:
    """y = softmax of each row of x, both (M, N) with unit column stride and N <= config.block_n."""
    _launch_rows(_softmax_fwd_kernel, (x, y), config)


def rows_bwd(dy: Tensor, y: Tensor, dx: Tensor, config: RowsConfig) -> None:
    """dx from dy and y, all (M, N) with unit column stride and N <= config.block_n."""
    _launch_rows(_softmax_bwd_kernel, (dy, y, dx), config)


def _launch_rows(kernel, tensors: tuple[Tensor, ...], config: RowsConfig) -> None:
    n_rows, n_cols = tensors[0].shape
    strides = tuple(t.stride(0) for t in tensors)
    prepared.launch(
        kernel,
        tensors,
        -(-n_rows // config.block_m),
        (*strides, n_rows, n_cols),
        (config.block_m, config.block_n, _common_vector((n_cols, *strides), tensors[0].element_size())),
        config.num_warps,
    )


def _common_vector(sizes: tuple[int, ...], itemsize: int) -> int:
    """Elements in 16 bytes if all sizes are multiples of them and the compiler does not know; else 1."""
    # By itself, Triton looks for multiples of 16: 1000 columns of a 16-bit dtype would be read one by one.
    if all(size % 16 == 0 for size in sizes):
        return 1
    vector = 16 // itemsize
    return vector if all(size % vector == 0 for size in sizes) else 1


Config = RowsConfig | TeamConfig | WideConfig


# By itemsize: (widest row, configuration). Small parts leave more programs to wait for one another's words; wide rows
# are faster in fewer, larger parts, and need them to fit into a team.
_TEAMS = {
    2: ((65_536, TeamConfig(4096, 2)), (524_288, TeamConfig(16_384, 4)), (1_048_576, TeamConfig(32_768, 8))),
    4: ((262_144, TeamConfig(8192, 4)), (524_288, TeamConfig(16_384, 16))),
}


@functools.lru_cache
def choose(n_cols: int, itemsize: int, backward: bool, max_parts: int, cut: bool = False) -> Config:
    """The kernels and their configuration for rows of `n_cols` elements of `itemsize` bytes, `cut` as by `_cut`.

    Measured on an H200 (profiles/records/LOG.md): rows of up to 16 KB are fastest held by one program without more ado,
    unless they are cut: then a team of one reads vectors, and several small programs are better than a large one.
    """
    block_n = triton.next_power_of_2(n_cols)
    if cut and 2048 < block_n * itemsize <= 16_384 and n_cols + 128 // itemsize <= block_n + 1:
        return TeamConfig(block_n, num_warps=min(8, block_n * itemsize // (1024 if backward else 2048)))
    if block_n <= 1024:
        return RowsConfig(1024 // block_n, block_n, num_warps=1)
    if block_n <= 4096:
        return RowsConfig(1, block_n, num_warps=block_n // (512 if backward else 1024))
    if block_n <= 8192:
        return RowsConfig(1, block_n, num_warps=16)
    if itemsize == 4 and block_n <= 16384:
        return RowsConfig(1, block_n, num_warps=16 if backward else 32)
    # One program a row, if it would not leave much of its registers idle.
    fits = 4 * n_cols >= 3 * block_n and not cut
    if itemsize == 2 and block_n <= 32768 and (fits or max_parts == 1):
        return TeamConfig(block_n, num_warps=block_n // (2048 if backward else 1024))
    for widest, config in _TEAMS[itemsize]:
        if n_cols <= min(widest, max_parts * config.block):
            return config
    return WideConfig()


def _cut(tensors: tuple[Tensor, ...]) -> bool:
    """Whether rows end between vectors, which the kernels of teams can read nevertheless."""
    x = tensors[0]
    return x.shape[1] * x.element_size() % 16 != 0 and elements_per_vector(tensors) > 1


def softmax_fwd(x: Tensor, dim: int) -> Tensor:
    """softmax of x along `dim` >= 0, for any shape and layout, in fp32, bf16 or fp16."""
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    x_rows, y_rows = _rows(x, dim), _rows(y, dim)
    config = choose(x_rows.shape[1], x.element_size(), False, max_parts(x), _cut((x_rows, y_rows)))
    if isinstance(config, RowsConfig):
        rows_fwd(x_rows, y_rows, config)
    elif isinstance(config, TeamConfig):
        team_fwd(x_rows, y_rows, config)
    else:
        wide_fwd(x_rows, y_rows, config)
    return _written(y, y_rows, dim)


def softmax_bwd(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    """dx = y * (dy - sum(y * dy)) along `dim` >= 0; dy in the shape and dtype of y; any layouts."""
    dx = torch.empty_like(y)
    if y.numel() == 0:
        return dx
    dy_rows, y_rows, dx_rows = _rows(dy, dim), _rows(y, dim), _rows(dx, dim)
    config = choose(y_rows.shape[1], y.element_size(), True, max_parts(y), _cut((dy_rows, y_rows, dx_rows)))
    if isinstance(config, RowsConfig):
        rows_bwd(dy_rows, y_rows, dx_rows, config)
    elif isinstance(config, TeamConfig):
        team_bwd(dy_rows, y_rows, dx_rows, config)
    else:
        wide_bwd(dy_rows, y_rows, dx_rows, config)
    return _written(dx, dx_rows, dim)


def _rows(x: Tensor, dim: int) -> Tensor:
    """x as (M, N) with unit column stride: a view where its layout allows one, else a copy."""
    if x.ndim == 2 and dim == 1 and x.stride(1) == 1:
        return x
    if x.ndim == 0:
        return x.view(1, 1)
    if dim != x.ndim - 1:
        x = x.movedim(dim, -1)
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _written(out: Tensor, out_rows: Tensor, dim: int) -> Tensor:
    """`out`, into which `out_rows` is copied unless it is a view of it."""
    if out_rows.data_ptr() != out.data_ptr():
        moved = out.movedim(dim, -1)
        moved.copy_(out_rows.view(moved.shape))
    return out
