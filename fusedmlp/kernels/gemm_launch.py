"""From a GEMM's tensors to a launch: prepared once for a problem, then as cheap as Triton lets a launch be.

Triton's own launch looks at every argument each time, which for a kernel with four tensor descriptors costs more host
time than a small GEMM takes. What it looks at is the same for every call with the same sizes, strides, alignment and
dtype, so a `Launch` is made once for those and later hands the arguments straight to the compiled kernel.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmlp.kernels import configs, gemm
from fusedmlp.kernels.configs import GemmConfig, Problem

# Versions of Triton whose compiled kernels are called as here: every argument in order, descriptors of any class.
_DIRECT_TRITON = ("3.6",)

Block = tuple[int, int]


class Matrix(NamedTuple):
    """What a compiled kernel reads of a tensor descriptor."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    padding: str = "zero"


class Launch:
    """A kernel with its configuration for one problem; calling it launches.

    Args:
        kernel: a Triton or Gluon kernel that takes tensors, then integers, then constants.
        arguments: for each tensor argument its place in what the caller passes, and its (rows, columns) block if it is
            a tensor descriptor, else None.
        descriptor: (tensor, block) -> the descriptor that Triton's own launch takes.
        programs: size of the grid.  integers, constants: in the kernel's order.  options: num_warps and the like.
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
    ):
        self._kernel, self._arguments, self._descriptor = kernel, arguments, descriptor
        self._grid, self._scalars, self._options = (programs, 1, 1), (*integers, *constants), options
        self._compiled: Callable | None = None
        self._matrices: list[tuple] = []

    def __call__(self, *tensors: Tensor) -> None:
        if self._compiled is not None:
            arguments = [
                tensors[place] if shape is None else Matrix(tensors[place], shape, strides)
                for place, shape, strides in self._matrices
            ]
            self._compiled(*arguments, *self._scalars)
            return
        arguments = [
            tensors[place] if block is None else self._descriptor(tensors[place], list(block))
            for place, block in self._arguments
        ]
        kernel = self._kernel[self._grid](*arguments, *self._scalars, **self._options)
        if configs.TRITON in _DIRECT_TRITON and kernel is not None:
            # Sizes and strides are what a launch is prepared for, so they are the same in every call.
            self._matrices = [
                (place, None, None) if block is None else (place, tensors[place].shape, tensors[place].stride())
                for place, block in self._arguments
            ]
            self._compiled = kernel[self._grid]


def remember(prepared: dict, key: tuple, value):
    """Put a prepared launch into a table that ever new shapes must not fill without bound."""
    if len(prepared) >= 2048:
        prepared.clear()
    prepared[key] = value
    return value


def forward(problem: Problem, config: GemmConfig, strides: tuple[int, int], flags: tuple, b_is_nk: bool) -> Launch:
    """Launch of linear_gelu's forward kernel with (x, weight, act, preact, bias).

    Args:
        strides: from row to row of x and weight.  flags: APPROXIMATE, HAS_BIAS, STORE_PREACT.
    """
    a, b, c = _blocks(config, b_is_nk)
    arguments = ((0, a), (1, b), (2, c), (3 if flags[2] else 2, c), (4, None))
    if config.kernel == "hopper":
        kernel = _gemm_hopper()._hopper_linear_gelu_fwd_kernel
        return _hopper(kernel, arguments, problem, config, flags, b_is_nk)
    return _plain(gemm._linear_gelu_fwd_kernel, arguments, problem, config, strides, flags, b_is_nk)


def backward(problem: Problem, config: GemmConfig, strides: tuple[int, int], flags: tuple, b_is_nk: bool) -> Launch:
    """Launch of the kernel with dGELU in its epilogue with (dy, weight, preact, dpreact, act, partial).

    Args:
        strides: from row to row of dy and weight.  flags: APPROXIMATE, STORE_ACT, SUM_ROWS.
    """
    a, b, c = _blocks(config, b_is_nk)
    arguments = ((0, a), (1, b), (2, c), (3, c), (4, c), (5, None))
    if config.kernel == "hopper":
        return _hopper(_gemm_hopper()._hopper_dgelu_kernel, arguments, problem, config, flags, b_is_nk)
    return _plain(gemm._dgelu_kernel, arguments, problem, config, strides, flags, b_is_nk)


def _blocks(config: GemmConfig, b_is_nk: bool) -> tuple[Block, Block, Block]:
    """Blocks of the left operand, the right one and the result."""
    M, N, K = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    return (M, K), ((N, K) if b_is_nk else (K, N)), (M, N)


def _programs(problem: Problem, config: GemmConfig) -> int:
    tiles = triton.cdiv(problem.M, config.BLOCK_M) * triton.cdiv(problem.N, config.BLOCK_N)
    return min(tiles, configs.multiprocessors(problem.device))


def _hopper(kernel, arguments, problem: Problem, config: GemmConfig, flags: tuple, b_is_nk: bool) -> Launch:
    programs = _programs(problem, config)
    integers = (problem.M, problem.N, problem.K, programs)
    constants = (*flags, b_is_nk, config.GROUP_M, config.num_stages)
    options = {"num_warps": config.num_warps, "maxnreg": _gemm_hopper().MAXNREG}
    return Launch(kernel, arguments, _gemm_hopper().descriptor, programs, integers, constants, options)


def _plain(kernel, arguments, problem, config, strides, flags: tuple, b_is_nk: bool) -> Launch:
    if not problem.use_tma:
        arguments = tuple((place, None) for place, _ in arguments)
    programs = _programs(problem, config)
    integers = (*strides, problem.M, problem.N, problem.K, programs)
    blocks = (config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.GROUP_M)
    constants = (*flags, problem.precision, b_is_nk, problem.use_tma, *blocks)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Launch(kernel, arguments, TensorDescriptor.from_tensor, programs, integers, constants, options)


@cache
def _gemm_hopper():
    """The module of Gluon kernels, imported only where they run: other versions of Triton may lack what it needs."""
    from fusedmlp.kernels import gemm_hopper

    return gemm_hopper
