"""Work and traffic of a case, by hand, and what the command line may say."""

import pytest
import torch
from conftest import raises

from fusedmlp.bench.cases import SIZES, Case, make_tensors, parse_case
from fusedmlp.bench.selection import OPS, cases, usual_cases
from fusedmlp.errors import UserError


def test_gelu_by_hand():
    case = Case("gelu", (1000, 2000), "bf16")
    assert case.least_bytes("forward") == 2 * 2_000_000 * 2
    assert case.least_bytes("backward") == 3 * 2_000_000 * 2
    assert case.least_bytes("step") == 5 * 2_000_000 * 2
    # scaled, erf, + 1, half, product
    assert case.flops("forward") == 5 * 2_000_000
    assert case.gemms("step") == []


def test_linear_gelu_by_hand():
    case = Case("linear_gelu", (128, 64, 256), "fp32", "tanh")
    assert case.flops("forward") == 2 * 128 * 64 * 256
    assert case.flops("backward") == 2 * case.flops("forward")
    assert case.flops("step") == 3 * case.flops("forward")
    x, weight, bias, hidden = 128 * 64, 64 * 256, 256, 128 * 256
    assert case.least_bytes("forward") == 4 * (x + weight + bias + hidden)
    # dy, preact, x, weight are read; dx, dweight, dbias written
    backward = 4 * (2 * hidden + 2 * x + 2 * weight + bias)
    assert case.least_bytes("backward") == backward
    # in training the forward pass writes preact too
    assert case.least_bytes("step") == case.least_bytes("forward") + 4 * hidden + backward


def test_mlp_has_six_products():
    case = Case("mlp", (32, 8, 16, 4), "fp32")
    assert case.gemms("forward") == [(32, 8, 16), (32, 16, 4)]
    assert sorted(case.gemms("backward")) == sorted([(32, 16, 8), (16, 32, 8), (32, 4, 16), (4, 32, 16)])
    assert case.flops("step") == 3 * case.flops("forward") == 3 * 2 * 32 * (8 * 16 + 16 * 4)


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        (("mlp", "64x32", "bf16"), (64, 32, 128, 32)),
        (("mlp", "64x32x96", "bf16"), (64, 32, 96, 32)),
        (("mlp", "64x32x96x16", "bf16"), (64, 32, 96, 16)),
        (("softmax", "4096X50257", "fp32", "tanh"), (4096, 50257)),
    ],
)
def test_words_of_the_command_line(words, shape):
    assert parse_case(*words).shape == shape


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("relu", "4x4", "fp32"), ("'relu'", "gelu, softmax")),
        (("gelu", "4x4", "fp8"), ("'fp8'", "fp32, bf16, fp16")),
        (("gelu", "4x4", "fp32", "exact"), ("'exact'", "none, tanh")),
        (("gelu", "4x", "fp32"), ("'4x'", "16384x768")),
        (("gelu", "0x4", "fp32"), ("'0x4'",)),
        (("gelu", "4x4x4", "fp32"), ("'4x4x4' does not fit gelu", SIZES["gelu"])),
        (("linear_gelu", "4x4", "fp32"), ("does not fit linear_gelu", "MxKxN")),
        (("mlp", "4", "fp32"), ("does not fit mlp",)),
        (("mlp", "4x4x4x4x4", "fp32"), ("does not fit mlp",)),
    ],
)
def test_wrong_words_are_named(words, message):
    with raises(UserError, *message):
        parse_case(*words)


@pytest.mark.parametrize("op", OPS)
def test_tensors_have_the_shapes_of_the_op(op):
    (case, *_) = usual_cases(op, on_gpu=False)
    tensors = make_tensors(case, torch.device("cpu"))
    M, K, N, N2 = case.sizes()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    expected = {
        "gelu": {"x": (M, N)},
        "softmax": {"x": (M, N)},
        "linear_gelu": {"x": (M, K), "weight": (N, K), "bias": (N,)},
        "mlp": {"x": (M, K), "weight1": (N, K), "bias1": (N,), "weight2": (N2, N), "bias2": (N2,)},
    }
    assert shapes == expected[op]


def test_selection():
    assert cases("softmax", ["8x16"], ["fp16", "fp32"], [], False, False) == [
        Case("softmax", (8, 16), "fp16"),
        Case("softmax", (8, 16), "fp32"),
    ]
    both = cases("gelu", ["8x16"], ["fp32"], ["none", "tanh"], True, False)
    assert [case.approximate for case in both] == ["none", "tanh"]
    # Two usual cases that differ in dtype alone become one.
    forced = cases("gelu", [], ["fp16"], ["none"], True, False)
    assert len(forced) == len(set(forced)) == 1
    assert set(usual_cases("softmax", True)) < set(usual_cases("softmax", True, full=True))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_run_takes_all_usual_cases(on_gpu):
    for op in OPS:
        assert cases(op, (), (), (), on_gpu, full=True) == usual_cases(op, on_gpu, full=True)


def test_a_shape_that_no_memory_holds():
    parse_case("mlp", "16384x8192x32768x8192", "bf16")
    for op, shape in (
        ("gelu", "2000000x2000000"),
        ("mlp", "16384x8192x99999999999"),
        ("linear_gelu", "9x9x9" + "9" * 13),
    ):
        with raises(UserError, "larger than any memory"):
            parse_case(op, shape, "bf16")
