"""The operators torch.ops.fusedmlp_cuda.*: what they promise without a GPU, and how they compute with one."""

import math

import pytest
import torch
from oracle import Case, assert_within, check
from torch.utils.flop_counter import FlopCounterMode

from fusedmlp import functional, impls
from fusedmlp.kernels import cuda_ops

M, K, N, N2 = 24, 16, 32, 40


def meta(*shape):
    return torch.empty(shape, device="meta")


def test_fake_kernels_give_shapes():
    """Leading dimensions are kept, what is not asked for is empty."""
    x, weight, bias = meta(2, 3, K), meta(N, K), meta(N)
    act, preact = cuda_ops.linear_gelu_fwd(x, weight, bias, "none", True)
    assert act.shape == (2, 3, N)
    assert preact.shape == (6, N)
    assert cuda_ops.linear_gelu_fwd(x, weight, None, "none", False)[1].shape == (0,)
    gradients = cuda_ops.linear_gelu_bwd(act, x, weight, preact, "none", True)
    assert [tuple(g.shape) for g in gradients] == [(2, 3, K), (N, K), (N,)]
    gradients = cuda_ops.linear_gelu_bwd(act, None, None, preact, "none", False)
    assert [tuple(g.shape) for g in gradients] == [(0,), (0,), (0,)]
    weight2 = meta(N2, N)
    y, preact, act = cuda_ops.mlp_fwd(x, weight, bias, weight2, meta(N2), "tanh", True, True)
    assert [tuple(t.shape) for t in (y, preact, act)] == [(2, 3, N2), (6, N), (6, N)]
    gradients = cuda_ops.mlp_bwd(y, x, weight, weight2, preact, act, "tanh", True, True)
    assert [tuple(g.shape) for g in gradients] == [(2, 3, K), (N, K), (N,), (N2, N), (N2,)]
    gradients = cuda_ops.mlp_bwd(y, None, None, None, None, act, "tanh", False, False)
    assert [tuple(g.shape) for g in gradients] == [(0,), (0,), (0,), (N2, N), (0,)]
    transposed = meta(5, 7).t()
    assert cuda_ops.gelu_fwd(transposed, "none").stride() == transposed.stride()
    assert cuda_ops.softmax_bwd(meta(5, 7), transposed.t(), 1).shape == (5, 7)


def test_flops_are_those_of_the_products_that_run():
    def flops(op, *args):
        with FlopCounterMode(display=False) as counter:
            op(*args)
        return counter.get_total_flops()

    x, weight1, weight2, hidden = meta(M, K), meta(N, K), meta(N2, N), meta(M, N)
    y, first, second = meta(M, N2), 2 * M * K * N, 2 * M * N * N2
    assert flops(cuda_ops.linear_gelu_fwd, x, weight1, None, "none", True) == first
    assert flops(cuda_ops.linear_gelu_bwd, hidden, x, weight1, hidden, "none", True) == 2 * first
    assert flops(cuda_ops.linear_gelu_bwd, hidden, x, None, hidden, "none", True) == first
    assert flops(cuda_ops.linear_gelu_bwd, hidden, None, None, hidden, "none", True) == 0
    assert flops(cuda_ops.mlp_fwd, x, weight1, None, weight2, None, "tanh", True, True) == first + second
    backward = cuda_ops.mlp_bwd
    assert flops(backward, y, x, weight1, weight2, hidden, hidden, "tanh", True, True) == 2 * first + 2 * second
    assert flops(backward, y, None, None, None, None, hidden, "tanh", False, True) == second
    assert flops(backward, y, x, None, weight2, hidden, None, "tanh", True, True) == first + second
    assert flops(cuda_ops.gelu_fwd, x, "none") == flops(cuda_ops.softmax_fwd, x, 1) == 0


@pytest.fixture
def on_gpu():
    if (reason := impls.unavailable("cuda")) is not None:
        pytest.skip(reason)
    impls.load("cuda").gelu(torch.ones(1, device="cuda"), "none")


LOW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
in_all_dtypes = pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)


