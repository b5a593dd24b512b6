"""Softmax over rows that several programs share, or that fill one: forward and backward.

Each program holds one **part** of a row in registers, so that every element is read once. The programs of a row are a
**team**: each posts what the others need, (max, sum) or sum(y * dy), as one 8-byte word in global memory, and waits for
the others' words. Words are combined by all in the same order, so results are bit-equal from run to run. While one
program waits, others on the same multiprocessor load and store: the more of them fit, the better, which is why 16-bit
parts are held as they came and converted again for each pass (`_forget`).
"""

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmlp.kernels import prepared
from fusedmlp.kernels.launch import num_sms
from fusedmlp.kernels.row_vectors import (
    elements_per_vector,
    ends_of_row,
    inner_vectors,
    longest_lead,
    part_width,
    row_start,
)

_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

# A team has at most one program for each lane of a warp: see `_collect`.
MAX_PARTS = 32


@triton.jit
def _post(word_ptr, high, low):
    """Publish two fp32 values as one 8-byte word, which nobody can see half written."""
    high = high.to(tl.int32, bitcast=True).to(tl.int64)
    low = low.to(tl.int32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(word_ptr, (high << 32) | (low & 0xFFFFFFFF), sem="relaxed")


@triton.jit
def _collect(words_ptr, PARTS: tl.constexpr):
    """Wait until all parts of a row have posted; return their (high, low), (-inf, 0) beyond PARTS.

    A word that nobody has written is 0, and no word that is posted is. Each warp waits for itself. All of its lanes
    agree when to stop because there are 32 words, one for each lane; with fewer, two lanes would watch the same word
    and could see it change at different times, and with more, a warp would depend on another one's words.
    """
    offs = tl.arange(0, 32)
    words = tl.load(words_ptr + offs, mask=offs < PARTS, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(words_ptr + offs, mask=offs < PARTS, other=1, volatile=True)
    high = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    low = words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(offs < PARTS, high, float("-inf")), tl.where(offs < PARTS, low, 0.0)


@triton.jit
def _take_task(work_ptr, PARTS: tl.constexpr):
    """(row, part) of this program.

    Tasks are taken in the order in which programs start. A program waits only for its own team, and of all teams only
    the newest can have members that have not started: so the others finish and make room for these.
    """
    if PARTS == 1:
        return tl.program_id(0).to(tl.int64), tl.full((), 0, tl.int64)
    else:
        task = tl.atomic_add(work_ptr, 1, sem="relaxed")
        return task // PARTS, task % PARTS


@triton.jit
def _zero_after(zero, value):
    """`zero`, but not before `value` is known: what depends on it is not computed while the program still waits.

    For a NaN it is 1, which may spoil what is then multiplied by NaN.
    """
    return zero + (value != value).to(tl.int32)


@triton.jit
def _forget(x, zero, PACKED: tl.constexpr):
    """x, and the compiler cannot know: it would keep the fp32 copies of a 16-bit x in registers, twice as many."""
    if PACKED:
        zeros = tl.full(x.shape, 0, tl.int16) + zero.to(tl.int16)
        return tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zeros], x.dtype, is_pure=True, pack=2)
    else:
        return x


