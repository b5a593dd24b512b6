"""Bytes that a call moves, operator by operator: operands read and results written, each once.

That is what fusing saves: every operator between two others writes its result to memory and the next one reads it back.
What a kernel reads twice for itself (a softmax that passes over its row three times) does not show here.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusedmlp.bench.clock import Function
from fusedmlp.impls import compiled

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class OperatorTraffic(TorchDispatchMode):
    """Counts bytes of the operators that run in this context; views and allocations move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _ALLOCATIONS or func.is_view:
            return results
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        written = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        owned = {t.untyped_storage()._cdata for t in read.values()}
        if not func._schema.is_mutable and all(t.untyped_storage()._cdata in owned for t in written):
            # An alias under another name (detach, _unsafe_view).
            return results
        self.total += sum(map(_bytes, [*read.values(), *written]))
        return results


def _bytes(tensor: Tensor) -> int:
    # An expanded tensor has more elements than memory.
    elements = math.prod(s for s, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return elements * tensor.element_size()


class Graph(NamedTuple):
    """A graph that TorchInductor compiled: whether it is a backward pass, and the bytes of its kernels' operands."""

    backward: bool
    bytes: int


@contextmanager
def compiled_graphs() -> Iterator[list[Graph]]:
    """The graphs that are compiled in this context."""
    from torch._inductor.graph import GraphLowering

    graphs: list[Graph] = []
    codegen = GraphLowering.codegen

    def counted(graph: Any) -> Any:
        code = codegen(graph)
        sizes = (node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes)
        graphs.append(Graph(bool(graph.is_backward), int(sum(sizes))))
        return code

    with mock.patch.object(GraphLowering, "codegen", counted):
        yield graphs


def moved(run: Function, direction: str, graphs: Sequence[Graph]) -> int:
    """Bytes that one call moves.

    Args:
        run: the call.  direction: "forward", "backward" or "step".
        graphs: those that were compiled for a training step of the same op; none if nothing was compiled.
    """
    if not graphs:
        with OperatorTraffic() as traffic:
            run()
        return traffic.total
    if direction == "forward":
        # Without gradients it is another graph, which has not been compiled yet.
        with compiled_graphs() as graphs:
            run()
    return sum(graph.bytes for graph in graphs if graph.backward or direction != "backward")


@contextmanager
def static_uncached_compilation() -> Iterator[None]:
    """torch.compile compiles every shape for itself, here and now.

    With a second shape it would go over to slower code for any shape; code from its cache is not counted; and with
    donated buffers a backward pass could be timed only once on one graph.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    # What was compiled before, with other settings and perhaps for shapes of any size, is compiled again.
    torch.compiler.reset()
    compiled.forget()
    with (
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),
        inductor.patch(fx_graph_cache=False),
        functorch.patch(enable_autograd_cache=False, donated_buffer=False),
    ):
        yield
