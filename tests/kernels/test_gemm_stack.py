"""The kernel for a layer's whole backward pass within a stack: against float64, the kernels apart, and when it runs."""

from types import SimpleNamespace

import pytest
import torch
from conftest import ON_GPU, raises
from oracle import assert_within

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp.kernels import configs, gemm_launch, linear_gelu
from fusedmlp.kernels.configs import GemmConfig, StackConfig
from fusedmlp.kernels.linear_gelu import dgelu_gemm, stack_bwd, takes_stack

# Through TMA, for 16-bit dtypes; in the interpreter by pointers, where bf16 products are wrong.
DTYPES = [torch.float16, torch.bfloat16 if ON_GPU else torch.float32]
DEVICE = "cuda" if ON_GPU else "cpu"
# Whole tiles; ragged ones; one row; more rows than dweight takes in a step, and one column tile.
SHAPES = [(128, 64, 128), (200, 264, 72), (1, 8, 16), (300, 40, 8)]
# Tiles and steps of different sizes for the two kinds.
LONG, SHORT = (128, 32) if ON_GPU else (32, 16)
APART = StackConfig(
    GemmConfig("plain", 64, 64, LONG, 8, 2, 4, True), GemmConfig("plain", 64, 128, 64, 8, 3, 4), DX_FIRST=True
)

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        ON_GPU and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for compute capability 9.0"
    ),
]


