"""Which kernel PyTorch launches for which size: cdist, add and matmul.

The same call in Python runs different kernels for different sizes and dtypes, and a jump in a plot of times is often
only that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedmlp.bench.cases import DTYPES
from fusedmlp.bench.clock import in_turns
from fusedmlp.bench.launches import launched
from fusedmlp.bench.measure import Bench

GPU_SIZES = (16, 128, 1024, 2048, 4096)
CPU_SIZES = (16, 128)
# cdist has no 16-bit kernels.
OPS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "add": (torch.add, ("fp32", "bf16")),
    "matmul": (torch.matmul, ("fp32", "bf16")),
    "cdist": (torch.cdist, ("fp32",)),
}


def kernel_rows(bench: Bench, sizes: Sequence[int] = (), dtypes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each op, dtype and size: the kernels of one call, longest first, and the time of the call."""
    rows = []
    for op, (function, known) in OPS.items():
        for dtype in [d for d in known if not dtypes or d in dtypes]:
            for size in sizes or (GPU_SIZES if bench.on_gpu else CPU_SIZES):
                a, b = (torch.randn(size, size, device=bench.device).to(DTYPES[dtype]) for _ in range(2))
                rows.append({"op": op, "size": f"{size}x{size}", "dtype": dtype} | _row(function, a, b, bench))
    return rows


def _row(function: Callable, a: torch.Tensor, b: torch.Tensor, bench: Bench) -> dict[str, Any]:
    kernels = sorted(launched(lambda: function(a, b), bench.device), key=lambda kernel: -kernel.us)
    measured = in_turns({"call": lambda: function(a, b)}, bench.device, bench.pace)["call"]
    return {
        "ms": measured.timing.p50,
        "host_us": measured.host_us,
        "kernels": len(kernels) or None,
        "longest": kernels[0].short_name if kernels else None,
        "names": [kernel.name for kernel in kernels],
    }
