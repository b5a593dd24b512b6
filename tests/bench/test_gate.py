"""The gate lets right results through and stops wrong ones."""

import pytest
import torch
from conftest import raises

from fusedmlp.bench import gate
from fusedmlp.bench.candidates import impl_op
from fusedmlp.bench.cases import Case, make_tensors

CASES = [
    Case("gelu", (33, 17), "bf16", "tanh"),
    Case("softmax", (33, 17), "fp16"),
    Case("linear_gelu", (33, 8, 12), "bf16"),
    Case("mlp", (33, 8, 12, 5), "fp32"),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def setup(case):
    tensors = make_tensors(case, torch.device("cpu"))
    op = impl_op("native", case)
    dy = torch.randn_like(op(*tensors.values()))
    return tensors, op, dy


@each_case
def test_right_results_pass(case):
    tensors, _, dy = setup(case)
    oracle = gate.make_oracle(case, tensors, dy)
    for impl in ("manual", "native"):
        assert oracle.check(gate.results(impl_op(impl, case), tensors, dy)) < 0.05


@each_case
def test_one_wrong_element_of_any_result_is_found(case):
    tensors, op, dy = setup(case)
    oracle = gate.make_oracle(case, tensors, dy)
    got = gate.results(op, tensors, dy)
    for name in got:
        wrong = got[name].clone()
        wrong.view(-1)[-1] += 0.3 * wrong.abs().max().clamp_min(1)
        with raises(gate.WrongResult, f"error of {name}"):
            oracle.check(got | {name: wrong})
        not_finite = got[name].clone()
        not_finite.view(-1)[0] = float("nan")
        with raises(gate.WrongResult, f"error of {name} inf"):
            oracle.check(got | {name: not_finite})


@each_case
def test_slices_give_what_the_whole_gives(case, monkeypatch):
    tensors, _, dy = setup(case)
    whole = gate.make_oracle(case, tensors, dy)
    monkeypatch.setattr(gate, "_SLICE", 64)
    sliced = gate.make_oracle(case, tensors, dy)
    for name, expected in whole.expected.items():
        torch.testing.assert_close(sliced.expected[name], expected)
        assert sliced.bounds[name] == pytest.approx(whole.bounds[name])


def test_a_wrong_shape_is_an_error():
    assert gate.errors(torch.zeros(2, 3), torch.zeros(3, 2).double()) == (float("inf"), float("inf"))
