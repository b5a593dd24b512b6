"""Launchers of the GEMM kernels.

`M` rows, `K` in_features, `N` out_features (hidden features of the MLP). All tensors are matrices here. Which kernel
runs is decided by dtype, sizes, alignment and card before anything is launched: the Gluon kernel for 16-bit dtypes on
Hopper, the plain kernel with tensor descriptors or with pointers otherwise.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from fusedmlp.kernels import choice, configs, gemm_launch
from fusedmlp.kernels.configs import GemmConfig, Problem, StackConfig
from fusedmlp.kernels.launch import on_device_of
from fusedmlp.kernels.prepared import Launch, remember
from fusedmlp.kernels.reduce import column_sum

# What a call depends on -> its launch, and the rows of a tile.
_prepared: dict[tuple, tuple[Launch, int]] = {}


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
    if M == 0 or N == 0:
        return act, preact
    if K == 0:
        x, weight = x.new_zeros((M, 8)), weight.new_zeros((N, 8))
    x = _with_contiguous_rows(x)
    weight, as_stored = _stored(weight)
    bias = bias if bias is None or bias.stride(0) == 1 else bias.contiguous()
    flags = (approximate, bias is not None, store_preact)
    tensors = (x, weight, act, preact, act if bias is None else bias)
    with on_device_of(x):
        launch, _ = _prepare(gemm_launch.forward, tensors, x.shape[1], flags, as_stored)
        launch(*tensors)
    return act, preact


def dgelu_gemm(
    dy: Tensor,
    weight: Tensor,
    preact: Tensor,
    approximate: str,
    store_act: bool,
    need_dbias: bool,
    store_product: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dpreact = (dy @ weight) * gelu'(preact): back through a layer and the GELU before it.

    Args:
        dy: (M, K), any strides.  weight: (K, N), any strides.  preact: (M, N), contiguous; all of one dtype.
        store_act: also give gelu(preact).  store_product: or dy @ weight.
        need_dbias: also give the sum of dpreact over rows.
    Returns: dpreact (M, N); act or the product (M, N), or (0,); dbias (N,) or (0,). In the dtype of dy; sums are
        accumulated in fp32.
    Raises: ValueError if both act and the product are asked for.
    """
    if store_act and store_product:
        raise ValueError("dgelu_gemm gives act or the product, not both")
    (M, K), N = dy.shape, weight.shape[1]
    dpreact = torch.empty_like(preact)
    second = torch.empty_like(preact) if store_act or store_product else preact.new_empty(0)
    if M == 0 or N == 0:
        return dpreact, second, preact.new_zeros(N if need_dbias else 0)
    if K == 0:
        dy, weight = dy.new_zeros((M, 8)), weight.new_zeros((8, N))
    dy = _with_contiguous_rows(dy)
    weight, as_stored = _stored(weight)
    flags = (approximate, store_act, need_dbias, store_product)
    # Tensors that are not asked for are not touched; any one stands in for them.
    tensors = (dy, weight, preact, dpreact, second if second.numel() else dpreact)
    with on_device_of(dy):
        launch, block_m = _prepare(gemm_launch.backward, tensors, dy.shape[1], flags, not as_stored)
        if not need_dbias:
            launch(*tensors, dpreact)
            return dpreact, second, preact.new_empty(0)
        partial = preact.new_empty((triton.cdiv(M, block_m), N), dtype=torch.float32)
        launch(*tensors, partial)
        return dpreact, second, column_sum(partial, preact.dtype)


def takes_stack(dy: Tensor, weight: Tensor, x: Tensor, always: bool = False) -> bool:
    """Whether `stack_bwd` can run on these, and is faster than a kernel for each product; `always`: can run alone."""
    M, K = dy.shape
    N = weight.shape[1]
    device = dy.device.index if dy.is_cuda else -1
    if not (M and N and K and configs.for_stack(M, N, K, dy.element_size(), device, always)):
        return False
    if not (dy.dtype == weight.dtype == x.dtype and dy.is_contiguous()):
        return False
    if not dy.is_cuda:
        # The interpreter's bf16 products are wrong.
        return dy.dtype != torch.bfloat16 and _has_contiguous_rows(weight) and _has_contiguous_rows(x)
    # Of the layer before, preact and what comes out have rows of N, as x has.
    return N % 8 == 0 and all(_has_contiguous_rows(t) and _fits_tma(t) for t in (dy, weight, x))


