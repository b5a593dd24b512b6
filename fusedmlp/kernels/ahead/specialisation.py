"""What Triton compiles a kernel for: the kernel, and of each argument no more than the compiler gets to know of it.

Of a pointer that is its dtype and whether it lies at a multiple of 16 bytes, of a tensor descriptor its dtype and
block, of an integer whether it is 1, a multiple of 16, or wider than 32 bits. Launches that agree in these share one
compiled kernel, whatever their sizes. `recorded` collects them from launchers, which then launch nothing; `build`
compiles one into Triton's cache on disk, where the launch that it stands for finds it.
"""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmlp.kernels import gemm_launch, linear_gelu, prepared


@dataclass(frozen=True)
class Pointer:
    """A tensor, as far as Triton looks at it."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 16 if self.aligned else 1


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor; Gluon's have a layout, which follows from dtype and block."""

    dtype: torch.dtype
    block: tuple[int, ...]
    gluon: bool

    def stand_in(self) -> Any:
        """A descriptor of a matrix that has no memory."""
        matrix = torch.empty(self.block, dtype=self.dtype, device="meta")
        make = gemm_launch._gemm_hopper().descriptor if self.gluon else TensorDescriptor.from_tensor
        return make(matrix, list(self.block))


@dataclass(frozen=True)
class Specialisation:
    """One compiled kernel.

    Attributes:
        module, name: of the kernel.  arguments: in its order, an integer as one of its kind, constants as they are.
        options: num_warps and the like.
    """

    module: str
    name: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    def kernel(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)

    def stand_ins(self) -> list[Any]:
        """Arguments for which Triton compiles the same as for those that were recorded."""
        return [value.stand_in() if isinstance(value, Descriptor) else value for value in self.arguments]

    def __str__(self) -> str:
        values = [(p, value) for p, value in zip(self.kernel().params, self.arguments, strict=True)]
        tensors = (value for _, value in values if isinstance(value, Pointer | Descriptor))
        dtype = str(next(tensors).dtype).removeprefix("torch.")
        sizes = [f"{p.name}={_in_words(v)}" for p, v in values if isinstance(v, int) and not p.is_constexpr]
        constants = [f"{p.name}={value}" for p, value in values if p.is_constexpr]
        options = [f"{name}={value}" for name, value in self.options]
        return f"{self.name}({', '.join([dtype, *sizes, *constants, *options])})"


def _in_words(value: int) -> str:
    """An integer of those that stand for their kind: n any, 16n a multiple of 16."""
    kind = {1: "1", 0: "16n"}.get(value if value == 1 else value % 16, "n")
    return f"{kind} >= 2**31" if value > 16 else kind


def specialisation(kernel: Any, arguments: tuple, options: dict[str, Any]) -> Specialisation:
    """What a launch of `kernel` with these arguments is compiled for."""
    kinds = tuple(_kind(value, parameter) for value, parameter in zip(arguments, kernel.params, strict=True))
    return Specialisation(kernel.__module__, kernel.__name__, kinds, tuple(options.items()))


def _kind(value: Any, parameter: Any) -> Any:
    if parameter.is_constexpr:
        return value
    if isinstance(value, torch.Tensor):
        return Pointer(value.dtype, value.data_ptr() % 16 == 0)
    if isinstance(value, int):
        return _integer_like(value, parameter.do_not_specialize)
    return Descriptor(value.base.dtype, tuple(value.block_shape), hasattr(value, "layout"))


def _integer_like(value: int, unspecialised: bool) -> int:
    """An integer of the same kind as `value` to the compiler."""
    if value == 1 and not unspecialised:
        return 1
    wide = 0 if -(2**31) <= value < 2**31 else 2**32
    return wide + (2 if unspecialised or value % 16 else 16)


@contextmanager
def recorded() -> Iterator[dict[Specialisation, None]]:
    """In this context tensors have no memory, and launches are noted, in order and once each, in place of running."""
    found: dict[Specialisation, None] = {}

    def record(kernel: Any, arguments: tuple, options: dict[str, Any]) -> None:
        found[specialisation(kernel, arguments, options)] = None

    with ExitStack() as stack:
        for prepared_before in (prepared._prepared, linear_gelu._prepared, linear_gelu._prepared_stack):
            # What is prepared here must not be found later, nor the other way round.
            stack.enter_context(mock.patch.dict(prepared_before, clear=True))
        stack.enter_context(mock.patch.object(prepared, "recorder", record))
        # Launchers ask it for alignment; fresh tensors are aligned.
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", _address))
        stack.enter_context(FakeTensorMode())
        yield found


def _address(tensor: FakeTensor) -> int:
    return 0


def build(item: Specialisation) -> None:
    """Compile for the current GPU, and make what Triton launches it with: all that a first launch would wait for."""
    compiled = item.kernel().warmup(*item.stand_ins(), grid=(1,), **dict(item.options))
    # Asking for it makes the launcher, C code in Triton up to 3.6, and loads the kernel.
    _ = compiled.run
