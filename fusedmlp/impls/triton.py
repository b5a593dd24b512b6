"""triton: hand-written Triton kernels, forward and backward.

Each kernel launcher is an operator, `torch.ops.fusedmlp_triton.*` (`fusedmlp/kernels/triton_ops.py`); a
`torch.autograd.Function` ties the forward operator to the backward one.
"""

import os

import torch
from torch import Tensor

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError("Triton is missing: `pip install triton` (Linux), or use impl=native or impl=compiled") from error

from fusedmlp.impls import _stack
from fusedmlp.impls._autograd import free_saved, like_rows_of, once_differentiable, requires_grad, rows
from fusedmlp.kernels import triton_ops

DEVICES = triton_ops.DEVICES

_REMEDY = "use impl=native or impl=compiled, or set TRITON_INTERPRET=1 to run the kernels on CPU tensors, slowly"


def unavailable() -> str | None:
    if triton_ops.INTERPRETER:
        from fusedmlp.kernels import interpreter

        return interpreter.fault()
    if not torch.cuda.is_available():
        return f"there is no CUDA GPU; {_REMEDY}"
    if torch.version.hip is not None:
        return f"the GPU is not NVIDIA's, and the kernels are written for those; {_REMEDY}"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU has compute capability {major}.{minor} and the kernels need 8.0 (A100) or newer; {_REMEDY}"
    return None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, approximate: str) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return triton_ops.gelu_fwd(x, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return triton_ops.gelu_bwd(dy, x, ctx.approximate), None


def gelu(x: Tensor, approximate: str) -> Tensor:
    if requires_grad(x):
        return _Gelu.apply(x, approximate)
    return triton_ops.gelu_fwd(x, approximate)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int) -> Tensor:
        ctx.set_materialize_grads(False)
        y = triton_ops.softmax_fwd(x, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return triton_ops.softmax_bwd(dy, y, ctx.dim), None


def softmax(x: Tensor, dim: int) -> Tensor:
    if requires_grad(x):
        return _Softmax.apply(x, dim)
    return triton_ops.softmax_fwd(x, dim)


class _LinearGelu(torch.autograd.Function):
    """Keeps preact (M, N), and what the wanted gradients need of x and weight. `_stack` links it to its like.

    preact is an output too, so that it leads to all inputs and a second derivative is noticed.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        act, preact = triton_ops.linear_gelu_fwd(rows(x), weight, bias, approximate, True)
        need_dx, need_dweight, _, _ = ctx.needs_input_grad
        ctx.save_for_backward(preact, x if need_dweight else None, weight if need_dx else None)
        ctx.approximate, ctx.x_shape = approximate, x.shape
        _stack.prepare(ctx, x, weight)
        return like_rows_of(x, act), preact

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, *_):
        preact, x, weight = ctx.saved_tensors
        free_saved(ctx)
        need_dx, need_dweight, need_dbias, _ = ctx.needs_input_grad
        ready = _stack.take(ctx, dy)
        dpreact, sums = ready or triton_ops.dgelu_dbias(rows(dy), preact, ctx.approximate, need_dbias)
        del preact, ready
        before = _stack.layer_before(ctx, x)
        if need_dweight:
            x = rows(x)
        before_preact = None if before is None or not need_dx else _stack.preact_of(before)
        if before_preact is not None and need_dweight and _stack.merges(dpreact, weight, x):
            merged = _merged(before, dpreact, weight, x, before_preact, sums, ctx.x_shape)
            return (*merged[:2], merged[2] if need_dbias else None, None)
        dbias = triton_ops.column_sum(sums, dpreact.dtype) if sums.ndim == 2 else sums
        # First, so that x is let go before dx is there, and the layer before's dpreact maybe.
        dweight = dpreact.t() @ x if need_dweight else None
        del x
        dx = _dx(dpreact, weight, before, before_preact, ctx.x_shape) if need_dx else None
        return dx, dweight, dbias if need_dbias else None, None


def _merged(before, dpreact, weight, x, preact, sums, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias by one kernel, and what the dGELU of the layer `before` makes of dx."""
    partial = sums if sums.ndim == 2 else None
    need_sums = before.needs_input_grad[2]
    results = triton_ops.stack_bwd(dpreact, weight, x, preact, partial, before.approximate, need_sums)
    dpreact, dx, sums_before, dweight, dbias = results
    dx = dx.view(shape)
    _stack.hand_over(before, dx, dpreact, sums_before)
    return dx, dweight, sums if partial is None else dbias


def _dx(dpreact: Tensor, weight: Tensor, before, preact: Tensor | None, shape: torch.Size) -> Tensor:
    """dpreact @ weight; with it, given the preact of a layer `before`, what the dGELU of that one makes of it."""
    if preact is None:
        return (dpreact @ weight).view(shape)
    need_dbias = before.needs_input_grad[2]
    dpreact, dx, dbias = triton_ops.dgelu_gemm(dpreact, weight, preact, before.approximate, False, need_dbias, True)
    dx = dx.view(shape)
    _stack.hand_over(before, dx, dpreact, dbias)
    return dx


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    if requires_grad(x, weight, bias):
        act, _ = _LinearGelu.apply(x, weight, bias, approximate)
        return act
    act, _ = triton_ops.linear_gelu_fwd(rows(x), weight, bias, approximate, False)
    return like_rows_of(x, act)


# What `mlp` keeps of its hidden features for the backward pass, and the price, for M rows of N hidden features:
#   "preact+act"  2 M N elements; nothing is computed again.
#   "preact"      M N elements; the GEMM that gives dpreact also writes act again (M N more elements of traffic), and
#                 for that moment there are three hidden-sized tensors.
#   "x"           none; the backward pass runs the first layer's forward GEMM again, a seventh GEMM beside the six.
# x and the weights are kept either way. During the backward pass alone, "preact+act" and "x" never hold more than two
# hidden-sized tensors. Set this, or FUSEDMLP_MLP_KEEP before the import; it is read at every forward call.
MLP_KEEP = os.environ.get("FUSEDMLP_MLP_KEEP", "preact+act")


def _mlp_keep() -> str:
    if MLP_KEEP not in ("preact+act", "preact", "x"):
        raise ValueError(f"MLP_KEEP (or FUSEDMLP_MLP_KEEP) is {MLP_KEEP!r}; accepted: preact+act, preact, x")
    return MLP_KEEP


class _Mlp(torch.autograd.Function):
    """Keeps x, the weights that the wanted gradients need, and of preact and act what `keep` says.

    A preact that is kept is an output too, so that it leads to all inputs and a second derivative is noticed.
    """

    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2, approximate: str, keep: str) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        need_dx, need_dweight1, need_dbias1, need_dweight2, *_ = ctx.needs_input_grad
        need_dpreact = need_dx or need_dweight1 or need_dbias1
        # Without dpreact, act alone is as small as preact alone and needs nothing recomputed.
        keep_preact = need_dpreact and keep != "x"
        keep_act = need_dweight2 and (keep == "preact+act" or (keep == "preact" and not need_dpreact))
        act, preact = triton_ops.linear_gelu_fwd(rows(x), weight1, bias1, approximate, keep_preact)
        y = torch.nn.functional.linear(act, weight2, bias2)
        recompute = keep == "x" and (need_dpreact or need_dweight2)
        ctx.save_for_backward(
            x if need_dweight1 or recompute else None,
            weight1 if need_dx or recompute else None,
            bias1 if recompute else None,
            weight2 if need_dpreact else None,
            preact if keep_preact else None,
            act if keep_act else None,
        )
        ctx.approximate, ctx.x_shape, ctx.recompute = approximate, x.shape, recompute
        return like_rows_of(x, y), preact if keep_preact else None

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, *_):
        x, weight1, bias1, weight2, preact, act = ctx.saved_tensors
        free_saved(ctx)
        need_dx, need_dweight1, need_dbias1, need_dweight2, need_dbias2, *_ = ctx.needs_input_grad
        need_dpreact = need_dx or need_dweight1 or need_dbias1
        dy = rows(dy)
        dx = dweight1 = dbias1 = dweight2 = None
        if ctx.recompute:
            act, preact = triton_ops.linear_gelu_fwd(rows(x), weight1, bias1, ctx.approximate, need_dpreact)
        # Each hidden-sized tensor is let go after its last use: two at a time, three where act is computed again.
        if need_dweight2 and act is not None:
            dweight2 = dy.t() @ act
            act = None
        if need_dpreact:
            recompute_act = need_dweight2 and dweight2 is None
            dpreact, act, dbias1 = triton_ops.dgelu_gemm(
                dy, weight2, preact, ctx.approximate, recompute_act, need_dbias1
            )
            preact = None
            if recompute_act:
                dweight2 = dy.t() @ act
            act = None
            dx = (dpreact @ weight1).view(ctx.x_shape) if need_dx else None
            dweight1 = dpreact.t() @ rows(x) if need_dweight1 else None
        dbias2 = dy.sum(0) if need_dbias2 else None
        return dx, dweight1, dbias1 if need_dbias1 else None, dweight2, dbias2, None, None


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, approximate: str
) -> Tensor:
    if requires_grad(x, weight1, bias1, weight2, bias2):
        y, _ = _Mlp.apply(x, weight1, bias1, weight2, bias2, approximate, _mlp_keep())
        return y
    act, _ = triton_ops.linear_gelu_fwd(rows(x), weight1, bias1, approximate, False)
    return like_rows_of(x, torch.nn.functional.linear(act, weight2, bias2))
