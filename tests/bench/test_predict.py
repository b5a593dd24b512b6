"""The cost model, by hand, and its built-in calibration against the records that it was fitted to."""

import json
import re
from pathlib import Path

import pytest
from conftest import raises

from fusedmlp.bench import calibration
from fusedmlp.bench.cards import CARDS, find_card
from fusedmlp.bench.cases import Case
from fusedmlp.bench.predict import (
    KERNEL_MS,
    START_MS,
    Entry,
    Prediction,
    Rates,
    calibrate,
    gemm_ms,
    predict,
    rates,
    winner,
)
from fusedmlp.bench.verdict import agreement, verdicts
from fusedmlp.errors import UserError

# 1 TB/s and 1 TFLOP/s, in bytes and FLOPs per ms; one multiprocessor, so that tiles of 128 x 256 always fill it.
CARD = Rates(sms=1, copy=1e9, gemm={"fp32": 1e9, "bf16": 1e9, "fp16": 1e9})
LINEAR = Case("linear_gelu", (1280, 512, 2560), "bf16", "tanh")


def entry(op, impl, direction, value, dtype="bf16", approximate="none", width=1024):
    return Entry(op, impl, direction, dtype, approximate, width, value)


def test_pointwise_is_bytes_over_bandwidth_times_share():
    case = Case("gelu", (1000, 1000), "bf16")
    # 4 MB at 1 TB/s are 4 us; at half of copy speed 8 us, and 5 us to start and end.
    known = [entry("gelu", "native", "forward", 0.5)]
    assert predict(case, "forward", "native", CARD, known).kernel_ms == pytest.approx(0.008 + 0.005)
    assert predict(case, "forward", "native", CARD, []) is None


def test_products_and_what_nothing_hides():
    products = 2 * 1280 * 512 * 2560 / 1e9
    hidden = 1280 * 2560 * 2 / 1e9
    known = [entry("linear_gelu", "native", "forward", 2.0, approximate="tanh", width=0)]
    # 2 us more for GELU's kernel.
    expected = START_MS + products + 2 * hidden + 0.002
    assert predict(LINEAR, "forward", "native", CARD, known).kernel_ms == pytest.approx(expected)


def test_a_fused_kernel_that_beat_the_product_alone_is_not_expected_to_elsewhere():
    known = [entry("linear_gelu", "triton", "forward", -3.0, approximate="tanh", width=0)]
    products = 2 * 1280 * 512 * 2560 / 1e9
    assert predict(LINEAR, "forward", "triton", CARD, known).kernel_ms == pytest.approx(START_MS + products)


def test_what_is_not_known_of_an_op_follows_from_its_parts():
    gelu = [entry("gelu", "native", "forward", 0.5), entry("gelu", "native", "backward", 0.75)]
    hidden = 1280 * 2560 * 2 / 1e9
    bare = sum(2 * m * k * n / 1e9 for m, k, n in LINEAR.gemms("backward"))
    # Unfused: three tensors at 0.75 of copy speed, and a sum for the bias gradient, in two kernels.
    expected = START_MS + bare + (3 / 0.75 + 1) * hidden + 2 * KERNEL_MS
    assert predict(LINEAR, "backward", "native", CARD, gelu).kernel_ms == pytest.approx(expected)
    step = predict(LINEAR, "step", "native", CARD, gelu)
    parts = [predict(LINEAR, part, "native", CARD, gelu) for part in ("forward", "backward")]
    assert step.kernel_ms == pytest.approx(sum(p.kernel_ms for p in parts))
    assert step.host_us == pytest.approx(sum(p.host_us for p in parts))


def test_the_other_kind_of_gelu_differs_as_gelu_by_itself_does():
    known = [entry("linear_gelu", "native", "forward", 2.0, approximate="none", width=512)]
    products = 2 * 1280 * 512 * 2560 / 1e9
    hidden = 1280 * 2560 * 2 / 1e9
    start = START_MS + products + KERNEL_MS
    assert predict(LINEAR, "forward", "native", CARD, known).kernel_ms == pytest.approx(start + 2 * hidden)
    known += [entry("gelu", "native", "forward", s, approximate=k) for k, s in (("none", 1.0), ("tanh", 0.5))]
    # Two tensors at half of copy speed instead of full.
    assert predict(LINEAR, "forward", "native", CARD, known).kernel_ms == pytest.approx(start + 4 * hidden)


def test_the_nearest_measurement_counts():
    known = [
        entry("softmax", "triton", "forward", 0.9, width=1024),
        entry("softmax", "triton", "forward", 0.8, width=131072),
        entry("softmax", "triton", "forward", 0.5, width=50257),
        entry("softmax", "triton", "forward", 1.0, dtype="fp32", width=16384),
    ]

    def share(n_cols, dtype="bf16"):
        case = Case("softmax", (8192, n_cols), dtype)
        ms = predict(case, "forward", "triton", CARD, known).kernel_ms - START_MS
        return case.least_bytes("forward") / CARD.copy / ms

    assert share(2048) == pytest.approx(0.9)
    assert share(100_000) == pytest.approx(0.8)
    # Rows that begin between vectors are of their own kind, whatever their width.
    assert share(1001) == pytest.approx(0.5)
    assert share(2048, "fp32") == pytest.approx(1.0)