def normal(*shape, dtype, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def mlp_case(dtype, approximate, bias, shape=(512, 256, 1024, 264)):
    M, K, N, N2 = shape
    tensors = {
        "x": normal(M, K, dtype=dtype),
        "weight1": normal(N, K, dtype=dtype, scale=K**-0.5),
        "bias1": normal(N, dtype=dtype) if bias else None,
        "weight2": normal(N2, N, dtype=dtype, scale=N**-0.5),
        "bias2": normal(N2, dtype=dtype) if bias else None,
    }
    return Case("mlp", tensors, {"approximate": approximate})


@pytest.fixture(params=["measured", "first"])
def choice(request, monkeypatch):
    """Both how ways are chosen by time, and the first way of each, which is what deterministic algorithms get.

    With those, PyTorch fills fresh memory with NaN as well: what is not written shows.
    """
    if request.param == "measured":
        yield
        return
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@in_all_dtypes
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_products_of_sizes_that_cublaslt_takes(on_gpu, choice, dtype, approximate, bias):
    """Large enough for several tiles and split sums, a multiple of 16 bytes in every dimension."""
    case = mlp_case(dtype, approximate, bias)
    dy = normal(512, 264, dtype=dtype)
    check(case, "cuda", dy)
    first = {name: case.tensors[f"{name}1" if name != "x" else "x"] for name in ("x", "weight", "bias")}
    check(Case("linear_gelu", first, case.options), "cuda", normal(512, 1024, dtype=dtype))


@pytest.mark.gpu
@in_all_dtypes
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(33, 41, 66, 17), (64, 64, 68, 64), (1, 8, 8, 8), (16, 64, 64, 63)])
def test_products_of_sizes_that_it_does_not(on_gpu, dtype, approximate, shape):
    """No dimension a multiple of 16 bytes, the hidden one alone, one row, an output that does not fit."""
    check(mlp_case(dtype, approximate, True, shape), "cuda", normal(shape[0], shape[3], dtype=dtype))


