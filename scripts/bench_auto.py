"""impl=auto against the best single implementation, over the shapes of the bench tables, and what its first use costs.

    python scripts/bench_auto.py --out profiles/records/2026-01-01-auto
    python scripts/bench_auto.py --out DIR --impls native triton cuda compiled   # compiled is a candidate too

For each cell, forward alone (no_grad) and forward and backward: the first call of auto in a fresh table (with the
kernels' compilation, and a second time without), then auto and every implementation in turns, timed as the bench tables
are: what their kernels take, captured in a CUDA graph or, with --launched, called one by one. `slower` is auto's time
over the best single one's; `same` is that of the implementation that auto chose over auto's, which is the same code:
how far from 1 it is says what a difference is worth. A cell in which auto is more than 2 % behind is measured once
more, with five times as many rounds, and that counts; `slower at first` says what it was. `auto's` are the times that
auto measured itself when it chose.
Choices are made in a table of its own. Writes auto.json and auto.md to --out.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import at_least, needs_gpu
from torch import Tensor

from fusedmlp import auto, build, impls
from fusedmlp.auto.call import REPLAYED
from fusedmlp.bench.clock import Pace, in_turns
from fusedmlp.profiling import timing

LIMIT, AGAIN = 1.02, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    """One op at one size: `sizes` are rows and columns, or M, K, N."""

    op: str
    option: str | int
    sizes: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        option = f" {self.option}" if isinstance(self.option, str) else ""
        return f"{self.op}{option} {' x '.join(map(str, self.sizes))} {self.dtype}"

    def tensors(self, device: str) -> tuple[Tensor, ...]:
        """The op's tensors, as leaves that require gradients."""

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(DTYPES[self.dtype]).requires_grad_()

        if self.op in ("gelu", "softmax"):
            return (normal(*self.sizes),)
        M, K, N = self.sizes
        first = (normal(M, K), normal(N, K, scale=K**-0.5), normal(N))
        return first if self.op == "linear_gelu" else (*first, normal(K, N, scale=N**-0.5), normal(K))


ROWS = [
    ((32768, 1024), "bf16"), ((16384, 8192), "bf16"), ((16384, 16384), "fp32"), ((8192, 32768), "bf16"),
    ((4096, 131072), "bf16"), ((2048, 262144), "bf16"), ((65536, 1000), "bf16"), ((4096, 50304), "bf16"),
    ((4096, 50257), "bf16"),
]  # fmt: skip
LINEAR = [(1024, 2048, 2048), (16384, 768, 3072), (16384, 1024, 4096), (16384, 2048, 8192), (16384, 4096, 16384)]
CELLS = [
    *(Cell("gelu", kind, (16384, 16384), dtype) for kind in ("none", "tanh") for dtype in ("fp32", "bf16")),
    *(Cell("softmax", 1, sizes, dtype) for sizes, dtype in ROWS),
    *(Cell("linear_gelu", kind, sizes, "bf16") for sizes in LINEAR for kind in ("tanh", "none")),
    *(Cell("mlp", kind, sizes, "bf16") for sizes in LINEAR[1:] for kind in ("tanh", "none")),
]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        # Built, and loaded, from the usual cache.
        if impls.unavailable("cuda") is None:
            build.load()
        os.environ["FUSEDMLP_CACHE"] = folder
        if args.impls:
            os.environ["FUSEDMLP_AUTO_IMPLS"] = ",".join(args.impls)
        auto.forget()
        rows: list[dict[str, Any]] = []
        for cell in CELLS:
            if _asked_for(cell, args):
                for backward in (False, True):
                    rows.append(measure(cell, backward, args))
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
                record(args, rows)
        print(timing.markdown_table(rows))
    worst = max(rows, key=lambda row: row["slower"])
    first, again = (max(row[name] for row in rows) for name in ("first use s", "compiled kernels s"))
    print(f"\nauto takes at most {worst['slower']:.3f} times the best single implementation ({worst['cell']})")
    print(f"first use at most {first:.2f} s, {again:.2f} s where kernels are compiled already")
    return 0


