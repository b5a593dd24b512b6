"""cuda: C++ and CUDA, forward and backward.

GELU and softmax are hand-written kernels. Linear+GELU and the MLP go through cuBLASLt: for tanh in 16 bits with GELU in
its epilogues, for erf (which it does not have) with a pointwise kernel that gives the bias gradient on the way. Where
there are several ways they are timed once for each problem, up to 128 problems, and the fastest one is kept;
`torch.use_deterministic_algorithms(True)` switches that off. The kernels are built on first use: see `fusedmlp.build`.

Each call is one operator, `torch.ops.fusedmlp_cuda.*` (`fusedmlp/kernels/cuda_ops.py`), in C++ down to the launches; a
`torch.autograd.Function` ties the forward operator to the backward one.
"""

import torch
from torch import Tensor

from fusedmlp import build
from fusedmlp.impls._autograd import once_differentiable, requires_grad
from fusedmlp.kernels import cuda_ops, toolchain

DEVICES = ("cuda",)

_REMEDY = "use impl=native or impl=compiled"

_ready = False


def unavailable() -> str | None:
    if torch.version.cuda is None:
        return f"{toolchain.missing()}; or {_REMEDY}"
    if not torch.cuda.is_available():
        return f"there is no CUDA GPU; {_REMEDY}"
    archs = build.visible_archs()
    if archs[0] < 80:
        hide = "hide it with CUDA_VISIBLE_DEVICES, or " if archs[-1] >= 80 else ""
        need = "the kernels need 8.0 (A100) or newer"
        return f"a GPU has compute capability {archs[0] / 10} and {need}; {hide}{_REMEDY}"
    if build.find(archs) is None and (reason := build.missing(archs)) is not None:
        return f"{reason}; or {_REMEDY}"
    return None


def built() -> bool:
    """Whether the kernels are built; impl=auto does not wait for nvcc."""
    return build.loaded() or build.find(build.visible_archs()) is not None


def _load_kernels() -> None:
    global _ready
    build.load()
    _ready = True


# The first call may come while TorchDynamo traces: then it runs this, and takes the result for a constant.
_load_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _starts_graph(*tensors: Tensor | None) -> bool:
    """Whether a call is to be differentiated; after this the kernels are there to run it."""
    if torch.compiler.is_compiling() or not _ready:
        _load_kernels()
    return requires_grad(*tensors)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, approximate: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return cuda_ops.gelu_fwd(x, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return cuda_ops.gelu_bwd(dy, x, ctx.approximate), None


def gelu(x: Tensor, approximate: str) -> Tensor:
    if _starts_graph(x):
        return _Gelu.apply(x, approximate)
    return cuda_ops.gelu_fwd(x, approximate)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int) -> Tensor:
        ctx.set_materialize_grads(False)
        y = cuda_ops.softmax_fwd(x, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return cuda_ops.softmax_bwd(dy, y, ctx.dim), None


def softmax(x: Tensor, dim: int) -> Tensor:
    if _starts_graph(x):
        return _Softmax.apply(x, dim)
    return cuda_ops.softmax_fwd(x, dim)


class _LinearGelu(torch.autograd.Function):
    """Keeps preact (M, N), and what the wanted gradients need of x and weight.

    preact is an output too, so that it leads to all inputs and a second derivative is noticed.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        act, preact = cuda_ops.linear_gelu_fwd(x, weight, bias, approximate, True)
        need_dx, need_dweight, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_dweight else None, weight if need_dx else None, preact)
        ctx.approximate = approximate
        return act, preact

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, *_):
        x, weight, preact = ctx.saved_tensors
        needs = ctx.needs_input_grad
        gradients = cuda_ops.linear_gelu_bwd(dy, x, weight, preact, ctx.approximate, needs[2])
        return *_wanted(gradients, needs), None


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    if _starts_graph(x, weight, bias):
        act, _ = _LinearGelu.apply(x, weight, bias, approximate)
        return act
    act, _ = cuda_ops.linear_gelu_fwd(x, weight, bias, approximate, False)
    return act


class _Mlp(torch.autograd.Function):
    """Keeps preact and act (M, N), and what the wanted gradients need of x and the weights.

    preact is an output too, so that it leads to all inputs and a second derivative is noticed.
    """

    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2, approximate: str) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        need_dx, need_dweight1, need_dbias1, need_dweight2, _, _ = ctx.needs_input_grad
        need_dpreact = need_dx or need_dweight1 or need_dbias1
        y, preact, act = cuda_ops.mlp_fwd(x, weight1, bias1, weight2, bias2, approximate, need_dpreact, need_dweight2)
        ctx.save_for_backward(
            x if need_dweight1 else None,
            weight1 if need_dx else None,
            weight2 if need_dpreact else None,
            preact if need_dpreact else None,
            act if need_dweight2 else None,
        )
        ctx.approximate = approximate
        return y, preact if need_dpreact else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, *_):
        needs = ctx.needs_input_grad
        gradients = cuda_ops.mlp_bwd(dy, *ctx.saved_tensors, ctx.approximate, needs[2], needs[4])
        return *_wanted(gradients, needs), None


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, approximate: str
) -> Tensor:
    if _starts_graph(x, weight1, bias1, weight2, bias2):
        y, _ = _Mlp.apply(x, weight1, bias1, weight2, bias2, approximate)
        return y
    y, _, _ = cuda_ops.mlp_fwd(x, weight1, bias1, weight2, bias2, approximate, False, False)
    return y


def _wanted(gradients: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=False))
