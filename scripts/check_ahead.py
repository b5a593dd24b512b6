"""Whether anything is left to compile after `python -m fusedmlp.build --impl triton`, on this machine's GPU.

    python scripts/check_ahead.py --out profiles/records/2026-01-01-ahead
    python scripts/check_ahead.py --out DIR --dtypes bf16 --jobs 8

Compiles into a cache of its own, again (when all is there), and then, for each dtype in a fresh process, calls the four
ops forward and backward at the sizes of real networks and at random ones. Compilations are counted twice: by Triton's
listener, which names the kernels, and by the files that are new in its cache, C code of launchers included. At the end
comes a call that is not covered, which both must notice. Writes ahead.json and ahead.md to --out; exit code 1 if
anything was compiled, or if compiling ahead failed.
"""

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from arguments import at_least, needs_gpu
from torch import Tensor

from fusedmlp import build, impls
from fusedmlp.profiling import timing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
# Names the dtype that a child process calls with.
CHILD = "FUSEDMLP_AHEAD_CHECK"
# Nothing is compiled there, and no call takes seconds.
CHILD_S, BUILD_S = 300, 600

# Bytes; attention of GPT-2 and of a ViT; vocabularies of GPT-2 (as it is, and padded), Llama, Llama 3, Qwen, Gemma;
# ImageNet's classes; rows that end between vectors.
ROWS = [
    (4096, 256), (98_304, 1024), (37_824, 197), (4096, 50_257), (4096, 50_304), (4096, 32_000), (1024, 128_256),
    (1024, 151_936), (512, 262_144), (512, 262_208), (256, 1000), (4096, 10_003), (577, 577), (64, 10),
]  # fmt: skip
# (M, K, N): GPT-2, small and XL, ViT-S and ViT-B, Whisper, the lecture's stack, bench tables, odd and small batches.
PRODUCTS = [
    (4096, 768, 3072), (2048, 1600, 6400), (12_608, 384, 1536), (591, 384, 1536), (25_216, 768, 3072),
    (1500, 1280, 5120), (1024, 512, 512), (999, 512, 512), (1024, 1024, 1024), (1024, 2048, 2048), (16_384, 1024, 4096),
    (8192, 4096, 16_384), (33, 768, 3072), (8, 128, 128), (256, 256, 256),
]  # fmt: skip
ELEMENTS = [(4096, 3072), (12_608, 1536), (25, 77), (16_384, 16_384)]


def calls(impl: Any, dtype: torch.dtype, device: str, sizes: tuple[list, list, list]) -> Iterator[tuple[str, Callable]]:
    """(what, a function that makes the call) for every op, GELU kind, size, and set of gradients."""
    rows, products, elements = sizes
    for shape in rows:
        yield f"softmax {shape}", functools.partial(_unary, impl.softmax, shape, 1, dtype, device)
    for kind in ("none", "tanh"):
        for shape in elements:
            yield f"gelu {kind} {shape}", functools.partial(_unary, impl.gelu, shape, kind, dtype, device)
        for size in products:
            for bias in (True, False):
                for op in (_linear, _mlp, _stack):
                    what = f"{op.__name__[1:]} {kind} {size} {'with' if bias else 'without'} bias"
                    yield what, functools.partial(op, impl, size, bias, kind, dtype, device)
            yield f"transposed {kind} {size}", functools.partial(_transposed, impl, size, dtype, device)


def _normal(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device).mul_(0.02).requires_grad_()


def _unary(op: Callable, shape: tuple[int, int], option: Any, dtype: torch.dtype, device: str) -> None:
    x = _normal(*shape, dtype=dtype, device=device)
    with torch.no_grad():
        op(x, option)
    y = op(x, option)
    torch.autograd.grad(y, x, torch.ones_like(y))


def _both_ways(op: Callable, x: Tensor, parameters: list[Tensor]) -> None:
    """Without gradients; with all; with that of x alone; through a sum, whose gradient has no strides."""
    with torch.no_grad():
        op(x)
    y = op(x)
    torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))
    torch.autograd.grad(op(x).sum(), [x, *parameters])
    for parameter in parameters:
        parameter.requires_grad_(False)
    torch.autograd.grad(op(x), x, torch.ones_like(y))


