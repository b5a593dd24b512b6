"""The record that scripts/gpu_trace_check.py writes."""

import argparse
import json
from pathlib import Path

from profiling.test_nsys_stats import PRINTED
from scripts_by_path import script

from fusedmlp.sweep.job import Signals

SCRIPT = script("gpu_trace_check")


def test_a_record_names_no_folder_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["check", "--out", "here/out", "--parts", "nsys"])
    check = SCRIPT.Check(argparse.Namespace(out=Path("here/out")), Signals())
    run = tmp_path / "here" / "out" / "work" / "runs" / "lecture"
    check.record["runs"]["lecture"] = {"trace": {"file": f"{run}/trace.json.gz"}}
    check.section("nsys", [f"left {run}/trace.nsys-rep", f"beside {tmp_path / 'here' / 'out'}"])
    check.keep_text("nsys-stats.txt", PRINTED.replace("trace.nsys-rep", f"{run}/trace.nsys-rep"))
    texts = {file.name: file.read_text() for file in (tmp_path / "here" / "out").glob("*.*")}
    assert sorted(texts) == ["nsys-stats.txt", "record.json", "record.md"]
    assert not any(str(tmp_path) in text or "here/out" in text for text in texts.values())
    record = json.loads(texts["record.json"])
    assert record["command"][2:] == ["--out", "DIR", "--parts", "nsys"]
    assert record["runs"]["lecture"]["trace"]["file"] == "lecture/trace.json.gz"
    assert "left lecture/trace.nsys-rep\nbeside DIR" in texts["record.md"]
    assert "from lecture/trace.nsys-rep" in texts["nsys-stats.txt"]
