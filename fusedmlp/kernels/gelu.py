"""GELU in Triton: its mathematics, once for every kernel, and the pointwise kernels.

    gelu(x) = x * gate(x)      d gelu / dx = gate(x) + x * density(x)      gate(-x) = 1 - gate(x)

    approximate   gate(x)                                                   density(x) = d gate / dx
    "none"        (1 + erf(x / sqrt(2))) / 2                                exp(-x^2 / 2) / sqrt(2 pi)
    "tanh"        sigmoid(2u),  u = sqrt(2 / pi) * (x + 0.044715 x^3)       gate * (1 - gate) * d(2u)/dx

The tanh gate, (1 + tanh(u)) / 2, is a sigmoid. Both are computed as the tail gate(-|x|), so that nothing overflows and
the small side keeps its relative accuracy; 1 - tail serves the other side.

`gelu`, `gelu_grad` and `gelu_and_grad` are for use inside kernels, on fp32 values; `APPROXIMATE` is the string "none"
or "tanh". Their constants are written out because a global one would cost host time at each launch: Triton compares it
with the value that was compiled in.

`gelu_fwd` and `gelu_bwd` are the launchers of the pointwise kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedmlp.kernels import prepared
from fusedmlp.kernels.pdl import follow

# Two 16-byte accesses in each of 128 threads; one for fp32 forward, which needs no more in flight (measured, H200).
_BLOCK_BYTES = 4096
_BLOCK_BYTES_FP32_FORWARD = 2048
_NUM_WARPS = 4


@triton.jit
def _mills(z):
    """gate(-z) / exp(-z^2 / 2) of the erf form, for z >= 0: Mills' ratio over sqrt(2 pi).

    A polynomial in z / (1 + z / 4), minimax: relative error 1e-7 up to z = 5, growing to 1.5e-5 at z = 13, where the
    tail is the smallest normal fp32. Half the instructions of erf, and the factor exp(-z^2 / 2) is the density that
    the gradient needs anyway.
    """
    # Beyond 16 the tail is 0 in fp32, and the bound keeps inf / inf away.
    z = tl.minimum(z, 16.0)
    # The square of the reciprocal root is one instruction more than a root; a division would be four.
    root = tl.rsqrt(z * 0.25 + 1.0)
    u = z * root * root
    p = u * 6.004288479743991e-06 - 7.671614730497822e-05
    p = p * u + 0.00014915138308424503
    p = p * u + 0.0033591382671147585
    p = p * u - 0.032889679074287415
    p = p * u + 0.15025855600833893
    p = p * u - 0.3989419639110565
    return p * u + 0.5


@triton.jit
def _gate_and_density(x, APPROXIMATE: tl.constexpr):
    """The gate and its derivative for fp32 x. What the caller does not use, the compiler drops."""
    if APPROXIMATE == "tanh":
        # e^(-2u) = 2^(-2 sqrt(2 / pi) log2(e) * (|x| + 0.044715 |x|^3))
        e = tl.exp2(tl.abs(x) * (x * x * -0.10294323958002349 - 2.302208198144325))
        root = tl.rsqrt(e + 1.0)
        tail = e * (root * root)
        density = tail * (1.0 - tail) * (x * x * 0.21406444881780074 + 1.5957691216057308)
    else:
        # e^(-x^2 / 2)
        bell = tl.exp2(x * x * -0.7213475204444817)
        tail = bell * _mills(tl.abs(x))
        density = bell * 0.3989422804014327
    return tl.where(x < 0, tail, 1.0 - tail), density


@triton.jit
def gelu(x, APPROXIMATE: tl.constexpr):
    """gelu(x) for fp32 x."""
    gate, _ = _gate_and_density(x, APPROXIMATE)
    return x * gate


@triton.jit
def gelu_grad(x, APPROXIMATE: tl.constexpr):
    """d gelu / dx at fp32 x."""
    gate, density = _gate_and_density(x, APPROXIMATE)
    return x * density + gate


@triton.jit
def gelu_and_grad(x, APPROXIMATE: tl.constexpr):
    """(gelu(x), d gelu / dx) for fp32 x: for epilogues that need both."""
    gate, density = _gate_and_density(x, APPROXIMATE)
    return x * gate, x * density + gate


@triton.jit
def _gelu_fwd_kernel(x_ptr, y_ptr, n, APPROXIMATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False):
    """One program reads BLOCK consecutive elements of x and writes gelu(x)."""
    follow(PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK)
    x_ptrs = x_ptr + start + offs
    y_ptrs = y_ptr + start + offs
    # A mask that is not known to be the same for 16 bytes would split every access: only the last program has one.
    if start + BLOCK <= n:
        x = tl.load(x_ptrs).to(tl.float32)
        tl.store(y_ptrs, gelu(x, APPROXIMATE))
    else:
        mask = offs < n - start
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptrs, gelu(x, APPROXIMATE), mask=mask)


@triton.jit
def _gelu_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, n, APPROXIMATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False
):
    """One program reads BLOCK consecutive elements of dy and x and writes dx = dy * gelu'(x)."""
    follow(PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK)
    dy_ptrs = dy_ptr + start + offs
    x_ptrs = x_ptr + start + offs
    dx_ptrs = dx_ptr + start + offs
    if start + BLOCK <= n:
        x = tl.load(x_ptrs).to(tl.float32)
        dy = tl.load(dy_ptrs).to(tl.float32)
        tl.store(dx_ptrs, dy * gelu_grad(x, APPROXIMATE))
    else:
        mask = offs < n - start
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptrs, dy * gelu_grad(x, APPROXIMATE), mask=mask)


def gelu_fwd(x: Tensor, approximate: str) -> Tensor:
    """gelu(x) for x of any shape and layout, in fp32, bf16 or fp16; in the layout of x if that is dense."""
    y = torch.empty_like(x)
    block_bytes = _BLOCK_BYTES_FP32_FORWARD if x.element_size() == 4 else _BLOCK_BYTES
    _launch(_gelu_fwd_kernel, (_laid_out_as(y, x),), y, approximate, block_bytes)
    return y


def gelu_bwd(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """dx = dy * gelu'(x); dy in the shape and dtype of x; any layouts."""
    dx = torch.empty_like(x)
    _launch(_gelu_bwd_kernel, (_laid_out_as(dx, dy), _laid_out_as(dx, x)), dx, approximate, _BLOCK_BYTES)
    return dx


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """x itself if it lies in memory as `like` does, which has no gaps; else a copy that does."""
    return x if x.stride() == like.stride() else torch.empty_like(like).copy_(x)


def _launch(kernel, inputs: tuple[Tensor, ...], output: Tensor, approximate: str, block_bytes: int) -> None:
    n = output.numel()
    if n > 0:
        block = block_bytes // output.element_size()
        prepared.launch(kernel, (*inputs, output), -(-n // block), (n,), (approximate, block), _NUM_WARPS)
