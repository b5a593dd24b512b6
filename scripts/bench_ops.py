"""GELU and softmax side by side: manual, native, compiled, triton, forward and backward.

    python scripts/bench_ops.py --out profiles/runs/ops
    python scripts/bench_ops.py --out profiles/runs/ops --op softmax --impl native triton --rep 10

Each cell stands behind a correctness gate on the same tensors: its error against float64 must not exceed twice that of
the native op plus a rounding band. Times of one row alternate in one run. The limit is the time that a copy of the same
bytes would take on this card in this run: forward reads one tensor and writes one, backward reads two and writes one.
Writes gelu-softmax.json and gelu-softmax.md to --out and prints the table.
"""

import argparse
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
# Rows of the tensors that are compared with float64: those at the ends, where masks and the last programs are.
CHECKED_ROWS = 64


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


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    # Backward is timed again and again on one graph, whose buffers `compiled` would otherwise give away.
    functorch_config.donated_buffer = False
    bandwidth = timing.copy_bytes_per_ms()
    rows = []
    for case in CASES:
        if case.op in args.op:
            rows += measure(case, args, bandwidth)
            torch.cuda.empty_cache()
    details = {"copy bandwidth, TB/s": bandwidth / 1e9, "rounds": args.rounds, "rep, ms": args.rep}
    tables = {op: [row for row in rows if row["case"].startswith(op)] for op in args.op}
    timing.write_record(args.out, "gelu-softmax", tables, details)
    print(timing.markdown_table(rows), f"\ncopy bandwidth: {bandwidth / 1e9:.2f} TB/s")


def measure(case: Case, args: argparse.Namespace, bandwidth: float) -> list[dict]:
    """Check every implementation of the case, then time them in turns, forward and backward."""
    x = torch.randn(case.shape, dtype=DTYPES[case.dtype], device="cuda", requires_grad=True)
    dy = torch.randn_like(x, requires_grad=False)
    ops = {name: op(name, case) for name in args.impl}
    errors = {name: check(function, case, x.detach(), dy) for name, function in ops.items()}
    peaks = {name: timing.peak_bytes(lambda f=f: torch.autograd.grad(f(x), x, dy)) for name, f in ops.items()}
    with torch.no_grad():
        forward = timing.time_side_by_side(
            {name: lambda f=f: f(x) for name, f in ops.items()},
            args.rounds,
            rep_ms=args.rep,
        )
    # Backward in turns needs the graphs of all implementations at once.
    outputs = {name: f(x) for name, f in ops.items()}
    backward = timing.time_side_by_side(
        {name: lambda y=y: torch.autograd.grad(y, x, dy, retain_graph=True) for name, y in outputs.items()},
        args.rounds,
        rep_ms=args.rep,
    )
    copy_ms = x.numel() * x.element_size() / bandwidth
    return [
        {
            "case": str(case),
            "impl": name,
            "forward ms": forward[name].p50,
            "share of limit": 2 * copy_ms / forward[name].p50,
            "backward ms": backward[name].p50,
            "share of limit, backward": 3 * copy_ms / backward[name].p50,
            "forward p20 / p80": f"{forward[name].p20:.4g} / {forward[name].p80:.4g}",
            "backward p20 / p80": f"{backward[name].p20:.4g} / {backward[name].p80:.4g}",
            "error y": errors[name][0],
            "error dx": errors[name][1],
            "peak MiB": peaks[name] / 2**20,
        }
        for name in ops
    ]


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
            raise SystemExit(f"wrong: {name} of {case}: error {error:.3e} exceeds {bound:.3e}")
        errors.append(float(error / oracle.abs().max()))
    return errors[0], errors[1]


def run(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and dx."""
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


if __name__ == "__main__":
    main()
