"""triton: hand-written Triton kernels, forward and backward.

Each kernel launcher is an operator, `torch.ops.fusedmlp_triton.*`, with a fake kernel; a `torch.autograd.Function` ties
the forward operator to the backward one. So `torch.compile(fullgraph=True)`, FLOP counters, selective activation
checkpointing and FSDP see operators, and an eager call stays cheap. Host time added to a launcher that does nothing,
one forward call / forward and backward (one CPU core, torch 2.14): this way 3 / 9 us, `torch.library.custom_op` with
`register_autograd` 11 / 50 us, `torch.library.triton_op` 14 / 66 us.
"""

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError("Triton is missing: `pip install triton` (Linux), or use impl=native or impl=compiled") from error

from fusedmlp.kernels.gelu import gelu_bwd, gelu_fwd
from fusedmlp.kernels.softmax import softmax_bwd, softmax_fwd

_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

DEVICES = ("cpu", "cuda") if _INTERPRETER else ("cuda",)

_REMEDY = "use impl=native or impl=compiled, or set TRITON_INTERPRET=1 to run the kernels on CPU tensors, slowly"


def unavailable() -> str | None:
    if _INTERPRETER:
        return None
    if not torch.cuda.is_available():
        return f"there is no CUDA GPU; {_REMEDY}"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU has compute capability {major}.{minor} and the kernels need 8.0 (A100) or newer; {_REMEDY}"
    return None


_library = torch.library.Library("fusedmlp_triton", "FRAGMENT")


def _register(schema: str, launcher: Callable, fake: Callable) -> Callable:
    """Make `launcher` an operator with this schema; `fake` gives its outputs' shapes, dtypes and strides."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in DEVICES:
        _library.impl(name, launcher, device.upper())
    torch.library.register_fake(f"fusedmlp_triton::{name}", fake, lib=_library)
    # The overload itself: looking it up in its packet costs a microsecond a call.
    return getattr(torch.ops.fusedmlp_triton, name).default


_gelu_fwd = _register(
    "gelu_fwd(Tensor x, str approximate) -> Tensor", gelu_fwd, lambda x, approximate: torch.empty_like(x)
)
_gelu_bwd = _register(
    "gelu_bwd(Tensor dy, Tensor x, str approximate) -> Tensor", gelu_bwd, lambda dy, x, approximate: torch.empty_like(x)
)


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient on and raises when somebody differentiates it."""

    @staticmethod
    def forward(ctx, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_: Tensor):
        raise RuntimeError("impl='triton' has first derivatives only; for a second derivative use impl='native'")


def once_differentiable(backward: Callable) -> Callable:
    """Decorator of a backward function that returns a tuple.

    `torch.autograd.function.once_differentiable` raises only if the incoming gradient requires a gradient itself: after
    `y.sum()` it does not, and the second derivative would come out as 0. This one raises whenever there is one.
    """

    @functools.wraps(backward)
    def first_order(ctx, *incoming):
        with torch.no_grad():
            outgoing = backward(ctx, *incoming)
        if not torch.is_grad_enabled():
            return outgoing
        sources = [t for t in (*incoming, *ctx.saved_tensors) if isinstance(t, Tensor) and t.requires_grad]
        return tuple(None if g is None else _NoSecondDerivative.apply(g, *sources) for g in outgoing)

    return first_order


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return _gelu_fwd(x, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return _gelu_bwd(dy, x, ctx.approximate), None


def gelu(x: Tensor, approximate: str) -> Tensor:
    # `ctx.needs_input_grad` does not know about no_grad, so the question is asked here.
    if torch.is_grad_enabled() and x.requires_grad:
        return _Gelu.apply(x, approximate)
    return _gelu_fwd(x, approximate)


_softmax_fwd = _register("softmax_fwd(Tensor x, int dim) -> Tensor", softmax_fwd, lambda x, dim: torch.empty_like(x))
_softmax_bwd = _register(
    "softmax_bwd(Tensor dy, Tensor y, int dim) -> Tensor", softmax_bwd, lambda dy, y, dim: torch.empty_like(y)
)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int) -> Tensor:
        y = _softmax_fwd(x, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return _softmax_bwd(dy, y, ctx.dim), None


def softmax(x: Tensor, dim: int) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Softmax.apply(x, dim)
    return _softmax_fwd(x, dim)
