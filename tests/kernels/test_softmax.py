"""The softmax kernels against float64, narrow rows and wide ones, and what their launchers owe the caller."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import ON_GPU
from oracle import assert_within

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp.kernels import row_vectors, softmax, softmax_team, softmax_wide
from fusedmlp.kernels.softmax import RowsConfig, softmax_bwd, softmax_fwd
from fusedmlp.kernels.softmax_team import MAX_PARTS, TeamConfig
from fusedmlp.kernels.softmax_wide import WideConfig

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.interpreter
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def softmax_grad(dy, y, dim):
    return torch._softmax_backward_data(dy, y, dim, y.dtype)


def check(x, dim, dy=None):
    dy = torch.randn_like(x) if dy is None else dy
    y = softmax_fwd(x, dim)
    dx = softmax_bwd(dy, y, dim)
    assert_within(y, torch.softmax(x.double(), dim), torch.softmax(x, dim), "y")
    incoming = dy.abs().max().item() if dy.numel() else 1.0
    expected = softmax_grad(dy.double(), y.double(), dim)
    assert_within(dx, expected, softmax_grad(dy.contiguous(), y, dim), "dx", incoming)
    return y, dx


FORCED = {"team": TeamConfig(1024, num_warps=1), "wide": WideConfig(64, num_warps=1)}


@pytest.fixture(params=["chosen", *FORCED])
def kernels(request, monkeypatch):
    """The kernels that the width asks for, or those for wider rows whatever the width."""
    if request.param in FORCED:
        monkeypatch.setattr(softmax, "choose", lambda *_: FORCED[request.param])
    return request.param


# A power of two, one less and one more, one column, a width in the middle; a row count that fills no block.
@in_all_dtypes
@pytest.mark.parametrize("shape", [(5, 128), (7, 127), (3, 129), (1, 1), (9, 1), (1, 7), (2, 1000), (70, 16), (0, 5)])
def test_equals_float64(device, dtype, shape, kernels, poisoned):
    check((torch.randn(shape, device=device) * 3).to(dtype), 1)


@in_all_dtypes
@pytest.mark.parametrize("n_cols", [1023, 1025, 1985, 4033, 4096, 8001, 8193, 16400, 32767, 40000])
def test_equals_float64_across_configurations(device, dtype, n_cols, poisoned):
    check(torch.randn(2, n_cols, device=device).to(dtype), 1)


@pytest.mark.parametrize("spread", [20.0, 1e4])
def test_large_values(device, kernels, spread):
    check(torch.randn(4, 300, device=device) * spread, 1)


def test_constant_rows(device, kernels):
    y, dx = check(torch.full((3, 200), 7.0, device=device), 1, torch.ones(3, 200, device=device))
    assert (y - 1 / 200).abs().max() < 1e-8
    assert dx.abs().max() < 1e-8


@in_all_dtypes
def test_infinities_and_nan_as_in_torch(device, dtype, kernels):
    """Also a prefix of -inf wider than a chunk, which an online maximum has to survive."""
    x = torch.randn(7, 300, device=device)
    x[0] = -math.inf
    x[1, :200] = -math.inf
    x[2, 5] = math.inf
    x[3, 299] = math.nan
    x[4, 100:] = -math.inf
    x[5, ::2] = -math.inf
    x = x.to(dtype)
    y, expected = softmax_fwd(x, 1), torch.softmax(x.double(), 1)
    assert torch.equal(y.isnan(), expected.isnan())
    assert_within(y.nan_to_num(), expected.nan_to_num(), torch.softmax(x, 1).nan_to_num(), "y")
    dy = torch.randn_like(x)
    assert torch.equal(softmax_bwd(dy, y, 1).isnan(), softmax_grad(dy, y, 1).isnan())


@pytest.mark.parametrize(
    ("layout", "dim"),
    [
        (lambda x: x, 0),
        (lambda x: x.t(), 1),
        (lambda x: x.t(), 0),
        (lambda x: x[:, ::2], 1),
        (lambda x: x[:, 3:], 1),
        (lambda x: x[:, :1].expand(-1, 7), 1),
        (lambda x: x.view(6, 4, 10), 1),
        (lambda x: x.view(6, 4, 10).permute(2, 0, 1), 2),
        (lambda x: x[0, 0], 0),
    ],
    ids=[
        "columns",
        "transposed",
        "transposed columns",
        "every other",
        "unaligned",
        "expanded",
        "middle",
        "permuted",
        "0d",
    ],
)
def test_layouts_and_dimensions(device, layout, dim, kernels):
    x = layout(torch.randn(6, 40, device=device))
    y, dx = check(x, dim, layout(torch.randn(6, 40, device=device)))
    expected = torch.empty_like(x).stride()
    assert y.stride() == expected
    assert dx.stride() == expected
    check(x, dim, torch.ones((), device=device).expand_as(x))


def test_inputs_stay_and_results_repeat(device, kernels):
    x, dy = torch.randn(2, 4, 500, device=device)
    before = x.clone(), dy.clone()
    y = softmax_fwd(x, 1)
    kept = y.clone()
    first, second = ((softmax_fwd(x, 1), softmax_bwd(dy, y, 1)) for _ in range(2))
    assert torch.equal(x, before[0])
    assert torch.equal(dy, before[1])
    assert torch.equal(y, kept)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("n_cols", [1, 2, 3, 1000, 1024, 1025, 8192, 8193, 20000, 32768, 50257, 262144, 5_000_000])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("max_parts", [1, 14, MAX_PARTS])
def test_chosen_configuration_holds_the_row(n_cols, itemsize, max_parts):
    for backward, cut in itertools.product((False, True), (False, True) if n_cols * itemsize % 16 else (False,)):
        config = softmax.choose(n_cols, itemsize, backward, max_parts, cut)
        if isinstance(config, WideConfig):
            assert n_cols > max_parts * 16384
            continue
        columns = config.block_m * config.block_n if isinstance(config, RowsConfig) else config.block
        assert n_cols <= columns * (1 if isinstance(config, RowsConfig) else max_parts)
        # Registers of a thread: rows are held in fp32, parts as they are; one tensor forward, two backward.
        held = 4 if isinstance(config, RowsConfig) else itemsize
        assert columns * held * (2 if backward else 1) / (32 * config.num_warps) <= 4 * 128


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_cut_row_of_16_kb_or_less_is_read_in_vectors_where_there_is_room(itemsize):
    """The room is for what is cut off in front, up to 127 bytes."""
    lead = 128 // itemsize - 1
    for n_bytes in (4096, 8192, 16384):
        block = n_bytes // itemsize
        for backward in (False, True):
            fits, full = (
                softmax.choose(n, itemsize, backward, MAX_PARTS, True) for n in (block - lead, block - lead + 1)
            )
            assert isinstance(fits, TeamConfig)
            assert fits.block == block
            assert isinstance(full, RowsConfig)
            assert isinstance(softmax.choose(block - lead, itemsize, backward, MAX_PARTS, False), RowsConfig)
    assert softmax.choose(30_001, 2, False, MAX_PARTS, True) == TeamConfig(4096, 2)
    assert softmax.choose(30_000, 2, False, MAX_PARTS, False) == TeamConfig(32_768, 32)


def test_which_rows_count_as_cut(device, monkeypatch):
    """Those that end between vectors, if they begin alike in all tensors and these are aligned."""
    chosen = []
    choose = softmax.choose
    monkeypatch.setattr(softmax, "choose", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    odd, unaligned = torch.randn(3, 1985, device=device), torch.randn(3 * 1985 + 1, device=device)[1:].view(3, 1985)
    y = softmax_fwd(odd, 1)
    softmax_bwd(odd, y, 1)
    assert chosen == [TeamConfig(2048, 4), TeamConfig(2048, 8)]
    for x in (torch.randn(3, 1984, device=device), unaligned, torch.randn(3, 1986, device=device)[:, :1985]):
        softmax_fwd(x, 1)
        assert isinstance(chosen[-1], RowsConfig)
    softmax_bwd(unaligned, y, 1)
    assert isinstance(chosen[-1], RowsConfig)


def assert_rows_are_equal(*tensors):
    for rows in tensors:
        assert torch.equal(rows, rows[:1].expand_as(rows))


@in_all_dtypes
@pytest.mark.parametrize("n_cols", [1000, 9000, 50_264])
def test_equal_rows_that_begin_with_a_vector_give_equal_bits(device, dtype, n_cols):
    """Wherever they lie: nothing is cut off in front of them, so that all sums run in the same order."""
    x, dy = torch.randn(2, 1, n_cols, device=device).to(dtype).expand(2, 5, -1).contiguous()
    y = softmax_fwd(x, 1)
    assert_rows_are_equal(y, softmax_bwd(dy, y, 1))


@in_all_dtypes
def test_rows_with_gaps_that_begin_with_a_vector(device, dtype):
    """Rows of 997 elements, 1000 apart: they end between vectors, and what follows them stays."""
    x, dy = torch.randn(2, 1, 1000, device=device).to(dtype).expand(2, 6, -1).contiguous()
    y, dx = torch.full((2, 6, 1000), 5.0, device=device, dtype=dtype)
    x, dy, rows, grads = (t[:, :997] for t in (x, dy, y, dx))
    for config, forward, backward in (
        (TeamConfig(1024, 1), softmax_team.team_fwd, softmax_team.team_bwd),
        (WideConfig(64, 1), softmax_wide.wide_fwd, softmax_wide.wide_bwd),
    ):
        forward(x, rows, config)
        backward(dy, rows, grads, config)
        assert_rows_are_equal(y, dx)
        assert_within(rows, torch.softmax(x.double(), 1), torch.softmax(x, 1), "y")
        expected = softmax_grad(dy.double(), rows.double(), 1)
        assert_within(grads, expected, softmax_grad(dy, rows.contiguous(), 1), "dx", dy.abs().max().item())
        assert (y[:, 997:] == 5).all()
        assert (dx[:, 997:] == 5).all()


def words(high, low):
    """Pairs of fp32 values as a team posts them."""
    high, low = (v.float().view(torch.int32).long() for v in (high, low))
    return (high << 32) | (low & 0xFFFFFFFF)


def unpacked(area):
    """The values of a team's words, without the number of tasks in front."""
    return torch.stack([(area[1:] >> 32).int().view(torch.float32), area[1:].int().view(torch.float32)])


