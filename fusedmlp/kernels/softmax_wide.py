"""Softmax over rows wider than a team of programs can hold in registers: each part is read in chunks, once per pass.

A row of a million columns takes three passes forward and two backward; what the caches keep need not come from memory
again. Teams work as in `softmax_team.py`. With teams of one, this is also how the interpreter computes wide rows.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fusedmlp.kernels import prepared
from fusedmlp.kernels.row_vectors import (
    elements_per_vector,
    ends_of_row,
    inner_vectors,
    longest_lead,
    part_width,
    row_start,
)
from fusedmlp.kernels.softmax_team import _collect, _post, _take_task, max_parts, work_area


@triton.jit
def _chunk(start, low, high, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """Offsets of CHUNK elements of a row from `start` on, and which of them lie in whole vectors from low to high."""
    offs = start + tl.arange(0, CHUNK)
    return offs, inner_vectors(offs, low, high, VECTOR)


@triton.jit
def _softmax_fwd_wide_kernel(
    x_ptr, y_ptr, work_ptr, stride_xm, stride_ym, n_cols, width,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program reads one part (width columns) of one row of x, shares its (max, sum), and writes that part of y."""
    row, part = _take_task(work_ptr, PARTS)
    x_start, lead = row_start(row, stride_xm, VECTOR)
    y_start, _ = row_start(row, stride_ym, VECTOR)
    x_ptr += x_start
    y_ptr += y_start
    first = part * width
    low = tl.maximum(first, lead)
    high = tl.minimum(first + width, n_cols + lead)

    lane_max = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in range(first, high, CHUNK):
        offs, mask = _chunk(start, low, high, CHUNK, VECTOR)
        lane_max = tl.maximum(lane_max, tl.load(x_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32))
    row_max = tl.max(lane_max, axis=0)
    if VECTOR > 1:
        end_offs, end_mask = ends_of_row(low, high, VECTOR)
        x_ends = tl.load(x_ptr + end_offs, mask=end_mask, other=float("-inf")).to(tl.float32)
        row_max = tl.maximum(row_max, tl.max(x_ends, axis=0))

    # 0 takes the place of a part's maximum of -inf: the row's maximum may be elsewhere, and -inf - -inf is NaN.
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    lane_sum = tl.zeros((CHUNK,), tl.float32)
    for start in range(first, high, CHUNK):
        offs, mask = _chunk(start, low, high, CHUNK, VECTOR)
        x = tl.load(x_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
        lane_sum += tl.exp2((x - shift) * 1.4426950408889634)
    row_sum = tl.sum(lane_sum, axis=0)
    if VECTOR > 1:
        row_sum += tl.sum(tl.exp2((x_ends - shift) * 1.4426950408889634), axis=0)

    if PARTS > 1:
        words_ptr = work_ptr + 1 + row * PARTS
        _post(words_ptr + part, row_max, row_sum)
        maxima, sums = _collect(words_ptr, PARTS)
        row_max = tl.max(maxima, axis=0)
        row_sum = tl.sum(sums * tl.exp2((maxima - row_max) * 1.4426950408889634), axis=0)

    scale = 1.0 / row_sum
    for start in range(first, high, CHUNK):
        offs, mask = _chunk(start, low, high, CHUNK, VECTOR)
        x = tl.load(x_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + offs, tl.exp2((x - row_max) * 1.4426950408889634) * scale, mask=mask)
    if VECTOR > 1:
        y_ends = tl.exp2((x_ends - row_max) * 1.4426950408889634) * scale
        tl.store(y_ptr + end_offs, y_ends, mask=end_mask)


@triton.jit
def _softmax_bwd_wide_kernel(
    dy_ptr, y_ptr, dx_ptr, work_ptr, stride_dym, stride_ym, stride_dxm, n_cols, width,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program reads one part of one row of dy and y, shares its sum(y * dy), and writes that part of dx."""
    row, part = _take_task(work_ptr, PARTS)
    dy_start, lead = row_start(row, stride_dym, VECTOR)
    y_start, _ = row_start(row, stride_ym, VECTOR)
    dx_start, _ = row_start(row, stride_dxm, VECTOR)
    dy_ptr += dy_start
    y_ptr += y_start
    dx_ptr += dx_start
    first = part * width
    low = tl.maximum(first, lead)
    high = tl.minimum(first + width, n_cols + lead)

    lane_dot = tl.zeros((CHUNK,), tl.float32)
    for start in range(first, high, CHUNK):
        offs, mask = _chunk(start, low, high, CHUNK, VECTOR)
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        lane_dot += y * tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dot = tl.sum(lane_dot, axis=0)
    if VECTOR > 1:
        end_offs, end_mask = ends_of_row(low, high, VECTOR)
        y_ends = tl.load(y_ptr + end_offs, mask=end_mask, other=0.0).to(tl.float32)
        dy_ends = tl.load(dy_ptr + end_offs, mask=end_mask, other=0.0).to(tl.float32)
        dot += tl.sum(y_ends * dy_ends, axis=0)

    if PARTS > 1:
        words_ptr = work_ptr + 1 + row * PARTS
        # The first value only makes the word differ from 0.
        _post(words_ptr + part, tl.full((), 1.0, tl.float32), dot)
        _, dots = _collect(words_ptr, PARTS)
        dot = tl.sum(dots, axis=0)

    for start in range(first, high, CHUNK):
        offs, mask = _chunk(start, low, high, CHUNK, VECTOR)
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, y * (dy - dot), mask=mask)
    if VECTOR > 1:
        tl.store(dx_ptr + end_offs, y_ends * (dy_ends - dot), mask=end_mask)


@dataclass(frozen=True)
class WideConfig:
    """Elements that a program reads at a time (a power of two), and its warps."""

    chunk: int = 4096
    num_warps: int = 8


def wide_fwd(x: Tensor, y: Tensor, config: WideConfig) -> None:
    """y = softmax of each row of x, both (M, N) with unit column stride, N of any size."""
    _launch(_softmax_fwd_wide_kernel, (x, y), config)


def wide_bwd(dy: Tensor, y: Tensor, dx: Tensor, config: WideConfig) -> None:
    """dx from dy and y, all (M, N) with unit column stride, N of any size."""
    _launch(_softmax_bwd_wide_kernel, (dy, y, dx), config)


def _launch(kernel, tensors: tuple[Tensor, ...], config: WideConfig) -> None:
    x = tensors[0]
    n_rows, n_cols = x.shape
    vector = elements_per_vector(tensors)
    parts = min(max_parts(x), max(1, n_cols // config.chunk))
    prepared.launch(
        kernel,
        (*tensors, work_area(x, n_rows, parts)),
        n_rows * parts,
        (*(t.stride(0) for t in tensors), n_cols, part_width(n_cols + longest_lead(tensors, vector), parts)),
        (parts, config.chunk, vector),
        config.num_warps,
    )