@pytest.mark.gpu
def test_a_misaligned_parameter_takes_another_way(on_gpu):
    """The second call of a problem can come with an address that the first one's way does not take."""
    case = mlp_case(torch.bfloat16, "tanh", True)
    check(case, "cuda", normal(512, 264, dtype=torch.bfloat16))
    flat = torch.cat([torch.zeros(1, device="cuda", dtype=torch.bfloat16), case.tensors["weight1"].flatten()])
    case.tensors["weight1"] = flat[1:].view(1024, 256)
    bias = torch.cat([torch.zeros(1, device="cuda", dtype=torch.bfloat16), case.tensors["bias1"]])
    case.tensors["bias1"] = bias[1:]
    check(case, "cuda", normal(512, 264, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_tf32_follows_pytorch(on_gpu, monkeypatch):
    x, weight = normal(512, 1024, dtype=torch.float32), normal(512, 1024, dtype=torch.float32)
    exact = torch.nn.functional.gelu(x.double() @ weight.double().t(), approximate="tanh")
    errors = {}
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32" if allowed else "ieee")
        y = functional.linear_gelu(x, weight, None, "tanh", impl="cuda")
        errors[allowed] = ((y - exact).norm() / exact.norm()).item()
    assert errors[False] < 1e-5 < errors[True] < 1e-2


# Where the ways to hold a row meet: 1024 columns in a warp, 32768 (fp32, backward: 16384) in a block, then clusters of
# 2, 4, 8 and 16 blocks with slices of both kinds, and two passes. Columns that are not a multiple of 16 bytes, so that
# every row begins elsewhere.
@pytest.mark.gpu
@in_all_dtypes
@pytest.mark.parametrize(
    "columns",
    [128, 1024, 1025, 8191, 16384, 16385, 32768, 32769, 50257, 65537, 131072, 200000, 262143, 262144, 524288, 600001],
)
def test_softmax_across_widths(on_gpu, dtype, columns):
    x, dy = normal(5, columns, dtype=dtype, scale=3.0), normal(5, columns, dtype=dtype)
    y = cuda_ops.softmax_fwd(x, 1)
    dx = cuda_ops.softmax_bwd(dy, y, 1)
    assert_within(y, torch.softmax(x.double(), 1), torch.softmax(x, 1), f"y {columns}")
    expected = torch._softmax_backward_data(dy.double(), y.double(), 1, torch.float64)
    eager = torch._softmax_backward_data(dy, y, 1, dtype)
    assert_within(dx, expected, eager, f"dx {columns}", dy.abs().max().item())


@pytest.mark.gpu
@in_all_dtypes
def test_softmax_of_special_rows_that_are_wide(on_gpu, dtype):
    """-inf, inf and NaN in one block of a cluster while the others hold ordinary values."""
    x = normal(4, 70_000, dtype=dtype)
    x[0, :40_000] = -math.inf
    x[1] = -math.inf
    x[2, 69_999] = math.inf
    x[3, 5] = math.nan
    y, expected = cuda_ops.softmax_fwd(x, 1), torch.softmax(x, 1)
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.gpu
@in_all_dtypes
def test_softmax_of_many_wide_rows_in_a_graph(on_gpu, dtype):
    """Clusters of several rows at a time on each multiprocessor; a recorded launch; the same bits every time."""
    x, dy = normal(2000, 50257, dtype=dtype, scale=3.0), normal(2000, 50257, dtype=dtype)
    expected = cuda_ops.softmax_fwd(x, 1)
    assert_within(expected, torch.softmax(x.double(), 1), torch.softmax(x, 1), "y")
    expected_dx = cuda_ops.softmax_bwd(dy, expected, 1)
    exact_dx = torch._softmax_backward_data(dy.double(), expected.double(), 1, torch.float64)
    eager_dx = torch._softmax_backward_data(dy, expected, 1, dtype)
    assert_within(expected_dx, exact_dx, eager_dx, "dx", dy.abs().max().item())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cuda_ops.softmax_fwd(x, 1)
        dx = cuda_ops.softmax_bwd(dy, y, 1)
    for _ in range(3):
        y.zero_()
        dx.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        assert torch.equal(dx, expected_dx)


@pytest.mark.gpu
@in_all_dtypes
def test_offsets_into_a_storage(on_gpu, dtype):
    """A tensor that begins between two multiples of 16 bytes."""
    flat = normal(1 + 64 * 130, dtype=dtype)
    x = flat[1:].view(64, 130)
    check(Case("gelu", {"x": x}), "cuda")
    check(Case("softmax", {"x": x}, {"dim": 1}), "cuda", normal(64, 130, dtype=dtype))
    check(Case("softmax", {"x": x[:, 3:]}, {"dim": 1}), "cuda", normal(64, 127, dtype=dtype))


@pytest.mark.gpu
def test_schemas_and_fake_kernels_match_the_real_ones(on_gpu):
    """Nothing is written, nothing aliases, and fake outputs have the real ones' shapes and strides."""
    x, weight1, weight2 = (normal(*s, dtype=torch.float32) for s in ((2, 12, K), (N, K), (N2, N)))
    bias1, bias2, dy = (normal(*s, dtype=torch.float32) for s in ((N,), (N2,), (2, 12, N2)))
    hidden = normal(M, N, dtype=torch.float32)
    calls = [
        (cuda_ops.gelu_fwd, (x.mT, "none")),
        (cuda_ops.gelu_bwd, (x, x.mT.contiguous().mT, "tanh")),
        (cuda_ops.softmax_fwd, (x, 1)),
        (cuda_ops.softmax_bwd, (x, x, 2)),
        (cuda_ops.linear_gelu_fwd, (x, weight1, bias1, "tanh", True)),
        (cuda_ops.linear_gelu_fwd, (x, weight1, None, "none", False)),
        (cuda_ops.linear_gelu_bwd, (hidden.view(2, 12, N), x, weight1, hidden, "none", True)),
        (cuda_ops.mlp_fwd, (x, weight1, bias1, weight2, bias2, "none", True, False)),
        (cuda_ops.mlp_bwd, (dy, x, weight1, weight2, hidden, hidden, "tanh", True, True)),
        (cuda_ops.mlp_bwd, (dy, None, None, None, None, hidden, "none", False, False)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_a_graph_captured_before_anything_was_measured(on_gpu):
    """A capture must not be waited on: the first call of a problem takes the heuristic's choice there."""
    x, weight = normal(96, 72, dtype=torch.bfloat16), normal(88, 72, dtype=torch.bfloat16)
    # Kernels and handles are loaded by a call of another problem.
    functional.linear_gelu(x[:64], weight, None, "tanh", impl="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = functional.linear_gelu(x, weight, None, "tanh", impl="cuda")
    graph.replay()
    expected = torch.nn.functional.gelu(x.double() @ weight.double().t(), approximate="tanh")
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_another_stream(on_gpu):
    """Work is enqueued on the current stream: behind what is there, before what follows."""
    x, stream = normal(4096, 4096, dtype=torch.float32), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        scaled = x * 2
        y = functional.gelu(scaled, impl="cuda")
        total = y.sum()
    stream.synchronize()
    torch.testing.assert_close(total, torch.nn.functional.gelu(x * 2).sum(), rtol=1e-4, atol=1.0)
