"""A stack of Linear+GELU: a layer's dGELU in the epilogue of the next layer's dx product.

Layer by layer, the backward pass writes dx = dpreact @ weight, and the layer before reads it again for

    dpreact_before = dx * gelu'(preact_before)        dbias_before = its sum over rows

Where x is the act of another layer of this implementation, one product gives all three, and the layer before finds its
dpreact and dbias ready: a pass over (M, N) less and a launch less. dx is written all the same, and it is what autograd
gets, so whoever looks at it or adds to it (`retain_grad`, `torch.autograd.grad`, a residual) is served as ever. What is
ready counts only while the gradient that arrives is that very tensor, not written to since: a sum or a changed gradient
is another one, and the layer before computes for itself.

Where layers are so narrow that no product fills the GPU, one kernel computes all of a layer's backward pass: dx and
dpreact_before as above, dweight, and dbias from the partial sums that the launch before has left. That takes one tensor
more at a time: x, which else is let go before dx is made.

Nothing is linked where that could show: under `torch.compile`, with hooks on saved tensors (checkpointing, offloading)
or on act, with `create_graph`, and where the layer before has no part in the backward pass. What cannot be seen is a
hook on a node (`grad_fn.register_hook`) that writes to the gradient through `.data`: change it in place, or return it.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmlp.kernels import configs
from fusedmlp.kernels.linear_gelu import takes_stack

# "auto": where the product with the epilogue is as fast as two kernels or faster; "always"; "never". Set this, or
# FUSEDMLP_LINK_STACK before the import; it is read at every forward call.
LINK_STACK = os.environ.get("FUSEDMLP_LINK_STACK", "auto")
# The same for all of a linked layer's backward pass in one kernel (FUSEDMLP_MERGE_STACK); read at every backward call.
MERGE_STACK = os.environ.get("FUSEDMLP_MERGE_STACK", "auto")

try:
    _saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    _current_backward_pass = torch._C._current_graph_task_id
    _will_execute = torch._C._will_engine_execute_node
    _at_its_end = torch.autograd.Variable._execution_engine.queue_callback
except AttributeError:
    # A PyTorch without these internals of its engine: layer by layer.
    _LINKABLE = False
else:
    _LINKABLE = True
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Ready(NamedTuple):
    """What the next layer has computed for this one: dpreact of the gradient `dy` at its `version`, and its sums over
    rows, all (N,) or partial ones (P, N) in fp32."""

    dy: Tensor
    version: int
    stream: int
    dpreact: Tensor
    sums: Tensor


def prepare(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """In a layer's forward pass: note in `ctx` whether it can be linked, as the layer after another or before one."""
    plain = _LINKABLE and not torch.compiler.is_compiling() and _saved_tensor_hooks(True) is None
    ctx.plain, ctx.linked = plain, plain and _follows_another(ctx, x) and _wanted(x, weight)


def _follows_another(ctx: Any, x: Tensor) -> bool:
    before: Any = x.grad_fn
    return type(before) is type(ctx) and before.plain and x.output_nr == 0


def _wanted(x: Tensor, weight: Tensor) -> bool:
    return _pays(x, weight) if LINK_STACK == "auto" else _is_always("LINK_STACK", LINK_STACK)


def _is_always(name: str, value: str) -> bool:
    if value not in ("always", "never"):
        raise ValueError(f"{name} (or FUSEDMLP_{name}) is {value!r}; accepted: auto, always, never")
    return value == "always"


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Whether the one product is known to keep up with cuBLAS's and a pointwise kernel: 16 bit, through TMA."""
    if not x.is_cuda:
        return True
    aligned = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    return x.element_size() == 2 and aligned and configs.has_tma(x.device.index)


def layer_before(ctx: Any, x: Tensor | None) -> Any | None:
    """In the backward pass: the autograd node of the layer that gave x, if its dGELU is to be taken over, else None."""
    # Tensors made in inference mode have no version.
    if not ctx.linked or torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return None
    # A hook may write to the gradient through `.data`, which no version counts; where x is not kept nobody knows.
    if x is None or x._backward_hooks:
        return None
    node, _ = ctx.next_functions[0]
    # With `create_graph` ctx is not the node itself; -1 where the node is called by hand.
    takes_part = type(node) is type(ctx) and _current_backward_pass() != -1 and _will_execute(node)
    return node if takes_part else None


def merges(dpreact: Tensor, weight: Tensor, x: Tensor) -> bool:
    """Whether one kernel does all of a linked layer's backward pass, given dpreact (M, N), weight (N, K), x (M, K)."""
    if MERGE_STACK == "auto":
        return takes_stack(dpreact, weight, x)
    return _is_always("MERGE_STACK", MERGE_STACK) and takes_stack(dpreact, weight, x, always=True)


def preact_of(node: Any) -> Tensor | None:
    """What the layer has saved; None if another backward pass has freed it."""
    try:
        return node.saved_tensors[0]
    except RuntimeError:
        # Raised once more if the layer's own turn comes.
        return None


def hand_over(node: Any, dy: Tensor, dpreact: Tensor, sums: Tensor) -> None:
    """Give `node` what its dGELU makes of `dy`, the gradient that autograd is about to bring it."""
    node.ready = _Ready(dy, dy._version, _current_stream(dy), dpreact, sums)
    # If its turn does not come, because only `dy` is asked for, nothing stays behind.
    _at_its_end(partial(vars(node).pop, "ready", None))


def take(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor] | None:
    """dpreact and its sums for the gradient `dy`, if they have been handed over."""
    if torch.compiler.is_compiling():
        return None
    ready = vars(ctx).pop("ready", None)
    if ready is None or ready.dy is not dy or dy._version != ready.version or _current_stream(dy) != ready.stream:
        return None
    return ready.dpreact, ready.sums


def _current_stream(tensor: Tensor) -> int:
    """Memory goes back to the stream it came from: what one stream has made must not be used up on another."""
    return _stream(tensor.device.index) if tensor.is_cuda and _stream is not None else 0
