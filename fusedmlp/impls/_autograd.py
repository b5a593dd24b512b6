"""What the autograd functions of hand-written kernels share."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The overload itself: looking it up in its packet costs host time at every call.
_unsafe_view = torch.ops.aten._unsafe_view.default


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is to be differentiated.

    `ctx.needs_input_grad` does not know about no_grad, so the question is asked before `.apply`.
    """
    if forward_ad._current_level >= 0:
        if not torch.compiler.is_compiling():
            _refuse_transforms()
        # An operator would drop the tangent without a word; an autograd function without a `jvp` refuses it.
        return True
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if needed and not torch.compiler.is_compiling():
        _refuse_transforms()
    return needed


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "hand-written kernels (impl='triton', impl='cuda') have no derivatives under torch.func's transforms (grad,"
            " vjp, jvp, vmap, ...); use impl='native', impl='manual' or impl='auto' there"
        )


def reshaped(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """y in another shape, for an autograd function to return: it is no view in autograd's eyes.

    In-place operations on a view that such a function returns are refused, and `y += residual` is common.
    """
    return _unsafe_view(y, shape)


def rows(x: Tensor) -> Tensor:
    """x (..., K) as a matrix (M, K)."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def like_rows_of(x: Tensor, y: Tensor) -> Tensor:
    """The matrix y (M, N) with the leading dimensions of x (..., K)."""
    return y if x.ndim == 2 else reshaped(y, (*x.shape[:-1], y.shape[1]))


def free_saved(ctx: Any) -> None:
    """Drop the node's references to its saved tensors, unless the graph is kept for another backward pass.

    Then a tensor is freed as soon as the backward function has no more use for it, not at its end.
    """
    if hasattr(ctx, "maybe_clear_saved_tensors") and not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient on and raises when somebody differentiates it."""

    @staticmethod
    def forward(ctx, gradient: Tensor, impl: str, *sources: Tensor) -> Tensor:
        ctx.impl = impl
        return reshaped(gradient, gradient.shape)

    @staticmethod
    def backward(ctx, *_: Tensor):
        raise RuntimeError(f"impl={ctx.impl!r} has first derivatives only; for a second derivative use impl='native'")


def once_differentiable(backward: Callable) -> Callable:
    """Decorator of a backward function that returns a tuple: differentiating what it returns raises.

    `torch.autograd.function.once_differentiable` raises only if the incoming gradient requires a gradient itself: after
    `y.sum()` it does not, and the second derivative would come out as 0. This one raises whenever there is one, as long
    as what is saved leads to every differentiable input: itself, or an output, which leads to all of them.

    Where no gradient arrives, because what comes after gives None, none is passed on: as PyTorch's own functions do.
    For that the forward function says `ctx.set_materialize_grads(False)`. The first output is the only one in use.
    """
    impl = backward.__module__.rpartition(".")[2]

    @functools.wraps(backward)
    def first_order(ctx, *incoming):
        if incoming[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        if not torch.is_grad_enabled():
            return backward(ctx, *incoming)
        unpacked = _Unpacked(ctx)
        with torch.no_grad():
            outgoing = backward(unpacked, *incoming)
        sources = [t for t in (*incoming, *unpacked.saved_tensors) if isinstance(t, Tensor) and t.requires_grad]
        return tuple(None if g is None else _NoSecondDerivative.apply(g, impl, *sources) for g in outgoing)

    return first_order


class _Unpacked:
    """A context whose saved tensors are unpacked once, as activation checkpointing demands."""

    def __init__(self, ctx):
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name):
        return getattr(self._ctx, name)
