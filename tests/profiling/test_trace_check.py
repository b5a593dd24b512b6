"""The runs of scripts/gpu_trace_check.py, and the record that it writes."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest
from profiling.test_nsys_stats import PRINTED
from scripts_by_path import script

from fusedmlp.errors import UserError
from fusedmlp.signals import Signals
from fusedmlp.sweep.ahead import Run

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


# In place of train.py: a run of 80 steps that take 10 ms, and under the profiler 10.2 ms once its window is over.
PROCESS = """
import json, pathlib, sys
folder, overrides = pathlib.Path(sys.argv[1]), sys.argv[2:]
folder.mkdir(parents=True)
if "impl=broken" in overrides:
    sys.exit("no luck")
later = 10.2 if "profile=torch" in overrides else 10.0
rows = [f"{step},{500 if step in (10, 50) else 10.0 if step < 50 else later}" for step in range(10, 90, 10)]
(folder / "metrics.csv").write_text("\\n".join(["step,time/step_ms", *rows]))
(folder / "result.json").write_text(json.dumps({"status": "completed", "reason": None, "trace": None}))
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A record whose runs only pretend to train."""

    def pretend(check, wanted) -> Run:
        folder = check.work / "runs" / wanted.name
        command = [sys.executable, "-c", PROCESS, str(folder), *wanted.overrides]
        return Run(command, tmp_path, check.kept / f"{wanted.name}.txt", folder)

    monkeypatch.setattr(SCRIPT.Check, "_run", pretend)
    return SCRIPT.Check(SCRIPT.parse(["--out", str(tmp_path)]), Signals())


@pytest.mark.parametrize("preload", [0, 2])
def test_the_cost_of_the_profiler_is_a_ratio_of_ratios(check, preload):
    check.options.preload = preload
    SCRIPT.overhead(check)
    runs = check.record["runs"]
    assert [name.removeprefix("overhead-") for name in runs] == ["none-0", "torch-0", "torch-1", "none-1"]
    assert all("experiment=gpt" in run["overrides"] and run["exit_code"] == 0 for run in runs.values())
    assert "profile=none" in runs["overhead-none-0"]["overrides"]
    found = {what: check.record[f"overhead_percent_{what}_torch"] for what in
             ("before_window", "after_window", "after_against_before")}  # fmt: skip
    assert found == pytest.approx({"before_window": 0.0, "after_window": 2.0, "after_against_before": 2.0})
    assert not check.failed


def test_a_run_that_fails_is_in_the_record_and_the_next_one_comes(check):
    wanted = [SCRIPT.Wanted(name, (f"impl={name}",)) for name in ("one", "broken", "two")]
    found = dict(check.train(wanted))
    assert [name for name, folder in found.items() if folder is not None] == ["one", "two"]
    assert check.failed
    assert check.record["runs"]["broken"]["reason"] == "exit code 1: no luck"
    assert check.record["runs"]["broken"]["exit_code"] == 1


def test_what_there_is_no_time_for_is_left_out(check):
    check.options.budget = 5
    assert dict(check.train([SCRIPT.Wanted("one", ())])) == {"one": None}
    assert check.record["runs"]["one"]["reason"] == "left out: the time was up"


def test_analyses_are_taken_in_order_and_their_errors_are_raised():
    taken = []
    with SCRIPT.InTurn(lambda name, result: taken.append((name, result))) as work:
        work.add("slow", lambda: time.sleep(0.2))
        work.add("fast", int, "3")
        assert taken == [], "nobody waits for it"
    assert taken == [("slow", None), ("fast", 3)]

    def fail() -> None:
        raise UserError("no trace")

    with pytest.raises(UserError, match="no trace"):
        with SCRIPT.InTurn(lambda name, result: None) as work:
            work.add("bad", fail)
