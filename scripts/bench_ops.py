"""GELU and softmax side by side: manual, native, compiled, triton, forward and backward.

    python scripts/bench_ops.py --out profiles/runs/ops
    python scripts/bench_ops.py --out profiles/runs/ops --op softmax --impl native triton --rep 10

Each cell stands behind a correctness gate on the same tensors: its error against float64 must not exceed twice that of
the native op plus a rounding band; an implementation that fails it, or cannot run, is not timed and says why. Times are
those of the kernels, replayed from a CUDA graph with a cold L2 cache, and alternate in one run. The limit is the time
that a copy of the same bytes would take on this card in this run: forward reads one tensor and writes one, backward
reads two and writes one.
Writes gelu-softmax.json and gelu-softmax.md to --out and prints the table.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from fusedmlp import impls
from fusedmlp.profiling import timing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MEASURED = (
    "forward ms", "forward share of limit", "backward ms", "backward share of limit", "forward p20 / p80",
    "backward p20 / p80", "error y", "error dx", "peak MiB",
)  # fmt: skip
# Rows of the tensors that are compared with float64: those at the ends, where masks and the last programs are.
CHECKED_ROWS = 64


class WrongResult(Exception):
    """An implementation's result is further from float64 than its dtype allows."""


@dataclass(frozen=True)
class Case:
    """One row of a table: an op, its argument besides x, and the tensor's shape and dtype."""

    op: str
    argument: Any
    shape: tuple[int, int]
    dtype: str

    def __str__(self) -> str:
        detail = f" {self.argument}" if self.op == "gelu" else ""
        return f"{self.op}{detail} {self.shape[0]} x {self.shape[1]} {self.dtype}"


CASES = [
    *(
        Case("gelu", approximate, (16384, 16384), dtype)
        for approximate in ("none", "tanh")
        for dtype in ("fp32", "bf16")
    ),
    Case("softmax", 1, (32768, 1024), "bf16"),
    Case("softmax", 1, (16384, 8192), "bf16"),
    Case("softmax", 1, (16384, 16384), "fp32"),
    Case("softmax", 1, (8192, 32768), "bf16"),
    Case("softmax", 1, (4096, 131072), "bf16"),
    Case("softmax", 1, (2048, 262144), "bf16"),
    # Widths that are no power of two: a padded width, and vocabularies with and without padding.
    Case("softmax", 1, (65536, 1000), "bf16"),
    Case("softmax", 1, (4096, 50304), "bf16"),
    Case("softmax", 1, (4096, 50257), "bf16"),
]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("profiles/runs/ops"))
    parser.add_argument("--op", nargs="*", default=["gelu", "softmax"], choices=["gelu", "softmax"])
    parser.add_argument("--impl", nargs="*", default=["manual", "native", "compiled", "triton"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rep", type=int, default=30, help="ms of measuring per cell and round")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    # Backward is timed again and again on one graph, whose buffers `compiled` would otherwise give away.
    functorch_config.donated_buffer = False
    # Every case is a shape of its own; after the second `compiled` would go over to slower code for any shape.
    torch._dynamo.config.automatic_dynamic_shapes = False
    bandwidth = timing.copy_bytes_per_ms()
    details = {"copy bandwidth, TB/s": bandwidth / 1e9, "rounds": args.rounds, "rep, ms": args.rep}
    tables: dict[str, list[dict]] = {op: [] for op in args.op}
    for case in CASES:
        if case.op in args.op:
            tables[case.op] += measure(case, args, bandwidth)
            torch.cuda.empty_cache()
            # After every case, so that whatever stops the run costs that case alone.
            timing.write_record(args.out, "gelu-softmax", tables, details)
    rows = [row for table in tables.values() for row in table]
    print(timing.markdown_table(rows), f"\ncopy bandwidth: {bandwidth / 1e9:.2f} TB/s")
    return 1 if any(row["failure"] for row in rows) else 0


def measure(case: Case, args: argparse.Namespace, bandwidth: float) -> list[dict]:
    """Check every implementation of the case, then time those that are right in turns, forward and backward."""
    x = torch.randn(case.shape, dtype=DTYPES[case.dtype], device="cuda", requires_grad=True)
    dy = torch.randn_like(x, requires_grad=False)
    rows = {name: {"case": str(case), "impl": name, **dict.fromkeys(MEASURED), "failure": None} for name in args.impl}
    ops = {}
    for name, row in rows.items():
        try:
            function = op(name, case)
            row["error y"], row["error dx"] = check(function, case, x.detach(), dy)
            row["peak MiB"] = timing.peak_bytes(lambda f=function: torch.autograd.grad(f(x), x, dy)) / 2**20
            ops[name] = function
        except (RuntimeError, WrongResult) as error:
            row["failure"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"{case} {name}: {row['failure']}", flush=True)
    with torch.no_grad():
        forwards = {name: timing.captured(lambda f=f: f(x)) for name, f in ops.items()}
    forward = timing.time_side_by_side(forwards, args.rounds, rep_ms=args.rep)
    del forwards
    # Backward in turns needs the graphs of all implementations at once.
    backward = timing.time_side_by_side(
        {name: captured_backward(f, x, dy) for name, f in ops.items()}, args.rounds, rep_ms=args.rep
    )
    copy_ms = x.numel() * x.element_size() / bandwidth
    for direction, tensors, times in (("forward", 2, forward), ("backward", 3, backward)):
        for name, time in times.items():
            rows[name][f"{direction} ms"] = time.p50
            rows[name][f"{direction} share of limit"] = tensors * copy_ms / time.p50
            rows[name][f"{direction} p20 / p80"] = f"{time.p20:.4g} / {time.p80:.4g}"
    return list(rows.values())


def captured_backward(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Callable[[], Any]:
    """The backward pass of one forward pass, captured on the stream on which autograd will run it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = function(x)
    return timing.captured(lambda: torch.autograd.grad(y, x, dy, retain_graph=True), stream)


def op(impl: str, case: Case) -> Callable[[Tensor], Tensor]:
    function = getattr(impls.load(impl), case.op)
    return lambda x: function(x, case.argument)


def check(function: Callable[[Tensor], Tensor], case: Case, x: Tensor, dy: Tensor) -> tuple[float, float]:
    """Largest errors of y and dx against float64, each relative to the largest value; raises if they are too large."""
    ends = torch.cat([torch.arange(CHECKED_ROWS), torch.arange(case.shape[0] - CHECKED_ROWS, case.shape[0])]).cuda()
    got = run(function, x, dy)
    got = [tensor[ends].double() for tensor in got]
    expected = run(op("manual", case), x[ends].double(), dy[ends].double())
    native = run(op("native", case), x[ends], dy[ends])
    errors = []
    for name, ours, oracle, eager in zip(("y", "dx"), got, expected, native, strict=True):
        error, bound = (ours - oracle).abs().max(), 2 * (eager.double() - oracle).abs().max()
        bound += 2 * torch.finfo(x.dtype).eps * oracle.abs().max()
        if not error <= bound:
            raise WrongResult(f"error of {name} {error:.3e} exceeds {bound:.3e}")
        errors.append(float(error / oracle.abs().max()))
    return errors[0], errors[1]


def run(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx."""
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


if __name__ == "__main__":
    sys.exit(main())
