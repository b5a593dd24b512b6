"""Linear+GELU and the MLP side by side: manual, native, compiled, triton, and the plain GEMMs that bound them.

    python scripts/bench_gemm.py --out profiles/runs/gemm              # correctness, then all tables
    python scripts/bench_gemm.py --only linear --k 768 --try 64x4x5,64x16x4   # tuning: other orders and stages

Times stand behind a correctness gate (unless --only leaves it out): every kernel in every configuration against float64
products of the same inputs, odd sizes, all dtypes and all epilogues included, in processes of their own. Candidates of
one row take turns in random order, each after a while of running alone and replayed from a CUDA graph, so that kernels
are timed and not their launches (those are in the table of host times); what counts is their ratio.
Writes gemm.json and gemm.md to --out and prints the tables.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gate_gemm
import torch
import torch.nn.functional as F
from arguments import at_least, needs_gpu
from gate_gemm import normal, relative_error
from torch import Tensor
from triton.testing import do_bench

from fusedmlp import functional, impls
from fusedmlp.impls import triton as impl_triton
from fusedmlp.kernels import choice, configs, linear_gelu
from fusedmlp.profiling import timing

# M, K, N: a layer of the lecture's MLP, and the first layers of transformers' MLPs; then those MLPs' widths and rows
# (hidden is 4 times the width).
LINEAR = [(1024, 2048, 2048), (16384, 768, 3072), (16384, 1024, 4096), (16384, 2048, 8192), (16384, 4096, 16384)]
MLP_WIDTHS, MLP_ROWS = (768, 1024, 2048, 4096), 16384


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("profiles/runs/gemm"))
    parser.add_argument("--only", default="gate,linear,mlp,host", help="parts to run, separated by commas")
    parser.add_argument("--gate", default="bfloat16,float16,float32", help="dtypes of the correctness gate")
    parser.add_argument("--k", type=at_least(1), nargs="*", help="in_features to keep; all by default")
    parser.add_argument("--approximate", default="tanh,none")
    parser.add_argument(
        "--try", dest="tries", default="", help="Hopper kernels to time too: GROUP_MxBLOCK_KxSTAGES,..."
    )
    parser.add_argument("--impls", default="native,compiled,manual", help="implementations beside triton; native stays")
    parser.add_argument("--eager", action="store_true", help="launch call by call, not from a CUDA graph")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument(
        "--settle", type=at_least(0), default=60, help="ms of running a candidate before it is measured"
    )
    parser.add_argument("--rep", type=at_least(1), default=30, help="ms of measuring per candidate and round")
    args = parser.parse_args()
    needs_gpu(parser)
    return args


def linear_tables(args: argparse.Namespace, approximate: str) -> dict[str, list[dict]]:
    """Forward, and the backward GEMM with dGELU, against the GEMM alone and what the others do."""
    tables: dict[str, list[dict]] = {"forward": [], "backward": []}
    for M, K, N in LINEAR:
        if args.k and K not in args.k:
            continue
        x, weight, bias = normal(M, K), normal(N, K, scale=K**-0.5), normal(N)
        act = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate=approximate)
        tables["forward"] += rows_of(f"{M}, {K}, {N}", linear_candidates(args, x, weight, bias, approximate), act, args)
        del act
        dy, weight2, preact = normal(M, K), normal(K, N, scale=K**-0.5), normal(M, N)
        dpreact = (dy.double() @ weight2.double()) * gate_gemm.gelu_grad(preact.double(), approximate)
        candidates = dgelu_candidates(args, dy, weight2, preact, approximate)
        tables["backward"] += rows_of(f"{M}, {K}, {N}", candidates, dpreact, args)
        del dpreact
        torch.cuda.empty_cache()
    return tables


def rows_of(case: str, candidates: dict[str, Callable], expected: Tensor, args: argparse.Namespace) -> list[dict]:
    """One row for each candidate: time, what it is of the GEMM alone and of native, peak memory, error."""
    times = time_in_turns(candidates, args)
    rows = []
    for name, t in times.items():
        row: dict = {"M, K, N": case, "impl": name, "ms": t.p50, "/ GEMM": t.p50 / times["GEMM"].p50}
        row |= {"x native": times["native"].p50 / t.p50, "p20": t.p20, "p80": t.p80, "peak MiB": None, "error": None}
        if name != "GEMM":
            row["peak MiB"] = timing.peak_bytes(candidates[name]) / 2**20
            result = candidates[name]()
            row["error"] = relative_error((result if isinstance(result, Tensor) else result[0]).detach(), expected)
        rows.append(row)
        print(short(row), flush=True)
    return rows


def short(row: dict) -> dict:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def time_in_turns(candidates: dict[str, Callable], args: argparse.Namespace) -> dict[str, timing.Timing]:
    """Each candidate in every round, in random order, after a while of running it alone.

    A GPU at its power limit takes some tens of ms to settle on a clock, so without that while a candidate would be
    measured at the clock of the one before it.
    """
    if not args.eager:
        candidates = {name: timing.captured(candidate) for name, candidate in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(args.rounds):
        for name in random.sample(list(candidates), len(candidates)):
            times[name] += do_bench(candidates[name], warmup=args.settle, rep=args.rep, return_mode="all")
    return {name: timing.Timing.of(values) for name, values in times.items()}


def linear_candidates(args, x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> dict[str, Callable]:
    def native():
        return F.gelu(F.linear(x, weight, bias), approximate=approximate)

    candidates = {"GEMM": lambda: F.linear(x, weight), "native": native}
    if approximate == "tanh":  # the only one it has
        candidates["cuBLASLt act"] = lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    leaves = tuple(t.detach().requires_grad_() for t in (x, weight, bias))
    for name in args.impls.split(","):
        op = impls.load(name).linear_gelu
        if name != "native":
            candidates[f"{name} act"] = lambda op=op: op(x, weight, bias, approximate)
        if name == "cuda":
            candidates[f"{name} preact+act"] = lambda op=op: op(*leaves, approximate)
    candidates["triton act"] = lambda: linear_gelu.linear_gelu_fwd(x, weight, bias, approximate, False)
    candidates["triton preact+act"] = lambda: linear_gelu.linear_gelu_fwd(x, weight, bias, approximate, True)
    for name, override in overrides(args, backward=False):
        candidates[f"triton preact+act {name}"] = override(
            lambda: linear_gelu.linear_gelu_fwd(x, weight, bias, approximate, True)
        )
    return candidates


def dgelu_candidates(args, dy: Tensor, weight: Tensor, preact: Tensor, approximate: str) -> dict[str, Callable]:
    def native():
        return torch.ops.aten.gelu_backward(dy @ weight, preact, approximate=approximate)

    def native_dbias():
        dpreact = native()
        return dpreact, dpreact.sum(0)

    def fused(store_act: bool, need_dbias: bool):
        return lambda: linear_gelu.dgelu_gemm(dy, weight, preact, approximate, store_act, need_dbias)

    candidates = {"GEMM": lambda: dy @ weight, "native": native, "native dbias": native_dbias}
    candidates |= {"triton": fused(False, False), "triton dbias": fused(False, True)}
    candidates["triton dbias act"] = fused(True, True)
    for name, override in overrides(args, backward=True):
        candidates[f"triton dbias {name}"] = override(fused(False, True))
    return candidates


def overrides(args: argparse.Namespace, backward: bool):
    """(name, wrapper) for each configuration to try in place of the chosen one."""
    for name in filter(None, args.tries.split(",")):
        block_k, group, stages = map(int, name.split("x"))
        config = configs.GemmConfig("hopper", 128, 128, block_k, group, stages, 4)
        shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
        if config.shared_bytes(2, True, backward) > shared:
            continue

        def wrapper(function, config=config):
            def with_config():
                with choice.using(config):
                    return function()

            return with_config

        yield name, wrapper


def mlp_table(args: argparse.Namespace, approximate: str) -> list[dict]:
    """Forward and backward of the MLP, biases included: share of the six GEMMs, memory, error."""
    rows = []
    for width in MLP_WIDTHS:
        if args.k and width not in args.k:
            continue
        x, weight1, bias1, weight2, bias2 = mlp_tensors(width)
        dy = normal(MLP_ROWS, width)
        candidates = {"six GEMMs": lambda x=x, w1=weight1, w2=weight2, dy=dy: six_gemms(x, w1, w2, dy)}
        for name in args.impls.split(","):
            candidates[name] = mlp_step(name, (x, weight1, bias1, weight2, bias2), dy, approximate)
        for keep in ("preact+act", "preact", "x"):
            candidates[f"triton {keep}"] = mlp_step(
                "triton", (x, weight1, bias1, weight2, bias2), dy, approximate, keep
            )
        exact = mlp_exact((x, weight1, bias1, weight2, bias2), dy, approximate)
        times = time_in_turns(candidates, args)
        limit, baseline = times["six GEMMs"].p50, times["native"].p50
        peaks = {name: timing.peak_bytes(candidates[name]) / 2**20 for name in candidates if name != "six GEMMs"}
        for name, t in times.items():
            row = {"d": width, "impl": name, "ms": t.p50, "share of GEMMs": limit / t.p50, "x native": baseline / t.p50}
            row |= {"peak MiB": peaks.get(name), "peak / native": peaks.get(name, 0) / peaks["native"]}
            row["worst error"] = None
            if name != "six GEMMs":
                row["worst error"] = max(relative_error(*pair) for pair in zip(candidates[name](), exact, strict=True))
            rows.append(row)
            print(approximate, short(row), flush=True)
        del candidates, exact
        torch.cuda.empty_cache()
    return rows


def mlp_tensors(width: int) -> tuple[Tensor, ...]:
    hidden = 4 * width
    shapes = ((MLP_ROWS, width), (hidden, width), (hidden,), (width, hidden), (width,))
    scales = (1.0, width**-0.5, 1.0, hidden**-0.5, 1.0)
    return tuple(normal(*s, scale=c).requires_grad_() for s, c in zip(shapes, scales, strict=True))


def six_gemms(x: Tensor, weight1: Tensor, weight2: Tensor, dy: Tensor) -> None:
    """The products of forward and backward with nothing between them, on tensors of the right shapes."""
    with torch.no_grad():
        act = F.linear(x, weight1)
        F.linear(act, weight2)
        dact = dy @ weight2
        dy.t() @ act
        dact @ weight1
        dact.t() @ x


def mlp_step(impl: str, tensors: tuple[Tensor, ...], dy: Tensor, approximate: str, keep: str = "") -> Callable:
    """Forward and backward; gradients are returned, so nothing is accumulated."""
    op = impls.load(impl).mlp

    def step():
        if keep:
            impl_triton.MLP_KEEP = keep
        return torch.autograd.grad(op(*tensors, approximate), tensors, dy)

    return step


def mlp_exact(tensors: tuple[Tensor, ...], dy: Tensor, approximate: str) -> tuple[Tensor, ...]:
    """The five gradients in float64."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    return torch.autograd.grad(impls.load("native").mlp(*wide, approximate), wide, dy.double())


