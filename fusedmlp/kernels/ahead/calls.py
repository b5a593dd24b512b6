"""Calls of the launchers that between them launch every kernel that training or using a real network does.

That is: features in multiples of 16 and more than one row; softmax over rows of any width up to 270,000 that follow one
another without gaps, 512 of them or more where they are wider than 8192; tensors that begin on 16 bytes. Other calls
work too; their first one compiles.

`M` rows, `K` summed over, `N` columns of a GEMM's result.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fusedmlp.kernels import adamw, choice, configs
from fusedmlp.kernels.ahead.specialisation import Specialisation, recorded
from fusedmlp.kernels.configs import GemmConfig, Problem, StackConfig
from fusedmlp.kernels.gelu import gelu_bwd, gelu_fwd
from fusedmlp.kernels.linear_gelu import dgelu_gemm, linear_gelu_fwd, stack_bwd
from fusedmlp.kernels.reduce import dgelu_dbias
from fusedmlp.kernels.softmax import softmax_bwd, softmax_fwd

# By the name that the command line has: fp32 with products in full, and those that TF32 changes.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
KINDS = ("none", "tanh")

# Sizes at which a GEMM's rule is asked which configuration it takes: from one tile to more than any card runs at once,
# and sums from the shortest step to long ones.
ROWS = [16 * factor << power for power in range(14) for factor in (1, 3)]
COLUMNS = [64 * factor << power for power in range(9) for factor in (1, 3)]
SUMMED = [16, 64, 128, 256, 512, 1024, 4096]


def specialisations(device: int, dtypes: Sequence[str]) -> list[Specialisation]:
    """What these calls launch on a GPU, by its index, in these of DTYPES; what takes longest to compile first."""
    with recorded() as found:
        for name in dtypes:
            dtype, precision = DTYPES[name], "tf32" if name == "tf32" else "ieee"
            with _fp32_precision(precision):
                _gemms(dtype, precision, device)
                _stacks(dtype, device)
            if name != "tf32":
                _pointwise(dtype, device)
                _softmaxes(dtype, device)
                # Mixed precision keeps parameters in fp32.
                for kept in dict.fromkeys((dtype, torch.float32)):
                    _adamw(kept, device)
    return sorted(found, key=_rank)


def _rank(item: Specialisation) -> int:
    order = ("gemm_hopper", "gemm_stack", "gemm", "softmax_team")
    module = item.module.rpartition(".")[2]
    return order.index(module) if module in order else len(order)


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _empty(*shape: int, dtype: torch.dtype, device: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=f"cuda:{device}")


def _pointwise(dtype: torch.dtype, device: int) -> None:
    """GELU; dpreact and dbias of Linear+GELU."""
    for kind in KINDS:
        for n in (1024, 1023, 2**32):
            x = _empty(n, dtype=dtype, device=device)
            gelu_fwd(x, kind)
            gelu_bwd(x, x, kind)
        for M, N, need_dbias in itertools.product((16, 17, 2**16, 2**16 + 1), (1024,), (False, True)):
            preact = _empty(M, N, dtype=dtype, device=device)
            # The second is what `y.sum().backward()` brings.
            for dy in (preact, _empty(dtype=dtype, device=device).expand(M, N)):
                dgelu_dbias(dy, preact, kind, need_dbias)


def chosen_at(
    dtype: torch.dtype, precision: str, backward: bool, device: int
) -> dict[GemmConfig, tuple[int, int, int]]:
    """Every configuration that GEMMs may get here, and (M, K, N) of one that does.

    Those of the rule; all that can be measured where FUSEDMLP_TUNE=1 lets it; what has been measured before.
    """
    use_tma, tune = configs.has_tma(device), os.environ.get("FUSEDMLP_TUNE")
    measured = set() if tune == "0" else set(choice._measured().values())
    found: dict[GemmConfig, tuple[int, int, int]] = {}
    for M, K, N in itertools.product(ROWS, SUMMED, COLUMNS):
        problem = Problem(M, N, K, dtype, precision, use_tma, backward, "", device)
        found.setdefault(configs.by_rule(problem), (M, K, N))
        if measured or tune == "1":
            for config in configs.candidates(problem):
                if tune == "1" or config in measured:
                    found.setdefault(config, (M, K, N))
    return found


def _gemms(dtype: torch.dtype, precision: str, device: int) -> None:
    for config, sizes in chosen_at(dtype, precision, False, device).items():
        with choice.using(config):
            _forward(*sizes, dtype, device)
    for config, sizes in chosen_at(dtype, precision, True, device).items():
        with choice.using(config):
            _backward(*sizes, dtype, device)


def _forward(M: int, K: int, N: int, dtype: torch.dtype, device: int) -> None:
    weight, bias = _empty(N, K, dtype=dtype, device=device), _empty(N, dtype=dtype, device=device)
    transposed = _empty(K, N, dtype=dtype, device=device).t()
    for rows in (M, M + 1):
        x = _empty(rows, K, dtype=dtype, device=device)
        for kind, some_bias, store_preact in itertools.product(KINDS, (bias, None), (False, True)):
            linear_gelu_fwd(x, weight, some_bias, kind, store_preact)
        for store_preact in (False, True):
            # GPT-2 of Hugging Face keeps its weights transposed.
            linear_gelu_fwd(x, transposed, bias, "tanh", store_preact)


def _backward(M: int, K: int, N: int, dtype: torch.dtype, device: int) -> None:
    weight = _empty(K, N, dtype=dtype, device=device)
    transposed = _empty(N, K, dtype=dtype, device=device).t()
    for rows in (M, M + 1):
        dy, preact = _empty(rows, K, dtype=dtype, device=device), _empty(rows, N, dtype=dtype, device=device)
        for kind, second, need_dbias in itertools.product(KINDS, _seconds(dtype, device), (False, True)):
            dgelu_gemm(dy, weight, preact, kind, second == "act", need_dbias, second == "product")
        dgelu_gemm(dy, transposed, preact, "tanh", False, True)


def _seconds(dtype: torch.dtype, device: int) -> list[str]:
    """What the GEMM with dGELU gives beside dpreact: nothing, act where an MLP does not keep it, dx in a stack."""
    found = [""]
    if os.environ.get("FUSEDMLP_MLP_KEEP") == "preact":
        found.append("act")
    link = os.environ.get("FUSEDMLP_LINK_STACK", "auto")
    if link == "always" or (link == "auto" and dtype.itemsize == 2 and configs.has_tma(device)):
        found.append("product")
    return found


def _stacks(dtype: torch.dtype, device: int) -> None:
    """All of the backward pass of a layer within a narrow stack; the last layer gets no partial sums."""
    M, N, K = 1024, 512, 512
    merge = os.environ.get("FUSEDMLP_MERGE_STACK", "auto") != "never" and "product" in _seconds(dtype, device)
    if not merge or configs.for_stack(M, N, K, dtype.itemsize, device, True) is None:
        return
    weight = _empty(K, N, dtype=dtype, device=device)
    # Of up to 64 rows there is one partial sum.
    partial = [_empty(rows, K, dtype=torch.float32, device=device) for rows in (16, 17, 1)]
    # With biases, and without.
    sums = [*((some, True) for some in (*partial, None)), (None, False)]
    for config, rows in itertools.product(stack_configs(dtype, device), (M, M + 1)):
        dy, x = _empty(rows, K, dtype=dtype, device=device), _empty(rows, N, dtype=dtype, device=device)
        for kind, (some_sums, sum_rows) in itertools.product(KINDS, sums):
            stack_bwd(dy, weight, x, x, some_sums, kind, sum_rows, config)


def stack_configs(dtype: torch.dtype, device: int) -> list[StackConfig]:
    """Those for which the card has the shared memory."""
    shared = configs.card(device)[2]
    every = itertools.chain(*configs._STACK.values())
    return [config for config in every if config.shared_bytes(dtype.itemsize) <= shared]


def _softmaxes(dtype: torch.dtype, device: int) -> None:
    for n_cols in widths():
        for n_rows in (2**16, 2**16 + 1) if n_cols <= 16_384 else (2**16,):
            x = _empty(n_rows, n_cols, dtype=dtype, device=device)
            softmax_fwd(x, 1)
            softmax_bwd(x, x, 1)


def _adamw(dtype: torch.dtype, device: int) -> None:
    """A step over parameters of one dtype that begin on 16 bytes."""
    table = _empty(4, adamw.COLUMNS, dtype=torch.int64, device=device)
    chunks = _empty(8, 2, dtype=torch.int32, device=device)
    sums, one, two = (_empty(n, dtype=torch.float32, device=device) for n in (8, 1, 2))
    adamw.square_sums(table, chunks, sums, dtype, True)
    adamw.clip(table, sums, one, two)
    adamw.adamw(table, chunks, two, dtype, dtype, True)


def widths() -> list[int]:
    """Row widths of every kind: around each power of two, and in each range that a team's programs share alike.

    Each as a multiple of 16, of 8, of 4 and of none, which rows are read and aligned by.
    """
    blocks = [2**power for power in range(15)]
    even = {block * eighths // 8 for block in blocks for eighths in (5, 7, 8)} | set(range(14_336, 278_528, 4096))
    around = {n - n % 16 + offset for n in even for offset in (0, 8, 4, 1)} | {block - 1 for block in blocks}
    return sorted(n for n in even | around | set(range(64)) if n > 0)
