"""Two independent pieces of a step as branches of a CUDA graph, so that small ones share the GPU.

A GEMM of a narrow layer has fewer tiles than the GPU has multiprocessors. One after the other, two of them leave most
of it idle twice; as branches of a graph they run at the same time. Launched call by call they would not, because the
host takes longer to launch one than the GPU to run it, and two streams cost the host events besides.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from fusedmlp.kernels.launch import num_sms

_TILE = 128

First = TypeVar("First")
Second = TypeVar("Second")


def side_by_side(
    first: Callable[[], First], second: Callable[[], Second], shape: tuple[int, int], device: torch.device
) -> tuple[First, Second]:
    """Results of both.

    Args:
        first, second: launch work on the current stream that does not depend on each other's.
        shape: (M, N) of the product that `first` computes, which says whether there is room beside it.
    """
    if not _has_room(*shape, device):
        return first(), second()
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    # What is allocated on the side stream is used again only there, hence after the main stream's work up to here.
    side.wait_stream(main)
    with torch.cuda.stream(side):
        beside = second()
    result = first()
    main.wait_stream(side)
    return result, beside


def _has_room(M: int, N: int, device: torch.device) -> bool:
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        return False
    return num_sms(device) > -(-M // _TILE) * -(-N // _TILE)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)
