"""The GEMM kernels against float64, in every configuration that the card has, and how one is chosen."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ON_GPU, raises
from oracle import assert_within

pytest.importorskip("triton", reason="Triton is not installed")

from fusedmlp.kernels import choice, configs, gemm_launch, linear_gelu
from fusedmlp.kernels.configs import GemmConfig, Problem
from fusedmlp.kernels.linear_gelu import dgelu_gemm, linear_gelu_fwd

# Triton's interpreter computes bf16 dot products wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
DEVICE = "cuda" if ON_GPU else "cpu"
# Whole tiles; ragged ones that a tensor descriptor takes; sizes it does not take; one element; one long sum.
SHAPES = [(128, 64, 128), (200, 72, 136), (33, 37, 65), (1, 1, 1), (3, 520, 8)]

in_interpreter = pytest.mark.interpreter
in_all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
in_both_forms = pytest.mark.parametrize("approximate", ["none", "tanh"])


def normal(*shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def configurations(x, backward):
    """The largest and the smallest that a card has for this dtype; `scripts/bench_gemm.py` holds up all of them."""
    device = 0 if ON_GPU else -1
    found = configs.candidates(Problem(128, 128, 64, x.dtype, "ieee", ON_GPU, backward, "", device))
    # Any card can run the kernel that reads the preact first.
    step = 16 if x.dtype == torch.float32 else 64
    early = GemmConfig("plain", 64, 64, step, 8, 2, 4, READ_FIRST=True)
    return {found[0], found[-1], *([early] if backward else [])}


def usable(config, *sizes):
    """The Gluon kernel wants every row aligned to 16 bytes."""
    return config.kernel == "plain" or all(size % 8 == 0 for size in sizes)


@in_interpreter
@in_all_dtypes
@in_both_forms
def test_forward(dtype, approximate, poisoned):
    for M, K, N in SHAPES:
        x, weight, bias = normal(M, K, dtype=dtype), normal(N, K, dtype=dtype, scale=K**-0.5), normal(N, dtype=dtype)
        expected = F.linear(x.double(), weight.double(), bias.double())
        eager = F.linear(x, weight, bias)
        for config in configurations(x, backward=False):
            if not usable(config, K, N):
                continue
            with choice.using(config):
                act, preact = linear_gelu_fwd(x, weight, bias, approximate, True)
                only_act, nothing = linear_gelu_fwd(x, weight, bias, approximate, False)
            where = f"{(M, K, N)} {config}"
            assert_within(preact, expected, eager, f"preact {where}")
            assert_within(act, F.gelu(expected, approximate=approximate), F.gelu(eager, approximate=approximate), where)
            assert torch.equal(only_act, act), where
            assert nothing.numel() == 0


@in_interpreter
@in_all_dtypes
@in_both_forms
def test_backward(dtype, approximate, poisoned):
    for M, K, N in SHAPES:
        dy, weight, preact = (
            normal(M, K, dtype=dtype),
            normal(K, N, dtype=dtype, scale=K**-0.5),
            normal(M, N, dtype=dtype),
        )
        grad = torch.ops.aten.gelu_backward
        expected = grad(dy.double() @ weight.double(), preact.double(), approximate=approximate)
        eager = grad(dy @ weight, preact, approximate=approximate)
        for config in configurations(dy, backward=True):
            if not usable(config, K, N):
                continue
            where = f"{(M, K, N)} {config}"
            with choice.using(config):
                dpreact, act, dbias = dgelu_gemm(dy, weight, preact, approximate, True, True)
                alone, no_act, no_dbias = dgelu_gemm(dy, weight, preact, approximate, False, False)
                with_product = dgelu_gemm(dy, weight, preact, approximate, False, True, True)
            assert_within(dpreact, expected, eager, f"dpreact {where}")
            gelu = F.gelu(preact, approximate=approximate)
            assert_within(act, F.gelu(preact.double(), approximate=approximate), gelu, f"act {where}")
            assert_within(dbias, expected.sum(0), eager.sum(0), f"dbias {where}")
            assert torch.equal(alone, dpreact), where
            assert torch.equal(with_product[0], dpreact), where
            assert torch.equal(with_product[2], dbias), where
            assert_within(with_product[1], dy.double() @ weight.double(), dy @ weight, f"product {where}")
            assert no_act.numel() == no_dbias.numel() == 0


@in_interpreter
def test_backward_gives_one_matrix_beside_dpreact():
    with raises(ValueError, "act", "product", "both"):
        dgelu_gemm(normal(8, 8), normal(8, 8), normal(8, 8), "none", True, False, True)


@in_interpreter
@pytest.mark.parametrize("K", [8, 24, 64, 72, 128, 136, 200])
def test_sums_shorter_and_longer_than_a_step(K):
    """Steps of 64 and 128 over K, which end within it, with it and beyond it."""
    dtype = torch.float16
    x, weight = normal(70, K, dtype=dtype), normal(72, K, dtype=dtype, scale=K**-0.5)
    expected, eager = F.linear(x.double(), weight.double()), F.linear(x, weight)
    for config in (c for c in configs._FORWARD["16 bit"] if c.BLOCK_M * c.BLOCK_N <= 64 * 128):
        with choice.using(config):
            _, preact = linear_gelu_fwd(x, weight, None, "none", True)
        assert_within(preact, expected, eager, f"{K} {config}")


@in_interpreter
def test_any_strides_of_the_operands():
    x, weight = normal(24, 16), normal(40, 16)
    expected = F.gelu(F.linear(x, weight))

    def check(x, weight):
        got, _ = linear_gelu_fwd(x, weight, None, "none", False)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    wide = normal(24, 32)
    wide[:, ::2] = x
    check(x.t().contiguous().t(), weight)
    check(wide[:, ::2], weight)
    check(torch.cat([x, x], 1)[:, :16], weight)
    check(x, weight.t().contiguous().t())
    # A base that is not aligned to 16 bytes.
    check(torch.cat([normal(1), x.flatten()])[1:].view(24, 16), weight)
    expected = expected[:1].expand(24, 40)
    check(x[:1].expand(24, 16), weight)
    bias = normal(80)[::2]
    torch.testing.assert_close(
        linear_gelu_fwd(x, weight, bias, "none", False)[0], F.gelu(F.linear(x, weight, bias)), rtol=1e-4, atol=1e-5
    )


def test_strides_of_dimensions_of_size_one_are_made_ordinary():
    """They may be anything, 0 too, in a matrix that counts as contiguous."""
    row, column = torch.ones(1, 16).expand(4, 16)[:1], torch.ones(16, 4)[:, :1].contiguous().as_strided((16, 1), (1, 5))
    assert (row.stride(), column.stride()) == ((0, 1), (1, 5))
    assert linear_gelu._with_contiguous_rows(row).stride() == (16, 1)
    assert linear_gelu._with_contiguous_rows(column).stride() == (1, 1)
    assert linear_gelu._stored(row)[0].stride() == (16, 1)


def test_more_rows_than_a_descriptor_counts_go_by_pointers():
    row = torch.empty(1, 16)
    assert linear_gelu._fits_tma(row.expand(2**31 - 1, 16))
    assert not linear_gelu._fits_tma(row.expand(2**31, 16))


@in_interpreter
def test_sizes_of_zero():
    bias = normal(8)
    act, preact = linear_gelu_fwd(normal(5, 0), normal(8, 0), bias, "none", True)
    torch.testing.assert_close(preact, bias.expand(5, 8))
    torch.testing.assert_close(act, F.gelu(bias).expand(5, 8))
    assert linear_gelu_fwd(normal(0, 4), normal(8, 4), bias, "none", True)[0].shape == (0, 8)
    assert linear_gelu_fwd(normal(5, 4), normal(0, 4), None, "none", True)[1].shape == (5, 0)
    dpreact, act, dbias = dgelu_gemm(normal(5, 0), normal(0, 8), normal(5, 8), "none", True, True)
    assert not dpreact.any()
    assert not dbias.any()
    _, _, dbias = dgelu_gemm(normal(0, 4), normal(4, 8), normal(0, 8), "none", False, True)
    assert torch.equal(dbias, torch.zeros(8, device=DEVICE))


@in_interpreter
def test_rows_beyond_the_last_add_nothing_to_the_sums():
    """They are zero times the weight, which is NaN where the weight is infinite."""
    dtype = torch.float16
    weight = normal(8, 16, dtype=dtype)
    weight[3, 5] = float("inf")
    dy, preact = torch.ones(70, 8, device=DEVICE, dtype=dtype), normal(70, 16, dtype=dtype).abs()
    for config in configurations(dy, backward=True):
        with choice.using(config):
            _, _, dbias = dgelu_gemm(dy, weight, preact, "none", False, True)
        assert dbias[5] == float("inf"), config
        assert torch.isfinite(dbias).sum() == 15, config


@in_interpreter
def test_column_sums_are_bit_equal_every_time():
    dy, weight, preact = normal(300, 24), normal(24, 40), normal(300, 40)
    first = dgelu_gemm(dy, weight, preact, "none", False, True)[2]
    assert all(torch.equal(dgelu_gemm(dy, weight, preact, "none", False, True)[2], first) for _ in range(3))


@pytest.mark.gpu
def test_tf32_only_where_the_user_allows_it(monkeypatch):
    x, weight = normal(256, 512), normal(256, 512)
    expected = F.gelu(F.linear(x.double(), weight.double()))

    def error():
        return (linear_gelu_fwd(x, weight, None, "none", False)[0].double() - expected).abs().max().item()

    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")
    full = error()
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    assert full < 1e-3 < error()


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    M, K, N = 2**17 + 8, 64, 2**14 + 8
    x, weight = normal(M, K, dtype=torch.bfloat16), normal(N, K, dtype=torch.bfloat16)
    for config in configurations(x, backward=False):
        with choice.using(config):
            act, preact = linear_gelu_fwd(x, weight, None, "none", True)
        expected = F.linear(x[-64:], weight)
        torch.testing.assert_close(preact[-64:], expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(act[-64:], F.gelu(expected), rtol=2e-2, atol=2e-2)


def problem(M=4096, N=4096, K=1024, **changes):
    fields = {
        "dtype": torch.bfloat16,
        "precision": "ieee",
        "use_tma": True,
        "backward": False,
        "flags": "",
        "device": 0,
    }
    return Problem(M, N, K, **(fields | changes))


@pytest.fixture
def card(monkeypatch):
    """Stand in for a GPU of (capability, multiprocessors, shared memory of a block)."""

    def set_card(capability, multiprocessors, shared):
        monkeypatch.setattr(configs, "card", lambda device: (capability, multiprocessors, shared, "a card"))

    return set_card


H200, A100, RTX_3090 = ((9, 0), 132, 227 * 1024), ((8, 0), 108, 163 * 1024), ((8, 6), 82, 99 * 1024)
B300, RTX_5090 = ((10, 3), 148, 227 * 1024), ((12, 0), 170, 99 * 1024)


def test_configurations_by_card(card, monkeypatch):
    monkeypatch.setattr(configs, "TRITON", configs.HOPPER_TRITON[0])
    card(*H200)
    assert configs.candidates(problem())[0].kernel == "hopper"
    assert all(c.kernel == "plain" for c in configs.candidates(problem(use_tma=False)))
    assert all(c.kernel == "plain" for c in configs.candidates(problem(dtype=torch.float32)))
    monkeypatch.setattr(configs, "TRITON", "99.0")
    assert all(c.kernel == "plain" for c in configs.candidates(problem()))
    for other in (A100, RTX_3090, B300, RTX_5090):
        card(*other)
        kinds = [(torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")]
        for (dtype, precision), backward, tma in itertools.product(kinds, (False, True), (False, other[0] >= (9, 0))):
            found = configs.candidates(problem(dtype=dtype, precision=precision, use_tma=tma, backward=backward))
            assert found, (other, dtype)
            assert all(c.kernel == "plain" for c in found)
            assert all(c.shared_bytes(dtype.itemsize, tma, backward) <= other[2] for c in found)


def test_a_card_that_no_configuration_fits_is_named(card):
    card((7, 5), 40, 64 * 1024)
    with raises(RuntimeError, "64 KB", "a card (7.5)", "impl=native"):
        configs.by_rule(problem(use_tma=False))


def test_narrow_tiles_take_long_steps_where_shared_memory_and_k_allow(card, monkeypatch):
    monkeypatch.setattr(configs, "TRITON", configs.HOPPER_TRITON[0])
    for which, step in ((H200, 128), (A100, 128), (RTX_3090, 64)):
        card(*which)
        use_tma = which == H200
        # 1024 x 512 gets the smallest tile by the rule, 64 x 64 because there is no smaller one.
        for M, N in ((1024, 512), (64, 64), (1024, 1024)):
            steps = [configs.by_rule(problem(M, N, K, use_tma=use_tma)).BLOCK_K for K in (512, 64)]
            assert steps == [step, 64], (which, M, N)
    card(*H200)
    found = configs.by_rule(problem(1024, 512, 512)), configs.by_rule(problem(1024, 1024, 1024))
    in_pairs, alone = (
        GemmConfig("plain", 64, 32, 128, 8, 4, 4, READ_FIRST=True),
        GemmConfig("plain", 64, 128, 128, 8, 4, 8, READ_FIRST=True),
    )
    assert found == (in_pairs, alone)
    assert configs.by_rule(problem(1024, 2048, 2048)).kernel == "hopper"
    # One tile more than the 132 multiprocessors take at once.
    for M, N, first in ((64 * 132, 128, True), (64 * 133, 128, False)):
        assert configs.by_rule(problem(M, N, 1024)).READ_FIRST is first, (M, N)


def test_backward_in_one_wave_reads_the_preact_first(card, monkeypatch):
    """Where all tiles are computed at once, on Hopper: two programs of 64 x 128 on each of 132 multiprocessors."""
    monkeypatch.setattr(configs, "TRITON", configs.HOPPER_TRITON[0])
    card(*H200)
    alone, in_pairs = (GemmConfig("plain", 64, 128, 64, 8, stages, 8, READ_FIRST=True) for stages in (6, 4))
    for M, N, config in (
        (1024, 1024, alone),
        (64 * 132, 128, alone),
        (1024, 2048, in_pairs),
        (64 * 132, 256, in_pairs),
    ):
        assert configs.by_rule(problem(M, N, 2048, backward=True)) == config, (M, N)
    for M, N in ((64 * 133, 256), (4096, 4096)):
        assert configs.by_rule(problem(M, N, 2048, backward=True)).kernel == "hopper", (M, N)
        assert not any(c.READ_FIRST for c in configs.candidates(problem(M, N, 2048, backward=True)))
    narrow = GemmConfig("plain", 64, 32, 128, 8, 4, 4, READ_FIRST=True)
    for M, N, K in ((1024, 512, 512), (512, 1024, 512), (256, 256, 2048)):
        assert configs.by_rule(problem(M, N, K, backward=True)) == narrow, (M, N, K)
    assert configs.by_rule(problem(1024, 512, 64, backward=True)) == GemmConfig("plain", 64, 64, 64, 8, 4, 4)
    both = [c for c in configs.candidates(problem(1024, 2048, 2048, backward=True)) if c.READ_FIRST]
    assert [c.BLOCK_M for c in both] == [64, 128]
    for changes in ({"use_tma": False}, {"dtype": torch.float32}):
        assert not any(c.READ_FIRST for c in configs.candidates(problem(1024, 2048, **{"backward": True, **changes})))
    card(*A100)
    assert not any(c.READ_FIRST for c in configs.candidates(problem(1024, 2048, use_tma=False, backward=True)))


@in_interpreter
def test_a_program_for_every_tile_reads_the_preact_first(monkeypatch):
    """Else there are as many programs as multiprocessors, one in the interpreter."""
    monkeypatch.setattr(linear_gelu, "_prepared", {})
    launches = []
    launch = gemm_launch.backward
    monkeypatch.setattr(gemm_launch, "backward", lambda *args: launches.append(launch(*args)) or launches[-1])
    dy, weight, preact = normal(130, 8), normal(8, 130), normal(130, 130)
    for early, programs in ((True, 9), (False, min(9, configs.multiprocessors(0 if ON_GPU else -1)))):
        with choice.using(GemmConfig("plain", 64, 64, 16, 8, 2, 4, READ_FIRST=early)):
            dgelu_gemm(dy, weight, preact, "none", False, False)
        assert launches[-1]._grid == (programs, 1, 1)


def test_small_problems_get_small_tiles(card, monkeypatch):
    monkeypatch.setattr(configs, "TRITON", "99.0")
    card(*H200)
    areas = [c.BLOCK_M * c.BLOCK_N for c in (configs.by_rule(problem(M=M)) for M in (64, 512, 2048, 16384))]
    assert areas == sorted(areas)
    assert areas[0] < areas[-1]


@pytest.fixture
def tuning(card, monkeypatch, tmp_path):
    """A card, an empty cache, and `measure`: the candidate at an index is the fastest."""
    card(*A100)
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "_measured_cache", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    measured = []

    def fastest(index):
        def measure(run):
            measured.append(run)
            return -1.0 if len(measured) == index + 1 else 1.0

        monkeypatch.setattr(choice, "_time", measure)

    return SimpleNamespace(fastest=fastest, measured=measured, file=tmp_path / "gemm-configs.json")


def test_nothing_is_measured_unless_asked_for(tuning, monkeypatch):
    monkeypatch.delenv("FUSEDMLP_TUNE", raising=False)
    tuning.fastest(0)
    assert choice.choose(problem(use_tma=False), lambda config: None) == configs.by_rule(problem(use_tma=False))
    assert tuning.measured == []
    assert not tuning.file.exists()


def test_a_measured_choice_is_kept_for_later_processes(tuning, monkeypatch):
    wanted = problem(use_tma=False)
    monkeypatch.setenv("FUSEDMLP_TUNE", "1")
    tuning.fastest(1)
    chosen = choice.choose(wanted, lambda config: None)
    assert chosen == configs.candidates(wanted)[1] != configs.by_rule(wanted)
    assert len(json.loads(tuning.file.read_text())) == 1
    monkeypatch.setattr(choice, "_measured_cache", None)  # as in another process
    monkeypatch.delenv("FUSEDMLP_TUNE")
    count = len(tuning.measured)
    assert choice.choose(problem(M=4000, use_tma=False), lambda config: None) == chosen, "M in the same bucket"
    assert choice.choose(problem(M=9000, use_tma=False), lambda config: None) == configs.by_rule(wanted)
    assert len(tuning.measured) == count
    monkeypatch.setenv("FUSEDMLP_TUNE", "0")
    assert choice.choose(wanted, lambda config: None) == configs.by_rule(wanted), "the file is left aside"


@pytest.mark.parametrize("circumstance", ["capturing", "distributed"])
def test_nothing_is_measured_under_capture_or_by_one_rank_of_many(tuning, monkeypatch, circumstance):
    monkeypatch.setenv("FUSEDMLP_TUNE", "1")
    if circumstance == "capturing":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    else:
        monkeypatch.setattr(choice, "_is_distributed", lambda: True)
    choice.choose(problem(use_tma=False), lambda config: None)
    assert tuning.measured == []


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"key": {"kernel": "plain"}}', '{"key": 3}'])
def test_an_unreadable_cache_counts_as_empty(tuning, content):
    tuning.file.write_text(content)
    assert choice._read() == {}


def test_a_choice_that_no_longer_exists_is_not_used(tuning):
    gone = GemmConfig("plain", 32, 32, 32, 8, 2, 4)
    choice._remember(choice._key(problem(use_tma=False)), gone)
    assert choice.choose(problem(use_tma=False), lambda config: None) == configs.by_rule(problem(use_tma=False))


def test_using_is_undone_after_an_error():
    config = GemmConfig("plain", 32, 32, 32, 8, 1, 4)
    with raises(KeyError, "mine"), choice.using(config):
        raise KeyError("mine")
    assert choice.forced is None
