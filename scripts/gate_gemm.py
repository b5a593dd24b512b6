"""Holds every GEMM kernel, in every configuration that its problem has, against float64 products of the same inputs.

    python scripts/gate_gemm.py                      # all dtypes
    python scripts/gate_gemm.py bfloat16 float32

Odd sizes, both GELU kinds and all epilogues included. Most of the time goes into compiling, so the parts run side by
side, one on each core, in processes of their own; one that is silent for a minute is ended: a barrier that waits for
ever hangs the GPU, it does not raise.
"""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmlp.kernels import choice, configs, linear_gelu
from fusedmlp.kernels.reduce import dgelu_dbias

DTYPES = ("bfloat16", "float16", "float32")
# Parts of the gate: of each direction, the epilogues.
FORWARD = ("act", "act and preact", "weight transposed")
BACKWARD = ("dpreact", "dpreact and dbias", "act and dbias", "product", "product and dbias", "pointwise", "stack")
# Aligned and ragged tiles, one tile, odd sizes that no descriptor takes, few rows, long sums.
GATE = [(512, 256, 384), (1000, 448, 1192), (128, 64, 128), (333, 77, 129), (3, 1024, 512), (257, 4096, 264)]
# Names the part that a child process runs.
GATE_PART = "FUSEDMLP_GATE_PART"
# A configuration compiles in 1 to 4 s, and runs in less than one.
SILENT_S = 60
Config = configs.GemmConfig | configs.StackConfig
Results = Iterator[tuple[Config | None, str, Tensor, Tensor]]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, infinite for NaN."""
    error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(error) if torch.isfinite(error) else float("inf")


def gelu_grad(x: Tensor, approximate: str) -> Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)


def gate(dtype: str, approximate: str, part: str) -> list[dict]:
    """Every kernel of a part in every configuration against float64 at small sizes; exits at the first wrong one."""
    limits = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 2e-6}
    worst: dict[tuple[str, str], float] = {}
    signal.alarm(SILENT_S)  # the process ends unless the next result comes in time
    for M, K, N in GATE:
        for config, name, got, expected in results(M, K, N, getattr(torch, dtype), approximate, part):
            error = relative_error(got, expected)
            kernel = "pointwise" if config is None else config.kernel
            worst[kernel, name] = max(worst.get((kernel, name), 0.0), error)
            if error > limits[dtype]:
                where = f"{dtype} {approximate} {name} at M={M} K={K} N={N} with {config}"
                raise SystemExit(f"wrong: {where}: relative error {error:.2e}")
            signal.alarm(SILENT_S)
    return [
        {"dtype": dtype, "gelu": approximate, "kernel": kernel, "result": name, "worst error": error}
        for (kernel, name), error in worst.items()
    ]


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


def results(M: int, K: int, N: int, dtype: torch.dtype, approximate: str, part: str) -> Results:
    """(configuration, name, computed, expected) of the results of a part's kernels, for each configuration."""
    return (_forward if part in FORWARD else _backward)(M, K, N, dtype, approximate, part)


def _forward(M: int, K: int, N: int, dtype: torch.dtype, approximate: str, part: str) -> Results:
    x, weight, bias = normal(M, K, dtype=dtype), normal(N, K, dtype=dtype, scale=K**-0.5), normal(N, dtype=dtype)
    if part == "weight transposed":
        weight, bias = weight.t().contiguous().t(), None
    preact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    act = F.gelu(preact, approximate=approximate)
    store = part == "act and preact"
    call = functools.partial(linear_gelu.linear_gelu_fwd, x, weight, bias, approximate, store)
    for config, (got, stored) in in_every_configuration(call):
        yield config, f"act ({part})", got, act
        if store:
            yield config, "preact", stored, preact


