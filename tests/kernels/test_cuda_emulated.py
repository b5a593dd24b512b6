"""The CUDA kernels, compiled by the C++ compiler against an emulation of the CUDA runtime, and run on the CPU.

One fiber per CUDA thread, in random order between barriers; 16-byte accesses must be aligned, memory around a tensor
is watched, and shared memory starts as NaN. So index arithmetic, tails, shuffles, barriers and clusters are tested
without a GPU; speed, registers and what cuBLASLt does are not.
"""

import ctypes
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels.cuda_emulation import cuda_on_cpu

DTYPES = {"fp32": (0, torch.float32), "fp16": (1, torch.float16), "bf16": (2, torch.bfloat16)}
GUARD = 64


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    try:
        return cuda_on_cpu.build_library(tmp_path_factory.mktemp("emulation"))
    except RuntimeError as error:
        if "_Float16" in str(error):
            pytest.skip("needs a g++ that has _Float16 (12 or newer)")
        raise


@pytest.fixture(scope="module")
def emulated(library):
    """The launchers, as functions of a shared library."""
    launchers = ctypes.CDLL(str(library))
    launchers.strips.restype = ctypes.c_int64
    return launchers


def test_the_contract_on_cpu(library):
    """All that every implementation owes, with cuBLASLt's epilogues written out and each way to compute in its turn.

    In a process of its own, in which the operators accept CPU tensors.
    """
    emulation = str(Path(cuda_on_cpu.__file__).parent)
    path = os.pathsep.join(filter(None, [emulation, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUDA_ON_CPU": str(library), "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    selected = ["tests/impls/test_contract.py", "tests/impls/test_autograd.py", "tests/impls/test_composition.py"]
    command = [sys.executable, "-m", "pytest", "-p", "cuda_on_cpu", "-p", "no:cacheprovider", "-q", "-k", "cuda"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, *selected], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 50


@pytest.fixture(params=DTYPES)
def kind(request):
    return DTYPES[request.param]


class Guarded:
    """A tensor between two stretches of NaN, `offset` elements after a multiple of 64 bytes."""

    def __init__(self, values: torch.Tensor, offset: int = 0, stride: int | None = None):
        rows = values.reshape(1, -1) if values.ndim < 2 else values
        stride = rows.shape[1] if stride is None else stride
        self.memory = torch.full((2 * GUARD + rows.shape[0] * stride + 2 * GUARD,), math.nan, dtype=values.dtype)
        start = -(self.memory.data_ptr() // values.element_size()) % 32 + GUARD + offset
        view = self.memory.as_strided(rows.shape, (stride, 1), start)
        view.copy_(rows)
        self.values = view.view(values.shape) if values.ndim < 2 else view
        self.before = self.memory.clone()

    @property
    def pointer(self):
        return ctypes.c_void_p(self.values.data_ptr())

    def check_untouched_around(self):
        """Whatever is not the tensor still is what it was."""
        after = self.memory.clone()
        inside = after.as_strided(self.values.shape, self.values.stride(), self.values.storage_offset())
        before = self.before.as_strided(self.values.shape, self.values.stride(), self.values.storage_offset())
        inside.copy_(before)
        assert torch.equal(after.view(torch.uint8), self.before.view(torch.uint8)), "written outside of the result"


def empty(*shape, dtype):
    return Guarded(torch.full(shape, math.nan, dtype=dtype))


def long(number):
    return ctypes.c_int64(number)


def assert_close(got, expected, scale=1.0):
    """Within the rounding of the result's dtype and of the fp32 arithmetic inside."""
    eps = torch.finfo(got.dtype).eps
    bound = eps * expected.abs() + (4e-7 + (2**-24 if got.dtype == torch.float16 else 0.0)) * scale
    error = (got.double() - expected).abs()
    assert torch.all(error <= bound), f"error {error.max():.3e}, {(error / bound).max():.2f} of the bound"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(emulated, kind, approximate):
    code, dtype = kind
    # One block's worth of elements is 4096: less, exactly that, and one block with a tail.
    for n in (1, 7, 4095, 4096, 4097, 8192):
        x, dy = Guarded(torch.randn(n).mul(3).to(dtype)), Guarded(torch.randn(n).to(dtype))
        y, dx = empty(n, dtype=dtype), empty(n, dtype=dtype)
        flag = int(approximate == "tanh")
        assert emulated.run_gelu_fwd(code, flag, x.pointer, y.pointer, long(n)) == 0
        assert emulated.run_gelu_bwd(code, flag, dy.pointer, x.pointer, dx.pointer, long(n)) == 0
        leaf = x.values.double().requires_grad_()
        expected = torch.nn.functional.gelu(leaf, approximate=approximate)
        expected.backward(dy.values.double())
        assert_close(y.values, expected.detach(), scale=4.0)
        assert_close(dx.values, leaf.grad, scale=4.0)
        y.check_untouched_around()
        dx.check_untouched_around()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_special_values(emulated, approximate):
    """Finite for any finite x, no overflow on the way; inf, -inf and NaN as torch on CUDA."""
    values = [0.0, -0.0, 5.0, -5.0, 12.9, -12.9, 20.0, -20.0, 6e4, -6e4, 1e18, -1e18, math.inf, -math.inf, math.nan]
    x = Guarded(torch.tensor(values))
    y, dx, dy = empty(15, dtype=torch.float32), empty(15, dtype=torch.float32), Guarded(torch.ones(15))
    flag = int(approximate == "tanh")
    emulated.run_gelu_fwd(0, flag, x.pointer, y.pointer, long(15))
    emulated.run_gelu_bwd(0, flag, dy.pointer, x.pointer, dx.pointer, long(15))
    leaf = x.values[:12].double().requires_grad_()
    expected = torch.nn.functional.gelu(leaf, approximate=approximate)
    expected.sum().backward()
    torch.testing.assert_close(y.values[:12], expected.detach().float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(dx.values[:12], leaf.grad.float(), rtol=1e-6, atol=1e-6)
    assert y.values[12] == math.inf
    assert torch.isnan(y.values[13:]).all()
    assert torch.isnan(dx.values[14])


@pytest.mark.parametrize("term", ["sums alone", "none", "tanh"])
def test_column_sums(emulated, kind, term):
    code, dtype = kind
    # A tile is 32 x 8 (16-bit) or 32 x 4 columns and 32 rows: below, at and above; rows not a multiple of 16 bytes.
    for M, N in [(1, 8), (33, 256), (40, 264), (5, 130), (100, 37), (64, 1)]:
        dy, preact = Guarded(torch.randn(M, N).to(dtype)), Guarded(torch.randn(M, N).to(dtype))
        count = emulated.strips(code, long(M), long(N))
        partial, out = empty(count, N, dtype=torch.float32), empty(N, dtype=dtype)
        dpreact = empty(M, N, dtype=dtype)
        flag = {"sums alone": -1, "none": 0, "tanh": 1}[term]
        pointers = [t.pointer for t in (dy, preact, dpreact, partial, out)]
        assert emulated.run_column_sums(code, flag, *pointers, long(M), long(N)) == 0
        expected = dy.values.double()
        if flag >= 0:
            leaf = preact.values.double().requires_grad_()
            torch.nn.functional.gelu(leaf, approximate=term).backward(expected)
            expected = leaf.grad
            assert_close(dpreact.values, expected, scale=4.0)
            dpreact.check_untouched_around()
        assert_close(out.values, expected.sum(0), scale=4.0 * M)
        partial.check_untouched_around()
        out.check_untouched_around()


# Columns: within a lane, a warp, a block, at and around powers of two; then what only a cluster holds, and what nothing
# does. The same columns with no clusters at all take the other ways.
COLUMNS = [1, 2, 7, 8, 9, 31, 33, 127, 128, 129, 250, 257, 1000, 1024, 1025, 2047, 4104]
WIDE = [(16384 + 8, 8), (32768 + 3, 4), (40001, 1), (17000, 2)]


def run_softmax(emulated, kind, x, dy, max_cluster):
    """y, dx of the kernels for x and dy, Guarded."""
    code, dtype = kind
    M, N = x.values.shape
    y, dx = empty(M, N, dtype=dtype), empty(M, N, dtype=dtype)
    stride_x, stride_dy = long(x.values.stride(0)), long(dy.values.stride(0))
    assert emulated.run_softmax_fwd(code, x.pointer, stride_x, y.pointer, long(M), long(N), max_cluster) == 0
    y.check_untouched_around()
    y_pointers = (y.pointer, long(N))
    assert (
        emulated.run_softmax_bwd(code, dy.pointer, stride_dy, *y_pointers, dx.pointer, long(M), long(N), max_cluster)
        == 0
    )
    dx.check_untouched_around()
    return y.values, dx.values


def check_softmax(emulated, kind, x, dy, max_cluster):
    y, dx = run_softmax(emulated, kind, x, dy, max_cluster)
    expected = torch.softmax(x.values.double(), 1)
    assert_close(y, expected)
    wide_y, wide_dy = y.double(), dy.values.double()
    assert_close(dx, wide_y * (wide_dy - (wide_y * wide_dy).sum(1, keepdim=True)), scale=8.0)


@pytest.mark.parametrize("max_cluster", [1, 16])
def test_softmax(emulated, kind, max_cluster):
    for N in COLUMNS:
        M = 5 if N > 100 else 70
        x, dy = (Guarded(torch.randn(M, N).mul(3).to(kind[1])) for _ in range(2))
        check_softmax(emulated, kind, x, dy, max_cluster)


@pytest.mark.parametrize(("N", "max_cluster"), WIDE)
def test_softmax_of_wide_rows(emulated, kind, N, max_cluster):
    x, dy = (Guarded(torch.randn(2, N).mul(3).to(kind[1])) for _ in range(2))
    check_softmax(emulated, kind, x, dy, max_cluster)


def test_softmax_of_the_widest_rows(emulated):
    """In the dtype whose rows are the longest for their bytes; then two passes."""
    kind = DTYPES["bf16"]
    for N, max_cluster in [(100_000, 8), (262_144, 8), (300_000, 8)]:
        x, dy = (Guarded(torch.randn(1, N).to(kind[1])) for _ in range(2))
        check_softmax(emulated, kind, x, dy, max_cluster)


# Columns of bf16: (vectors of a thread, blocks) for a row, by what most bytes stay on a multiprocessor with; forward,
# and backward, where a row is one of dy and one of y.
SLICES = {32_769: (16, 2), 50_304: (16, 2), 65_536: (8, 4), 100_000: (16, 4), 131_072: (8, 8), 200_001: (16, 8)}
SLICES |= {262_144: (8, 16), 262_145: (16, 16), 524_288: (16, 16)}
PAIRS = {16_385: (16, 2), 25_000: (16, 2), 32_768: (8, 4), 50_257: (16, 4), 65_536: (8, 8), 131_072: (8, 16)}
PAIRS |= {131_073: (16, 16), 200_001: (16, 16), 262_144: (16, 16)}


def plan_slices(emulated, row_vectors, operands, max_cluster):
    """vectors, blocks, vectors of a warp, bytes resident on a multiprocessor."""
    numbers = (ctypes.c_int64 * 4)()
    emulated.plan_slices(long(row_vectors), operands, max_cluster, numbers)
    return tuple(numbers)


def test_the_plan_of_rows_wider_than_a_block(emulated):
    """What was fastest on an H200; full slices fill its shared memory, and most others come near."""
    for operands, table in [(1, SLICES), (2, PAIRS)]:
        for N, expected in table.items():
            assert plan_slices(emulated, -(-N // 8), operands, 16)[:2] == expected, N
    for operands, N, resident in [(1, 65_536, 192), (1, 50_304, 200), (1, 40_000, 200), (2, 32_768, 192)]:
        assert plan_slices(emulated, N // 8, operands, 16)[3] == resident << 10
    for N in range(32_768, 262_145, 1024):
        assert plan_slices(emulated, N // 8, 1, 16)[3] >= 168 << 10, N
        assert plan_slices(emulated, N // 8, 2, 16)[3] >= 168 << 10, N


@pytest.mark.parametrize("operands", [1, 2])
@pytest.mark.parametrize("max_cluster", [2, 4, 8, 16])
def test_a_row_fits_its_slices(emulated, operands, max_cluster):
    most = max_cluster * 4096 // operands
    for row_vectors in {2049, 2500, 4097, 4100, 5000, 6288, 8193, 12_289, 20_000, 32_769, most - 1, most}:
        if row_vectors <= most:
            vectors, cluster, per_warp, _ = plan_slices(emulated, row_vectors, operands, max_cluster)
            assert vectors in (8, 16)
            assert cluster in (2, 4, 8, 16)
            assert cluster <= max_cluster
            assert operands * per_warp <= 32 * vectors
            assert cluster * 8 * per_warp >= row_vectors


@pytest.mark.parametrize(("largest", "found"), [(16, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_clusters_are_as_large_as_the_hardware_has_them(emulated, largest, found):
    assert emulated.find_max_cluster(largest) == found


@pytest.mark.parametrize("N", SLICES)
def test_softmax_in_slices(emulated, N):
    """Each kind of a slice and size of a cluster, where rows begin between vectors if N is odd; two rows, in a turn."""
    kind = DTYPES["bf16"]
    x = Guarded(torch.randn(2, N).mul(3).to(kind[1]))
    y = empty(2, N, dtype=kind[1])
    assert emulated.run_softmax_fwd(kind[0], x.pointer, long(N), y.pointer, long(2), long(N), 16) == 0
    y.check_untouched_around()
    assert_close(y.values, torch.softmax(x.values.double(), 1))


def run_softmax_bwd(emulated, kind, dy, y, dx, max_cluster=16):
    """dx, Guarded, of the kernel for dy and y."""
    M, N = dx.values.shape
    strides = [long(t.stride(0)) for t in (dy, y)]
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (dy, y)]
    operands = (pointers[0], strides[0], pointers[1], strides[1], dx.pointer)
    assert emulated.run_softmax_bwd(kind[0], *operands, long(M), long(N), max_cluster) == 0
    dx.check_untouched_around()
    wide_dy, wide_y = dy.double(), y.double()
    assert_close(dx.values, wide_y * (wide_dy - (wide_y * wide_dy).sum(1, keepdim=True)), scale=8.0)


@pytest.mark.parametrize("N", PAIRS)
def test_softmax_gradient_in_slices(emulated, N):
    kind = DTYPES["bf16"]
    dy = Guarded(torch.randn(2, N).to(kind[1]))
    y = Guarded(torch.softmax(torch.randn(2, N).mul(3), 1).to(kind[1]))
    run_softmax_bwd(emulated, kind, dy.values, y.values, empty(2, N, dtype=kind[1]))


@pytest.fixture
def watch_prefetches(emulated):
    """watch((pointer, elements of 2 bytes), ...): from then on, reading ahead of anything else is an error."""

    def watch(*tensors):
        pointers = [ctypes.c_void_p(pointer) for pointer, _ in tensors]
        sizes = [long(2 * elements) for _, elements in tensors]
        count = len(tensors)
        emulated.watch_prefetches(count, (ctypes.c_void_p * count)(*pointers), (ctypes.c_int64 * count)(*sizes))

    yield watch
    watch()


PREFETCHED = [(40_000, 0, 0), (33_001, 3, 8), (50_257, 5, 24), (65_536, 0, 64)]


@pytest.mark.parametrize(("N", "offset", "gap"), PREFETCHED)
def test_later_rows_are_read_ahead(emulated, watch_prefetches, N, offset, gap):
    """Once for each row but the first, and nothing beside the tensor's rows; the emulated device runs 5 clusters."""
    kind = DTYPES["bf16"]
    values = torch.randn(3, N).to(kind[1])
    x, dy, y = (Guarded(values, offset, N + gap) for _ in range(3))
    out = Guarded(torch.full((3, N), math.nan, dtype=kind[1]), offset)
    elements = 2 * (N + gap) + N

    def lines_read_ahead(tensor, row):
        first = tensor.values[row].data_ptr()
        asked = [emulated.was_prefetched(ctypes.c_void_p(at)) for at in range(first, first + 2 * N - 128, 128)]
        return sum(asked) / len(asked)

    watch_prefetches((x.values.data_ptr(), elements))
    stride = long(N + gap)
    assert emulated.run_softmax_fwd(kind[0], x.pointer, stride, out.pointer, long(3), long(N), 16) == 0
    assert [lines_read_ahead(x, row) for row in range(3)] == pytest.approx([0.0, 1.0, 1.0], abs=1e-3)
    watch_prefetches((dy.values.data_ptr(), elements), (y.values.data_ptr(), elements))
    run_softmax_bwd(emulated, kind, dy.values, y.values, out)
    for tensor in (dy, y):
        assert [lines_read_ahead(tensor, row) for row in range(3)] == pytest.approx([0.0, 1.0, 1.0], abs=1e-3)


@pytest.mark.parametrize(
    ("offset", "N", "stride"),
    [(3, 33_001, 33_009), (0, 40_003, 40_011), (5, 50_257, 25), (1, 50_003, 3), (1, 50_008, 0)],
)
def test_softmax_in_slices_of_rows_that_begin_anywhere(emulated, watch_prefetches, offset, N, stride):
    """Cut vectors at both ends of the tensor, beside gaps, and in rows that overlap or are one and the same."""
    kind = DTYPES["bf16"]
    memory = torch.full((64 + offset + 2 * stride + N + 64,), math.nan, dtype=kind[1])
    start = -(memory.data_ptr() // 2) % 32 + offset
    x = memory.as_strided((3, N), (stride, 1), start)
    memory[start : start + 2 * stride + N] = torch.randn(2 * stride + N).to(kind[1])
    y = Guarded(torch.full((3, N), math.nan, dtype=kind[1]), offset)
    pointer = ctypes.c_void_p(x.data_ptr())
    watch_prefetches((x.data_ptr(), 2 * stride + N))
    assert emulated.run_softmax_fwd(kind[0], pointer, long(stride), y.pointer, long(3), long(N), 16) == 0
    y.check_untouched_around()
    assert_close(y.values, torch.softmax(x.double(), 1))
    # As the gradient of y, whose rows are in step with these.
    dy, probabilities = x, Guarded(y.values.clone(), offset)
    watch_prefetches((x.data_ptr(), 2 * stride + N), (probabilities.values.data_ptr(), 3 * N))
    run_softmax_bwd(emulated, kind, dy, probabilities.values, Guarded(torch.full_like(y.values, math.nan), offset))


def test_softmax_of_rows_with_gaps(emulated, kind):
    """Rows with a stride: as far from a multiple of 16 bytes as those of the result, and one value for all rows."""
    for N, stride in [(16, 24), (13, 29), (1030, 1038), (64, 0)]:
        rows = torch.randn(1 if stride == 0 else 6, N).mul(3).to(kind[1])
        x, dy = Guarded(rows, stride=stride or N), Guarded(torch.randn(6, N).to(kind[1]))
        if stride == 0:
            x.values = x.values.expand(6, N)
        check_softmax(emulated, kind, x, dy, 16)


@pytest.mark.parametrize("max_cluster", [1, 16])
def test_softmax_of_special_rows(emulated, kind, max_cluster):
    """inf, NaN and rows of -inf, narrow, behind a prefix of -inf that fills a warp, and wider than a block."""
    inf = math.inf
    ends = torch.tensor(
        [
            [0.0, -inf, 1.0, 2.0],
            [-inf, -inf, -inf, -inf],
            [inf, 0.0, 1.0, 2.0],
            [math.nan, 0.0, 1.0, 2.0],
            [math.nan, math.nan, math.nan, math.nan],
            [-inf, -inf, -inf, 3.0],
            [1e4, -1e4, 1e4, 0.0],
        ]
    )
    for prefix in (0, 3, 1500, 20_000, 40_000):
        for parts in ([torch.full((7, prefix), -inf), ends], [ends, torch.full((7, prefix), -inf)]):
            x = Guarded(torch.cat(parts, 1).to(kind[1]))
            dy = Guarded(torch.randn(x.values.shape).to(kind[1]))
            y, dx = run_softmax(emulated, kind, x, dy, max_cluster)
            expected = torch.softmax(x.values.double(), 1)
            assert torch.equal(torch.isnan(y), torch.isnan(expected))
            finite = ~torch.isnan(expected)
            assert_close(y[finite], expected[finite])
            assert torch.equal(torch.isnan(dx).any(1), torch.isnan(expected).any(1))
            if prefix > 2000 and kind[1] != torch.bfloat16:
                break
