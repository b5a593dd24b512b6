"""Softmax over rows, forward and backward: the launchers, and the kernels for rows that one program can hold.

    y = exp(x - max(x)) / sum(exp(x - max(x)))        dx = y * (dy - sum(y * dy))

M: n_rows, all dimensions but one, flattened. N: n_cols, the dimension that sums to one.

A row up to `ROW_BLOCK` columns is read once by one program, narrow rows several at a time. Wider rows are in
`softmax_wide.py`. Infinities need no guard here: a row of -inf, or one with +inf or NaN, becomes NaN by itself
(-inf - -inf, inf - inf), as in torch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmlp.kernels import softmax_wide
from fusedmlp.kernels.launch import on_device_of

# Columns that one program holds in registers: 32 fp32 values in each of 512 threads.
ROW_BLOCK = 16384

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _softmax_fwd_kernel(
    x_ptr, y_ptr, stride_xm, stride_ym, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program reads every num_programs-th block of BLOCK_M whole rows of x and writes their softmax."""
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_cols
    first = tl.program_id(0).to(tl.int64)
    for block in tl.range(first, tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0), num_stages=NUM_STAGES):
        offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (offs_m < n_rows)[:, None] & mask_n[None, :]
        x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]
        x = tl.load(x_ptrs, mask=mask, other=float("-inf")).to(tl.float32)  # (M, N)
        e = tl.exp2((x - tl.max(x, axis=1)[:, None]) * _LOG2_E)
        y = e * (1.0 / tl.sum(e, axis=1))[:, None]
        tl.store(y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :], y, mask=mask)


@triton.jit
def _softmax_bwd_kernel(
    dy_ptr, y_ptr, dx_ptr, stride_dym, stride_ym, stride_dxm, n_rows, n_cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program reads every num_programs-th block of BLOCK_M whole rows of dy and y and writes dx."""
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_cols
    first = tl.program_id(0).to(tl.int64)
    for block in tl.range(first, tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0), num_stages=NUM_STAGES):
        offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (offs_m < n_rows)[:, None] & mask_n[None, :]
        dy_ptrs = dy_ptr + offs_m[:, None] * stride_dym + offs_n[None, :]
        y_ptrs = y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :]
        y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)  # (M, N)
        dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(y * dy, axis=1)[:, None])
        tl.store(dx_ptr + offs_m[:, None] * stride_dxm + offs_n[None, :], dx, mask=mask)


@dataclass(frozen=True)
class RowsConfig:
    """How rows of one width are spread over programs; `num_programs` None: one for each block of rows."""

    block_m: int
    num_warps: int
    num_stages: int = 1
    num_programs: int | None = None


def rows_fwd(x: Tensor, y: Tensor, config: RowsConfig) -> None:
    """y = softmax of each row of x, both (M, N) with unit column stride and N <= ROW_BLOCK."""
    _launch_rows(_softmax_fwd_kernel, (x, y), config)


def rows_bwd(dy: Tensor, y: Tensor, dx: Tensor, config: RowsConfig) -> None:
    """dx from dy and y, all (M, N) with unit column stride and N <= ROW_BLOCK."""
    _launch_rows(_softmax_bwd_kernel, (dy, y, dx), config)


def _launch_rows(kernel, tensors: tuple[Tensor, ...], config: RowsConfig) -> None:
    n_rows, n_cols = tensors[0].shape
    programs = triton.cdiv(n_rows, config.block_m)
    if config.num_programs is not None:
        programs = min(programs, config.num_programs)
    strides = [t.stride(0) for t in tensors]
    block_n = triton.next_power_of_2(n_cols)
    kernel[(programs,)](
        *tensors, *strides, n_rows, n_cols, config.block_m, block_n, config.num_stages, num_warps=config.num_warps
    )


def rows_config(n_cols: int) -> RowsConfig:
    """Enough columns per thread to keep wide loads in flight, and enough rows to fill a warp."""
    block_n = triton.next_power_of_2(n_cols)
    return RowsConfig(block_m=max(1, 1024 // block_n), num_warps=min(16, max(1, block_n // 1024)))


def softmax_fwd(x: Tensor, dim: int) -> Tensor:
    """softmax of x along `dim` >= 0, for any shape and layout, in fp32, bf16 or fp16."""
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    x_rows, y_rows = _rows(x, dim), _rows(y, dim)
    with on_device_of(x):
        if x_rows.shape[1] <= ROW_BLOCK:
            rows_fwd(x_rows, y_rows, rows_config(x_rows.shape[1]))
        else:
            softmax_wide.wide_fwd(x_rows, y_rows)
    return _written(y, y_rows, dim)


def softmax_bwd(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    """dx = y * (dy - sum(y * dy)) along `dim` >= 0; dy in the shape and dtype of y; any layouts."""
    dx = torch.empty_like(y)
    if y.numel() == 0:
        return dx
    dy_rows, y_rows, dx_rows = _rows(dy, dim), _rows(y, dim), _rows(dx, dim)
    with on_device_of(y):
        if y_rows.shape[1] <= ROW_BLOCK:
            rows_bwd(dy_rows, y_rows, dx_rows, rows_config(y_rows.shape[1]))
        else:
            softmax_wide.wide_bwd(dy_rows, y_rows, dx_rows)
    return _written(dx, dx_rows, dim)


def _rows(x: Tensor, dim: int) -> Tensor:
    """x as (M, N) with unit column stride: a view where its layout allows one, else a copy."""
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
