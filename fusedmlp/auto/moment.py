"""Whether a measurement can be made at this moment."""

import torch
from torch.autograd import forward_ad


def obstacle() -> str | None:
    """What forbids a measurement at this moment, in words; None if nothing does."""
    if torch.compiler.is_compiling():
        return "under torch.compile"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "while a CUDA graph is captured"
    if transformed():
        return "under a functorch transform, forward-mode differentiation or torch.jit.trace"
    if torch._C._current_graph_task_id() != -1:
        # The thread that would run the measurement's backward pass is the one that waits for it.
        return "during a backward pass"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "under a dispatch mode"
    return None


def transformed() -> bool:
    """Whether vmap, torch.func.grad, dual numbers or torch.jit.trace are at work: they need ops that PyTorch knows."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
