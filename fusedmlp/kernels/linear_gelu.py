"""Launchers of the GEMM kernels.

`M` rows, `K` in_features, `N` out_features (hidden features of the MLP). All tensors are matrices here. Which kernel
runs is decided by dtype, sizes, alignment and card before anything is launched: the ping-pong kernel for 16-bit dtypes
on Hopper, the plain kernel with tensor descriptors or with pointers otherwise.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedmlp.kernels import configs, gemm
from fusedmlp.kernels.configs import GemmConfig, Problem
from fusedmlp.kernels.launch import on_device_of
from fusedmlp.kernels.reduce import column_sum


def linear_gelu_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, store_preact: bool
) -> tuple[Tensor, Tensor]:
    """act = gelu(x @ weight.T + bias).

    Args:
        x: (M, K), any strides; fp32, bf16 or fp16.  weight: (N, K), any strides.  bias: (N,) or None.
        approximate: "none" (erf) or "tanh".
        store_preact: also give preact = x @ weight.T + bias.
    Returns: act (M, N) and preact (M, N), or (0,) if not asked for; contiguous, dtype of x.
    """
    (M, K), N = x.shape, weight.shape[0]
    act = x.new_empty((M, N))
    preact = x.new_empty((M, N) if store_preact else 0)
    if act.numel() == 0:
        return act, preact
    if K == 0:
        x, weight = x.new_zeros((M, 8)), weight.new_zeros((N, 8))
    x, (weight, b_is_nk) = _with_contiguous_rows(x), _right_operand(weight.t())
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    flags = f"{approximate} {'preact' if store_preact else 'act'}"
    problem = _problem(x, weight, act, x.shape[1], False, flags)

    def run(config: GemmConfig) -> None:
        operands = (x, weight, act, preact if store_preact else act, act if bias is None else bias)
        _launch_fwd(config, problem, operands, approximate, bias is not None, store_preact, b_is_nk)

    with on_device_of(x):
        run(configs.choose(problem, run))
    return act, preact


def dgelu_gemm(
    dy: Tensor, weight: Tensor, preact: Tensor, approximate: str, store_act: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dpreact = (dy @ weight) * gelu'(preact): through the MLP's second layer and its GELU.

    Args:
        dy: (M, K), any strides.  weight: (K, N), any strides.  preact: (M, N), contiguous; all of one dtype.
        store_act: also give gelu(preact).  need_dbias: also give the sum of dpreact over rows.
    Returns: dpreact (M, N), act (M, N) or (0,), dbias (N,) or (0,); dtype of dy, sums accumulated in fp32.
    """
    (M, K), N = dy.shape, weight.shape[1]
    dpreact = torch.empty_like(preact)
    act = torch.empty_like(preact) if store_act else preact.new_empty(0)
    if preact.numel() == 0:
        return dpreact, act, preact.new_zeros(N if need_dbias else 0)
    if K == 0:
        dy, weight = dy.new_zeros((M, 8)), weight.new_zeros((8, N))
    dy, (weight, b_is_nk) = _with_contiguous_rows(dy), _right_operand(weight)
    flags = f"{approximate}{' act' if store_act else ''}{' dbias' if need_dbias else ''}"
    problem = _problem(dy, weight, preact, dy.shape[1], True, flags)
    partial = preact

    def run(config: GemmConfig) -> None:
        nonlocal partial
        if need_dbias:
            partial = preact.new_empty((triton.cdiv(M, config.BLOCK_M), N), dtype=torch.float32)
        operands = (dy, weight, preact, dpreact, act if store_act else dpreact, partial)
        _launch_dgelu(config, problem, operands, approximate, store_act, need_dbias, b_is_nk)

    with on_device_of(dy):
        run(configs.choose(problem, run))
        dbias = column_sum(partial, preact.dtype) if need_dbias else preact.new_empty(0)
    return dpreact, act, dbias


@cache
def _gemm_hopper():
    """The module of Gluon kernels, imported only where they run: other versions of Triton may lack what it needs."""
    from fusedmlp.kernels import gemm_hopper

    return gemm_hopper


