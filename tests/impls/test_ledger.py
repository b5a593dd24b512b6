"""The ledger of reads and writes against the bytes that manual's operations really move."""

import pytest
import torch
from conftest import raises
from torch.utils._python_dispatch import TorchDispatchMode

from fusedmlp.impls import manual

M, N, K, N2 = 48, 80, 24, 56
VIEWS = {"view", "t", "transpose", "unsqueeze", "expand", "detach", "alias", "_unsafe_view", "permute"}


class TrafficCounter(TorchDispatchMode):
    """Counts the bytes that each aten call reads from its tensor arguments and writes to its results.

    An argument that appears twice is read once, and a broadcast one as often as it has elements; views move nothing.
    """

    def __init__(self):
        super().__init__()
        self.read_bytes = self.written_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            tensors = {id(t): t for t in args if isinstance(t, torch.Tensor) and t.ndim > 0}
            self.read_bytes += sum(t.numel() * t.element_size() for t in tensors.values())
            self.written_bytes += result.numel() * result.element_size()
        return result


def traffic(op, *args, element_size=4):
    with TrafficCounter() as counter:
        getattr(manual, op)(*args)
    return counter.read_bytes // element_size, counter.written_bytes // element_size


def test_softmax_by_the_lecture():
    assert manual.ledger("softmax", M, N) == (5 * M * N + 2 * M, 3 * M * N + 2 * M)
    assert manual.ledger("softmax", M, N, fused=True) == (M * N, M * N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_moves_what_the_ledger_says(dtype):
    x = torch.randn(M, N, dtype=dtype)
    assert traffic("softmax", x, 1, element_size=x.element_size()) == manual.ledger("softmax", M, N)


def test_low_precision_pays_two_casts_more():
    x = torch.randn(M, N, dtype=torch.bfloat16)
    with TrafficCounter() as counter:
        manual.softmax(x, 1)
    reads, writes = manual.ledger("softmax", M, N)
    assert counter.read_bytes == 4 * reads + (2 + 4) * M * N
    assert counter.written_bytes == 4 * writes + (4 + 2) * M * N


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_moves_what_the_ledger_says(approximate):
    assert traffic("gelu", torch.randn(M, N), approximate) == manual.ledger("gelu", M, N, approximate=approximate)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_gelu_and_mlp_move_what_the_ledger_says(approximate, bias):
    x, weight1, weight2 = torch.randn(M, K), torch.randn(N, K), torch.randn(N2, N)
    bias1, bias2 = (torch.randn(N), torch.randn(N2)) if bias else (None, None)
    options = {"approximate": approximate, "bias": bias}
    assert traffic("linear_gelu", x, weight1, bias1, approximate) == manual.ledger("linear_gelu", M, N, K, **options)
    moved = traffic("mlp", x, weight1, bias1, weight2, bias2, approximate)
    assert moved == manual.ledger("mlp", M, N, K, N2, **options)


def test_fused_reads_inputs_once_and_writes_the_result():
    assert manual.ledger("gelu", M, N, fused=True) == (M * N, M * N)
    assert manual.ledger("linear_gelu", M, N, K, fused=True) == (M * K + N * K + N, M * N)
    least = (M * K + N * K + N + N2 * N + N2, M * N2)
    assert manual.ledger("mlp", M, N, K, N2, fused=True) == least


def test_unknown_op_is_named():
    with raises(ValueError, "'relu'", "gelu, softmax, linear_gelu, mlp"):
        manual.ledger("relu", M, N)
