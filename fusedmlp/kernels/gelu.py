"""GELU in Triton: its mathematics, once for every kernel, and the pointwise kernels.

    gelu(x)  = x * gate(x)
    gate(x)  = (1 + erf(x / sqrt(2))) / 2                              approximate = "none"
    gate(x)  = sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3))        approximate = "tanh"

The second gate is (1 + tanh(u)) / 2 written as a sigmoid: it neither overflows nor cancels for large |x|.

`gelu`, `gelu_grad` and `gelu_and_grad` are called inside kernels on fp32 values; `APPROXIMATE` is the string "none"
or "tanh". (A constant stands on the right of a product: the interpreter does not know constexpr * tensor.)
"""

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_NEG_HALF_LOG2_E = tl.constexpr(-0.7213475204444817)
# sigmoid(2u) = 1 / (1 + 2^(x * (_EXP_LINEAR + _EXP_CUBIC * x^2)))
_EXP_LINEAR = tl.constexpr(-2.302208198144325)
_EXP_CUBIC = tl.constexpr(-0.10294323958002349)
# d(2u)/dx = _SLOPE + _SLOPE_SQUARE * x^2
_SLOPE = tl.constexpr(1.5957691216057308)
_SLOPE_SQUARE = tl.constexpr(0.21406444881780074)


@triton.jit
def _gate(x, APPROXIMATE: tl.constexpr):
    """gelu(x) / x, in [0, 1], for fp32 x."""
    if APPROXIMATE == "tanh":
        return 1.0 / (1.0 + tl.exp2(x * (x * x * _EXP_CUBIC + _EXP_LINEAR)))
    else:
        return 0.5 + 0.5 * tl.math.erf(x * _SQRT_HALF)


@triton.jit
def _x_gate_grad(x, gate, APPROXIMATE: tl.constexpr):
    """x * d gate / dx, for fp32 x and its gate."""
    if APPROXIMATE == "tanh":
        return x * (x * x * _SLOPE_SQUARE + _SLOPE) * (gate * (1.0 - gate))
    else:
        return x * (tl.exp2(x * x * _NEG_HALF_LOG2_E) * _INV_SQRT_2PI)


@triton.jit
def gelu(x, APPROXIMATE: tl.constexpr):
    """gelu(x) for fp32 x."""
    return x * _gate(x, APPROXIMATE)


@triton.jit
def gelu_grad(x, APPROXIMATE: tl.constexpr):
    """d gelu / dx at fp32 x."""
    gate = _gate(x, APPROXIMATE)
    return gate + _x_gate_grad(x, gate, APPROXIMATE)


@triton.jit
def gelu_and_grad(x, APPROXIMATE: tl.constexpr):
    """(gelu(x), d gelu / dx) for fp32 x: for epilogues that need both."""
    gate = _gate(x, APPROXIMATE)
    return x * gate, gate + _x_gate_grad(x, gate, APPROXIMATE)
