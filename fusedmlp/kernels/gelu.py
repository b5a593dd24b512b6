"""GELU in Triton: its mathematics, once for every kernel, and the pointwise kernels.

    gelu(x)  = x * gate(x)
    gate(x)  = (1 + erf(x / sqrt(2))) / 2                              approximate = "none"
    gate(x)  = sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3))        approximate = "tanh"

The second line is (1 + tanh(u)) / 2 written as a sigmoid: it neither overflows nor cancels for large |x|.

`gelu`, `gelu_grad` and `gelu_and_grad` are called inside kernels on fp32 values; `APPROXIMATE` is the string "none" or "tanh".
"""

import triton
import triton.language as tl

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_LOG2_E = tl.constexpr(1.4426950408889634)
# 2 * sqrt(2 / pi) * log2(e): sigmoid(2u) = 1 / (1 + 2^-(x * (_TANH_LINEAR + _TANH_CUBIC * x^2)))
_TANH_LINEAR = tl.constexpr(2.302208198144325)
_TANH_CUBIC = tl.constexpr(2.302208198144325 * 0.044715)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _gate(x, APPROXIMATE: tl.constexpr):
    """gelu(x) / x, in [0, 1], for fp32 x."""
    if APPROXIMATE == "tanh":
        return 1.0 / (1.0 + tl.exp2(-x * (_TANH_LINEAR + _TANH_CUBIC * x * x)))
    else:
        return 0.5 + 0.5 * tl.math.erf(x * _SQRT_HALF)


@triton.jit
def _gate_slope(x, gate, APPROXIMATE: tl.constexpr):
    """x * d gate / dx, for fp32 x and its gate."""
    if APPROXIMATE == "tanh":
        return x * (_LN_2 * (_TANH_LINEAR + 3.0 * _TANH_CUBIC * x * x)) * (gate * (1.0 - gate))
    else:
        return x * (_INV_SQRT_2PI * tl.exp2(-0.5 * _LOG2_E * x * x))


@triton.jit
def gelu(x, APPROXIMATE: tl.constexpr):
    """gelu(x) for fp32 x."""
    return x * _gate(x, APPROXIMATE)


@triton.jit
def gelu_grad(x, APPROXIMATE: tl.constexpr):
    """d gelu / dx at fp32 x."""
    gate = _gate(x, APPROXIMATE)
    return gate + _gate_slope(x, gate, APPROXIMATE)


@triton.jit
def gelu_and_grad(x, APPROXIMATE: tl.constexpr):
    """(gelu(x), d gelu / dx) for fp32 x: for epilogues that need both."""
    gate = _gate(x, APPROXIMATE)
    return x * gate, gate + _gate_slope(x, gate, APPROXIMATE)
