"""manual: elementary torch operations, one per line. Read this first; it defines the mathematics.

Beside each line stands what it reads from and writes to memory, in elements: `M` rows, `N` columns (for linear_gelu
and mlp: `K` in_features, `N` out_features or hidden features, `N2` the MLP's out_features). `ledger` adds the lines up.
That is fp32 (and fp64) traffic; bf16 and fp16 inputs are widened to fp32 first and rounded at the end, because exp,
erf, tanh and sums belong in fp32, and each of those two casts reads and writes the tensor once more.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

SQRT_1_2 = math.sqrt(0.5)
SQRT_2_PI = math.sqrt(2.0 / math.pi)
TANH_CUBIC = 0.044715


class Traffic(NamedTuple):
    """Memory traffic in elements."""

    reads: int
    writes: int


def unavailable() -> str | None:
    return None


def gelu(x: Tensor, approximate: str) -> Tensor:
    """y = x * Phi(x), with Phi the normal distribution function or its tanh approximation (arXiv 1606.08415)."""
    z = _widened(x)
    if approximate == "none":
        scaled = z * SQRT_1_2  # MN reads, MN writes
        erf = torch.erf(scaled)  # MN reads, MN writes
        twice_phi = erf + 1.0  # MN reads, MN writes
    else:
        squared = z * z  # MN reads, MN writes
        cubed = squared * z  # 2MN reads, MN writes
        correction = cubed * TANH_CUBIC  # MN reads, MN writes
        corrected = z + correction  # 2MN reads, MN writes
        scaled = corrected * SQRT_2_PI  # MN reads, MN writes
        tanh = torch.tanh(scaled)  # MN reads, MN writes
        twice_phi = tanh + 1.0  # MN reads, MN writes
    half = z * 0.5  # MN reads, MN writes
    y = half * twice_phi  # 2MN reads, MN writes
    return y.to(x.dtype)


def softmax(x: Tensor, dim: int) -> Tensor:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) along `dim`."""
    z = _widened(x)
    # Subtracting any constant leaves softmax unchanged, so the maximum needs no gradient.
    row_max = z.amax(dim, keepdim=True).detach()  # MN reads, M writes
    shifted = z - row_max  # MN + M reads, MN writes
    numerator = torch.exp(shifted)  # MN reads, MN writes
    denominator = numerator.sum(dim, keepdim=True)  # MN reads, M writes
    y = numerator / denominator  # MN + M reads, MN writes
    return y.to(x.dtype)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """y = gelu(x @ weight.T + bias)."""
    return gelu(_linear(x, weight, bias), approximate)


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, approximate: str
) -> Tensor:
    """y = gelu(x @ weight1.T + bias1) @ weight2.T + bias2."""
    act = linear_gelu(x, weight1, bias1, approximate)
    return _linear(act, weight2, bias2)


def ledger(
    op: str, M: int, N: int, K: int = 0, N2: int = 0, approximate: str = "none", bias: bool = True, fused: bool = False
) -> Traffic:
    """Elements that one forward call of `op` reads and writes: line by line here, or at least (`fused=True`).

    Args:
        op: "gelu", "softmax", "linear_gelu" or "mlp".
        M, N: rows and columns; for linear_gelu out_features, for mlp hidden features.
        K, N2: in_features, and the MLP's out_features.
    Raises: ValueError for an unknown op.
    """
    vectors = N + N2 if bias else 0
    rows = {
        "gelu": (_GELU[approximate], Traffic(M * N, M * N)),
        "softmax": ((5, 3), Traffic(M * N, M * N)),
        "linear_gelu": (_GELU[approximate], Traffic(M * K + N * K + vectors, M * N)),
        "mlp": (_GELU[approximate], Traffic(M * K + N * K + N2 * N + vectors, M * N2)),
    }
    if op not in rows:
        raise ValueError(f"op={op!r} is unknown; accepted: {', '.join(rows)}")
    (reads, writes), least = rows[op]
    if fused:
        return least
    traffic = Traffic(reads * M * N, writes * M * N)
    if op == "softmax":
        traffic = _plus(traffic, 2 * M, 2 * M)
    if op in ("linear_gelu", "mlp"):
        traffic = _plus(traffic, *_linear_ledger(M, K, N, bias))
    if op == "mlp":
        traffic = _plus(traffic, *_linear_ledger(M, N, N2, bias))
    return traffic


_GELU = {"none": (6, 5), "tanh": (12, 9)}


def _plus(traffic: Traffic, reads: int, writes: int) -> Traffic:
    return Traffic(traffic.reads + reads, traffic.writes + writes)


def _linear_ledger(M: int, K: int, N: int, bias: bool) -> Traffic:
    gemm = Traffic(M * K + N * K, M * N)
    return _plus(gemm, M * N + N, M * N) if bias else gemm


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    preact = x @ weight.t()  # MK + NK reads, MN writes
    if bias is not None:
        preact = preact + bias  # MN + N reads, MN writes
    return preact


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
