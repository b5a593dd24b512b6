"""Two experiments with PyTorch's own matrix products: sizes off multiples of 64, and tiles off multiples of the GPU."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusedmlp.bench.cases import DTYPES
from fusedmlp.bench.clock import Function, Measured, in_turns
from fusedmlp.bench.launches import launched, longest
from fusedmlp.bench.measure import Bench
from fusedmlp.bench.waves import ALIGNMENT, experiment, padding, quantisation

Product = tuple[int, int, int]

# What is odd: the vocabulary of GPT-2's last layer, the width of a layer, the rows of a batch.
GPU_PADDING: tuple[tuple[str, Product], ...] = (
    ("vocabulary", (8192, 768, 50257)),
    ("in_features", (8192, 1023, 4096)),
    ("in_features", (8192, 1000, 4096)),
    ("out_features", (8192, 1024, 4095)),
    ("rows", (8191, 1024, 4096)),
)
CPU_PADDING: tuple[tuple[str, Product], ...] = (("vocabulary", (64, 32, 257)), ("in_features", (64, 63, 128)))
_PLACE = {"rows": 0, "in_features": 1, "out_features": 2, "vocabulary": 2}


def padding_rows(bench: Bench, dtypes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """x (M, K) @ weight (N, K).T forward, and both products of its backward pass, as they are and padded to 64."""
    rows = []
    for dtype in dtypes or (("bf16",) if bench.on_gpu else ("fp32",)):
        for what, sizes in GPU_PADDING if bench.on_gpu else CPU_PADDING:
            padded = padding(sizes[_PLACE[what]], ALIGNMENT)
            assert padded is not None
            M, K, N = (padded.padded if i == _PLACE[what] else s for i, s in enumerate(sizes))
            pair = {False: sizes, True: (M, K, N)}
            runs = {str(key): _training_products(size, dtype, bench.device) for key, size in pair.items()}
            times = in_turns(runs, bench.device, bench.pace)
            for key, size in pair.items():
                row = {"padded": what, "M,K,N": ", ".join(map(str, size)), "dtype": dtype, "multiple_of_64": key}
                row |= _speed(times[str(key)], runs[str(key)], 6 * size[0] * size[1] * size[2], bench)
                row["x_as_it_is"] = times["False"].timing.p50 / times[str(key)].timing.p50
                rows.append(row)
    return rows


def wave_rows(bench: Bench, dtypes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Products whose results just fill the GPU's multiprocessors 1, 2 and 4 times with 128 x 256 tiles, or just do not.

    The tile is the one that the kernel's name gives, where it gives one.
    """
    sms = torch.cuda.get_device_properties(bench.device).multi_processor_count if bench.on_gpu else 4
    K, tile = (4096, (128, 256)) if bench.on_gpu else (32, (16, 32))
    rows = []
    for dtype in dtypes or (("bf16",) if bench.on_gpu else ("fp32",)):
        for M, N in experiment(sms, tile):
            a = torch.randn(M, K, device=bench.device).to(DTYPES[dtype])
            b = torch.randn(N, K, device=bench.device).to(DTYPES[dtype])
            run = partial(torch.nn.functional.linear, a, b)
            time = in_turns({"run": run}, bench.device, bench.pace)["run"]
            row = {"M,K,N": f"{M}, {K}, {N}", "dtype": dtype} | _speed(time, run, 2 * M * K * N, bench)
            found = next((k.tile for k in launched(run, bench.device) if k.tile), None)
            filled = quantisation(M, N, found or tile, sms)
            row |= {"tile": "x".join(map(str, found or tile)) + ("" if found else " (assumed)"), "tiles": filled.tiles}
            row |= {"waves": filled.tiles / sms, "wave_efficiency": filled.efficiency}
            rows.append(row)
    return rows


def _training_products(sizes: Product, dtype: str, device: torch.device) -> Function:
    M, K, N = sizes
    x, weight, dy = (torch.randn(s, device=device).to(DTYPES[dtype]) for s in ((M, K), (N, K), (M, N)))

    def run() -> None:
        x @ weight.t()
        dy @ weight
        dy.t() @ x

    return run


def _speed(time: Measured, run: Function, flops: int, bench: Bench) -> dict[str, Any]:
    kernel = longest(run, bench.device)
    return {
        "ms": time.timing.p50,
        "ms_p20": time.timing.p20,
        "ms_p80": time.timing.p80,
        "tflops_per_s": flops / time.timing.p50 / 1e9,
        "kernel": kernel.name if kernel else None,
    }
