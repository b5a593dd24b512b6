"""The operators torch.ops.fusedmlp_triton.*: launchers with their schemas, fake kernels and FLOP formulas.

`torch.compile(fullgraph=True)`, FLOP counters, selective activation checkpointing and FSDP see operators, and an eager
call stays cheap. Host time added to a launcher that does nothing, one forward call / forward and backward tied by a
`torch.autograd.Function` (one CPU core, torch 2.14): this way 3 / 9 us, `torch.library.custom_op` with
`register_autograd` 11 / 50 us, `torch.library.triton_op` 14 / 66 us.

What goes in and comes out, the launchers say. An output that is not asked for has no elements.
"""

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fusedmlp.kernels import gelu, linear_gelu, reduce, softmax
from fusedmlp.kernels.configs import STACK_ROWS

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

DEVICES = ("cpu", "cuda") if INTERPRETER else ("cuda",)

# The launcher of each operator, for whoever wants its launches without data: the operator would run its fake kernel.
LAUNCHERS: dict[Callable, Callable] = {}

_library = torch.library.Library("fusedmlp_triton", "FRAGMENT")


def _register(schema: str, launcher: Callable, fake: Callable) -> Callable:
    """Make `launcher` an operator with this schema; `fake` gives its outputs' shapes, dtypes and strides."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in DEVICES:
        _library.impl(name, launcher, device.upper())
    torch.library.register_fake(f"fusedmlp_triton::{name}", fake, lib=_library)
    # The overload itself: looking it up in its packet costs a microsecond a call.
    operator = getattr(torch.ops.fusedmlp_triton, name).default
    LAUNCHERS[operator] = launcher
    return operator


def _rounded_products(launcher: Callable) -> Callable:
    """The launcher; in the interpreter, whose bf16 dot products are wrong, with bf16 widened to fp32 around it."""

    @functools.wraps(launcher)
    def widened(*args):
        low = torch.bfloat16
        if args[0].dtype != low:
            return launcher(*args)
        results = launcher(*(a.float() if isinstance(a, Tensor) else a for a in args))
        return tuple(result.to(low) for result in results)

    return widened if INTERPRETER else launcher


def _fake_linear_gelu_fwd(x, weight, bias, approximate, store_preact):
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if store_preact else 0)


def _fake_dgelu_dbias(dy, preact, approximate, need_dbias):
    return torch.empty_like(preact), preact.new_empty(preact.shape[1] if need_dbias else 0)


def _fake_dgelu_gemm(dy, weight, preact, approximate, store_act, need_dbias, store_product=False):
    second = preact.new_empty(preact.shape if store_act or store_product else 0)
    return torch.empty_like(preact), second, preact.new_empty(preact.shape[1] if need_dbias else 0)


def _fake_stack_bwd(dy, weight, x, preact, sums, approximate, sum_rows):
    rows = (preact.shape[0] + STACK_ROWS - 1) // STACK_ROWS
    partial = preact.new_empty((rows, preact.shape[1]) if sum_rows else 0, dtype=torch.float32)
    dweight, dbias = weight.new_empty(weight.shape), dy.new_empty(0 if sums is None else dy.shape[1])
    return torch.empty_like(preact), torch.empty_like(preact), partial, dweight, dbias


gelu_fwd = _register(
    "gelu_fwd(Tensor x, str approximate) -> Tensor", gelu.gelu_fwd, lambda x, approximate: torch.empty_like(x)
)
gelu_bwd = _register(
    "gelu_bwd(Tensor dy, Tensor x, str approximate) -> Tensor",
    gelu.gelu_bwd,
    lambda dy, x, approximate: torch.empty_like(x),
)
softmax_fwd = _register(
    "softmax_fwd(Tensor x, int dim) -> Tensor", softmax.softmax_fwd, lambda x, dim: torch.empty_like(x)
)
softmax_bwd = _register(
    "softmax_bwd(Tensor dy, Tensor y, int dim) -> Tensor", softmax.softmax_bwd, lambda dy, y, dim: torch.empty_like(y)
)
linear_gelu_fwd = _register(
    "linear_gelu_fwd(Tensor x, Tensor weight, Tensor? bias, str approximate, bool store_preact) -> (Tensor, Tensor)",
    _rounded_products(linear_gelu.linear_gelu_fwd),
    _fake_linear_gelu_fwd,
)
dgelu_dbias = _register(
    "dgelu_dbias(Tensor dy, Tensor preact, str approximate, bool need_dbias) -> (Tensor, Tensor)",
    reduce.dgelu_dbias,
    _fake_dgelu_dbias,
)
dgelu_gemm = _register(
    "dgelu_gemm(Tensor dy, Tensor weight, Tensor preact, str approximate, bool store_act, bool need_dbias,"
    " bool store_product=False) -> (Tensor, Tensor, Tensor)",
    _rounded_products(linear_gelu.dgelu_gemm),
    _fake_dgelu_gemm,
)
stack_bwd = _register(
    "stack_bwd(Tensor dy, Tensor weight, Tensor x, Tensor preact, Tensor? sums, str approximate, bool sum_rows)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    linear_gelu.stack_bwd,
    _fake_stack_bwd,
)
column_sum = _register(
    "column_sum(Tensor partial, ScalarType dtype) -> Tensor",
    reduce.column_sum,
    lambda partial, dtype: partial.new_empty(partial.shape[1], dtype=dtype),
)


@register_flop_formula(torch.ops.fusedmlp_triton.linear_gelu_fwd)
def _linear_gelu_flops(x_shape, weight_shape, *_, **__) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@register_flop_formula(torch.ops.fusedmlp_triton.dgelu_gemm)
def _dgelu_gemm_flops(dy_shape, weight_shape, *_, **__) -> int:
    return 2 * dy_shape[0] * weight_shape[0] * weight_shape[1]


@register_flop_formula(torch.ops.fusedmlp_triton.stack_bwd)
def _stack_bwd_flops(dy_shape, weight_shape, *_, **__) -> int:
    return 4 * dy_shape[0] * weight_shape[0] * weight_shape[1]
