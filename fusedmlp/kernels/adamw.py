"""AdamW with clipping by the global norm, over any number of tensors, in three launches and the least traffic.

The gradients are read once for their norm and once more for the update, which scales them on the way: clipped gradients
are never written. Per parameter that is 16 bytes in bf16 and 32 in fp32 (gradient twice, parameter and both moments
read and written); clipping apart from the update takes 20 and 40.

    _square_sums_kernel   a sum of squares for each chunk of the gradients
    _clip_kernel          the norm, the factor that clips, and the steps counted, by one program
    _adamw_kernel         the update, chunk by chunk

Tensors lie anywhere: a table has a row of COLUMNS 64-bit words for each, with the addresses of what belongs to it, and
chunks, (tensor, ordinal) in 32 bits each, divide them into programs. The same inputs give the same bits.

Decoupled weight decay: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; clipping as in
`torch.nn.utils.clip_grad_norm_`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmlp.kernels import prepared
from fusedmlp.kernels.pdl import follow

# Words of a row: addresses of parameter, gradient, moments, step count (fp32), learning rate (fp32) and settings, and
# the number of elements.
COLUMNS = 8
# fp32 settings of a group of parameters, in this order: 1 - beta1, 1 - beta2, ln beta1, ln beta2, eps, weight decay,
# and what the gradient is multiplied by: 1, or -1 to maximize.
SETTINGS = 7
# Elements of a chunk: enough to be worth the two loads that a program waits for before its first element.
CHUNK = 8192
_NUM_WARPS = 8
_SUM_BLOCK = 4096

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _chunk(table_ptr, chunk_ptr, program, CHUNK: tl.constexpr):
    """The row of the table for the chunk of a program, its first element, and the number of elements of its tensor."""
    tensor = tl.load(chunk_ptr + program * 2).to(tl.int64)
    first = tl.load(chunk_ptr + program * 2 + 1).to(tl.int64) * CHUNK
    row = table_ptr + tensor * 8
    return row, first, tl.load(row + 7)


@triton.jit
def _pointer(word_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer that a word of the table holds."""
    pointer = tl.load(word_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _scalar(word_ptr, index):
    """An fp32 value of those that a word of the table points to."""
    return tl.load(tl.load(word_ptr).to(tl.pointer_type(tl.float32)) + index)


@triton.jit
def _one_minus_power(log_beta, step):
    """1 - beta^step, to fp32 accuracy also where beta^step is close to 1."""
    x = log_beta * step
    # e^x - 1 by its series; for x < -0.5 nothing cancels.
    near = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))))))
    return tl.where(x > -0.5, -near, 1.0 - tl.exp(x))