def stack_bwd(
    dy: Tensor,
    weight: Tensor,
    x: Tensor,
    preact: Tensor,
    sums: Tensor | None,
    approximate: str,
    sum_rows: bool,
    config: StackConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Back through a layer within a stack, and through the GELU of the layer before, where `takes_stack` says so.

        dx = dy @ weight, dpreact = dx * gelu'(preact), dweight = dy.T @ x, dbias = sum of `sums` over its rows

    Args:
        dy: (M, K), the gradient of this layer's own preact.  weight: (K, N).  x: (M, N), act of the layer before.
        preact: (M, N), contiguous, of the layer before.  All of one dtype.
        sums: (P, K), fp32, contiguous: partial sums of dy; None for no dbias.
        sum_rows: also give partial sums of dpreact.
        config: for measurements and tests, instead of the rule's.
    Returns: dpreact, dx (M, N); its partial sums (cdiv(M, 64), N) in fp32, or (0,); dweight (K, N); dbias (K,) or (0,).
    """
    (M, K), N = dy.shape, weight.shape[1]
    dpreact, dx, dweight = torch.empty_like(preact), torch.empty_like(preact), weight.new_empty((K, N))
    rows = triton.cdiv(M, configs.STACK_ROWS)
    partial = preact.new_empty((rows, N) if sum_rows else 0, dtype=torch.float32)
    dbias = dy.new_empty(0 if sums is None else K)
    # Tensors that are not asked for are not touched.
    tensors = (
        dy, weight, preact, dpreact, dx, partial if sum_rows else dpreact, x, dweight,
        dpreact if sums is None else sums, dweight if sums is None else dbias,
    )  # fmt: skip
    with on_device_of(dy):
        launch = _prepare_stack(tensors, 0 if sums is None else sums.shape[0], (approximate, sum_rows), config)
        launch(*tensors)
    return dpreact, dx, partial, dweight, dbias


# What a call of `stack_bwd` depends on -> its launch.
_prepared_stack: dict[tuple, Launch] = {}


def _prepare_stack(tensors: tuple[Tensor, ...], rows: int, flags: tuple, config: StackConfig | None) -> Launch:
    dy, weight, preact, *_, x, _, sums, _ = tensors
    (M, N), K = preact.shape, dy.shape[1]
    strides = (dy.stride(0), weight.stride(0), x.stride(0))
    key = (flags, M, N, K, rows, strides, dy.dtype, dy.device, _aligned(preact), _aligned(sums), config)
    launch = _prepared_stack.get(key)
    if launch is None:
        device = dy.device.index if dy.is_cuda else -1
        config = config or configs.for_stack(M, N, K, dy.element_size(), device, True)
        if config is None:
            raise ValueError(f"no kernel for a stack's layer of {M} x {K} x {N} in {dy.dtype} on {dy.device}")
        launch = gemm_launch.stack((M, N, K, rows), config, strides, flags, dy.device)
        remember(_prepared_stack, key, launch)
    return launch


def _prepare(make: Callable[..., Launch], tensors: tuple[Tensor, ...], K: int, flags: tuple, b_is_nk: bool):
    """The launch for these tensors, and the rows of a tile: chosen and made on the first call of its kind."""
    a, b, result, *_ = tensors
    precision = _precision(a.dtype)
    key = (
        make, flags, b_is_nk, result.shape, K, a.dtype, a.device, a.stride(0), b.stride(0),
        _aligned(a), _aligned(b), _aligned(result), _aligned(tensors[-1]), precision, choice.forced,
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = remember(_prepared, key, _choose(make, tensors, K, precision, flags, b_is_nk))
    return prepared


def _choose(make, tensors, K: int, precision: str, flags: tuple, b_is_nk: bool) -> tuple[Launch, int]:
    a, b, result, *_ = tensors
    M, N = result.shape
    device = a.device.index if a.is_cuda else -1
    use_tma = configs.has_tma(device) and all(map(_fits_tma, (a, b, result)))
    backward = make is gemm_launch.backward
    problem = Problem(M, N, K, a.dtype, precision, use_tma, backward, " ".join(map(str, flags)), device)

    def launch_with(config: GemmConfig) -> Launch:
        return make(problem, config, (a.stride(0), b.stride(0)), flags, b_is_nk)

    def run(config: GemmConfig) -> Callable[[], None]:
        launch, rows = launch_with(config), triton.cdiv(M, config.BLOCK_M)
        partial = (a.new_empty((rows, N), dtype=torch.float32),) if backward else ()
        return lambda: launch(*tensors, *partial)

    config = choice.choose(problem, run)
    return launch_with(config), config.BLOCK_M


def _precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: as torch's own, TF32 only where the user has allowed it."""
    # `allow_tf32` raises where the user has set this newer one.
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def _fits_tma(matrix: Tensor) -> bool:
    """Whether a matrix with contiguous rows can be a tensor descriptor: base and rows aligned to 16 bytes."""
    # Tiles are addressed in 32 bits.
    small = max(matrix.shape) < 2**31
    return small and _aligned(matrix) and matrix.stride(0) * matrix.element_size() % 16 == 0


def _has_contiguous_rows(matrix: Tensor) -> bool:
    stride, inner = matrix.stride()
    return inner == 1 and stride >= matrix.shape[1]


def _with_contiguous_rows(matrix: Tensor) -> Tensor:
    if _has_contiguous_rows(matrix):
        return matrix
    matrix = matrix.contiguous()
    # A dimension of size 1 may keep any stride, 0 say, where nothing had to be copied.
    return matrix if _has_contiguous_rows(matrix) else matrix.view(-1).view(matrix.shape)


def _stored(weight: Tensor) -> tuple[Tensor, bool]:
    """The weight as a matrix with contiguous rows, and whether it is in its own order or transposed."""
    if not _has_contiguous_rows(weight) and _has_contiguous_rows(transposed := weight.t()):
        return transposed, False
    return _with_contiguous_rows(weight), True
