"""What the autograd functions of hand-written kernels share."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is to be differentiated.

    `ctx.needs_input_grad` does not know about no_grad, so the question is asked before `.apply`.
    """
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _NoSecondDerivative(torch.autograd.Function):
    """Passes a gradient on and raises when somebody differentiates it."""

    @staticmethod
    def forward(ctx, gradient: Tensor, impl: str, *sources: Tensor) -> Tensor:
        ctx.impl = impl
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *_: Tensor):
        raise RuntimeError(f"impl={ctx.impl!r} has first derivatives only; for a second derivative use impl='native'")


def once_differentiable(backward: Callable) -> Callable:
    """Decorator of a backward function that returns a tuple: differentiating what it returns raises.

    `torch.autograd.function.once_differentiable` raises only if the incoming gradient requires a gradient itself: after
    `y.sum()` it does not, and the second derivative would come out as 0. This one raises whenever there is one.
    """
    impl = backward.__module__.rpartition(".")[2]

    @functools.wraps(backward)
    def first_order(ctx, *incoming):
        with torch.no_grad():
            outgoing = backward(ctx, *incoming)
        if not torch.is_grad_enabled():
            return outgoing
        sources = [t for t in (*incoming, *ctx.saved_tensors) if isinstance(t, Tensor) and t.requires_grad]
        return tuple(None if g is None else _NoSecondDerivative.apply(g, impl, *sources) for g in outgoing)

    return first_order