def test_no_kernel_is_shorter_than_a_kernel():
    case = Case("gelu", (2, 2), "fp32")
    known = [entry("gelu", "native", "forward", 1.0), entry("gelu", "manual", "forward", 1.0)]
    assert predict(case, "forward", "native", CARD, known).kernel_ms == pytest.approx(START_MS, rel=1e-3)
    assert predict(case, "forward", "manual", CARD, known).kernel_ms == START_MS + 5 * KERNEL_MS
    # Called eagerly it takes what the host takes.
    assert predict(case, "forward", "native", CARD, known).ms == pytest.approx(0.012)


def test_products_bound_by_bytes():
    # (1, 4096) @ (4096, 4096): 33.5 MFLOP against 33.6 MB.
    fast = Rates(132, copy=4e9, gemm={"bf16": 7e11})
    assert gemm_ms(1, 4096, 4096, "bf16", fast) >= 4096 * 4096 * 2 / 4e9


def test_what_an_h200_sustains():
    h200 = rates(CARDS["NVIDIA H200"])
    assert h200.copy == pytest.approx(4.25e9, rel=0.01)
    assert h200.gemm["bf16"] == pytest.approx(692e9, rel=0.01)
    # Records have (16384, 1024) @ (1024, 4096) in 0.20 to 0.23 ms.
    assert gemm_ms(16384, 1024, 4096, "bf16", h200) == pytest.approx(0.21, rel=0.1)


def rows(op, shape, direction, times, limit_ms, **more):
    return [
        {"op": op, "shape": shape, "dtype": "bf16", "approximate": "tanh", "direction": direction, "impl": impl}
        | {"ms": ms, "limit_ms": limit_ms, "share_of_limit": limit_ms / ms, **more}
        for impl, ms in times.items()
    ]


def test_calibrating_on_a_record_gives_its_times_back():
    limit = START_MS + sum(gemm_ms(*sizes, "bf16", CARD) for sizes in LINEAR.gemms("forward"))
    measured = rows("linear_gelu", "1280x512x2560", "forward", {"native": limit + 0.1, "triton": limit + 0.02}, limit)
    measured += rows("gelu", "1000x1000", "forward", {"native": 0.009}, 0.008)
    entries = calibrate([(measured, 1000.0)])
    again = predict(LINEAR, "forward", "triton", CARD, entries)
    assert again.kernel_ms == pytest.approx(limit + 0.02, rel=1e-3)
    gelu = predict(Case("gelu", (1000, 1000), "bf16", "tanh"), "forward", "native", CARD, entries)
    assert gelu.kernel_ms == pytest.approx(0.009)
    # 4 MB in 4 us, beside the start.
    assert [e.value for e in entries if e.op == "gelu"] == [1.0]


def test_one_value_of_passes_explains_all_widths():
    # Hidden tensors of 2 and 2 us beside products of 10 and 40 us. Native's GELU is a kernel of its own, 2 us: of
    # 8 us beside the products 6 are left, which are 3 passes, of 4 us 2, which are 1.
    measured = rows("linear_gelu", "1000x512x1000", "forward", {"native": 0.018}, 0.010)
    measured += rows("linear_gelu", "1000x2048x1000", "forward", {"native": 0.044}, 0.040)
    (found,) = calibrate([(measured, 1000.0)])
    # Least squares of relative errors: weights (2 / 10)^2 and (2 / 40)^2, so (0.04 * 3 + 0.0025 * 1) / 0.0425.
    assert found == entry("linear_gelu", "native", "forward", 2.882, approximate="tanh", width=0)


def test_passes_are_a_line_over_K_where_three_are_known():
    known = [Entry("linear_gelu", "triton", "forward", "bf16", "tanh", 0, 4.0, slope=-1.0)]
    cases = {K: Case("linear_gelu", (1280, K, 2560), "bf16", "tanh") for K in (512, 768, 1024, 2048, 4096, 8192)}
    times = {K: predict(case, "forward", "triton", CARD, known).kernel_ms for K, case in cases.items()}
    hidden, products = 1280 * 2560 * 2 / 1e9, {K: 2 * 1280 * K * 2560 / 1e9 for K in times}
    passes = {K: (ms - START_MS - products[K]) / hidden for K, ms in times.items()}
    # Beyond what the bench tables measure nothing is extrapolated.
    assert passes == pytest.approx({512: 3.25, 768: 3.25, 1024: 3, 2048: 2, 4096: 0, 8192: 0}, abs=1e-9)

    measured = []
    for K in (768, 1024, 4096):
        limit = START_MS + products[K]
        measured += rows("linear_gelu", f"1280x{K}x2560", "forward", {"triton": times[K]}, limit)
    assert calibrate([(measured, 1000.0)]) == known
    # The other kind of GELU, known at one K, is assumed to be hidden alike.
    limit = START_MS + products[1024]
    erf = rows("linear_gelu", "1280x1024x2560", "forward", {"triton": limit + 5 * hidden}, limit, approximate="none")
    found = calibrate([(measured + erf, 1000.0)])
    assert found == [*known, Entry("linear_gelu", "triton", "forward", "bf16", "none", 0, 6.0, slope=-1.0)]