def _backward(M: int, K: int, N: int, dtype: torch.dtype, approximate: str, part: str) -> Results:
    dy, weight, preact = normal(M, K, dtype=dtype), normal(K, N, dtype=dtype, scale=K**-0.5), normal(M, N, dtype=dtype)
    if part == "pointwise":
        if dtype != torch.float32:
            expected = dy.double() * gelu_grad(dy.double(), approximate)
            dpreact, dbias = dgelu_dbias(dy, dy, approximate, True)
            yield None, "dpreact", dpreact, expected
            yield None, "dbias", *against_terms(dbias, expected)
        return
    if part == "stack":
        yield from _stack(dy, weight, preact, approximate)
        return
    product = dy.double() @ weight.double()
    expected = product * gelu_grad(preact.double(), approximate)
    seconds = {"act": F.gelu(preact.double(), approximate=approximate), "product": product}
    second = next((name for name in seconds if part.startswith(name)), None)
    need_dbias = part.endswith("dbias")
    call = functools.partial(
        linear_gelu.dgelu_gemm, dy, weight, preact, approximate, second == "act", need_dbias, second == "product"
    )
    for config, (dpreact, beside, dbias) in in_every_configuration(call):
        yield config, f"dpreact ({part})", dpreact, expected
        if second is not None:
            yield config, f"{second} beside dpreact", beside, seconds[second]
        if need_dbias:
            yield config, f"dbias ({part})", *against_terms(dbias, expected)


def _stack(dy: Tensor, weight: Tensor, preact: Tensor, approximate: str) -> Results:
    """All of a layer's backward pass in one kernel, where it takes these."""
    x = torch.randn_like(preact)
    if not linear_gelu.takes_stack(dy, weight, x, always=True):
        return
    product = dy.double() @ weight.double()
    expected = product * gelu_grad(preact.double(), approximate)
    # Partial sums as from another layer's launch: 33 do not fit one step of the sum.
    sums = normal(33, dy.shape[1], dtype=torch.float32)
    for config in itertools.chain(*configs._STACK.values()):
        for given, sum_rows in ((sums, True), (None, False)):
            results = linear_gelu.stack_bwd(dy, weight, x, preact, given, approximate, sum_rows, config)
            dpreact, dx, partial, dweight, dbias = results
            yield config, "dpreact (stack)", dpreact, expected
            yield config, "dx (stack)", dx, product
            yield config, "dweight (stack)", dweight, dy.double().t() @ x.double()
            if sum_rows:
                yield config, "partial sums (stack)", *against_terms(partial.double().sum(0), expected)
                yield config, "dbias (stack)", *against_terms(dbias, sums.double())


def against_terms(dbias: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Computed and expected column sums, shifted so that an error counts against the terms, which cancel in the sum."""
    return dbias.double() + terms.norm(dim=0), terms.sum(0) + terms.norm(dim=0)


def check(dtypes: Sequence[str] = DTYPES) -> list[dict]:
    """The gate's rows, its parts side by side in processes of their own. Raises: SystemExit for a wrong result."""
    parts = [":".join(names) for names in itertools.product(dtypes, ("none", "tanh"), (*FORWARD, *BACKWARD))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outputs = [pool.submit(in_a_process, part) for part in parts]
        try:
            return [row for output in outputs for row in json.loads(output.result().splitlines()[-1])]
        finally:
            pool.shutdown(cancel_futures=True)


def in_a_process(part: str) -> str:
    """What a part prints. Raises: SystemExit."""
    command = [sys.executable, os.path.abspath(__file__)]
    child = subprocess.run(command, env={**os.environ, GATE_PART: part}, stdout=subprocess.PIPE, text=True)
    if child.returncode == -signal.SIGALRM:
        raise SystemExit(f"{part}: no result for {SILENT_S} s: a barrier may wait for ever")
    if child.returncode != 0:
        raise SystemExit(f"{part} failed with exit status {child.returncode}")
    print(f"{part}: ended", file=sys.stderr, flush=True)
    return child.stdout


def main() -> None:
    torch.manual_seed(0)
    if GATE_PART in os.environ:
        print(json.dumps(gate(*os.environ[GATE_PART].split(":"))))
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: the gate runs on a CUDA GPU, and PyTorch finds none here")
    unknown = set(sys.argv[1:]) - set(DTYPES)
    if unknown:
        raise SystemExit(f"error: {', '.join(sorted(unknown))}: accepted: {', '.join(DTYPES)}")
    for row in check(sys.argv[1:] or DTYPES):
        print(row)


if __name__ == "__main__":
    main()
