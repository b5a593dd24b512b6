"""The operators torch.ops.fusedmlp_cuda.*: schemas, fake kernels and FLOP formulas.

Their CUDA kernels are C++ (`csrc/bindings.cpp`), which `fusedmlp.build.load` builds and loads; all that is here works
without. Shapes: `M` rows (all leading dimensions of x flattened), `K` in_features, `N` out_features or hidden features,
`N2` the MLP's out_features. An output that is not asked for has no elements.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("fusedmlp_cuda", "FRAGMENT")


def _define(schema: str, fake: Callable) -> Callable:
    """Make an operator of this schema; `fake` gives its outputs' shapes, dtypes and strides."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"fusedmlp_cuda::{name}", fake, lib=_library)
    # The overload itself: looking it up in its packet costs a microsecond a call.
    return getattr(torch.ops.fusedmlp_cuda, name).default


def _rows(shape) -> int:
    return math.prod(shape[:-1])


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _fake_linear_gelu_fwd(x, weight, bias, approximate, keep_preact):
    N = weight.shape[0]
    act = x.new_empty((*x.shape[:-1], N))
    return act, x.new_empty((_rows(x.shape), N)) if keep_preact else _nothing(x)


def _fake_linear_gelu_bwd(dy, x, weight, preact, approximate, need_dbias):
    N = preact.shape[1]
    dx = _nothing(preact) if weight is None else preact.new_empty((*dy.shape[:-1], weight.shape[1]))
    dweight = _nothing(preact) if x is None else preact.new_empty((N, x.shape[-1]))
    return dx, dweight, preact.new_empty(N if need_dbias else 0)


def _fake_mlp_fwd(x, weight1, bias1, weight2, bias2, approximate, keep_preact, keep_act):
    hidden = (_rows(x.shape), weight1.shape[0])
    y = x.new_empty((*x.shape[:-1], weight2.shape[0]))
    preact = x.new_empty(hidden) if keep_preact else _nothing(x)
    return y, preact, x.new_empty(hidden) if keep_act else _nothing(x)


def _fake_mlp_bwd(dy, x, weight1, weight2, preact, act, approximate, need_dbias1, need_dbias2):
    needs_hidden = preact is not None
    dx = dy.new_empty((*dy.shape[:-1], weight1.shape[1])) if needs_hidden and weight1 is not None else _nothing(dy)
    dweight1 = dy.new_empty((preact.shape[1], x.shape[-1])) if needs_hidden and x is not None else _nothing(dy)
    dbias1 = dy.new_empty(preact.shape[1] if needs_hidden and need_dbias1 else 0)
    dweight2 = _nothing(dy) if act is None else dy.new_empty((dy.shape[-1], act.shape[1]))
    return dx, dweight1, dbias1, dweight2, dy.new_empty(dy.shape[-1] if need_dbias2 else 0)


gelu_fwd = _define("gelu_fwd(Tensor x, str approximate) -> Tensor", lambda x, approximate: torch.empty_like(x))
gelu_bwd = _define(
    "gelu_bwd(Tensor dy, Tensor x, str approximate) -> Tensor", lambda dy, x, approximate: torch.empty_like(x)
)
softmax_fwd = _define("softmax_fwd(Tensor x, int dim) -> Tensor", lambda x, dim: torch.empty_like(x))
softmax_bwd = _define("softmax_bwd(Tensor dy, Tensor y, int dim) -> Tensor", lambda dy, y, dim: torch.empty_like(y))
# -> act (..., N), preact (M, N)
linear_gelu_fwd = _define(
    "linear_gelu_fwd(Tensor x, Tensor weight, Tensor? bias, str approximate, bool keep_preact) -> (Tensor, Tensor)",
    _fake_linear_gelu_fwd,
)
# -> dx (..., K) if weight is given, dweight (N, K) if x is given, dbias (N,)
linear_gelu_bwd = _define(
    "linear_gelu_bwd(Tensor dy, Tensor? x, Tensor? weight, Tensor preact, str approximate, bool need_dbias)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_linear_gelu_bwd,
)
# -> y (..., N2), preact and act (M, N)
mlp_fwd = _define(
    "mlp_fwd(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, str approximate,"
    " bool keep_preact, bool keep_act) -> (Tensor, Tensor, Tensor)",
    _fake_mlp_fwd,
)
# -> dx (..., K) if weight1 is given, dweight1 (N, K) if x is given, dbias1 (N,), dweight2 (N2, N) if act is given,
# dbias2 (N2,). preact and weight2 are given where any of the first three is needed.
mlp_bwd = _define(
    "mlp_bwd(Tensor dy, Tensor? x, Tensor? weight1, Tensor? weight2, Tensor? preact, Tensor? act, str approximate,"
    " bool need_dbias1, bool need_dbias2) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_mlp_bwd,
)


@register_flop_formula(torch.ops.fusedmlp_cuda.linear_gelu_fwd)
def _linear_gelu_fwd_flops(x_shape, weight_shape, *_, **__) -> int:
    return 2 * _rows(x_shape) * math.prod(weight_shape)


@register_flop_formula(torch.ops.fusedmlp_cuda.linear_gelu_bwd)
def _linear_gelu_bwd_flops(dy_shape, x_shape, weight_shape, preact_shape, *_, **__) -> int:
    hidden = math.prod(preact_shape)
    of_dx = 0 if weight_shape is None else 2 * hidden * weight_shape[1]
    of_dweight = 0 if x_shape is None else 2 * hidden * x_shape[-1]
    return of_dx + of_dweight


@register_flop_formula(torch.ops.fusedmlp_cuda.mlp_fwd)
def _mlp_fwd_flops(x_shape, weight1_shape, bias1_shape, weight2_shape, *_, **__) -> int:
    return 2 * _rows(x_shape) * (math.prod(weight1_shape) + math.prod(weight2_shape))


@register_flop_formula(torch.ops.fusedmlp_cuda.mlp_bwd)
def _mlp_bwd_flops(dy_shape, x_shape, weight1_shape, weight2_shape, preact_shape, act_shape, *_, **__) -> int:
    flops = 0
    if preact_shape is not None:
        hidden = math.prod(preact_shape)
        flops += 2 * hidden * dy_shape[-1]
        flops += 0 if weight1_shape is None else 2 * hidden * weight1_shape[1]
        flops += 0 if x_shape is None else 2 * hidden * x_shape[-1]
    if act_shape is not None:
        flops += 2 * math.prod(act_shape) * dy_shape[-1]
    return flops
