"""A kernel's launch, prepared once for one kind of arguments, and then as cheap as the driver lets a launch be.

Triton's own launch looks at every argument each time, calls Python hooks, and encodes every tensor descriptor anew:
more host time than a small GEMM takes. What it finds is the same for every call with the same sizes, strides, alignment
and dtype, so a `Launch` is made once for those. Its first call goes through Triton, later ones hand addresses and
encoded descriptors to the compiled kernel's C entry.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fusedmlp.kernels import pdl
from fusedmlp.kernels.launch import on_device_of

# Versions of Triton whose compiled kernels are called as here; others launch as they always do.
_DIRECT_TRITON = ("3.6",)
_TRITON = ".".join(triton.__version__.split(".")[:2])
# Encoded descriptors that an argument keeps, by address: a training step comes back to the same few.
_MAX_MAPS = 1024

Block = tuple[int, int]

# Who gets kernel, arguments and options of each launch in place of the GPU: see ahead/specialisation.py.
recorder: Callable[[Any, tuple, dict[str, Any]], None] | None = None


class Matrix(NamedTuple):
    """What Triton reads of a tensor descriptor when it encodes it."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"


class Launch:
    """A kernel with its constants for one kind of arguments; calling it launches on the current device and stream.

    Args:
        kernel: a Triton or Gluon kernel that takes tensors, then integers, then constants.
        arguments: for each tensor argument its place in what the caller passes, and its (rows, columns) block if it is
            a tensor descriptor, else None.
        descriptor: (tensor, block) -> the descriptor that Triton's own launch takes.
        programs: size of the grid.  integers, constants: in the kernel's order.  options: num_warps and the like.
        device: of the tensors; where it allows, a kernel with a constant PDL, its last, is launched as `pdl.py` says.
    """

    def __init__(
        self,
        kernel: Any,
        arguments: Sequence[tuple[int, Block | None]],
        descriptor: Callable | None,
        programs: int,
        integers: tuple[int, ...],
        constants: tuple,
        options: dict[str, Any],
        device: torch.device | None = None,
    ):
        if device is not None and "PDL" in kernel.arg_names:
            early = pdl.available(device)
            constants = (*constants, early)
            options = {**options, "launch_pdl": True} if early else options
        self._kernel, self._arguments, self._descriptor = kernel, arguments, descriptor
        self._grid, self._scalars, self._options = (programs, 1, 1), (*integers, *constants), options
        self._direct: Callable[[tuple[Tensor, ...]], None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if self._direct is not None and not _hooks():
            self._direct(tensors)
            return
        arguments = [
            tensors[place] if block is None else self._descriptor(tensors[place], list(block))
            for place, block in self._arguments
        ]
        if recorder is not None:
            recorder(self._kernel, (*arguments, *self._scalars), self._options)
            return
        compiled = self._kernel[self._grid](*arguments, *self._scalars, **self._options)
        if self._direct is None and compiled is not None and _TRITON in _DIRECT_TRITON:
            self._direct = _direct_launch(compiled, self._grid, self._arguments, tensors, self._scalars)


def _hooks() -> bool:
    """Whether somebody, a profiler say, wants to hear of every launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _direct_launch(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[tuple[int, Block | None]],
    tensors: tuple[Tensor, ...], scalars: tuple,
) -> Callable[[tuple[Tensor, ...]], None] | None:  # fmt: skip
    """A function that launches `compiled` with other tensors of the same kind; None if it takes anything else."""
    run = compiled.run
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    descriptors = sum(block is not None for _, block in arguments)
    if run.global_scratch_size or run.profile_scratch_size or len(metas) != descriptors or None in metas:
        return None
    entry = run.launch
    if metas:
        # Around the entry stands a function that encodes descriptors.
        entry = inspect.getclosurevars(entry).nonlocals["launcher"]
    encoders = iter(metas)
    places = tuple(
        (place, None if block is None else _encoded(tensors[place], next(encoders))) for place, block in arguments
    )
    # The three Nones at the end: what the hooks would get, and no hook before and after.
    fixed = (
        compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata,
        None, None, None,
    )  # fmt: skip
    current_stream, device = triton.runtime.driver.active.get_current_stream, tensors[0].device.index

    def direct(tensors: tuple[Tensor, ...]) -> None:
        values: list = []
        for place, encoded in places:
            address = tensors[place].data_ptr()
            if encoded is None:
                values.append(address)
            else:
                values += encoded(address, tensors[place])
        entry(*grid, current_stream(device), *fixed, *values, *scalars)

    return direct


def _encoded(like: Tensor, meta: dict) -> Callable[[int, Tensor], list]:
    """A function that gives the arguments for a descriptor of a matrix with the shape and strides of `like`."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    shape, strides = tuple(like.shape), like.stride()
    maps: dict[int, list] = {}

    def arguments(address: int, matrix: Tensor) -> list:
        found = maps.get(address)
        if found is None:
            if len(maps) >= _MAX_MAPS:
                maps.clear()
            found = maps[address] = make_tensordesc_arg(Matrix(matrix, shape, strides), meta)
        return found

    return arguments


def remember(prepared: dict, key: tuple, value):
    """Put a prepared launch into a table that ever new shapes must not fill without bound."""
    if len(prepared) >= 2048:
        prepared.clear()
    prepared[key] = value
    return value


# What a call of `launch` depends on -> its launch.
_prepared: dict[tuple, Launch] = {}


def launch(
    kernel: Any, tensors: tuple[Tensor, ...], programs: int, integers: tuple[int, ...], constants: tuple, num_warps: int
) -> None:
    """Launch a kernel that takes pointers, integers and constants, in this order, on the GPU of the first tensor."""
    first = tensors[0]
    key = (
        kernel, programs, integers, constants, num_warps, first.device,
        *[(t.dtype, t.data_ptr() % 16) for t in tensors],
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        arguments = [(place, None) for place in range(len(tensors))]
        prepared = Launch(
            kernel, arguments, None, programs, integers, constants, {"num_warps": num_warps}, first.device
        )
        remember(_prepared, key, prepared)
    with on_device_of(first):
        prepared(*tensors)
