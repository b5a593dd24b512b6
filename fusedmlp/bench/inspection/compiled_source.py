"""The Triton source that torch.compile generates for `manual`, for a GPU that need not be there.

The op is traced on tensors without data, differentiated and split into a forward and a backward graph as AOTAutograd
does, and lowered by TorchInductor up to the source; nothing is compiled or run.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedmlp.bench.cards import Card
from fusedmlp.bench.cases import Case, make_tensors, option
from fusedmlp.bench.inspection.fake_gpu import fake_gpu
from fusedmlp.impls import manual

_KERNEL = re.compile(r"(?:async_compile\.triton\('(\w+)', ''')(.*?)'''", re.S)


def compiled_source(case: Case, direction: str, card: Card) -> dict[str, str]:
    """The generated module of each graph: "forward" (of training, for "step"), "backward", or both."""
    graphs = dict(zip(("forward", "backward"), _graphs(case, direction != "forward"), strict=False))
    wanted = graphs if direction == "step" else {direction: graphs[direction]}
    return {name: _lower(graph, shapes, card, direction == "forward") for name, (graph, shapes) in wanted.items()}


def triton_sources(module: str) -> dict[str, str]:
    """The Triton kernels of a generated module: name -> source."""
    return dict(_KERNEL.findall(module))


def reading(module: str) -> list[str]:
    """What the generated kernels do, a line each: the loads, stores and reductions that the compiler counted."""
    lines = []
    for name, source in triton_sources(module).items():
        counts = {key: int(n) for key, n in re.findall(r"'num_(load|store|reduction)': (\d+)", source)}
        passes = len(re.findall(r"for r0_offset in", source))
        text = f"{name}: {counts.get('load', 0)} loads, {counts.get('store', 0)} stores"
        if counts.get("reduction"):
            text += f", {counts['reduction']} reductions"
        if passes > 1:
            text += f"; goes over each row {passes} times"
        lines.append(text)
    products = len(re.findall(r"extern_kernels\.(?:mm|addmm|bmm)\(", module))
    return [*lines, f"{products} matrix products by cuBLAS"] if products else lines


Graph = tuple[torch.fx.GraphModule, list[Tensor]]


def _graphs(case: Case, with_gradient: bool) -> list[Graph]:
    """The forward graph, and with gradients the backward one, with inputs that have shapes only."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append((graph, list(inputs)))
        return make_boxed_func(graph)

    function = aot_function(
        lambda *tensors: getattr(manual, case.op)(*tensors, option(case)),
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [
            t if t is None else t.detach().requires_grad_(with_gradient)
            for t in make_tensors(case, torch.device("cpu")).values()
        ]
        y = function(*tensors)
        if with_gradient:
            torch.autograd.grad(y, [t for t in tensors if t is not None], torch.empty_like(y))
    return graphs


def _lower(graph: torch.fx.GraphModule, shapes: list[Tensor], card: Card, is_inference: bool) -> str:
    """The source of a graph, traced once more with tensors on the GPU."""
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake_gpu(card) as mode, _inductor_for(card):
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in shapes]
        # A graph from AOTAutograd returns a tuple or list, which is what TorchInductor asks for.
        traced = make_fx(graph)(*inputs)
        with V.set_fake_mode(mode):
            # Among others, a product and the sum after it become one.
            post_grad_passes(traced, is_inference)
        lowering = GraphLowering(traced, example_inputs=inputs, shape_env=mode.shape_env)
        with V.set_graph_handler(lowering), V.set_fake_mode(mode):
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    return code if isinstance(code, str) else code.value


@contextmanager
def _inductor_for(card: Card) -> Iterator[None]:
    """TorchInductor believes in the GPU of `fake_gpu`."""
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as torch_triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.debug import DebugContext

    def properties(device: Any = None) -> Any:
        return torch.cuda.get_device_properties(device)

    with ExitStack() as stack:
        for target, name, value in (
            (CudaInterface, "get_device_properties", staticmethod(properties)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda device=None: card.sm)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(properties)),
            (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
            (scheduler, "has_triton", lambda *args: True),
            (torch_triton, "triton_hash_with_backend", lambda: ""),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.enter_context(DebugContext())
        _forget_cards()
        stack.callback(_forget_cards)
        yield


def _forget_cards() -> None:
    """Drop what TorchInductor has remembered about GPUs: of this machine before, of the named card afterwards."""
    from torch._inductor import utils
    from torch._inductor.runtime import hints

    for value in [*vars(utils).values(), hints.DeviceProperties.create]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()
