"""linear_gelu: the pointwise backward pass, what autograd keeps, and launches that are prepared once."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import INTERPRETER, ON_GPU
from oracle import assert_within

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp import functional
from fusedmlp.kernels import gemm_launch, linear_gelu, prepared, reduce
from fusedmlp.kernels.reduce import column_sum, dgelu_dbias

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICE = "cuda" if ON_GPU else "cpu"

pytestmark = pytest.mark.interpreter


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("strips", [reduce.SHORT, reduce.LONG], ids=["short", "long"])
def test_dpreact_and_dbias(dtype, approximate, strips, poisoned, monkeypatch):
    monkeypatch.setattr(reduce, "SHORT", strips)  # what a small matrix gets
    # One strip and several, one row, a width that neither a block nor a 16-byte access divides.
    for M, N in [(40, 64), (1, 300), (140, 257), (33, 1)]:
        dy, preact = normal(M, N, dtype=dtype), normal(M, N, dtype=dtype) * 3
        grad = torch.ops.aten.gelu_backward
        expected = grad(dy.double(), preact.double(), approximate=approximate)
        eager = grad(dy, preact, approximate=approximate)
        dpreact, dbias = dgelu_dbias(dy, preact, approximate, True)
        assert_within(dpreact, expected, eager, f"dpreact {(M, N)}")
        assert_within(dbias, expected.sum(0), eager.sum(0), f"dbias {(M, N)}")
        alone, nothing = dgelu_dbias(dy, preact, approximate, False)
        assert torch.equal(alone, dpreact)
        assert nothing.numel() == 0


@pytest.mark.parametrize("strips", [reduce.SHORT, reduce.LONG], ids=str)
def test_more_rows_than_one_launch_takes(strips, poisoned, monkeypatch):
    """In several launches, whose sums are added in the same order."""
    monkeypatch.setattr(reduce, "SHORT", strips)
    dy, preact = normal(600, 5).t().contiguous().t(), normal(600, 5)
    whole = dgelu_dbias(dy, preact, "none", True)
    monkeypatch.setattr(reduce, "MOST_ROWS", 256)
    assert all(map(torch.equal, dgelu_dbias(dy, preact, "none", True), whole))
    assert torch.equal(dgelu_dbias(dy, preact, "none", False)[0], whole[0])


def test_gradients_of_any_strides():
    preact = normal(20, 24)
    dense = normal(20, 48)
    narrow = dense[:, :24]
    for dy in (dense[:, ::2], narrow.t().contiguous().t(), narrow[:1].expand(20, 24), normal(()).expand(20, 24)):
        got, expected = dgelu_dbias(dy, preact, "none", True), dgelu_dbias(dy.contiguous(), preact, "none", True)
        torch.testing.assert_close(got, expected)


def test_sums_in_fp32():
    """16,384 ones sum to 16,384: bf16 and fp16 sums would stall at 256 and 2,048."""
    rows = 128 if INTERPRETER else 16384
    for dtype in (torch.float16, torch.bfloat16):
        dy = torch.full((rows, 8), 0.25, device=DEVICE, dtype=dtype)
        _, dbias = dgelu_dbias(dy, torch.full_like(dy, 30.0), "none", True)
        assert torch.equal(dbias, torch.full((8,), rows * 0.25, device=DEVICE, dtype=dtype))


def test_column_sum_of_many_partial_sums():
    sums = normal(101, 77)
    torch.testing.assert_close(column_sum(sums, torch.float32), sums.sum(0), rtol=1e-5, atol=1e-5)


def keep_shape(shapes, tensor):
    shapes.append(tuple(tensor.shape))
    return tensor


def test_what_is_kept_for_the_backward_pass():
    """preact always; x only for the weight's gradient, the weight only for x's."""
    x, weight, bias = normal(6, 8), normal(10, 8), normal(10)
    kept = {}
    for names in ("x weight bias", "x", "weight", "bias"):
        tensors = {"x": x.clone(), "weight": weight.clone(), "bias": bias.clone()}
        for name in names.split():
            tensors[name].requires_grad_()
        kept[names] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(keep_shape, kept[names]), lambda t: t):
            functional.linear_gelu(*tensors.values(), impl="triton")
    preact = (6, 10)
    assert kept["x weight bias"] == [preact, (6, 8), (10, 8)]
    assert kept["x"] == [preact, (10, 8)]
    assert kept["weight"] == [preact, (6, 8)]
    assert kept["bias"] == [preact]


def test_a_launch_is_prepared_once_for_equal_calls(monkeypatch):
    made = []
    forward = gemm_launch.forward
    monkeypatch.setattr(gemm_launch, "forward", lambda *args: made.append(args) or forward(*args))
    monkeypatch.setattr(linear_gelu, "_prepared", {})
    weight = normal(16, 8)
    for x in (normal(4, 8), normal(4, 8), normal(4, 16)[:, :8], normal(5, 8)):
        act, _ = linear_gelu.linear_gelu_fwd(x, weight, None, "tanh", False)
        torch.testing.assert_close(act, F.gelu(F.linear(x, weight), approximate="tanh"), rtol=1e-4, atol=1e-5)
    assert len(made) == 3, "other strides and another size are other launches, the second call is not"


def test_prepared_launches_do_not_grow_without_bound():
    table = {}
    for key in range(5000):
        prepared.remember(table, (key,), None)
    assert len(table) <= 2048


@pytest.mark.gpu
def test_inside_a_cuda_graph():
    x, weight, bias = (normal(*s, dtype=torch.bfloat16) for s in ((256, 64), (128, 64), (128,)))
    expected = linear_gelu.linear_gelu_fwd(x, weight, bias, "none", True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = linear_gelu.linear_gelu_fwd(x, weight, bias, "none", True)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
