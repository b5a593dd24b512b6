"""A peer for linear_gelu and mlp: cuBLASLt's epilogues as nvmath-python offers them, every product autotuned.

What a user without kernels of their own can have: GELU (tanh form) in the epilogue of the first product, its derivative
in that of the backward pass's first product, bias gradients in those of the weight gradients or as sums of their own,
whichever takes less time. A result of cuBLASLt's epilogues is column-major, so all is computed transposed.

`M` rows, `K` in_features, `N` out_features or hidden features, `N2` the MLP's out_features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_AUTOTUNE_RUNS = 10
_products: dict[tuple, Any] = {}
_fused_sums: dict[tuple, bool] = {}


def product(a: Tensor, b: Tensor, epilog: str = "", **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """a @ b with an epilogue of cuBLASLt, and what else that gives; planned and tuned once for each problem."""
    from nvmath.linalg import advanced

    key = (epilog, a.dtype, a.device, *[(t.shape, t.stride()) for t in (a, b)])
    plan = _products.get(key)
    if plan is None:
        plan = _products[key] = advanced.Matmul(a, b)
        plan.plan(epilog=getattr(advanced.MatmulEpilog, epilog) if epilog else None, epilog_inputs=inputs or None)
        plan.autotune(iterations=_AUTOTUNE_RUNS)
    else:
        plan.reset_operands_unchecked(a=a, b=b, epilog_inputs=inputs or None)
    result = plan.execute()
    # The plan would keep them alive until the next call.
    plan.release_operands()
    return result if isinstance(result, tuple) else (result, {})


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x @ weight.T + bias), tanh form; x (M, K), weight (N, K), bias (N,)."""
    if torch.is_grad_enabled():
        return _LinearGelu.apply(x, weight, bias)
    return _act(x, weight, bias, keep=False)[0]


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """linear_gelu and a second layer; weight1 (N, K), weight2 (N2, N)."""
    if torch.is_grad_enabled():
        return _MLP.apply(x, weight1, bias1, weight2, bias2)
    return _linear(_act(x, weight1, bias1, keep=False)[0], weight2, bias2)


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        act, preact = _act(x, weight, bias, keep=True)
        ctx.save_for_backward(x, weight, preact)
        ctx.has_bias = bias is not None
        return act

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, preact = ctx.saved_tensors
        dpreact = torch.ops.aten.gelu_backward(dy, preact.t(), approximate="tanh")
        dweight, dbias = _weight_gradient(dpreact, x, ctx.has_bias)
        return dpreact @ weight, dweight, dbias


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2):
        act, preact = _act(x, weight1, bias1, keep=True)
        ctx.save_for_backward(x, weight1, weight2, act, preact)
        ctx.has_bias = bias1 is not None, bias2 is not None
        return _linear(act, weight2, bias2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight1, weight2, act, preact = ctx.saved_tensors
        dpreact = product(weight2.t(), dy.t(), "DGELU", gelu_aux=preact)[0].t()  # (M, N)
        dweight2, dbias2 = _weight_gradient(dy, act, ctx.has_bias[1])
        dweight1, dbias1 = _weight_gradient(dpreact, x, ctx.has_bias[0])
        return product(weight1.t(), dpreact.t())[0].t(), dweight1, dbias1, dweight2, dbias2


def _act(x: Tensor, weight: Tensor, bias: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """act (M, N), and preact as cuBLASLt keeps it, (N, M), with no elements if it is not wanted."""
    epilog = "GELU" + "_AUX" * keep + "_BIAS" * (bias is not None)
    out, beside = product(weight, x.t(), epilog, **({} if bias is None else {"bias": bias}))
    return out.t(), beside["gelu_aux"] if keep else x.new_empty(0)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return product(weight, x.t())[0].t()
    return product(weight, x.t(), "BIAS", bias=bias)[0].t()


def _weight_gradient(dy: Tensor, x: Tensor, need_dbias: bool) -> tuple[Tensor, Tensor | None]:
    """dy.T @ x, (N, K), and the column sums of dy, (N,); dy (M, N), x (M, K)."""

    def fused() -> tuple[Tensor, Tensor | None]:
        out, beside = product(x.t(), dy, "BGRADB")
        return out.t(), beside["bgradb"]

    def separate() -> tuple[Tensor, Tensor | None]:
        return product(x.t(), dy)[0].t(), dy.sum(0)

    if not need_dbias:
        return product(x.t(), dy)[0].t(), None
    key = (dy.dtype, dy.shape, dy.stride(), x.shape)
    if key not in _fused_sums:
        _fused_sums[key] = _ms(fused) < _ms(separate)
    return fused() if _fused_sums[key] else separate()


def _ms(function: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return do_bench(function, warmup=20, rep=40, return_mode="median")
