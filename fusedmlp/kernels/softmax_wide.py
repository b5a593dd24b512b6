"""Softmax over rows wider than one program can hold, forward and backward.

Two ways. A **team** of programs shares a row: each holds one part of it in registers, posts what the others need, (max,
sum) or sum(y * dy), as one 8-byte word in global memory, and waits for the others' words. So each element is read once.
The **split** way needs no waiting: one kernel writes the parts' words, a second one reads every element again. It serves
rows with too many parts for a team, and the interpreter, which runs programs one after another.

A word is written by one program and combined by all in the same order, so results are bit-equal from run to run.
"""

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

# A team has at most one program for each lane of a warp: see `_collect`.
_MAX_TEAM = 32


@triton.jit
def _post(word_ptr, high, low):
    """Publish two fp32 values as one 8-byte word, which nobody can see half written."""
    high = high.to(tl.int32, bitcast=True).to(tl.int64)
    low = low.to(tl.int32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(word_ptr, (high << 32) | (low & 0xFFFFFFFF), sem="relaxed")


@triton.jit
def _collect(words_ptr, parts):
    """Wait until all parts of a row have posted; return their (high, low), (-inf, 0) beyond `parts`.

    A word that nobody has written is 0, and no word that is posted is. Each warp waits for itself. All of its lanes agree
    when to stop because there are 32 words, one for each lane; with fewer, two lanes would watch the same word and could
    see it change at different times, and with more, a warp would depend on another one's words.
    """
    offs = tl.arange(0, 32)
    words = tl.load(words_ptr + offs, mask=offs < parts, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(words_ptr + offs, mask=offs < parts, other=1, volatile=True)
    high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(offs < parts, high, float("-inf")), tl.where(offs < parts, low, 0.0)


@triton.jit
def _softmax_fwd_team_kernel(
    x_ptr, y_ptr, work_ptr, stride_xm, stride_ym, n_cols, width, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one part (width columns) of one row of x, shares its (max, sum), and writes that part of y."""
    # Tasks are taken in the order in which programs start: a task waits only for tasks of its own row, of which all but
    # the newest row's have started. So the oldest rows always finish and make room.
    task = tl.atomic_add(work_ptr, 1, sem="relaxed")
    row = task // parts
    start = (task % parts) * width
    offs = tl.arange(0, BLOCK)
    mask = offs < tl.minimum(width, n_cols - start)
    x = tl.load(x_ptr + row * stride_xm + start + offs, mask=mask, other=float("-inf")).to(tl.float32)
    part_max = tl.max(x, axis=0)
    # A part of -inf only must not become NaN: the row's maximum may be elsewhere.
    e = tl.exp2((x - tl.where(part_max == float("-inf"), 0.0, part_max)) * _LOG2_E)
    words_ptr = work_ptr + 1 + row * parts
    _post(words_ptr + task % parts, part_max, tl.sum(e, axis=0))
    maxima, sums = _collect(words_ptr, parts)
    row_max = tl.max(maxima, axis=0)
    row_sum = tl.sum(sums * tl.exp2((maxima - row_max) * _LOG2_E), axis=0)
    y = e * (tl.exp2((part_max - row_max) * _LOG2_E) / row_sum)
    tl.store(y_ptr + row * stride_ym + start + offs, y, mask=mask)


@triton.jit
def _softmax_bwd_team_kernel(
    dy_ptr, y_ptr, dx_ptr, work_ptr, stride_dym, stride_ym, stride_dxm, n_cols, width, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one part of one row of dy and y, shares its sum(y * dy), and writes that part of dx."""
    task = tl.atomic_add(work_ptr, 1, sem="relaxed")
    row = task // parts
    start = (task % parts) * width
    offs = tl.arange(0, BLOCK)
    mask = offs < tl.minimum(width, n_cols - start)
    y = tl.load(y_ptr + row * stride_ym + start + offs, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride_dym + start + offs, mask=mask, other=0.0).to(tl.float32)
    part_dot = tl.sum(y * dy, axis=0)
    words_ptr = work_ptr + 1 + row * parts
    # The first value only makes the word differ from 0.
    _post(words_ptr + task % parts, tl.full((), 1.0, tl.float32), part_dot)
    _, dots = _collect(words_ptr, parts)
    dx = y * (dy - tl.sum(dots, axis=0))
    tl.store(dx_ptr + row * stride_dxm + start + offs, dx, mask=mask)


@triton.jit
def _softmax_stats_kernel(
    x_ptr, max_ptr, sum_ptr, stride_xm, n_cols, width, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one part (width columns) of one row of x and writes its maximum and its sum of exp."""
    task = tl.program_id(0).to(tl.int64)
    row = task // parts
    start = (task % parts) * width
    end = tl.minimum(start + width, n_cols)
    offs = tl.arange(0, BLOCK)
    # Every lane keeps its own running maximum and sum; they are combined once, at the end.
    lane_max = tl.full((BLOCK,), float("-inf"), tl.float32)
    lane_sum = tl.zeros((BLOCK,), tl.float32)
    for block in range(start, end, BLOCK):
        x_ptrs = x_ptr + row * stride_xm + block + offs
        x = tl.load(x_ptrs, mask=block + offs < end, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(lane_max, x)
        # While a lane has seen nothing but -inf, 0 takes the place of its maximum: -inf - -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        lane_sum = lane_sum * tl.exp2((lane_max - shift) * _LOG2_E) + tl.exp2((x - shift) * _LOG2_E)
        lane_max = new_max
    part_max = tl.max(lane_max, axis=0)
    shift = tl.where(part_max == float("-inf"), 0.0, part_max)
    tl.store(max_ptr + task, part_max)
    tl.store(sum_ptr + task, tl.sum(lane_sum * tl.exp2((lane_max - shift) * _LOG2_E), axis=0))


@triton.jit
def _softmax_scale_kernel(
    x_ptr, max_ptr, sum_ptr, y_ptr, stride_xm, stride_ym, n_cols, width, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program reads all parts' (max, sum) of one row and one part of x, and writes that part of y."""
    task = tl.program_id(0).to(tl.int64)
    row = task // parts
    start = (task % parts) * width
    end = tl.minimum(start + width, n_cols)
    offs_p = tl.arange(0, PARTS)
    maxima = tl.load(max_ptr + row * parts + offs_p, mask=offs_p < parts, other=float("-inf"))
    sums = tl.load(sum_ptr + row * parts + offs_p, mask=offs_p < parts, other=0.0)
    row_max = tl.max(maxima, axis=0)
    scale = 1.0 / tl.sum(sums * tl.exp2((maxima - row_max) * _LOG2_E), axis=0)
    offs = tl.arange(0, BLOCK)
    for block in range(start, end, BLOCK):
        mask = block + offs < end
        x = tl.load(x_ptr + row * stride_xm + block + offs, mask=mask, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + row * stride_ym + block + offs, tl.exp2((x - row_max) * _LOG2_E) * scale, mask=mask)


@triton.jit
def _softmax_dot_kernel(
    dy_ptr, y_ptr, dot_ptr, stride_dym, stride_ym, n_cols, width, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program reads one part of one row of dy and y and writes its sum(y * dy)."""
    task = tl.program_id(0).to(tl.int64)
    row = task // parts
    start = (task % parts) * width
    end = tl.minimum(start + width, n_cols)
    offs = tl.arange(0, BLOCK)
    lane_dot = tl.zeros((BLOCK,), tl.float32)
    for block in range(start, end, BLOCK):
        mask = block + offs < end
        y = tl.load(y_ptr + row * stride_ym + block + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dym + block + offs, mask=mask, other=0.0).to(tl.float32)
        lane_dot += y * dy
    tl.store(dot_ptr + task, tl.sum(lane_dot, axis=0))


@triton.jit
def _softmax_dx_kernel(
    dy_ptr, y_ptr, dot_ptr, dx_ptr, stride_dym, stride_ym, stride_dxm, n_cols, width, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program reads all parts' sums of one row and one part of dy and y, and writes that part of dx."""
    task = tl.program_id(0).to(tl.int64)
    row = task // parts
    start = (task % parts) * width
    end = tl.minimum(start + width, n_cols)
    offs_p = tl.arange(0, PARTS)
    dot = tl.sum(tl.load(dot_ptr + row * parts + offs_p, mask=offs_p < parts, other=0.0), axis=0)
    offs = tl.arange(0, BLOCK)
    for block in range(start, end, BLOCK):
        mask = block + offs < end
        y = tl.load(y_ptr + row * stride_ym + block + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * stride_dym + block + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * stride_dxm + block + offs, y * (dy - dot), mask=mask)


@dataclass(frozen=True)
class TeamConfig:
    """Columns that each program holds, at most, and its warps."""

    block: int
    num_warps: int


_SPLIT_BLOCK = 4096
_SPLIT_WARPS = 8


def wide_fwd(x: Tensor, y: Tensor) -> None:
    """y = softmax of each row of x, both (M, N) with unit column stride."""
    config = team_config(x, _FWD_TEAM)
    if config is None:
        split_fwd(x, y)
    else:
        team_fwd(x, y, config)


def wide_bwd(dy: Tensor, y: Tensor, dx: Tensor) -> None:
    """dx from dy and y, all (M, N) with unit column stride."""
    config = team_config(y, _BWD_TEAM)
    if config is None:
        split_bwd(dy, y, dx)
    else:
        team_bwd(dy, y, dx, config)


_FWD_TEAM = TeamConfig(block=16384, num_warps=16)
_BWD_TEAM = TeamConfig(block=8192, num_warps=16)


def team_config(x: Tensor, config: TeamConfig) -> TeamConfig | None:
    """`config`, or None where a row cannot have a team: the programs of one must all fit on the GPU at once."""
    parts = triton.cdiv(x.shape[1], config.block)
    if not x.is_cuda or _INTERPRETER or parts > min(_MAX_TEAM, _num_sms(x.device)):
        return None
    return config


@functools.lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def team_fwd(x: Tensor, y: Tensor, config: TeamConfig) -> None:
    """As `wide_fwd`, a team of programs for each row."""
    _launch_team(_softmax_fwd_team_kernel, (x, y), config)


def team_bwd(dy: Tensor, y: Tensor, dx: Tensor, config: TeamConfig) -> None:
    """As `wide_bwd`, a team of programs for each row."""
    _launch_team(_softmax_bwd_team_kernel, (dy, y, dx), config)


def _launch_team(kernel, tensors: tuple[Tensor, ...], config: TeamConfig) -> None:
    n_rows, n_cols = tensors[0].shape
    parts = triton.cdiv(n_cols, config.block)
    width = _part_width(n_cols, parts)
    # The number of tasks taken, then the parts' words.
    work = torch.zeros(1 + n_rows * parts, dtype=torch.int64, device=tensors[0].device)
    strides = [t.stride(0) for t in tensors]
    kernel[(n_rows * parts,)](*tensors, work, *strides, n_cols, width, parts, config.block, num_warps=config.num_warps)


def split_fwd(x: Tensor, y: Tensor) -> None:
    """As `wide_fwd`, in two kernels."""
    (n_rows, n_cols), parts, width = x.shape, *_split(x)
    maxima, sums = torch.empty((2, n_rows * parts), dtype=torch.float32, device=x.device)
    sizes = (n_cols, width, parts, _SPLIT_BLOCK)
    grid = (n_rows * parts,)
    _softmax_stats_kernel[grid](x, maxima, sums, x.stride(0), *sizes, num_warps=_SPLIT_WARPS)
    _softmax_scale_kernel[grid](
        x, maxima, sums, y, x.stride(0), y.stride(0), *sizes, triton.next_power_of_2(parts), num_warps=_SPLIT_WARPS
    )


def split_bwd(dy: Tensor, y: Tensor, dx: Tensor) -> None:
    """As `wide_bwd`, in two kernels."""
    (n_rows, n_cols), parts, width = y.shape, *_split(y)
    dots = torch.empty(n_rows * parts, dtype=torch.float32, device=y.device)
    sizes = (n_cols, width, parts, _SPLIT_BLOCK)
    grid = (n_rows * parts,)
    strides = (dy.stride(0), y.stride(0))
    _softmax_dot_kernel[grid](dy, y, dots, *strides, *sizes, num_warps=_SPLIT_WARPS)
    _softmax_dx_kernel[grid](
        dy, y, dots, dx, *strides, dx.stride(0), *sizes, triton.next_power_of_2(parts), num_warps=_SPLIT_WARPS
    )


def _split(x: Tensor) -> tuple[int, int]:
    """(parts, columns of a part) of a row: parts of 16 blocks, of which one program's lanes can combine 1024."""
    n_cols = x.shape[1]
    parts = min(1024, triton.cdiv(n_cols, 16 * _SPLIT_BLOCK))
    return parts, _part_width(n_cols, parts)


def _part_width(n_cols: int, parts: int) -> int:
    """Columns of one part: equal shares, rounded up to 16 so that parts start where wide loads may."""
    return triton.cdiv(triton.cdiv(n_cols, parts), 16) * 16
