"""Rows of a case, and the tables that have no cases, at small sizes on a CPU."""

import pytest
import torch
from conftest import raises

from fusedmlp import impls
from fusedmlp.bench import alignment, candidates, ceilings, maps, measure, scaling, traffic
from fusedmlp.bench.cases import DIRECTIONS, Case
from fusedmlp.bench.clock import Pace
from fusedmlp.errors import UserError

CPU = torch.device("cpu")
PACE = Pace(rounds=1, settle_ms=0, rep_ms=0.1)
CASES = [
    Case("gelu", (16, 24), "bf16", "tanh"),
    Case("softmax", (16, 24), "fp32"),
    Case("linear_gelu", (16, 8, 24), "fp32"),
    Case("mlp", (16, 8, 24, 8), "bf16", "tanh"),
]


def bench(*names, **more):
    return measure.Bench(CPU, PACE, names, say=lambda line: None, **more)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_op_in_every_direction(case):
    rows = measure.measure_case(case, bench("manual", "native", directions=DIRECTIONS))
    assert [(row["direction"], row["impl"]) for row in rows] == [
        (direction, impl) for direction in DIRECTIONS for impl in ("manual", "native")
    ]
    for row in rows:
        assert row["failure"] is None
        assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert row["share_of_limit"] == pytest.approx(row["limit_ms"] / row["ms"])
        assert row["gb_per_s"] == pytest.approx(row["bytes_least"] / row["ms"] / 1e6)
        assert row["tflops_per_s"] == pytest.approx(case.flops(row["direction"]) / row["ms"] / 1e9)
        assert row["bytes_moved"] >= row["bytes_least"]
        assert 0 < row["error"] < 0.05 or case.dtype == "fp32"
        # What only a GPU has.
        assert row["kernels"] is row["peak_mib"] is row["host_us"] is None


def test_every_implementation(impl):
    if CPU.type not in getattr(impls.load(impl), "DEVICES", ("cpu",)):
        pytest.skip(f"impl={impl} runs on a GPU only")
    with traffic.static_uncached_compilation():
        rows = measure.measure_case(CASES[2], bench(impl))
    assert [row["failure"] for row in rows] == [None, None]
    assert all(row["bytes_ratio"] >= 1 for row in rows)


def test_usual_directions():
    assert [row["direction"] for row in measure.measure_case(CASES[3], bench("native"))] == ["forward", "step"]


def test_what_fails_is_a_row_with_its_reason(monkeypatch):
    native = candidates.impl_op

    def op(impl, case):
        if impl == "wrong":
            return lambda *tensors: native("native", case)(*tensors) + 0.5
        if impl == "broken":
            return lambda *tensors: {}["key"]
        if impl == "absent":
            raise RuntimeError("impl='absent' cannot run here: no GPU\nmore")
        return native(impl, case)

    monkeypatch.setattr(candidates, "impl_op", op)
    said = []
    chosen = measure.Bench(CPU, PACE, ["wrong", "broken", "absent", "native"], say=said.append)
    rows = measure.measure_case(CASES[0], chosen)
    failures = {row["impl"]: row["failure"] for row in rows if row["failure"]}
    assert failures["wrong"].startswith("WrongResult: largest error of y")
    assert failures["broken"] == "KeyError: 'key'"
    assert failures["absent"] == "RuntimeError: impl='absent' cannot run here: no GPU"
    assert len(said) == 3
    assert [row["impl"] for row in rows if row["ms"]] == ["native", "native"]


def test_a_peer_stands_beside_the_implementations(monkeypatch):
    monkeypatch.setitem(candidates.PEERS, "ours", {"softmax": ("torch", "torch.nn.functional", "softmax")})
    monkeypatch.setitem(candidates.PEERS, "odd", {"softmax": ("torch", "torch.nn.functional", "no_such_function")})
    monkeypatch.setattr(torch.nn.functional.softmax, "__defaults__", (-1, 3, None))
    rows = measure.measure_case(CASES[1], bench("native", peers=("ours", "odd", "liger")))
    ours = [row for row in rows if row["impl"] == "ours"]
    assert [row["failure"] for row in ours] == [None, None]
    # Its kernels need not be operators, so nothing is said about its bytes.
    assert ours[0]["bytes_moved"] is None
    assert "AttributeError" in next(row["failure"] for row in rows if row["impl"] == "odd")


def test_too_large_for_the_memory(monkeypatch):
    def out_of_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "make_tensors", out_of_memory)
    with raises(UserError, "does not fit", "--shape"):
        measure.measure_case(CASES[0], bench("native"))


def test_ceilings():
    copies = ceilings.copy_rows(bench(), sizes=[8, 16], dtypes=["bf16"])
    assert [row["bytes"] for row in copies] == [2 * 64 * 2, 2 * 256 * 2]
    products = ceilings.matmul_rows(bench(), sizes=[8])
    assert products[0]["tflops_per_s"] == pytest.approx(2 * 8**3 / products[0]["ms"] / 1e9)
    assert products[0]["kernel"] == "aten.mm"
    limits = ceilings.limits(copies, products)
    assert limits["copy_gb_per_s"] == max(row["gb_per_s"] for row in copies)
    assert ceilings.limits([], []) == {}


def test_kernel_map():
    rows = maps.kernel_rows(bench(), sizes=[30])
    assert {(row["op"], row["dtype"]): row["names"] for row in rows} == {
        ("add", "fp32"): ["aten.add"],
        ("add", "bf16"): ["aten.add"],
        ("matmul", "fp32"): ["aten.mm"],
        ("matmul", "bf16"): ["aten.mm"],
        # Above 25 rows it goes over to matrix products.
        ("cdist", "fp32"): rows[-1]["names"],
    }
    assert maps.kernel_rows(bench(), sizes=[8])[-1]["names"] == ["aten._cdist_forward"]
    assert rows[-1]["names"] != ["aten._cdist_forward"]


def test_scaling():
    rows = scaling.scaling_rows(bench("native", "nope"))
    done = [row for row in rows if row["impl"] == "native"]
    assert [(row["axis"], row["factor"]) for row in done] == [
        (axis, factor) for axis in scaling.CPU_BASE for factor in scaling.CPU_FACTORS
    ]
    assert [row["x_base"] for row in done if row["factor"] == 1] == [1.0] * 4
    assert all("'nope' is unknown" in row["failure"] for row in rows if row["impl"] == "nope")
    # 2 steps, 4 layers: 4 forward products, 4 for weights, 3 for inputs, each 2 x 256 x 128 x 128.
    assert scaling.flops({"steps": 2, "layers": 4, "batch": 256, "dim": 128}) == 2 * 11 * 2 * 256 * 128**2


def test_padding_and_waves():
    rows = alignment.padding_rows(bench())
    assert [row["M,K,N"] for row in rows] == ["64, 32, 257", "64, 32, 320", "64, 63, 128", "64, 64, 128"]
    assert [row["x_as_it_is"] for row in rows[::2]] == [1.0, 1.0]
    waves = alignment.wave_rows(bench())
    assert [row["waves"] for row in waves] == [1, 1.5, 2, 2.5, 4, 4.5]
    assert [row["wave_efficiency"] for row in waves[:2]] == [1.0, 0.75]
