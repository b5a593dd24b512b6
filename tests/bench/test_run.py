"""scripts/bench.py, scripts/advise.py and scripts/readme_tables.py as a user runs them, on a CPU."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from scripts_by_path import script

from fusedmlp import impls
from fusedmlp.bench import calibration
from fusedmlp.bench import run as bench_run
from fusedmlp.bench.cards import CARDS
from fusedmlp.bench.options import parse
from fusedmlp.bench.readme import TABLES, generate
from fusedmlp.bench.selection import OPS
from fusedmlp.bench.selection import TABLES as ALL

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--device", "cpu", "--rounds", "1", "--rep", "0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A record of all tables."""
    out = tmp_path_factory.mktemp("record")
    assert script("bench").main([*QUICK, "--impl", "manual", "native", "--out", str(out)]) == 0
    return out


def test_everything_is_written(folder):
    record = json.loads((folder / "bench.json").read_text())
    assert list(record["tables"]) == list(ALL)
    assert record["environment"]["device"] == "cpu"
    assert set(record["limits"]) == {"copy_gb_per_s", "matmul_tflops_per_s"}
    for name, rows in record["tables"].items():
        with (folder / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(rows) > 0
        assert f"## {name}" in (folder / "bench.md").read_text()
    for name in (*OPS, "roofline", "mlp_scaling"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name


def test_readme_is_generated_from_a_record(folder, tmp_path, capsys):
    readme, main = tmp_path / "README.md", script("readme_tables").main
    names = [name for name in TABLES if name != "advice"]
    parts = [f"## {name}\n<!-- bench {name} {folder}/bench.json -->\nold\n<!-- end bench -->\nkept\n" for name in names]
    readme.write_text("".join(parts))
    assert main([str(readme), "--check"]) == 1
    assert main([str(readme)]) == 0
    assert main([str(readme), "--check"]) == 0
    text = readme.read_text()
    assert "old" not in text
    assert text.count("kept") == len(names)
    assert "| gelu (erf) | 6MN | 5MN | MN | MN | manual 5.5, native 1 (fp32) |" in text
    assert "| softmax | 5MN + 2M | 3MN + 2M | MN | MN |" in text
    (row, *_) = json.loads((folder / "bench.json").read_text())["tables"]["gelu"]
    (line,) = re.findall(r"\| 512 x 512 fp32 erf \| forward \| ([\d.]+) \| ([\d.]+) \(([\d.]+)\)", text)
    assert [float(number) for number in line] == pytest.approx(
        [row["limit_ms"], row["ms"], row["share_of_limit"]], rel=0.01, abs=0.006
    )
    shares = [f"{share:.2f}" for share in _gelu_shares(folder)]
    assert f"| 512 x 512 fp32 erf | {shares[0]} / {shares[1]} | {shares[2]} / {shares[3]} |" in text
    # A number that was changed by hand is found.
    readme.write_text(text.replace("6MN", "5MN", 1))
    assert main([str(readme), "--check"]) == 1


def _gelu_shares(folder):
    """Forward and backward of manual, then of native, in the first case."""
    rows = json.loads((folder / "bench.json").read_text())["tables"]["gelu"][:4]
    by_key = {(row["impl"], row["direction"]): row["share_of_limit"] for row in rows}
    return [by_key[impl, way] for impl in ("manual", "native") for way in ("forward", "backward")]


def test_tables_name_what_was_not_measured_and_the_memory_of_what_fuses(tmp_path):
    common = {"shape": "4x2x8x2", "dtype": "bf16", "approximate": "tanh", "limit_ms": 20.25, "ms": 40.5}
    common |= {"share_of_limit": 0.5, "kernels": 1}
    rows = [common | {"impl": "triton", "direction": "step", "peak_mib": 30.0}]
    rows += [common | {"impl": "native", "direction": way, "peak_mib": 40.0} for way in ("forward", "step")]
    record = tmp_path / "bench.json"
    record.write_text(json.dumps({"tables": {"mlp": rows}}))
    assert generate("mlp_shares", record).splitlines() == [
        "| mlp: share of the limit, step / forward | native | triton |",
        "| --- | --- | --- |",
        "| 4 x 2 x 8 x 2 bf16 tanh | 0.50 / 0.50 | 0.50 / - |",
    ]
    step = "| 4 x 2 x 8 x 2 bf16 tanh | step | 20.2 | 40.5 (0.50) | 40.5 (0.50) | triton 0.75 |"
    forward = "| 4 x 2 x 8 x 2 bf16 tanh | forward | 20.2 | 40.5 (0.50) |  |  |"
    assert generate("mlp", record).splitlines()[2:] == [step, forward]


def test_readme_agrees_with_its_records():
    """What README.md says was measured is what the committed records hold."""
    main = script("readme_tables").main
    assert main(["--check"]) == 0
    # It has such tables, each from a committed record.
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- bench (\w+) (\S+) -->\n(.*?)<!-- end bench -->", text, re.DOTALL)
    assert {"gelu", "softmax_shares", "matmul", "mlp", "mlp_scaling", "ledger"} <= {table for table, _, _ in found}
    for table, record, content in found:
        assert generate(table, ROOT / record) == content
        assert (ROOT / record).is_relative_to(ROOT / "profiles" / "records")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<!-- bench relu {record} -->\n<!-- end bench -->", "'relu' is unknown"),
        ("<!-- bench gelu none.json -->\n<!-- end bench -->", "none.json cannot be read"),
        ("<!-- bench gelu README.md -->\n<!-- end bench -->", "README.md cannot be read as a record"),
        ("<!-- bench advice {record} -->\n<!-- end bench -->", "has no table 'advice'"),
        ("<!-- bench gelu {record} -->\n", "has no <!-- end bench -->"),
    ],
)
def test_a_readme_that_cannot_be_generated(folder, tmp_path, capsys, content, words):
    readme = tmp_path / "README.md"
    readme.write_text(content.format(record=folder / "bench.json"))
    assert script("readme_tables").main([str(readme)]) == 2
    assert words in capsys.readouterr().err