@triton.jit
def _square_sums_kernel(
    table_ptr, chunk_ptr, sums_ptr, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Program c writes the sum of the squares of the gradient's elements in chunk c."""
    follow(PDL)
    program = tl.program_id(0)
    row, first, size = _chunk(table_ptr, chunk_ptr, program, CHUNK)
    gradient = _pointer(row + 1, GRADIENT, ALIGNED) + first
    offs = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    # A mask that is not known to be the same for 16 bytes would split every access: only a tensor's end has one.
    if first + CHUNK <= size:
        for start in tl.range(0, CHUNK, BLOCK, num_stages=1):
            g = tl.load(gradient + start + offs).to(tl.float32)
            squares += g * g
    else:
        for start in tl.range(0, CHUNK, BLOCK, num_stages=1):
            g = tl.load(gradient + start + offs, mask=start + offs < size - first, other=0.0).to(tl.float32)
            squares += g * g
    tl.store(sums_ptr + program, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=["num_sums", "num_tensors"])
def _clip_kernel(
    table_ptr, sums_ptr, max_norm_ptr, clip_ptr, num_sums, num_tensors, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """clip = (norm, factor): the root of the sums' sum and what gradients are multiplied by; counts the steps."""
    follow(PDL)
    offs = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, num_sums, BLOCK):
        squares += tl.load(sums_ptr + start + offs, mask=start + offs < num_sums, other=0.0)
    norm = tl.sqrt(tl.sum(squares, axis=0))
    factor = tl.load(max_norm_ptr) / (norm + 1e-6)
    tl.store(clip_ptr, norm)
    # A norm that is no number clips to none, as in PyTorch.
    tl.store(clip_ptr + 1, tl.where(factor > 1.0, 1.0, factor))
    for start in range(0, num_tensors, BLOCK):
        mask = start + offs < num_tensors
        steps = tl.load(table_ptr + (start + offs) * 8 + 4, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        tl.store(steps, tl.load(steps, mask=mask, other=0.0) + 1.0, mask=mask)


@triton.jit
def _adamw(
    parameter, gradient, exp_avg, exp_avg_sq, offs, mask, factor, decay, weight1, weight2, size, root2, eps,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The update at `offs`: p = p * decay - size * m / (sqrt(v) / root2 + eps)."""
    if MASKED:
        p = tl.load(parameter + offs, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gradient + offs, mask=mask, other=0.0).to(tl.float32) * factor
        m = tl.load(exp_avg + offs, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + offs, mask=mask, other=0.0).to(tl.float32)
    else:
        p = tl.load(parameter + offs).to(tl.float32)
        g = tl.load(gradient + offs).to(tl.float32) * factor
        m = tl.load(exp_avg + offs).to(tl.float32)
        v = tl.load(exp_avg_sq + offs).to(tl.float32)
    m = m * (1.0 - weight1) + g * weight1
    v = v * (1.0 - weight2) + g * g * weight2
    p = p * decay - size * m / (tl.sqrt(v) / root2 + eps)
    dtype: tl.constexpr = parameter.dtype.element_ty
    if MASKED:
        tl.store(parameter + offs, p.to(dtype), mask=mask)
        tl.store(exp_avg + offs, m.to(dtype), mask=mask)
        tl.store(exp_avg_sq + offs, v.to(dtype), mask=mask)
    else:
        tl.store(parameter + offs, p.to(dtype))
        tl.store(exp_avg + offs, m.to(dtype))
        tl.store(exp_avg_sq + offs, v.to(dtype))


@triton.jit
def _adamw_kernel(
    table_ptr, chunk_ptr, clip_ptr, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program updates a chunk of a parameter and its moments, which have the parameter's dtype."""
    follow(PDL)
    # Backwards: the gradients whose squares were summed last are still in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row, first, size = _chunk(table_ptr, chunk_ptr, program, CHUNK)
    parameter = _pointer(row, PARAMETER, ALIGNED) + first
    gradient = _pointer(row + 1, GRADIENT, ALIGNED) + first
    exp_avg = _pointer(row + 2, PARAMETER, ALIGNED) + first
    exp_avg_sq = _pointer(row + 3, PARAMETER, ALIGNED) + first
    step, rate = _scalar(row + 4, 0), _scalar(row + 5, 0)
    weight1, weight2 = _scalar(row + 6, 0), _scalar(row + 6, 1)
    step_size = rate / _one_minus_power(_scalar(row + 6, 2), step)
    root2 = tl.sqrt(_one_minus_power(_scalar(row + 6, 3), step))
    eps, decay = _scalar(row + 6, 4), 1.0 - rate * _scalar(row + 6, 5)
    factor = tl.load(clip_ptr + 1) * _scalar(row + 6, 6)
    offs = tl.arange(0, BLOCK)
    if first + CHUNK <= size:
        for start in tl.range(0, CHUNK, BLOCK, num_stages=1):
            _adamw(
                parameter, gradient, exp_avg, exp_avg_sq, start + offs, None,
                factor, decay, weight1, weight2, step_size, root2, eps, False,
            )  # fmt: skip
    else:
        for start in tl.range(0, CHUNK, BLOCK, num_stages=1):
            _adamw(
                parameter, gradient, exp_avg, exp_avg_sq, start + offs, start + offs < size - first,
                factor, decay, weight1, weight2, step_size, root2, eps, True,
            )  # fmt: skip


def _block(dtype: torch.dtype) -> int:
    """Elements that a program takes at once: 16 bytes a thread."""
    return _NUM_WARPS * 32 * 16 // dtype.itemsize


def square_sums(table: Tensor, chunks: Tensor, sums: Tensor, dtype: torch.dtype, aligned: bool) -> None:
    """sums[c] = sum of the squares of the gradient in chunk c.

    Args:
        table: (tensors, COLUMNS) int64.  chunks: (C, 2) int32.  sums: (C,) fp32.
        dtype: of the gradients.  aligned: whether they all begin at a multiple of 16 bytes.
    """
    constants = (DTYPES[dtype], aligned, CHUNK, _block(dtype))
    prepared.launch(_square_sums_kernel, (table, chunks, sums), chunks.shape[0], (), constants, _NUM_WARPS)


def clip(table: Tensor, sums: Tensor, max_norm: Tensor, norm_and_factor: Tensor) -> None:
    """Writes the norm and min(max_norm / (norm + 1e-6), 1), and adds 1 to the step count of each row.

    Args:
        table: (tensors, COLUMNS) int64.  sums: (C,) fp32.  max_norm: (1,) fp32; inf to clip nothing.
        norm_and_factor: (2,) fp32.
    """
    tensors, integers = (table, sums, max_norm, norm_and_factor), (sums.shape[0], table.shape[0])
    prepared.launch(_clip_kernel, tensors, 1, integers, (_SUM_BLOCK,), num_warps=16)


def adamw(
    table: Tensor, chunks: Tensor, norm_and_factor: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype, aligned: bool
) -> None:
    """Updates the parameters and moments of the chunks.

    Args:
        table: (tensors, COLUMNS) int64.  chunks: (C, 2) int32.  norm_and_factor: (2,) fp32, from `clip`.
        dtype: of parameters and moments.  grad_dtype: of gradients.
        aligned: whether all of them begin at a multiple of 16 bytes.
    """
    constants = (DTYPES[dtype], DTYPES[grad_dtype], aligned, CHUNK, _block(dtype))
    tensors = (table, chunks, norm_and_factor)
    prepared.launch(_adamw_kernel, tensors, chunks.shape[0], (), constants, _NUM_WARPS)
