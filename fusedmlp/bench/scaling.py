"""How the lecture's MLP, a stack of Linear+GELU with forward and backward, scales in steps, layers, batch and width.

Work grows with each of the first three and with the square of the width. Where the time does not follow, launches are
what is paid for: kernel time (`ms`) and the host's time (`host_us`) stand side by side.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedmlp.bench.cases import DTYPES
from fusedmlp.bench.clock import Function, in_turns
from fusedmlp.bench.launches import launched
from fusedmlp.bench.measure import Bench, reason
from fusedmlp.modules import FusedLinearGeLU

GPU_BASE = {"steps": 2, "layers": 4, "batch": 256, "dim": 256}
CPU_BASE = {"steps": 1, "layers": 2, "batch": 16, "dim": 32}
CPU_FACTORS: tuple[int, ...] = (1, 2)
FACTORS: tuple[int, ...] = (1, 2, 4)
# The width is where the work grows fastest, and where a GPU starts to be busy.
DIM_FACTORS: tuple[int, ...] = (1, 2, 4, 8, 16)


def scaling_rows(bench: Bench, dtypes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each impl, dtype and size, one size varied at a time; `x_base` is the time over that of the base."""
    base = GPU_BASE if bench.on_gpu else CPU_BASE
    rows = []
    for dtype in dtypes or (("bf16",) if bench.on_gpu else ("fp32",)):
        for axis in base:
            factors = (DIM_FACTORS if axis == "dim" else FACTORS) if bench.on_gpu else CPU_FACTORS
            for factor in factors:
                sizes = base | {axis: base[axis] * factor}
                rows += [
                    {"axis": axis, "factor": factor, **sizes, "dtype": dtype, **r} for r in _rows(sizes, dtype, bench)
                ]
    _relate(rows)
    return rows


def flops(sizes: dict[str, int]) -> int:
    """FLOPs of the matrix products: 2 forward and 4 backward for each weight, row and step.

    The input takes no gradient, so the first layer has one product less.
    """
    each = 2 * sizes["batch"] * sizes["dim"] ** 2
    return sizes["steps"] * (3 * sizes["layers"] - 1) * each


def _rows(sizes: dict[str, int], dtype: str, bench: Bench) -> list[dict[str, Any]]:
    runs: dict[str, Function] = {}
    rows = []
    x = torch.randn(sizes["batch"], sizes["dim"], device=bench.device).to(DTYPES[dtype])
    for impl in bench.impls:
        try:
            runs[impl] = _run(sizes, x, impl)
            runs[impl]()
        except Exception as error:
            runs.pop(impl, None)
            rows.append({"impl": impl, **dict.fromkeys(_MEASURED), "failure": reason(error)})
    for impl, measured in in_turns(runs, bench.device, bench.pace).items():
        ms = measured.timing.p50
        kernels = len(launched(runs[impl], bench.device)) if bench.on_gpu else None
        values = (
            ms,
            measured.timing.p20,
            measured.timing.p80,
            measured.host_us,
            None,
            flops(sizes) / ms / 1e9,
            kernels,
        )
        rows.append({"impl": impl, **dict(zip(_MEASURED, values, strict=True)), "failure": None})
    return rows


_MEASURED = ("ms", "ms_p20", "ms_p80", "host_us", "x_base", "tflops_per_s", "kernels")


def _run(sizes: dict[str, int], x: Tensor, impl: str) -> Function:
    width = sizes["dim"]
    layers = [FusedLinearGeLU(width, width, impl=impl, device=x.device, dtype=x.dtype) for _ in range(sizes["layers"])]
    model = nn.Sequential(*layers)
    parameters = list(model.parameters())

    def run() -> None:
        for _ in range(sizes["steps"]):
            y = model(x).mean()
            torch.autograd.grad(y, parameters)

    return run


def _relate(rows: list[dict[str, Any]]) -> None:
    base = {(r["impl"], r["dtype"], r["axis"]): r["ms"] for r in rows if r["factor"] == 1}
    for row in rows:
        reference = base.get((row["impl"], row["dtype"], row["axis"]))
        if row["ms"] and reference:
            row["x_base"] = row["ms"] / reference