def _launch_fwd(config, problem, operands, approximate, has_bias, store_preact, b_is_nk) -> None:
    x, weight, act, preact, bias = operands
    matrices, num_programs = _arguments(config, problem, (x, weight, act, preact), b_is_nk)
    sizes = (problem.M, problem.N, problem.K, num_programs)
    flags = {"APPROXIMATE": approximate, "HAS_BIAS": has_bias, "STORE_PREACT": store_preact, "B_IS_NK": b_is_nk}
    if config.kernel == "hopper":
        kernel = _gemm_hopper()._hopper_linear_gelu_fwd_kernel
        kernel[(num_programs,)](*matrices, bias, *sizes, **flags, **_hopper_constants(config))
    else:
        x_, weight_, act_, preact_ = matrices
        gemm._linear_gelu_fwd_kernel[(num_programs,)](
            x_, weight_, bias, act_, preact_, x.stride(0), weight.stride(0), *sizes,
            **flags, **_plain_constants(config, problem),
        )  # fmt: skip


def _launch_dgelu(config, problem, operands, approximate, store_act, sum_rows, b_is_nk) -> None:
    dy, weight, preact, dpreact, act, partial = operands
    matrices, num_programs = _arguments(config, problem, (dy, weight, preact, dpreact, act), b_is_nk)
    sizes = (problem.M, problem.N, problem.K, num_programs)
    flags = {"APPROXIMATE": approximate, "STORE_ACT": store_act, "SUM_ROWS": sum_rows, "B_IS_NK": b_is_nk}
    if config.kernel == "hopper":
        kernel = _gemm_hopper()._hopper_dgelu_kernel
        kernel[(num_programs,)](*matrices, partial, *sizes, **flags, **_hopper_constants(config))
    else:
        gemm._dgelu_kernel[(num_programs,)](
            *matrices, partial, dy.stride(0), weight.stride(0), *sizes, **flags, **_plain_constants(config, problem)
        )


def _hopper_constants(config: GemmConfig) -> dict:
    constants = {"GROUP_M": config.GROUP_M, "STAGES": config.num_stages}
    return {**constants, "num_warps": config.num_warps, "maxnreg": _gemm_hopper().MAXNREG}


def _plain_constants(config: GemmConfig, problem: Problem) -> dict:
    constants = {"PRECISION": problem.precision, "USE_TMA": problem.use_tma, "GROUP_M": config.GROUP_M}
    blocks = {"BLOCK_M": config.BLOCK_M, "BLOCK_N": config.BLOCK_N, "BLOCK_K": config.BLOCK_K}
    return {**constants, **blocks, "num_warps": config.num_warps, "num_stages": config.num_stages}


def _arguments(config: GemmConfig, problem: Problem, matrices: tuple[Tensor, ...], b_is_nk: bool) -> tuple[list, int]:
    """The matrices as the kernel takes them, tensors or tensor descriptors, and the number of programs.

    The first is the left operand, the second the right one, the others are tiled as the result.
    """
    tiles = triton.cdiv(problem.M, config.BLOCK_M) * triton.cdiv(problem.N, config.BLOCK_N)
    num_programs = min(tiles, configs.multiprocessors(problem.device))
    if not problem.use_tma:
        return list(matrices), num_programs
    right = [config.BLOCK_N, config.BLOCK_K] if b_is_nk else [config.BLOCK_K, config.BLOCK_N]
    result = [config.BLOCK_M, config.BLOCK_N]
    blocks = [[config.BLOCK_M, config.BLOCK_K], right] + [result] * (len(matrices) - 2)
    descriptor = _gemm_hopper().descriptor if config.kernel == "hopper" else TensorDescriptor.from_tensor
    return [descriptor(matrix, block) for matrix, block in zip(matrices, blocks, strict=True)], num_programs


def _problem(a: Tensor, b: Tensor, result: Tensor, K: int, backward: bool, flags: str) -> Problem:
    M, N = result.shape
    device = a.device.index if a.is_cuda else -1
    use_tma = configs.has_tma(device) and all(map(_fits_tma, (a, b, result)))
    return Problem(M, N, K, a.dtype, _precision(a.dtype), use_tma, backward, flags, device)


def _precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: as torch's own, TF32 only where the user has allowed it."""
    # `allow_tf32` raises where the user has set this newer one.
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _fits_tma(matrix: Tensor) -> bool:
    """Whether a matrix with contiguous rows can be a tensor descriptor: base and rows aligned to 16 bytes."""
    stride = matrix.stride(0)
    return matrix.data_ptr() % 16 == 0 and stride * matrix.element_size() % 16 == 0 and stride >= matrix.shape[1]


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] else matrix.contiguous()


def _right_operand(b: Tensor) -> tuple[Tensor, bool]:
    """b (K, N) as a matrix with contiguous rows, and whether that is its transpose (N, K)."""
    if b.stride(0) == 1 and b.stride(1) >= b.shape[0]:
        return b.t(), True
    return _with_contiguous_rows(b), False
