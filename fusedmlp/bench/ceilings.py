"""What this machine can do at most: bytes that a copy moves, and FLOPs of PyTorch's own matrix product, by size."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusedmlp.bench.cases import DTYPES
from fusedmlp.bench.clock import in_turns
from fusedmlp.bench.launches import longest
from fusedmlp.bench.measure import Bench
from fusedmlp.bench.waves import quantisation
from fusedmlp.training.peaks import table_tflops

GPU_SIZES = (1024, 2048, 4096, 8192, 16384)
CPU_SIZES = (128, 256, 512)


def copy_rows(bench: Bench, sizes: Sequence[int] = (), dtypes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """GB/s, read and written, of copying a square matrix; what is smaller than the L2 cache is not faster when cold."""
    rows = []
    for dtype in dtypes or ("fp32",):
        for size in sizes or (GPU_SIZES if bench.on_gpu else CPU_SIZES):
            source = torch.randn(size, size, device=bench.device).to(DTYPES[dtype])
            target = torch.empty_like(source)
            time = in_turns({"copy": partial(target.copy_, source)}, bench.device, bench.pace)["copy"]
            moved = 2 * source.numel() * source.element_size()
            rows.append({"size": f"{size}x{size}", "dtype": dtype} | _columns(time) | {"bytes": moved})
            rows[-1]["gb_per_s"] = moved / time.timing.p50 / 1e6
    return rows


def matmul_rows(bench: Bench, sizes: Sequence[int] = (), dtypes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """TFLOP/s of square matrix products, with the kernel that PyTorch chose and how its tiles fill the last wave."""
    rows = []
    name = torch.cuda.get_device_name(bench.device) if bench.on_gpu else None
    sms = torch.cuda.get_device_properties(bench.device).multi_processor_count if bench.on_gpu else None
    for dtype in dtypes or (("bf16",) if bench.on_gpu else ("fp32",)):
        peak = None if name is None else table_tflops(name, _products_in(dtype))
        for size in sizes or (GPU_SIZES if bench.on_gpu else CPU_SIZES):
            a, b = (torch.randn(size, size, device=bench.device).to(DTYPES[dtype]) for _ in range(2))
            run = partial(torch.matmul, a, b)
            time = in_turns({"matmul": run}, bench.device, bench.pace)["matmul"]
            kernel = longest(run, bench.device)
            filled = quantisation(size, size, kernel.tile, sms) if kernel and kernel.tile and sms else None
            rate = 2 * size**3 / time.timing.p50 / 1e9
            row = {"size": f"{size}x{size}", "dtype": dtype} | _columns(time) | {"tflops_per_s": rate}
            row |= {"share_of_peak": rate / peak if peak else None, "kernel": kernel.name if kernel else None}
            row["wave_efficiency"] = filled.efficiency if filled else None
            rows.append(row)
    return rows


def limits(copies: Sequence[dict], products: Sequence[dict]) -> dict[str, float]:
    """The roofs of a roofline: the best copy in GB/s and the best product in TFLOP/s."""
    roofs = {}
    if copies:
        roofs["copy_gb_per_s"] = max(row["gb_per_s"] for row in copies)
    if products:
        roofs["matmul_tflops_per_s"] = max(row["tflops_per_s"] for row in products)
    return {name: value for name, value in roofs.items() if math.isfinite(value)}


def _products_in(dtype: str) -> str:
    return "tf32" if dtype == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32" else dtype


def _columns(time) -> dict[str, Any]:
    return {"ms": time.timing.p50, "ms_p20": time.timing.p20, "ms_p80": time.timing.p80, "host_us": time.host_us}
