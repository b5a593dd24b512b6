"""Hand-written kernels on this machine's GPU: every op against float64, every kernel once for a sanitizer.

    python scripts/check_impl.py cuda --out profiles/runs/cuda          # build, correctness in all dtypes, host time
    python scripts/check_impl.py triton --out profiles/runs/triton --quick
    compute-sanitizer --tool memcheck  python scripts/check_impl.py cuda --sanitize-small
    compute-sanitizer --tool racecheck python scripts/check_impl.py cuda --sanitize-small

Before a sanitizer looks at triton, `gate_gemm.py bfloat16 float32` compiles what it will run.

An error may be twice that of the native op, plus a rounding band (tests/oracle.py has the same bound), plus what the
order of a sum in fp32 may cost: of n terms added one by one the rounding errors walk as far as sqrt(n) of them.
Writes IMPL.json and IMPL.md to --out, prints the table, and ends with 1 if anything was wrong. Times of the kernels are
in bench.py and bench_gemm.py.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gate_gemm
import torch
from torch import Tensor

from fusedmlp import build, functional, impls
from fusedmlp.profiling import timing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ELEMENTWISE = [(64, 128), (63, 127), (1, 1), (3, 1023), (70_000, 3), (0, 16), (1024, 4096)]
# A warp, a block, clusters of 2 to 16 blocks, two passes; odd widths begin each row elsewhere.
ROWS = [
    *ELEMENTWISE,
    (9, 8192),
    (5, 16385),
    (5, 32768),
    (3, 50257),
    (3, 131072),
    (3, 262143),
    (2, 262144),
    (2, 600_001),
]
# M, K, N, N2: sizes that cuBLASLt takes, and sizes that it does not.
PRODUCTS = [(64, 64, 64, 64), (33, 40, 72, 43), (65, 63, 129, 66), (1, 16, 1, 19), (0, 16, 8, 8), (512, 256, 1024, 256)]
LARGE = [(4096, 1024, 4096, 1024), (4096, 768, 3072, 768)]


@dataclass(frozen=True)
class Case:
    """One call: an op, its tensors (None for a bias that is not there), its last argument."""

    op: str
    shape: tuple[int, ...]
    tensors: list[Tensor | None]
    argument: str | int

    def run(self, impl: str, dy: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients."""
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in self.tensors]
        y = getattr(functional, self.op)(*leaves, self.argument, impl=impl)
        y.backward(dy.to(dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def cases(dtype: torch.dtype, quick: bool) -> Iterator[Case]:
    for shape in ELEMENTWISE[:4] if quick else ELEMENTWISE:
        for approximate in ("none", "tanh"):
            yield Case("gelu", shape, [normal(*shape, dtype=dtype, scale=2.0)], approximate)
    for shape in ROWS[::2] if quick else ROWS:
        yield Case("softmax", shape, [normal(*shape, dtype=dtype, scale=3.0)], 1)
    for shape in PRODUCTS if quick else PRODUCTS + LARGE:
        for approximate in ("none", "tanh"):
            for bias in (True, False):
                yield from products(shape, approximate, bias, dtype)


def products(shape: tuple[int, ...], approximate: str, bias: bool, dtype: torch.dtype) -> Iterator[Case]:
    M, K, N, N2 = shape
    x, weight1 = normal(M, K, dtype=dtype), normal(N, K, dtype=dtype, scale=K**-0.5)
    bias1, bias2 = (normal(n, dtype=dtype) if bias else None for n in (N, N2))
    yield Case("linear_gelu", (M, K, N), [x, weight1, bias1], approximate)
    weight2 = normal(N2, N, dtype=dtype, scale=N**-0.5)
    yield Case("mlp", shape, [x, weight1, bias1, weight2, bias2], approximate)


def share_of_bound(name: str, case: Case, dtype: torch.dtype) -> float:
    """Largest error of the output and the gradients, as a share of what is allowed; inf for a wrong NaN."""
    dy = normal(case.shape[0], case.shape[-1], dtype=dtype)
    incoming = dy.abs().max().item() if dy.numel() else 1.0
    got, again, expected, eager = (
        case.run(impl, dy, d)
        for impl, d in ((name, dtype), (name, dtype), ("manual", torch.float64), ("native", dtype))
    )
    eps, inner = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    walk = max(case.shape) ** 0.5 if case.op in ("linear_gelu", "mlp") else 0.0
    worst = 0.0
    for one, other, exact, reference in zip(got, again, expected, eager, strict=True):
        if exact.numel() == 0:
            continue
        if not torch.equal(one, other) or not torch.isfinite(one).all():
            return float("inf")
        error, allowed = (one - exact).abs().max(), 2 * (reference - exact).abs().max()
        bound = allowed + 2 * eps * exact.abs().max() + inner * (incoming + walk * exact.square().mean().sqrt())
        worst = max(worst, (error / bound).item())
    return worst


def check(impl: str, quick: bool) -> list[dict]:
    """The worst case of each op and dtype."""
    rows = []
    for name, dtype in DTYPES.items():
        worst: dict[str, tuple[float, str]] = {}
        for case in cases(dtype, quick):
            share = share_of_bound(impl, case, dtype)
            key, where = case.op, f"{case.shape} {case.argument}"
            worst[key] = max(worst.get(key, (-1.0, "")), (share, where))
            if share > 1.0:
                print(f"WRONG {case.op} {name} {where}: {share:.2f} of the allowed error", flush=True)
        rows += [{"op": op, "dtype": name, "share": s, "case": where} for op, (s, where) in worst.items()]
    return rows


SECOND_START = """
import time, torch
from fusedmlp import build
torch.cuda.init()
begin = time.perf_counter()
build.load()
print(time.perf_counter() - begin)
"""


def build_seconds() -> dict[str, float | bool]:
    """Seconds of the build and of the loading in a second process."""
    cached = build.find(build.visible_archs()) is not None
    begin = time.perf_counter()
    impls.load("cuda").gelu(torch.ones(1, device="cuda"), "none")
    first = time.perf_counter() - begin
    second = subprocess.run([sys.executable, "-c", SECOND_START], capture_output=True, text=True, check=True).stdout
    return {"was_cached": cached, "first_start_s": first, "second_start_s": float(second)}


def host_us(function: Callable[[], object], times: int = 300) -> float:
    """Host time of one call in us, with little for the GPU to do."""
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        function()
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed / times * 1e6


def host_times(checked: str) -> list[dict]:
    x, weight, bias = (normal(*s, dtype=torch.bfloat16).requires_grad_() for s in ((64, 64), (64, 64), (64,)))

    def step(op: Callable, *arguments) -> Callable[[], None]:
        return lambda: op(*arguments).backward(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16))

    rows = []
    for impl in ("native", checked):
        module = impls.load(impl)
        calls = {
            "gelu": (module.gelu, x, "none"),
            "softmax": (module.softmax, x, 1),
            "linear_gelu": (module.linear_gelu, x, weight, bias, "tanh"),
            "mlp": (module.mlp, x, weight, bias, weight, bias, "tanh"),
        }
        for op, (function, *arguments) in calls.items():
            with torch.no_grad():
                forward = host_us(lambda f=function, a=arguments: f(*a))
            rows.append({"op": op, "impl": impl, "forward_us": forward, "both_us": host_us(step(function, *arguments))})
    return rows


def sanitize_small(impl: str) -> None:
    """Every kernel once, on sizes that a sanitizer gets through; of what is timed for a choice there is one launch."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    for dtype in DTYPES.values():
        for approximate in ("none", "tanh"):
            for n in (4096 + 5, 7):
                run(impl, functional.gelu, [normal(n, dtype=dtype)], approximate)
            for M, K, N in ((40, 32, 264), (33, 9, 37)):
                x, weight, bias = normal(M, K, dtype=dtype), normal(N, K, dtype=dtype), normal(N, dtype=dtype)
                run(impl, functional.linear_gelu, [x, weight, bias], approximate)
                run(
                    impl,
                    functional.mlp,
                    [x, weight, bias, weight.t().contiguous(), normal(K, dtype=dtype)],
                    approximate,
                )
            if impl == "triton" and dtype != torch.float16:
                # Every configuration, at sizes of gate_gemm.py: after that script nothing needs to be compiled here.
                for part in (*gate_gemm.FORWARD, *gate_gemm.BACKWARD):
                    for M, K, N in ((128, 64, 128), (333, 77, 129)):
                        list(gate_gemm.results(M, K, N, dtype, approximate, part))
        for columns in (3, 128, 250, 500, 1000, 1025, 5000, 16385, 32769, 70_000, 140_000, 600_001, 1_100_003):
            run(impl, functional.softmax, [normal(3, columns, dtype=dtype)], 1)
    torch.cuda.synchronize()
    print("every kernel ran")


def run(impl: str, op: Callable, tensors: list[Tensor], argument: str | int) -> None:
    leaves = [t.requires_grad_() for t in tensors]
    y = op(*leaves, argument, impl=impl)
    y.backward(torch.randn_like(y))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("impl", choices=["cuda", "triton"])
    parser.add_argument("--out", type=Path, help="folder for IMPL.json and IMPL.md")
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--sanitize-small", action="store_true", help="run every kernel once and end")
    options = parser.parse_args()
    impl = options.impl
    if (reason := impls.unavailable(impl)) is not None:
        parser.error(f"impl={impl} cannot run here: {reason}")
    torch.manual_seed(0)
    if options.sanitize_small:
        sanitize_small(impl)
        return 0
    if options.out is None:
        parser.error("--out DIR is missing")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be made: {error.strerror}")
    start = build_seconds() if impl == "cuda" else {}
    print(timing.markdown_table([start]), flush=True)
    rows = check(impl, options.quick)
    host = host_times(impl)
    text = "\n\n".join(timing.markdown_table(table) for table in ([start], rows, host) if table != [{}])
    print(text)
    record = {"environment": timing.environment(), "build": start, "errors": rows, "host": host}
    (options.out / f"{impl}.json").write_text(json.dumps(record, indent=1) + "\n")
    (options.out / f"{impl}.md").write_text(text + "\n")
    return 0 if all(row["share"] <= 1.0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