def test_several_runs_count_together():
    def run(native, triton):
        limit = START_MS + 0.1
        measured = rows("gelu", "1000x1000", "forward", {"native": START_MS + native}, 0.004)
        return measured + rows("linear_gelu", "1000x512x1000", "forward", {"triton": limit + triton}, limit), 1000.0

    # 4 MB are 4 us; one pass is 2 us.
    gelu, linear = calibrate([run(0.004, 0.004), run(0.008, 0.008)])
    assert gelu.value == pytest.approx((1 + 0.5) / 2)
    assert (linear.value, linear.slope) == (3.0, 0.0)


def test_a_share_is_never_rounded_to_nothing():
    (found,) = calibrate([(rows("gelu", "10x10", "forward", {"manual": 4.0}, 0.004), 1000.0)])
    # 400 bytes at 1 TB/s, of 3.995 ms.
    assert found.value == pytest.approx(4e-7 / 3.995, rel=1e-3)


def test_a_case_that_is_over_before_it_has_started_says_nothing_of_bandwidth():
    assert calibrate([(rows("gelu", "10x10", "forward", {"native": 0.004}, 0.004), 1000.0)]) == []


def test_verdicts():
    known = [entry("gelu", "native", "forward", 0.5), entry("gelu", "triton", "forward", 0.9)]
    measured = rows("gelu", "1000x1000", "forward", {"native": 0.008, "triton": 0.005, "cuda": 0.006}, 0.004)
    measured += rows("gelu", "2000x1000", "forward", {"native": 0.0100, "triton": 0.0101}, 0.008)
    measured += rows("gelu", "3000x1000", "forward", {"native": 0.010, "triton": 0.020}, 0.010)
    measured += rows("gelu", "4000x1000", "forward", {"native": 0.010}, 0.010)
    found = verdicts(measured, CARD, known, ["native", "triton", "cuda"])
    assert [row["predicted"] for row in found] == ["triton"] * 3
    # The second is a tie, the third wrong; a cell with one implementation is none.
    assert [row["agrees"] for row in found] == [True, True, False]
    assert "not predicted: cuda" in found[0]["note"]
    assert "2.00 times as long" in found[2]["note"]
    assert agreement(found) == (2, 3)


def test_winner():
    assert winner({"a": Prediction(2.0, 0), "b": Prediction(1.0, 9e9), "c": None}) == "b"
    assert winner({"c": None}) is None


def test_cards_and_files_that_are_not_there(tmp_path):
    assert find_card("H200").sms == 132
    with raises(UserError, "'gtx'", "h200", "NVIDIA A100"):
        find_card("gtx")
    with raises(UserError, "cannot be read"):
        calibration.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"tables": {}}')
    with raises(UserError, "neither a calibration nor a record"):
        calibration.load(tmp_path / "bad.json")
    entries = calibration.BUILT_IN[:3]
    calibration.save(tmp_path / "good.json", ["somewhere"], entries)
    assert calibration.load(tmp_path / "good.json") == entries


RECORDS = Path(__file__).resolve().parents[2] / "profiles" / "records"
FITTED = ("2026-11-30-h200-bench", "2026-11-30-h200-bench-full", "2026-11-30-h200-bench-check")


@pytest.mark.parametrize("name", FITTED)
def test_what_a_record_says_about_the_built_in_calibration(name):
    """How many cells agree, and each that does not."""
    tables = json.loads((RECORDS / name / "bench.json").read_text())["tables"]
    measured = [row for table in ("gelu", "softmax", "linear_gelu", "mlp") for row in tables[table]]
    card = rates(CARDS["NVIDIA H200"])
    found = verdicts(measured, card, calibration.BUILT_IN, ["manual", "native", "compiled", "triton", "cuda"])
    right, of = agreement(found)
    assert right >= 0.9 * of
    text = (RECORDS / name / "README.md").read_text()
    assert f"| {right} of {of} |" in text
    missed = {(row["case"], row["direction"], row["predicted"]) for row in found if not row["agrees"]}
    listed = re.findall(r"^\| (\w+(?: \(\w+\))? \S+ \w+) \| (\w+) \| (\w+), ", text, re.MULTILINE)
    assert set(listed) == missed


def test_the_built_in_calibration_is_what_its_records_give():
    fitted = calibration.from_records([RECORDS / name / "bench.json" for name in FITTED])
    assert fitted == calibration.BUILT_IN
    with raises(UserError, "is a calibration", "records of scripts/bench.py"):
        calibration.from_records([calibration.FILE])