def _linear(impl, size, bias: bool, kind: str, dtype: torch.dtype, device: str) -> None:
    M, K, N = size
    weight, vector = _normal(N, K, dtype=dtype, device=device), _normal(N, dtype=dtype, device=device)
    parameters = [weight, vector] if bias else [weight]
    own = vector if bias else None
    _both_ways(lambda x: impl.linear_gelu(x, weight, own, kind), _normal(M, K, dtype=dtype, device=device), parameters)


def _mlp(impl, size, bias: bool, kind: str, dtype: torch.dtype, device: str) -> None:
    M, K, N = size
    first, second = _normal(N, K, dtype=dtype, device=device), _normal(K, N, dtype=dtype, device=device)
    biases = [_normal(n, dtype=dtype, device=device) for n in (N, K)] if bias else [None, None]
    parameters = [first, second, *(b for b in biases if b is not None)]
    x = _normal(M, K, dtype=dtype, device=device)
    _both_ways(lambda x: impl.mlp(x, first, biases[0], second, biases[1], kind), x, parameters)


def _stack(impl, size, bias: bool, kind: str, dtype: torch.dtype, device: str) -> None:
    """Three layers, K -> N -> K -> N: the dGELU of one in the product of the next."""
    M, K, N = size
    shapes = ((N, K), (K, N), (N, K))
    weights = [_normal(*shape, dtype=dtype, device=device) for shape in shapes]
    biases = [_normal(n, dtype=dtype, device=device) if bias else None for n, _ in shapes]

    def stack(x: Tensor) -> Tensor:
        for weight, own in zip(weights, biases, strict=True):
            x = impl.linear_gelu(x, weight, own, kind)
        return x

    _both_ways(stack, _normal(M, K, dtype=dtype, device=device), [*weights, *(b for b in biases if b is not None)])


def _transposed(impl, size, dtype: torch.dtype, device: str) -> None:
    """GPT-2 of Hugging Face: weights stored (in, out), tanh."""
    M, K, N = size
    first, second = _normal(K, N, dtype=dtype, device=device), _normal(N, K, dtype=dtype, device=device)
    biases = [_normal(n, dtype=dtype, device=device) for n in (N, K)]
    x = _normal(M, K, dtype=dtype, device=device)
    with torch.no_grad():
        impl.mlp(x, first.t(), biases[0], second.t(), biases[1], "tanh")
    y = impl.mlp(x, first.t(), biases[0], second.t(), biases[1], "tanh")
    torch.autograd.grad(y, [x, first, second, *biases], torch.ones_like(y))


def random_sizes(seed: int) -> tuple[list, list, list]:
    """Sizes of which nobody has thought."""
    generator = random.Random(seed)
    rows = [(generator.randrange(512, 1500), generator.randrange(2, 2**power)) for power in range(3, 19)]
    products = [
        (generator.randrange(2, 9000), *(16 * generator.randrange(8, 2**power) for _ in range(2)))
        for power in (4, 5, 6, 7, 8)
    ]
    return rows, products, [(generator.randrange(2, 5000), generator.randrange(2, 5000)) for _ in range(4)]


class Watch:
    """Kernels that Triton compiles and that it finds in its cache, and the files that are new there."""

    def __init__(self) -> None:
        import triton

        self.compiled: list[str] = []
        self.found = 0
        self._folder = Path(triton.knobs.cache.dir)
        self._before = self._files()
        triton.knobs.compilation.listener = self._hear

    def _files(self) -> set[Path]:
        return {path for path in self._folder.rglob("*") if path.is_file()}

    def _hear(self, **event: Any) -> None:
        if event["cache_hit"]:
            self.found += 1
        else:
            source = event["src"]
            self.compiled.append(f"{source.name} {source.signature} {source.constants} {source.attrs}")

    def new_files(self) -> list[str]:
        before, self._before = self._before, self._files()
        return sorted(str(path.relative_to(self._folder)) for path in self._before - before)