def test_teams_leave_room_for_those_of_other_streams(monkeypatch):
    """One that waits for its last member holds at most a quarter of a GPU."""
    monkeypatch.setattr(softmax_team, "_INTERPRETER", False)
    for multiprocessors, parts in ((132, MAX_PARTS), (108, 27), (20, 5), (2, 1)):
        monkeypatch.setattr(softmax_team, "num_sms", lambda device, count=multiprocessors: count)
        assert softmax_team.max_parts(SimpleNamespace(is_cuda=True, device=None)) == parts


@pytest.mark.skipif(ON_GPU, reason="there, teams wait for one another: test_teams")
@in_all_dtypes
@pytest.mark.parametrize("n_cols", [2048, 2052, 2999, 3008, 3009])
def test_a_team_whose_words_are_there_before(monkeypatch, dtype, n_cols, poisoned):
    """The interpreter runs one program at a time, so that each finds what the others will post, and posts the same."""
    monkeypatch.setattr(softmax, "choose", lambda *_: TeamConfig(1024, num_warps=1))
    monkeypatch.setattr(softmax_team, "max_parts", lambda x: 4)
    x = torch.randn(5, n_cols).to(dtype)
    x[1, : n_cols // 2] = -math.inf
    dy, y = torch.randn_like(x), torch.softmax(x, 1)
    vector = row_vectors.elements_per_vector((x,))
    extent = n_cols + row_vectors.longest_lead((x,), vector)
    parts = -(-extent // 1024)
    width = row_vectors.part_width(extent, parts)
    # Where in its row each element of a part is: parts are counted from the beginning of a 128-byte line, unless all
    # rows begin with a vector.
    leads = torch.arange(5) * n_cols % (8 * vector) if n_cols % vector else torch.zeros(5, dtype=torch.int64)
    columns = torch.arange(parts * width) - leads[:, None]
    inside = (columns >= 0) & (columns < n_cols)

    def in_parts(values, other):
        spread = values.double().gather(1, columns.clamp(0, n_cols - 1)).where(inside, other)
        return spread.view(5, parts, width)

    def with_words(high, low, launch, *tensors):
        area = torch.cat([torch.zeros(1, dtype=torch.int64), words(high, low).flatten()])
        before = unpacked(area)
        monkeypatch.setattr(softmax_team, "work_area", lambda *_: area)
        result = launch(*tensors, 1)
        assert area[0] == 5 * parts, "tasks"
        torch.testing.assert_close(unpacked(area), before, rtol=1e-5, atol=1e-6)
        return result

    pieces = in_parts(x, -math.inf)
    maxima = pieces.amax(2)
    sums = (pieces - maxima.nan_to_num(neginf=0.0)[:, :, None]).exp().sum(2)
    assert_within(with_words(maxima, sums, softmax_fwd, x), torch.softmax(x.double(), 1), y, "y")
    dots = (in_parts(y, 0.0) * in_parts(dy, 0.0)).sum(2)
    dx = with_words(torch.ones_like(dots), dots, softmax_bwd, dy, y)
    assert_within(dx, softmax_grad(dy.double(), y.double(), 1), softmax_grad(dy, y, 1), "dx", dy.abs().max().item())


# Teams need programs that run at the same time. Rows that fill their parts and odd ones that do not; one row; more
# columns than a team can hold.
TEAM_SHAPES = [(300, 32768), (64, 50257), (1, 131072), (3, 131071), (40, 262144), (9, 262137), (2, 2_000_003)]


@pytest.mark.gpu
@in_all_dtypes
@pytest.mark.parametrize("shape", TEAM_SHAPES, ids=str)
def test_teams(dtype, shape, poisoned):
    x = torch.randn(shape, device="cuda").to(dtype)
    dy = torch.randn_like(x)
    first, second = check(x, 1, dy), check(x, 1, dy)
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TeamConfig(1024, num_warps=4), WideConfig(1024, num_warps=4)], ids=str)
@pytest.mark.parametrize("parts", [2, 3, MAX_PARTS])
def test_infinities_in_parts_of_a_team(monkeypatch, config, parts):
    monkeypatch.setattr(softmax, "choose", lambda *_: config)
    x = torch.randn(6, 1024 * parts, device="cuda")
    x[0] = -math.inf
    x[1, :1024] = -math.inf
    x[2, 1024:] = -math.inf
    x[3, -1] = math.nan
    x[4, 1500] = math.inf
    y, expected = softmax_fwd(x, 1), torch.softmax(x, 1)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70_000, 33), (70_000, 9000), (2**21 + 1, 1024)])
def test_many_rows_and_more_than_2_to_the_31_elements(shape):
    x = torch.randn(1, shape[1], device="cuda", dtype=torch.bfloat16).expand(shape).contiguous()
    y = softmax_fwd(x, 1)
    dx = softmax_bwd(x, y, 1)
    check(x[:2], 1, x[:2])
    assert torch.equal(y, y[:1].expand_as(y))
    assert torch.equal(dx, dx[:1].expand_as(dx))


@pytest.mark.gpu
def test_other_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for n_cols in (100, 40_000):
        check(torch.randn(20, n_cols, device="cuda:1"), 1)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
def test_teams_in_a_cuda_graph():
    """The words are zeroed inside the graph, so every replay starts afresh."""
    x = torch.randn(64, 65536, device="cuda")
    softmax_fwd(x, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax_fwd(x, 1)
    for _ in range(3):
        x.normal_()
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y, torch.softmax(x, 1), rtol=1e-5, atol=1e-9)
