"""Holds every GEMM kernel, in every configuration that its problem has, against float64 products of the same inputs.

    python scripts/gate_gemm.py                      # all dtypes
    python scripts/gate_gemm.py bfloat16 float32

Odd sizes, both GELU kinds and all epilogues included. Each part runs in a process of its own with a deadline: a barrier
that waits for ever hangs the GPU, it does not raise.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmlp.kernels import choice, configs, linear_gelu
from fusedmlp.kernels.reduce import dgelu_dbias

DTYPES = ("bfloat16", "float16", "float32")
DIRECTIONS = ("forward", "backward")
# Aligned and ragged tiles, one tile, odd sizes that no descriptor takes, few rows, long sums.
GATE = [(512, 256, 384), (1000, 448, 1192), (128, 64, 128), (333, 77, 129), (3, 1024, 512), (257, 4096, 264)]
# Names the part that a child process runs.
GATE_SLICE = "FUSEDMLP_GATE_SLICE"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, infinite for NaN."""
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def gelu_grad(x: Tensor, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)


def gate(slices: list[tuple[str, str, str]]) -> list[dict]:
    """Every kernel in every configuration against float64 at small sizes; raises on the first that is wrong."""
    limits = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 2e-6}
    worst: dict[tuple, float] = {}
    for dtype, approximate, direction in slices:
        results = forward_results if direction == "forward" else backward_results
        for M, K, N in GATE:
            for config, name, got, expected in results(M, K, N, getattr(torch, dtype), approximate):
                error = relative_error(got, expected)
                key = (dtype, approximate, config.kernel, name)
                worst[key] = max(worst.get(key, 0.0), error)
                if error > limits[dtype]:
                    raise SystemExit(f"wrong: {key} at M={M} K={K} N={N} with {config}: relative error {error:.2e}")
    return [{"dtype": d, "gelu": a, "kernel": k, "result": n, "worst error": e} for (d, a, k, n), e in worst.items()]


def in_every_configuration(call: Callable[[], tuple[Tensor, ...]]):
    """(configuration, results) of a launcher's call, for each configuration that its problem has."""
    problems: list[configs.Problem] = []
    chosen, linear_gelu._prepared = choice.choose, {}
    try:
        choice.choose = lambda problem, run: problems.append(problem) or configs.by_rule(problem)
        call()
    finally:
        choice.choose = chosen
    for config in configs.candidates(problems[0]):
        with choice.using(config):
            yield config, call()


def forward_results(M: int, K: int, N: int, dtype: torch.dtype, approximate: str):
    """(configuration, name, computed, expected) of every result of the forward kernels."""
    x, weight, bias = normal(M, K, dtype=dtype), normal(N, K, dtype=dtype, scale=K**-0.5), normal(N, dtype=dtype)
    preact = F.linear(x.double(), weight.double(), bias.double())
    act = F.gelu(preact, approximate=approximate)
    forward = linear_gelu.linear_gelu_fwd
    for config, (got, _) in in_every_configuration(lambda: forward(x, weight, bias, approximate, False)):
        yield config, "act", got, act
    for config, (got, stored) in in_every_configuration(lambda: forward(x, weight, bias, approximate, True)):
        yield config, "act beside preact", got, act
        yield config, "preact", stored, preact
    weight = weight.t().contiguous().t()
    act = F.gelu(F.linear(x.double(), weight.double()), approximate=approximate)
    for config, (got, _) in in_every_configuration(lambda: forward(x, weight, None, approximate, False)):
        yield config, "act, weight transposed, no bias", got, act


def backward_results(M: int, K: int, N: int, dtype: torch.dtype, approximate: str):
    """(configuration, name, computed, expected) of every result of the backward kernels."""
    dy, weight, preact = normal(M, K, dtype=dtype), normal(K, N, dtype=dtype, scale=K**-0.5), normal(M, N, dtype=dtype)
    product = dy.double() @ weight.double()
    expected = product * gelu_grad(preact.double(), approximate)
    act = F.gelu(preact.double(), approximate=approximate)
    for second, need_dbias in (("", False), ("", True), ("act", True), ("product", True), ("product", False)):
        flags = (second == "act", need_dbias, second == "product")
        call = functools.partial(linear_gelu.dgelu_gemm, dy, weight, preact, approximate, *flags)
        for config, (dpreact, beside, dbias) in in_every_configuration(call):
            yield config, "dpreact", dpreact, expected
            if second:
                yield config, f"{second} beside dpreact", beside, act if second == "act" else product
            if need_dbias:
                yield config, "dbias", *against_terms(dbias, expected)
    if dtype != torch.float32:
        (dpreact, dbias), expected = (
            dgelu_dbias(dy, dy, approximate, True),
            dy.double() * gelu_grad(dy.double(), approximate),
        )
        yield config, "pointwise dpreact", dpreact, expected
        yield config, "pointwise dbias", *against_terms(dbias, expected)


def against_terms(dbias: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Computed and expected column sums, shifted so that an error counts against the terms, which cancel in the sum."""
    return dbias.double() + terms.norm(dim=0), terms.sum(0) + terms.norm(dim=0)


def check(dtypes: Sequence[str] = DTYPES, seconds: int = 200) -> list[dict]:
    """The gate's rows, its parts side by side in processes of their own. Raises: SystemExit for a wrong result."""
    slices = [f"{d}:{a}:{w}" for d in dtypes for a in ("none", "tanh") for w in DIRECTIONS]
    environments = [{**os.environ, GATE_SLICE: name} for name in slices]
    children = [
        subprocess.Popen([sys.executable, os.path.abspath(__file__)], env=env, stdout=subprocess.PIPE, text=True)
        for env in environments
    ]
    deadline, rows = time.monotonic() + seconds, []
    for name, child in zip(slices, children, strict=True):
        try:
            output, _ = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in children:
                other.kill()
            raise SystemExit(f"{name} did not end within {seconds} s: a barrier may wait for ever") from None
        if child.returncode != 0:
            raise SystemExit(f"{name} failed with exit status {child.returncode}")
        rows += json.loads(output.splitlines()[-1])
    return rows


def main() -> None:
    torch.manual_seed(0)
    if GATE_SLICE in os.environ:
        dtype, approximate, direction = os.environ[GATE_SLICE].split(":")
        print(json.dumps(gate([(dtype, approximate, direction)])))
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: the gate runs on a CUDA GPU, and PyTorch finds none here")
    for row in check(sys.argv[1:] or DTYPES):
        print(row)


if __name__ == "__main__":
    main()