def normal(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def operands(M, K, N, dtype):
    """dy, weight, x, preact."""
    return (
        normal(M, K, dtype=dtype),
        normal(K, N, dtype=dtype, scale=K**-0.5),
        normal(M, N, dtype=dtype),
        normal(M, N, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("config", [None, APART], ids=["rule", "dx first"])
def test_against_float64(dtype, approximate, config, poisoned):
    for M, K, N in SHAPES:
        dy, weight, x, preact = operands(M, K, N, dtype)
        assert takes_stack(dy, weight, x, always=True)
        grad = torch.ops.aten.gelu_backward
        product, eager = dy.double() @ weight.double(), dy @ weight
        expected = grad(product, preact.double(), approximate=approximate)
        rounded = grad(eager, preact, approximate=approximate)
        # More rows than one step of the sum takes.
        sums = normal(35, K)
        dpreact, dx, partial, dweight, dbias = stack_bwd(dy, weight, x, preact, sums, approximate, True, config)
        where = f"{(M, K, N)}"
        assert_within(dx, product, eager, f"dx {where}")
        assert_within(dpreact, expected, rounded, f"dpreact {where}")
        assert_within(dweight, dy.double().t() @ x.double(), dy.t() @ x, f"dweight {where}")
        assert partial.shape == (-(-M // configs.STACK_ROWS), N)
        assert partial.dtype == torch.float32
        assert_within(partial.sum(0).to(dtype), expected.sum(0), rounded.sum(0), f"partial {where}")
        assert_within(dbias, sums.double().sum(0), sums.to(dtype).sum(0), f"dbias {where}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_the_kernels_apart(dtype):
    dy, weight, x, preact = operands(200, 72, 136, dtype)
    dpreact, dx, partial, _, _ = stack_bwd(dy, weight, x, preact, None, "none", True)
    # What the next launch makes of the partial sums.
    _, _, _, _, dbias = stack_bwd(dpreact, normal(136, 8, dtype=dtype), normal(200, 8, dtype=dtype),
                                  normal(200, 8, dtype=dtype), partial, "none", False)  # fmt: skip
    dpreact_apart, dx_apart, dbias_apart = dgelu_gemm(dy, weight, preact, "none", False, True, True)
    for one, other in ((dpreact, dpreact_apart), (dx, dx_apart), (dbias, dbias_apart)):
        torch.testing.assert_close(one, other, rtol=4 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


def test_what_is_not_asked_for():
    dy, weight, x, preact = operands(70, 40, 24, torch.float16)
    dpreact, dx, partial, dweight, dbias = stack_bwd(dy, weight, x, preact, None, "none", False)
    assert partial.numel() == dbias.numel() == 0
    both = stack_bwd(dy, weight, x, preact, normal(2, 40), "none", True)
    assert all(torch.equal(one, other) for one, other in zip((dpreact, dx, dweight), (*both[:2], both[3]), strict=True))
    assert (both[2].numel(), both[4].numel()) == (2 * 24, 40)


@pytest.mark.parametrize("given", [True, False])
def test_the_operators_fake_kernels(given):
    pytest.importorskip("fusedmlp.impls.triton")
    tensors = operands(70, 40, 24, torch.float16)
    sums = normal(3, 40)
    checks = ("test_schema", "test_faketensor")
    operators = torch.ops.fusedmlp_triton
    arguments = (*tensors, sums if given else None, "none", given)
    torch.library.opcheck(operators.stack_bwd.default, arguments, test_utils=checks)
    torch.library.opcheck(operators.column_sum.default, (sums, torch.float16), test_utils=checks)


def test_results_are_bit_equal_every_time():
    dy, weight, x, preact = operands(300, 72, 136, torch.float16)
    sums = normal(35, 72)
    first = stack_bwd(dy, weight, x, preact, sums, "none", True)
    for _ in range(3):
        again = stack_bwd(dy, weight, x, preact, sums, "none", True)
        assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))


def test_rows_that_lie_apart():
    """x and weight as columns of wider matrices; what cannot be read so is left to other kernels."""
    dtype = torch.float16
    dy, weight, x, preact = operands(70, 40, 24, dtype)
    expected = stack_bwd(dy, weight, x, preact, None, "none", True)
    wide_weight, wide_x = torch.cat([weight, weight], 1)[:, :24], torch.cat([x, x], 1)[:, :24]
    assert takes_stack(dy, wide_weight, wide_x)
    got = stack_bwd(dy, wide_weight, wide_x, preact, None, "none", True)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert not takes_stack(dy, weight.t().contiguous().t(), x)
    assert not takes_stack(dy, weight, torch.cat([x, x], 1)[:, ::2])
    assert not takes_stack(dy.t().contiguous().t(), weight, x)
    assert not takes_stack(dy, weight.float(), x)
    assert not takes_stack(dy[:0], weight, x[:0])


def test_rows_beyond_the_last_add_nothing():
    """They are zero times the weight, which is NaN where the weight is infinite."""
    dy, weight, x, preact = operands(70, 8, 16, torch.float16)
    weight[3, 5] = float("inf")
    dy, preact = torch.ones_like(dy), preact.abs()
    _, _, partial, dweight, _ = stack_bwd(dy, weight, x, preact, None, "none", True)
    assert torch.isfinite(dweight).all()
    assert (partial[:, 5] == float("inf")).all()
    assert torch.isfinite(partial).sum() == 2 * 15


def test_a_program_for_every_tile(monkeypatch):
    monkeypatch.setattr(linear_gelu, "_prepared_stack", {})
    launches = []
    launch = gemm_launch.stack
    monkeypatch.setattr(gemm_launch, "stack", lambda *args: launches.append(launch(*args)) or launches[-1])
    dy, weight, x, preact = operands(200, 136, 264, torch.float16)
    for sums, more in ((None, 0), (normal(2, 136), 2)):
        stack_bwd(dy, weight, x, preact, sums, "none", True, APART)
        # dx (200, 264) in tiles of 64 x 64, dweight (136, 264) of 64 x 128, dbias (136) in blocks of 128.
        assert launches[-1]._grid == (4 * 5 + 3 * 3 + more, 1, 1)


@pytest.fixture
def card(monkeypatch):
    """Stand in for a GPU of (capability, multiprocessors)."""

    def set_card(*capability, multiprocessors=132, shared=227):
        monkeypatch.setattr(configs, "card", lambda device: (capability, multiprocessors, shared * 1024, "a card"))
        configs.for_stack.cache_clear()

    yield set_card
    configs.for_stack.cache_clear()


def test_where_it_is_faster(card):
    card(9, 0)
    wide, narrow = configs._STACK["one wave, sm_90"]
    for M, width, config in ((1024, 1024, wide), (1024, 768, wide), (1024, 512, narrow), (64, 64, narrow)):
        assert configs.for_stack(M, width, width, 2, 0) == configs.for_stack(M, width, width, 2, 0, True) == config
        assert configs.for_stack(M, width, width, 4, 0, True) is None, "fp32"
    # All but two waves.
    assert configs.for_stack(1024, 2048, 2048, 2, 0) == configs._STACK["two waves, sm_90"][0]
    # More programs than run at once, and no two full waves; few tiles with long sums.
    for M, width in ((1024, 1152), (1024, 1536), (1024, 2560), (4096, 128), (4096, 1024)):
        assert configs.for_stack(M, width, width, 2, 0) is None
        assert configs.for_stack(M, width, width, 2, 0, True) in (wide, narrow)
    for other in ((8, 0), (10, 0), (12, 0)):
        card(*other)
        assert configs.for_stack(1024, 512, 512, 2, 0, True) is None
    card(9, 0, shared=64)
    assert configs.for_stack(1024, 512, 512, 2, 0, True) is None


def test_a_card_without_the_kernel_is_named(card):
    card(8, 0)
    matrix = SimpleNamespace(
        shape=(8, 8), dtype=torch.bfloat16, stride=lambda _: 8, is_cuda=True, data_ptr=lambda: 0,
        device=torch.device("cuda", 0), element_size=lambda: 2,
    )  # fmt: skip
    with raises(ValueError, "8 x 8 x 8", "bfloat16", "cuda:0"):
        linear_gelu._prepare_stack((matrix,) * 10, 0, ("none", True), None)
