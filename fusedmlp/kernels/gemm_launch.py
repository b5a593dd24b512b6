"""From a GEMM's problem and its configuration to a prepared launch of the kernel that runs it."""

from functools import cache

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmlp.kernels import configs, gemm, gemm_stack
from fusedmlp.kernels.configs import GemmConfig, Problem, StackConfig
from fusedmlp.kernels.prepared import Block, Launch


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
    last = (config.READ_FIRST,)
    return _plain(gemm._linear_gelu_fwd_kernel, arguments, problem, config, strides, flags, b_is_nk, last)


def backward(problem: Problem, config: GemmConfig, strides: tuple[int, int], flags: tuple, b_is_nk: bool) -> Launch:
    """Launch of the kernel with dGELU in its epilogue with (dy, weight, preact, dpreact, act or product, partial).

    Args:
        strides: from row to row of dy and weight.  flags: APPROXIMATE, STORE_ACT, SUM_ROWS, STORE_PRODUCT.
    """
    a, b, c = _blocks(config, b_is_nk)
    arguments = ((0, a), (1, b), (2, c), (3, c), (4, c), (5, None))
    if config.kernel == "hopper":
        return _hopper(_gemm_hopper()._hopper_dgelu_kernel, arguments, problem, config, flags, b_is_nk)
    if config.READ_FIRST:
        arguments = tuple((place, None if place == 2 else block) for place, block in arguments)
    last = (config.READ_FIRST,)
    return _plain(gemm._dgelu_kernel, arguments, problem, config, strides, flags, b_is_nk, last)


def stack(
    sizes: tuple[int, int, int, int],
    config: StackConfig,
    strides: tuple[int, int, int],
    flags: tuple,
    device: torch.device,
) -> Launch:
    """Launch of the kernel for a layer within a stack with (dy, weight, preact, dpreact, dx, partial, x, dweight, sums,
    dbias).

    Args:
        sizes: M, N, K and rows of `sums`, 0 without.  strides: from row to row of dy, weight and x.
        flags: APPROXIMATE, SUM_ROWS.
    """
    dx, dweight = config.dx, config.dweight
    a, b, c = _blocks(dx, False)
    step, result = dweight.BLOCK_K, (dweight.BLOCK_M, dweight.BLOCK_N)
    arguments: tuple[tuple[int, Block | None], ...] = (
        (0, a), (1, b), (2, None), (3, c), (4, c), (5, None),
        (0, (step, dweight.BLOCK_M)), (6, (step, dweight.BLOCK_N)), (7, result), (8, None), (9, None),
    )  # fmt: skip
    use_tma = device.type == "cuda"
    if not use_tma:
        arguments = tuple((place, None) for place, _ in arguments)
    M, N, K, rows = sizes
    programs = config.programs(M, N, K) if rows else sum(config.tiles(M, N, K))
    blocks = (dx.BLOCK_M, dx.BLOCK_N, dx.BLOCK_K, dx.GROUP_M, *result, step, dweight.num_stages)
    constants = (*flags, "ieee", use_tma, *blocks, config.DX_FIRST, configs.STACK_COLUMNS)
    options = {"num_warps": dx.num_warps, "num_stages": dx.num_stages}
    return Launch(
        gemm_stack._stack_bwd_kernel, arguments, TensorDescriptor.from_tensor, programs, (*strides, *sizes), constants,
        options, device,
    )  # fmt: skip


def _device(problem: Problem) -> torch.device:
    return torch.device("cpu") if problem.device < 0 else torch.device("cuda", problem.device)


def _blocks(config: GemmConfig, b_is_nk: bool) -> tuple[Block, Block, Block]:
    """Blocks of the left operand, the right one and the result."""
    M, N, K = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    return (M, K), ((N, K) if b_is_nk else (K, N)), (M, N)


def _programs(problem: Problem, config: GemmConfig) -> int:
    tiles = config.tiles(problem)
    return tiles if config.READ_FIRST else min(tiles, configs.multiprocessors(problem.device))


def _hopper(kernel, arguments, problem: Problem, config: GemmConfig, flags: tuple, b_is_nk: bool) -> Launch:
    programs = _programs(problem, config)
    integers = (problem.M, problem.N, problem.K, programs)
    constants = (*flags, b_is_nk, config.GROUP_M, config.num_stages)
    options = {"num_warps": config.num_warps, "maxnreg": _gemm_hopper().MAXNREG}
    return Launch(
        kernel, arguments, _gemm_hopper().descriptor, programs, integers, constants, options, _device(problem)
    )


def _plain(kernel, arguments, problem, config, strides, flags: tuple, b_is_nk: bool, last: tuple = ()) -> Launch:
    if not problem.use_tma:
        arguments = tuple((place, None) for place, _ in arguments)
    programs = _programs(problem, config)
    integers = (*strides, problem.M, problem.N, problem.K, programs)
    blocks = (config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.GROUP_M)
    constants = (*flags, problem.precision, b_is_nk, problem.use_tma, *blocks, *last)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Launch(
        kernel, arguments, TensorDescriptor.from_tensor, programs, integers, constants, options, _device(problem)
    )


@cache
def _gemm_hopper():
    """The module of Gluon kernels, imported only where they run: other versions of Triton may lack what it needs."""
    from fusedmlp.kernels import gemm_hopper

    return gemm_hopper
