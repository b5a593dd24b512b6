"""Softmax over wide rows, forward and backward: each row in parts, each part read in chunks.

A **part** is one program's share of a row. It is read from memory once and again from the multiprocessor's L1 cache for
the passes after the first, so a program needs few registers and many programs are in flight: that is what hides the
time in which each of them waits.

The programs of one row are a **team**. Each posts what the others need, (max, sum) or sum(y * dy), as one 8-byte word
in global memory, and waits for the others' words. Words are combined by all in the same order, so results are bit-equal
from run to run. A row of one part needs no words; that is how the interpreter, which runs one program after another,
computes rows of any width.
"""

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _load_chunk(ptr, first, end, lead, other, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """CHUNK elements from `first` on, as fp32; `other` before `lead` and from `end` on."""
    offs = tl.arange(0, CHUNK)
    left = tl.minimum(end - first, CHUNK).to(tl.int32)
    if VECTOR == 1:
        return tl.load(ptr + first + offs, mask=offs < left, other=other).to(tl.float32)
    else:
        # Whole 16-byte vectors are read, with up to VECTOR - 1 elements of the rows before and after.
        x = tl.load(ptr + first + offs, mask=offs // VECTOR * VECTOR < left, other=other).to(tl.float32)
        skipped = tl.maximum(lead - first, 0).to(tl.int32)
        return tl.where((offs >= skipped) & (offs < left), x, other)


@triton.jit
def _store_chunk(ptr, first, end, lead, values, CHUNK: tl.constexpr, VECTOR: tl.constexpr):
    """The counterpart of `_load_chunk`; nothing outside `lead` to `end` is written."""
    offs = tl.arange(0, CHUNK)
    left = tl.minimum(end - first, CHUNK).to(tl.int32)
    if VECTOR == 1:
        tl.store(ptr + first + offs, values, mask=offs < left)
    elif (first >= lead) & (left == CHUNK):
        tl.store(ptr + first + offs, values)
    else:
        skipped = tl.maximum(lead - first, 0).to(tl.int32)
        tl.store(ptr + first + offs, values, mask=(offs >= skipped) & (offs < left))


@triton.jit
def _row_start(row, stride, VECTOR: tl.constexpr):
    """(offset of the row's first element, rounded down to a multiple of VECTOR; what was cut off)."""
    if VECTOR == 1:
        return row * stride, 0
    else:
        lead = row * stride % VECTOR
        return tl.multiple_of(row * stride - lead, VECTOR), lead


@triton.jit
def _softmax_fwd_wide_kernel(
    x_ptr, y_ptr, work_ptr, stride_xm, stride_ym, n_cols, width,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program reads one part (width columns) of one row of x, shares its (max, sum), and writes that part of y."""
    row, part = _take_task(work_ptr, PARTS)
    x_start, lead = _row_start(row, stride_xm, VECTOR)
    y_start, _ = _row_start(row, stride_ym, VECTOR)
    x_ptr += x_start
    y_ptr += y_start
    first = part * width
    end = tl.minimum(first + width, n_cols + lead)

    lane_max = tl.full((CHUNK,), float("-inf"), tl.float32)
    for chunk in range(first, end, CHUNK):
        lane_max = tl.maximum(lane_max, _load_chunk(x_ptr, chunk, end, lead, float("-inf"), CHUNK, VECTOR))
    row_max = tl.max(lane_max, axis=0)

    # 0 takes the place of a part's maximum of -inf: the row's maximum may be elsewhere, and -inf - -inf is NaN.
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    lane_sum = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(first, end, CHUNK):
        x = _load_chunk(x_ptr, chunk, end, lead, float("-inf"), CHUNK, VECTOR)
        lane_sum += tl.exp2((x - shift) * 1.4426950408889634)
    row_sum = tl.sum(lane_sum, axis=0)

    if PARTS > 1:
        words_ptr = work_ptr + 1 + row * PARTS
        _post(words_ptr + part, row_max, row_sum)
        maxima, sums = _collect(words_ptr, PARTS)
        row_max = tl.max(maxima, axis=0)
        row_sum = tl.sum(sums * tl.exp2((maxima - row_max) * 1.4426950408889634), axis=0)

    scale = 1.0 / row_sum
    for chunk in range(first, end, CHUNK):
        x = _load_chunk(x_ptr, chunk, end, lead, float("-inf"), CHUNK, VECTOR)
        y = tl.exp2((x - row_max) * 1.4426950408889634) * scale
        _store_chunk(y_ptr, chunk, end, lead, y, CHUNK, VECTOR)


@triton.jit
def _softmax_bwd_wide_kernel(
    dy_ptr, y_ptr, dx_ptr, work_ptr, stride_dym, stride_ym, stride_dxm, n_cols, width,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program reads one part of one row of dy and y, shares its sum(y * dy), and writes that part of dx."""
    row, part = _take_task(work_ptr, PARTS)
    dy_start, lead = _row_start(row, stride_dym, VECTOR)
    y_start, _ = _row_start(row, stride_ym, VECTOR)
    dx_start, _ = _row_start(row, stride_dxm, VECTOR)
    dy_ptr += dy_start
    y_ptr += y_start
    dx_ptr += dx_start
    first = part * width
    end = tl.minimum(first + width, n_cols + lead)

    lane_dot = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(first, end, CHUNK):
        y = _load_chunk(y_ptr, chunk, end, lead, 0.0, CHUNK, VECTOR)
        lane_dot += y * _load_chunk(dy_ptr, chunk, end, lead, 0.0, CHUNK, VECTOR)
    dot = tl.sum(lane_dot, axis=0)

    if PARTS > 1:
        words_ptr = work_ptr + 1 + row * PARTS
        # The first value only makes the word differ from 0.
        _post(words_ptr + part, tl.full((), 1.0, tl.float32), dot)
        _, dots = _collect(words_ptr, PARTS)
        dot = tl.sum(dots, axis=0)

    for chunk in range(first, end, CHUNK):
        y = _load_chunk(y_ptr, chunk, end, lead, 0.0, CHUNK, VECTOR)
        dy = _load_chunk(dy_ptr, chunk, end, lead, 0.0, CHUNK, VECTOR)
        _store_chunk(dx_ptr, chunk, end, lead, y * (dy - dot), CHUNK, VECTOR)


@dataclass(frozen=True)
class WideConfig:
    """Columns of a part (at least; a team has at most 32 parts), elements that are read at a time, and warps."""

    width: int
    chunk: int
    num_warps: int


def wide_fwd(x: Tensor, y: Tensor, config: WideConfig) -> None:
    """y = softmax of each row of x, both (M, N) with unit column stride, N of any size."""
    _launch(_softmax_fwd_wide_kernel, (x, y), config)


def wide_bwd(dy: Tensor, y: Tensor, dx: Tensor, config: WideConfig) -> None:
    """dx from dy and y, all (M, N) with unit column stride, N of any size."""
    _launch(_softmax_bwd_wide_kernel, (dy, y, dx), config)


def _launch(kernel, tensors: tuple[Tensor, ...], config: WideConfig) -> None:
    n_rows, n_cols = tensors[0].shape
    vector = _vector(tensors)
    parts = _num_parts(tensors[0], config)
    # Equal shares, in multiples of 16 so that each begins where a wide access may.
    width = triton.cdiv(triton.cdiv(n_cols + vector - 1, parts), 16) * 16
    # The number of tasks taken, then the words.
    work = torch.zeros(1 + n_rows * parts if parts > 1 else 1, dtype=torch.int64, device=tensors[0].device)
    strides = [t.stride(0) for t in tensors]
    chunk = chunk_of(config, vector)
    kernel[(n_rows * parts,)](*tensors, work, *strides, n_cols, width, parts, chunk, vector, num_warps=config.num_warps)


def chunk_of(config: WideConfig, vector: int) -> int:
    """Elements read at a time: fewer where masks of single elements take registers as well."""
    return config.chunk if vector == 1 else min(config.chunk, 256 * config.num_warps)


def _num_parts(x: Tensor, config: WideConfig) -> int:
    """Programs for each row: parts of `config.width`, or smaller ones where there are too few rows to fill the GPU."""
    if _INTERPRETER or not x.is_cuda:
        return 1
    n_rows, n_cols = x.shape
    # All programs of a team must be on the GPU at once.
    sms = _num_sms(x.device)
    parts = triton.cdiv(n_cols, config.width)
    if n_rows * parts < 2 * sms:
        parts = max(parts, min(triton.cdiv(2 * sms, n_rows), n_cols // 2048))
    return min(parts, MAX_PARTS, sms)


def _vector(tensors: tuple[Tensor, ...]) -> int:
    """Elements in 16 bytes where rows begin between such vectors, and alike in all tensors; else 1.

    Where every row begins on a multiple of 16 bytes, the compiler knows it and needs no help.
    """
    vector = 16 // tensors[0].element_size()
    strides = {t.stride(0) % vector for t in tensors}
    if len(strides) > 1 or strides == {0} or any(t.data_ptr() % 16 for t in tensors):
        return 1
    return vector


@functools.lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