@triton.jit(do_not_specialize=["zero"])
def _softmax_fwd_team_kernel(
    x_ptr, y_ptr, work_ptr, stride_xm, stride_ym, n_cols, width, zero,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program reads one part (width columns) of one row of x, shares its (max, sum), and writes that part of y."""
    row, part = _take_task(work_ptr, PARTS)
    x_start, lead = row_start(row, stride_xm, VECTOR)
    y_start, _ = row_start(row, stride_ym, VECTOR)
    first = part * width
    low = tl.maximum(lead - first, 0).to(tl.int32)
    high = tl.minimum(n_cols + lead - first, width).to(tl.int32)
    x_ptr += x_start + first
    y_ptr += y_start + first
    offs = tl.arange(0, BLOCK)
    mask = inner_vectors(offs, low, high, VECTOR)

    x = tl.load(x_ptr + offs, mask=mask, other=float("-inf"))
    if VECTOR > 1:
        end_offs, end_mask = ends_of_row(low, high, VECTOR)
        x_ends = tl.load(x_ptr + end_offs, mask=end_mask, other=float("-inf")).to(tl.float32)
    row_max = tl.max(x.to(tl.float32), axis=0)
    if VECTOR > 1:
        row_max = tl.maximum(row_max, tl.max(x_ends, axis=0))
    x = _forget(x, zero, PACKED)
    # 0 takes the place of a part's maximum of -inf: the row's maximum may be elsewhere, and -inf - -inf is NaN.
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(tl.exp2((x.to(tl.float32) - shift) * 1.4426950408889634), axis=0)
    if VECTOR > 1:
        row_sum += tl.sum(tl.exp2((x_ends - shift) * 1.4426950408889634), axis=0)
    if PARTS > 1:
        words_ptr = work_ptr + 1 + row * PARTS
        _post(words_ptr + part, row_max, row_sum)
        maxima, sums = _collect(words_ptr, PARTS)
        row_max = tl.max(maxima, axis=0)
        row_sum = tl.sum(sums * tl.exp2((maxima - row_max) * 1.4426950408889634), axis=0)
    x = _forget(x, _zero_after(zero, row_sum), PACKED)
    scale = 1.0 / row_sum
    tl.store(y_ptr + offs, tl.exp2((x.to(tl.float32) - row_max) * 1.4426950408889634) * scale, mask=mask)
    if VECTOR > 1:
        y_ends = tl.exp2((x_ends - row_max) * 1.4426950408889634) * scale
        tl.store(y_ptr + end_offs, y_ends, mask=end_mask)


@triton.jit(do_not_specialize=["zero"])
def _softmax_bwd_team_kernel(
    dy_ptr, y_ptr, dx_ptr, work_ptr, stride_dym, stride_ym, stride_dxm, n_cols, width, zero,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One program reads one part of one row of dy and y, shares its sum(y * dy), and writes that part of dx."""
    row, part = _take_task(work_ptr, PARTS)
    dy_start, lead = row_start(row, stride_dym, VECTOR)
    y_start, _ = row_start(row, stride_ym, VECTOR)
    dx_start, _ = row_start(row, stride_dxm, VECTOR)
    first = part * width
    low = tl.maximum(lead - first, 0).to(tl.int32)
    high = tl.minimum(n_cols + lead - first, width).to(tl.int32)
    dy_ptr += dy_start + first
    y_ptr += y_start + first
    dx_ptr += dx_start + first
    offs = tl.arange(0, BLOCK)
    mask = inner_vectors(offs, low, high, VECTOR)

    y = tl.load(y_ptr + offs, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0)
    if VECTOR > 1:
        end_offs, end_mask = ends_of_row(low, high, VECTOR)
        y_ends = tl.load(y_ptr + end_offs, mask=end_mask, other=0.0).to(tl.float32)
        dy_ends = tl.load(dy_ptr + end_offs, mask=end_mask, other=0.0).to(tl.float32)
    dot = tl.sum(y.to(tl.float32) * dy.to(tl.float32), axis=0)
    if VECTOR > 1:
        dot += tl.sum(y_ends * dy_ends, axis=0)
    if PARTS > 1:
        words_ptr = work_ptr + 1 + row * PARTS
        # The first value only makes the word differ from 0.
        _post(words_ptr + part, tl.full((), 1.0, tl.float32), dot)
        _, dots = _collect(words_ptr, PARTS)
        dot = tl.sum(dots, axis=0)
    y = _forget(y, _zero_after(zero, dot), PACKED)
    dy = _forget(dy, _zero_after(zero, dot), PACKED)
    tl.store(dx_ptr + offs, y.to(tl.float32) * (dy.to(tl.float32) - dot), mask=mask)
    if VECTOR > 1:
        tl.store(dx_ptr + end_offs, y_ends * (dy_ends - dot), mask=end_mask)


@dataclass(frozen=True)
class TeamConfig:
    """Columns that a program can hold (a power of two), and its warps."""

    block: int
    num_warps: int


def team_fwd(x: Tensor, y: Tensor, config: TeamConfig) -> None:
    """y = softmax of each row of x, both (M, N) with unit column stride; a row needs at most `max_parts` programs."""
    _launch(_softmax_fwd_team_kernel, (x, y), config)


def team_bwd(dy: Tensor, y: Tensor, dx: Tensor, config: TeamConfig) -> None:
    """dx from dy and y, all (M, N) with unit column stride; a row needs at most `max_parts` programs."""
    _launch(_softmax_bwd_team_kernel, (dy, y, dx), config)


def _launch(kernel, tensors: tuple[Tensor, ...], config: TeamConfig) -> None:
    x = tensors[0]
    n_rows, n_cols = x.shape
    config = spread(config, x)
    vector = elements_per_vector(tensors)
    extent = n_cols + longest_lead(tensors, vector)
    if extent > max_parts(x) * config.block:
        # What is cut off in front of a row takes room in its parts; read element by element, a row has nothing cut off.
        vector, extent = 1, n_cols
    parts = -(-extent // config.block)
    packed = x.element_size() == 2 and not _INTERPRETER
    prepared.launch(
        kernel,
        (*tensors, work_area(x, n_rows, parts)),
        n_rows * parts,
        (*(t.stride(0) for t in tensors), n_cols, part_width(extent, parts), 0),
        (parts, config.block, vector, packed),
        config.num_warps,
    )


def max_parts(x: Tensor) -> int:
    """Programs that a team can have: all of them must be on the GPU at once. The interpreter runs one at a time.

    A quarter of the multiprocessors: on several streams, teams that each wait for their last members must not keep one
    another's from starting.
    """
    if _INTERPRETER or not x.is_cuda:
        return 1
    return max(1, min(MAX_PARTS, num_sms(x.device) // 4))


def spread(config: TeamConfig, x: Tensor) -> TeamConfig:
    """Smaller parts where there are too few rows to fill the GPU. Not of 16 KB or less, which are soon read: zeroing
    the words is a launch more."""
    n_rows, n_cols = x.shape
    if n_cols * x.element_size() <= 16_384:
        return config
    most = max_parts(x)
    block, num_warps = config.block, config.num_warps
    while block > 2048 and 2 * n_cols <= most * block and n_cols * n_rows < 2 * num_sms(x.device) * block:
        block, num_warps = block // 2, max(1, num_warps // 2)
    return config if block == config.block else TeamConfig(block, num_warps)


def work_area(x: Tensor, n_rows: int, parts: int) -> Tensor:
    """The number of tasks taken, then a word for each part, all 0; nothing where nobody waits."""
    return torch.zeros(1 + n_rows * parts, dtype=torch.int64, device=x.device) if parts > 1 else x