def host_table() -> list[dict]:
    """Host microseconds of a call at a size whose kernels are shorter than their launches, and of each part."""
    x, weight, bias = normal(64, 64).requires_grad_(), normal(64, 64).requires_grad_(), normal(64).requires_grad_()
    weight2, dy = normal(64, 64).requires_grad_(), normal(64, 64)
    rows = []
    for name in ("native", "triton"):
        module = impls.load(name)
        calls: dict[str, Callable] = {
            "linear_gelu forward": lambda m=module: m.linear_gelu(x, weight, bias, "none"),
            "linear_gelu forward+backward": lambda m=module: torch.autograd.grad(
                m.linear_gelu(x, weight, bias, "none"), (x, weight, bias), dy
            ),
            "mlp forward+backward": lambda m=module: torch.autograd.grad(
                m.mlp(x, weight, bias, weight2, bias, "none"), (x, weight, bias, weight2), dy
            ),
            "through functional, forward": lambda n=name: functional.linear_gelu(x, weight, bias, impl=n),
        }
        for what, call in calls.items():
            rows.append({"impl": name, "call": what, "host us": host_us(call)})
            print(rows[-1], flush=True)
    return rows


def host_us(call: Callable, repeats: int = 7, calls: int = 200) -> float:
    """Median over repeats of host time per call, the GPU idle at the start of each repeat."""
    for _ in range(20):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    random.seed(0)
    parts = args.only.split(",")
    tables: dict[str, list[dict]] = {}
    details = {"copy TB/s": timing.copy_bytes_per_ms() / 1e9}

    def add(title: str, rows: list[dict]) -> None:
        tables[title] = rows
        # After every table, so that whatever stops the run costs that table alone.
        timing.write_record(args.out, "gemm", tables, details)

    if "gate" in parts:
        add("correctness", gate_gemm.check(args.gate.split(",")))
        print(timing.markdown_table(tables["correctness"]), flush=True)
    for approximate in args.approximate.split(","):
        if "linear" in parts:
            for direction, rows in linear_tables(args, approximate).items():
                add(f"Linear + GELU ({approximate}), {direction}, bf16, ms", rows)
        if "mlp" in parts:
            add(f"MLP ({approximate}), bf16, forward and backward", mlp_table(args, approximate))
    if "host" in parts:
        add("host time", host_table())
    for title, rows in tables.items():
        print(f"{title}\n{timing.markdown_table(rows)}\n")


if __name__ == "__main__":
    main()