def measure(cell: Cell, backward: bool, args: argparse.Namespace) -> dict[str, Any]:
    """First uses of auto, then auto and the implementations in turns."""
    torch.manual_seed(0)
    tensors = cell.tensors(args.device)
    function = {name: call(cell, name, tensors, backward) for name in ("auto", *usable(args))}
    # Not the first kernel of the process: libraries load theirs when they are first used.
    function["native"]()
    first = first_use_s(function["auto"], args.device)
    auto.clear()
    again = first_use_s(function["auto"], args.device)
    with nullcontext() if args.launched else auto.replayed():
        function["auto"]()
        # That of the replay, where there are both, is longer.
        key, choice = max(auto.used().items(), key=lambda item: len(item[0]))
        if args.device == "cuda" and not args.launched:
            function = {name: timing.captured(one) for name, one in function.items()}
    times, rounds = side_by_side(function, args, args.rounds), args.rounds
    hasty = slower(times)
    if hasty > LIMIT:
        # Rounds enough to tell a choice from the clock's drift.
        rounds *= AGAIN
        times = side_by_side(function, args, rounds)
    best = min((name for name in times if name != "auto"), key=lambda name: times[name])
    known = next(iter(auto.choices().values()), {})
    entry = known.get(key) or known.get(key.removesuffix(REPLAYED))
    row: dict[str, Any] = {
        "cell": str(cell), "direction": "forward and backward" if backward else "forward", "choice": choice,
        "best": best, "slower": slower(times), "same": times[choice] / times["auto"],
        "rounds": rounds, "slower at first": hasty,
        "first use s": first, "compiled kernels s": again,
    }  # fmt: skip
    auto.forget()
    row |= {f"{name} ms": ms for name, ms in times.items()}
    return row | {"auto's": ", ".join(f"{name} {ms:.4g}" for name, ms in entry.ms.items()) if entry else None}


def slower(times: dict[str, float]) -> float:
    """Auto's time over that of the best single implementation."""
    return times["auto"] / min(ms for name, ms in times.items() if name != "auto")


def usable(args: argparse.Namespace) -> list[str]:
    names = args.impls or ["native", "triton", "cuda"]
    return [name for name in names if impls.unavailable(name) is None]


def call(cell: Cell, impl: str, tensors: tuple[Tensor, ...], backward: bool) -> Callable[[], Any]:
    op = getattr(impls.load(impl), cell.op)
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                op(*tensors, cell.option)

        return forward
    dy = torch.randn_like(op_output(cell, tensors))
    return lambda: torch.autograd.grad(op(*tensors, cell.option), tensors, dy)


def op_output(cell: Cell, tensors: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        return getattr(impls.load("native"), cell.op)(*tensors, cell.option)


def first_use_s(function: Callable[[], Any], device: str) -> float:
    """Seconds of one call, all that it starts on the GPU included."""
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - began


def side_by_side(functions: dict[str, Callable[[], Any]], args: argparse.Namespace, rounds: int) -> dict[str, float]:
    if args.device == "cuda":
        pace = Pace(rounds, args.settle, args.rep)
        found = in_turns(functions, torch.device("cuda", torch.cuda.current_device()), pace)
        return {name: measured.timing.p50 for name, measured in found.items()}
    return {name: 1e3 * first_use_s(function, args.device) for name, function in functions.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def record(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if args.device == "cuda":
        timing.write_record(
            args.out, "auto", {"auto": rows}, {"candidates": args.impls or "default", "captured": not args.launched}
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("profiles/runs/auto"))
    ops = ["gelu", "softmax", "linear_gelu", "mlp"]
    parser.add_argument("--op", nargs="*", default=ops, choices=ops)
    parser.add_argument("--match", help="only cells whose name contains this")
    parser.add_argument("--impls", nargs="*", help="candidates; by default what auto measures by itself")
    parser.add_argument("--launched", action="store_true", help="calls one by one instead of captured ones")
    parser.add_argument("--rounds", type=at_least(1), default=4)
    parser.add_argument("--settle", type=at_least(0), default=30, help="ms of running before measuring, per round")
    parser.add_argument("--rep", type=at_least(1), default=10, help="ms of measuring, per round")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    if args.device == "cuda":
        needs_gpu(parser)
    if not any(_asked_for(cell, args) for cell in CELLS):
        parser.error(f"--match {args.match}: no cell of {', '.join(args.op) or 'no op'} has that in its name")
    return args


def _asked_for(cell: Cell, args: argparse.Namespace) -> bool:
    return cell.op in args.op and (not args.match or args.match in str(cell))


if __name__ == "__main__":
    raise SystemExit(main())
