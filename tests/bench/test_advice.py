"""Advice on models and ops, as a function."""

import pytest
from conftest import raises

import fusedmlp.training.peaks as peaks
from fusedmlp.bench import advise
from fusedmlp.bench.predict import Entry
from fusedmlp.errors import UserError


def by_name(advice):
    return {op.op.name: op for op in advice.ops}


def test_gpt_on_an_h200():
    advice = advise("gpt", card="h200", dim=1024, heads=16, batch=16, vocab=50257)
    ops = by_name(advice)
    assert list(ops) == ["qkv", "attention softmax", "attention projection", "mlp", "head"]
    assert ops["mlp"].op.count == 12
    assert ops["mlp"].bound == "compute"
    assert ops["attention softmax"].bound == "memory"
    # 5 operations an element and pass, 3 passes, over 5 tensors of 2 bytes.
    assert ops["attention softmax"].intensity == pytest.approx(15 / 10)
    assert ops["attention softmax"].limit_ms == pytest.approx(5 * 16 * 16 * 1024 * 1024 * 2 / 4.25e9, rel=0.01)
    assert ops["mlp"].recommendation.startswith("fuse it with impl=triton")
    assert ops["qkv"].recommendation == "leave it to PyTorch"
    assert "vocabulary 50257 to 50304" in ops["head"].pad
    assert "the kernels decide" in advice.step
    assert "pad vocabulary 50257 to 50304 (+0.1 % work)" in advice.text()


def test_small_layers_are_bound_by_launches():
    advice = advise("mlp", card="h100", dim=512)
    (linear, _) = advice.ops
    assert linear.bound == "launches"
    assert linear.predictions["native"].host_us / 1e3 > 5 * linear.predictions["native"].kernel_ms
    assert "capture the step in a CUDA graph" in advice.step


def test_one_op_and_what_was_measured():
    advice = advise(op="softmax", shape="4096x1024", card="a100", measure=lambda case: {"native": 0.3, "triton": 0.1})
    (op,) = advice.ops
    assert op.measured_best == "triton"
    assert "measured ms: native 0.300, triton 0.100 (best triton" in advice.text()
    (row,) = advice.rows()
    assert row["measured_triton_ms"] == 0.1
    assert row["measured_best"] == "triton"


def test_a_gain_within_the_noise_is_none():
    def known(triton):
        values = {"native": 1.0, "triton": triton}
        return [
            Entry("gelu", i, d, "bf16", "tanh", 4096, v) for i, v in values.items() for d in ("forward", "backward")
        ]

    def recommendation(entries):
        return advise(op="gelu", shape="4096x4096", card="h200", entries=entries).ops[0].recommendation

    assert recommendation(known(1.02)) == "leave it to PyTorch"
    # Forward and backward move 168 MB in 39.5 us, two starts take 10: 49.5 us against 39.5 / 1.5 + 10.
    assert recommendation(known(1.5)) == "fuse it with impl=triton (1.36x native)"
    assert "nothing measured to go by" in recommendation([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, ("either a model",)),
        ({"model": "gpt", "op": "gelu"}, ("either a model",)),
        ({"model": "bert"}, ("'bert'", "gpt, mlp")),
        ({"model": "mlp", "heads": 3}, ("no size 'heads'", "dim, batch, layers")),
        ({"model": "mlp", "dim": 0}, ("dim=0",)),
        ({"model": "gpt", "dim": 100}, ("multiple of heads=12",)),
        ({"op": "gelu"}, ("needs a shape",)),
        ({"op": "gelu", "shape": "4"}, ("does not fit",)),
        ({"model": "gpt", "dtype": "fp8"}, ("'fp8'",)),
        ({"model": "gpt", "card": "gtx"}, ("'gtx'",)),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with raises(UserError, *message):
        advise(**{"card": "h200", **arguments})


def test_a_card_whose_peak_is_unknown(monkeypatch):
    monkeypatch.delitem(peaks._RATES, "NVIDIA L4")
    with raises(UserError, "peak of NVIDIA L4"):
        advise("gpt", card="l4")
