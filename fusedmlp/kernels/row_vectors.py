"""Rows as vectors of 16 bytes, also where they begin or end between two of them.

A row is seen from a multiple of 16 bytes at or before its begin on: most of it are whole vectors, read and written
with one access each, and the elements of the vectors that are cut, at most two, are an access of their own. So nothing
outside a row is touched.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def row_start(row, stride, VECTOR: tl.constexpr):
    """(offset of the row's first element, rounded down to a line of 8 vectors, 128 bytes; what was cut off).

    Where every row begins with a vector, nothing is cut off: sums run in the same order wherever a row lies, so equal
    rows give equal bits. Other rows need vectors that begin before them, and their sums depend on how much before.
    """
    if VECTOR == 1:
        return row * stride, tl.full((), 0, tl.int64)
    else:
        lead = tl.where(stride % VECTOR == 0, 0, row * stride % (8 * VECTOR))
        return tl.multiple_of(row * stride - lead, VECTOR), lead


@triton.jit
def inner_vectors(offs, low, high, VECTOR: tl.constexpr):
    """Which elements lie in vectors that are whole between low and high: all or none of a vector, to the compiler."""
    if VECTOR == 1:
        return offs < high
    else:
        return (offs >= (low + VECTOR - 1) // VECTOR * VECTOR) & (offs < high // VECTOR * VECTOR)


@triton.jit
def ends_of_row(low, high, VECTOR: tl.constexpr):
    """(offsets of the elements of two vectors, the one that holds low and the one that holds high; which of them lie
    between low and high and not in a whole vector)."""
    lanes = tl.arange(0, 2 * VECTOR)
    inner_low = (low + VECTOR - 1) // VECTOR * VECTOR
    first = lanes < VECTOR
    offs = tl.where(first, low // VECTOR * VECTOR + lanes, high // VECTOR * VECTOR + lanes - VECTOR)
    # Both may be the same vector: then its elements count as the first one's.
    mask = tl.where(first, (offs >= low) & (offs < inner_low), offs >= inner_low) & (offs < high)
    return offs, mask


def elements_per_vector(tensors: tuple[Tensor, ...]) -> int:
    """Elements in 16 bytes where rows begin or end between lines of 128 bytes, and alike in all tensors; else 1.

    Where all rows begin and end at multiples of 16 elements, the compiler knows it and needs no help.
    """
    n_cols, vector = tensors[0].shape[1], 16 // tensors[0].element_size()
    strides = [t.stride(0) for t in tensors]
    if all(n % 16 == 0 for n in (n_cols, *strides)):
        return 1
    alike = len({stride % (8 * vector) for stride in strides}) == 1
    return vector if alike and not any(t.data_ptr() % 16 for t in tensors) else 1


def longest_lead(tensors: tuple[Tensor, ...], vector: int) -> int:
    """Elements that `row_start` may cut off in front of a row."""
    return 0 if tensors[0].stride(0) % vector == 0 else 8 * vector - 1


def part_width(n_cols: int, parts: int) -> int:
    """Columns of one part: equal shares, in multiples of 64 so that each begins where a line of 128 bytes may."""
    return -(-n_cols // (64 * parts)) * 64