def child(name: str) -> dict[str, Any]:
    """All calls with one dtype, and what they compiled."""
    dtype, impl = DTYPES[name], impls.load("triton")
    torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
    watch, slowest, made = Watch(), (0.0, ""), 0
    for sizes in ((ROWS, PRODUCTS, ELEMENTS), random_sizes(len(name) + ord(name[0]))):
        for what, call in calls(impl, dtype, "cuda", sizes):
            if name == "tf32" and what.startswith(("softmax", "gelu")):
                continue
            began, before = time.perf_counter(), len(watch.compiled)
            call()
            torch.cuda.synchronize()
            slowest, made = max(slowest, (time.perf_counter() - began, what)), made + 1
            for kernel in watch.compiled[before:]:
                print(f"{name}, {what}: compiled {kernel}", file=sys.stderr, flush=True)
    compiled, files = len(watch.compiled), watch.new_files()
    for file in files:
        print(f"{name}: new in Triton's cache: {file}", file=sys.stderr, flush=True)
    # A control: pointers that lie between multiples of 16 bytes. TF32 shares the GELU of fp32, which has had its own.
    between = torch.ones(4097, dtype=dtype, device="cuda")[1:]
    impl.softmax(between, 0) if name == "tf32" else impl.gelu(between, "none")
    noticed = len(watch.compiled) == compiled + 1 and bool(watch.new_files())
    return {
        "dtype": name, "calls": made, "kernels found": watch.found, "kernels compiled": compiled,
        "new files": len(files), "control noticed": noticed, "slowest call s": slowest[0], "which": slowest[1],
    }  # fmt: skip


def ahead(args: argparse.Namespace, environment: dict[str, str]) -> tuple[bool, str, float]:
    """Whether compiling ahead succeeded, its last line, and how long it took with its start."""
    command = [sys.executable, "-m", "fusedmlp.build", "--impl", "triton", "--dtypes", *args.dtypes]
    if args.jobs:
        command += ["--jobs", str(args.jobs)]
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=BUILD_S)
    took = time.perf_counter() - began
    last = (done.stdout.strip().splitlines() or [""])[-1]
    print(f"{last}\n{took:.1f} s with the start of Python", flush=True)
    return done.returncode == 0, last, took


def in_a_process(name: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__)], env={**environment, CHILD: name}, stdout=subprocess.PIPE,
        text=True, timeout=CHILD_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"the calls with {name} failed with exit status {done.returncode}")
    row = json.loads(done.stdout.splitlines()[-1])
    print(row, flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    if CHILD in os.environ:
        print(json.dumps(child(os.environ[CHILD])))
        return 0
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        succeeded, first, first_s = ahead(args, environment)
        again_succeeded, again, again_s = ahead(args, environment)
        rows = [in_a_process(name, environment) for name in args.dtypes]
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    details = {
        "first": first, "first s": first_s, "again": again, "again s": again_s, "cache MB": size / 1e6,
        "cores": os.cpu_count(),
    }  # fmt: skip
    timing.write_record(args.out, "ahead", {"ahead": rows}, details)
    print(timing.markdown_table(rows))
    blind = [row["dtype"] for row in rows if not row["control noticed"] or not row["kernels found"]]
    compiled = [row["dtype"] for row in rows if row["kernels compiled"] or row["new files"]]
    for wrong, words in ((blind, "a compilation was not noticed"), (compiled, "something was compiled")):
        if wrong:
            print(f"{words}: {', '.join(wrong)}")
    return 0 if succeeded and again_succeeded and not blind and not compiled else 1


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("profiles/runs/ahead"))
    parser.add_argument("--dtypes", nargs="+", choices=build.DTYPES, default=list(build.DTYPES))
    parser.add_argument("--jobs", type=at_least(1), help="processes that compile; default: as many as cores")
    args = parser.parse_args(arguments)
    needs_gpu(parser)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