def test_one_op_at_the_users_size(tmp_path, capsys):
    arguments = [*QUICK, "softmax", "--shape", "6x10", "3x50257", "--dtype", "fp16", "--direction", "backward"]
    assert script("bench").main([*arguments, "--impl", "native", "--out", str(tmp_path), "--no-plots"]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["tables"]["softmax"]
    assert [(row["shape"], row["dtype"], row["direction"]) for row in rows] == [
        ("6x10", "fp16", "backward"),
        ("3x50257", "fp16", "backward"),
    ]
    assert not list(tmp_path.glob("*.png"))
    assert "6x10 fp16" in capsys.readouterr().out


def test_an_implementation_that_fails_is_a_row_and_an_exit_status(tmp_path, monkeypatch):
    monkeypatch.setattr(impls, "names", lambda: ["absent", "manual", "native"])
    arguments = [*QUICK, "softmax", "--shape", "4x4", "--impl", "native", "absent", "--no-plots"]
    assert script("bench").main([*arguments, "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "bench.json").read_text())["tables"]["softmax"]
    assert "cannot run here" in next(row["failure"] for row in rows if row["impl"] == "absent")
    assert any(row["ms"] for row in rows if row["impl"] == "native")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impl", "fast"], "--impl fast: unknown; accepted: auto, compiled"),
        (["--shape", "4x4"], "--shape belongs to ops"),
        (["copy", "--shape", "4x4"], "--shape belongs to ops"),
        (["gelu", "--shape", "4x4x4"], "does not fit gelu"),
        (["gelu", "softmax", "linear_gelu", "--shape", "4x4"], "does not fit linear_gelu"),
        (["--rounds", "0"], "--rounds must be more than 0"),
        (["--rep", "-1"], "--rep must be more than 0"),
        (["--settle", "-1"], "--settle must be at least 0"),
        (["--rep", "inf"], "--rep must be more than 0, and finite"),
        (["--size", "0"], "--size must be at least 1"),
        (["copy", "--size", "99999999999999999999"], "--size must be at least 1, and at most"),
        (["gelu", "--shape", "99999999999999999999x4"], "larger than any memory"),
        (["gelu", "--shape", "4x4", "--calibration", "none.json"], "none.json cannot be read"),
        (["--peers"], "--peers: none is installed"),
        (["--device", "cuda"], "there is no CUDA GPU here"),
    ],
)
def test_wrong_arguments(arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("fusedmlp.bench.options.installed", lambda name: False)
    assert script("bench").main([*arguments, "--out", str(tmp_path / "none")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_found_before_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_run, "measure_case", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert script("bench").main([*QUICK, "gelu", "--out", str(tmp_path / "file")]) == 2
    assert f"--out {tmp_path / 'file'} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["gelu", "--shape", "1000000x1000000"], ["copy", "--size", "4000000"]])
def test_too_little_memory_is_one_message(arguments, tmp_path, capsys):
    assert script("bench").main([*QUICK, *arguments, "--impl", "native", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "memory" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["relu"], ["gelu", "--dtype", "fp8"], ["gelu", "--approximate", "exact"]])
def test_words_that_are_none_of_the_choices(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        script("bench").main(arguments)
    assert stopped.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_stopping_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    measure_case, cases = bench_run.measure_case, []

    def stop_at_the_second(case, bench):
        cases.append(case)
        if len(cases) == 2:
            raise KeyboardInterrupt
        return measure_case(case, bench)

    monkeypatch.setattr(bench_run, "measure_case", stop_at_the_second)
    assert script("bench").main([*QUICK, "gelu", "--impl", "native", "--out", str(tmp_path)]) == 130
    rows = json.loads((tmp_path / "bench.json").read_text())["tables"]["gelu"]
    assert {row["dtype"] for row in rows} == {"fp32"}


def test_predictions_are_judged_on_a_known_card():
    tables = {"gelu": [_row("native", 0.344), _row("triton", 0.258), _row("manual", 3.9)]}
    options = parse(["gelu", "--impl", "native", "triton", "manual", "--device", "cpu"], "")
    on_gpu = type("Options", (), {**vars(options), "device": torch.device("cuda")})
    facts = {"gpu": "NVIDIA H200", "sms": CARDS["NVIDIA H200"].sms}
    (verdict,) = bench_run._judge(tables, {}, on_gpu, facts)
    assert (verdict["predicted"], verdict["measured"], verdict["agrees"]) == ("triton", "triton", True)
    assert verdict["predicted_ms"] == pytest.approx(0.258, rel=0.05)
    # An unknown card is judged by what was measured on it, if that was.
    unknown = facts | {"gpu": "Another"}
    assert bench_run._judge(tables, {}, on_gpu, unknown) == []
    limits = {"copy_gb_per_s": 4250.0, "matmul_tflops_per_s": 700.0}
    assert bench_run._judge(tables, limits, on_gpu, unknown)[0]["predicted"] == "triton"
    assert bench_run._judge(tables, limits, options, unknown) == []


def _row(impl, ms):
    row = {"op": "gelu", "shape": "16384x16384", "dtype": "bf16", "approximate": "none", "direction": "forward"}
    return row | {"impl": impl, "ms": ms, "limit_ms": 0.25, "share_of_limit": 0.25 / ms}


def test_advice_on_the_command_line(tmp_path, capsys):
    main = script("advise").main
    assert (
        main(["--model", "gpt", "--dim", "1024", "--heads", "16", "--card", "h200", "--out", str(tmp_path / "a")]) == 0
    )
    assert "mlp (x12)" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "a").read_text())["ops"]) == 5
    assert main(["--op", "softmax", "--shape", "64x64", "--card", "a100"]) == 0
    assert main(["--model", "gpt", "--dim", "1024", "--card", "h200"]) == 0, "heads follow from dim"


def test_calibrating_on_the_command_line(folder, tmp_path, capsys):
    main, file = script("advise").main, tmp_path / "mine.json"
    assert main(["--calibrate", str(folder / "bench.json"), "--out", str(file)]) == 0
    entries = calibration.load(file)
    # What the record measured replaces the built-in values, what it did not measure stays.
    assert {e.width for e in entries if (e.op, e.impl, e.direction) == ("gelu", "native", "forward")} == {512}
    triton = [e for e in calibration.BUILT_IN if e.impl == "triton"]
    assert [e for e in entries if e.impl == "triton"] == triton
    assert main(["--op", "gelu", "--shape", "64x64", "--card", "h200", "--calibration", str(file)]) == 0
    assert main(["--calibrate", str(folder / "bench.json")]) == 2
    assert "--out FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt"], "there is no GPU here; name the card"),
        (["--model", "mlp", "--card", "h200", "--context", "4"], "no size 'context'"),
        (["--op", "gelu", "--card", "h200"], "needs a shape"),
        (["--model", "mlp", "--card", "h200", "--shape", "4x4"], "--shape belongs to an op"),
        (["--model", "mlp", "--card", "h200", "--dim", "99999999999999999999"], "expected an integer from 1"),
        (["--model", "mlp", "--card", "h200", "--out", "/no/such/place"], "--out /no/such/place cannot be written"),
        (["--op", "gelu", "--card", "h200", "--shape", "4x4", "--dim", "4"], "--dim belongs to a model"),
        (["--op", "gelu", "--card", "h200", "--shape", "4x4", "--calibration", "none.json"], "cannot be read"),
    ],
)
def test_wrong_questions(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script("advise").main(arguments) == 2
    assert words in capsys.readouterr().err
