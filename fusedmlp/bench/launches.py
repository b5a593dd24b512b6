"""The kernels that a call launches, by name and time, as torch.profiler sees them; on a CPU the operators that run."""

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmlp.bench.clock import Function


@dataclass(frozen=True)
class Launched:
    """One kernel of a call, and its time in us; on a CPU one operator, without."""

    name: str
    us: float = 0.0

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of a GEMM kernel's tile, where its name says so: nvjet_tst_128x256_..., ...gemm_128x128...

        cuBLAS, whose matrices are stored by columns, is asked for the transposed result: its first number is ours last.
        """
        found = re.search(r"(?:nvjet\w*?_|gemm\w*?_|tilesize)(\d+)x(\d+)", self.name)
        return (int(found[2]), int(found[1])) if found else None

    @property
    def short_name(self) -> str:
        """Without template arguments and namespaces."""
        name = re.sub(r"^void ", "", self.name)
        functor = re.search(r"(\w+(?:Functor|_kernel_cuda|kernel_impl)\w*)", name)
        head = re.split(r"[<(]", name)[0].split("::")[-1]
        return f"{head} ({functor[1]})" if functor and functor[1] != head else head


def launched(function: Function, device: torch.device) -> list[Launched]:
    """The kernels of one call, in order. What has to be compiled is compiled in a call before."""
    function()
    if device.type != "cuda":
        with _Operators() as operators:
            function()
        return operators.seen
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # Notices about what the profiler keeps from one cycle to the next, of which there is one.
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            function()
            torch.cuda.synchronize()
        events = profiler.events() or []
    return [Launched(e.name, e.time_range.elapsed_us()) for e in events if e.device_type == DeviceType.CUDA]


def longest(function: Function, device: torch.device) -> Launched | None:
    """The kernel of one call that takes the longest; None where the profiler sees none."""
    return max(launched(function, device), key=lambda kernel: kernel.us, default=None)


class _Operators(TorchDispatchMode):
    """Notes the operators that run in this context, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Launched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not func.is_view and not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self.seen.append(Launched(str(func.overloadpacket)))
        return func(*args, **(kwargs or {}))
