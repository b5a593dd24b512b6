"""compiled: `torch.compile` of manual, op by op, so that it swaps like every other implementation.

TorchDynamo keeps at most `recompile_limit` (8) versions of one function and runs the ninth eagerly, without a word. An
explicit choice must never fall back, so each combination of op, dtype, rank, layout and gradient gets a compiled copy
of its own, leaving the eight to shapes, and a copy that is full all the same makes room for a fresh one.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fusedmlp.impls import manual

DTYPES = manual.DTYPES

_copies: dict[tuple, Callable[..., Tensor]] = {}


def unavailable() -> str | None:
    if not torch._dynamo.is_dynamo_supported():
        return f"torch.compile does not support Python {sys.version.split()[0]} on this platform; use impl=native"
    if _disabled():
        return "torch.compile is switched off; unset TORCH_COMPILE_DISABLE (or TORCHDYNAMO_DISABLE)"
    if not _compiler():
        return "torch.compile needs a C++ compiler; install g++ (apt-get install g++) or set CXX"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "torch.compile needs Python's C headers; install them (apt-get install python3-dev)"
    if torch.cuda.is_available() and not torch.utils._triton.has_triton_package():
        return "torch.compile needs Triton on a GPU; pip install triton"
    return None


def gelu(x: Tensor, approximate: str) -> Tensor:
    return _run(manual.gelu, x, approximate)


def softmax(x: Tensor, dim: int) -> Tensor:
    return _run(manual.softmax, x, dim)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return _run(manual.linear_gelu, x, weight, bias, approximate)


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, approximate: str
) -> Tensor:
    return _run(manual.mlp, x, weight1, bias1, weight2, bias2, approximate)


def forget() -> None:
    """Drop every compiled copy, for a measurement that must not depend on what was called before it."""
    _copies.clear()


def _run(op: Callable[..., Tensor], *args: Any) -> Tensor:
    if torch.compiler.is_compiling():
        # An outer torch.compile traces straight through: one graph, fused with what surrounds it.
        return op(*args)
    # Compiled code reads the memory of a negative view (the imaginary part of a conjugate) as it is.
    args = tuple(arg.resolve_neg() if isinstance(arg, Tensor) and arg.is_neg() else arg for arg in args)
    key = (op, torch.is_grad_enabled(), *map(_kind, args))
    try:
        return (_copies.get(key) or _compile(key))(*args)
    except torch._dynamo.exc.FailOnRecompileLimitHit:
        return _compile(key)(*args)


def _kind(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return arg.dtype, arg.device, arg.ndim, arg.requires_grad, arg.is_contiguous()


def _compile(key: tuple) -> Callable[..., Tensor]:
    op = key[0]
    # Dynamo counts versions per code object: a copy of the code starts at none.
    copy = FunctionType(op.__code__.replace(), op.__globals__, op.__name__, op.__defaults__)
    compiled = torch.compile(copy, fullgraph=True, backend=_inductor)
    _copies[key] = compiled
    return compiled


def _inductor(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    # With donated buffers the backward pass overwrites what the forward pass saved, and a second backward pass through
    # the same graph (retain_graph=True) is refused.
    from torch._inductor.compile_fx import compile_fx

    # AOTAutograd's cache would say again that some are donated; Inductor's has the code all the same.
    with torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False):
        compiled = compile_fx(graph, inputs)
    # None counts as "some are donated" when a backward pass that keeps the graph follows one that did not.
    context = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is not None and metadata.bw_donated_idxs is None:
        metadata.bw_donated_idxs = []
    return compiled


def _disabled() -> bool:
    return torch._dynamo.config.disable


def _compiler() -> str | None:
    candidates = [os.environ.get("CXX"), "g++", "clang++", "c++"]
    return next((path for path in map(shutil.which, filter(None, candidates)) if path), None)
