"""The report of a running sweep and its runs in W&B: what fails there never ends the sweep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reporting.fakes import failed, result, rich_sweep, write_run, write_sweep

from fusedmlp.reporting import report, wandb_summary
from fusedmlp.sweep import lost_run
from fusedmlp.sweep.reporter import Reporter

OFFLINE = {"mode": "offline", "project": "fusedmlp", "entity": None, "tags": ["test"]}


def records(folder: Path) -> list[dict]:
    """What W&B itself reads from the one offline run below `folder`."""
    (path,) = folder.glob("wandb/offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    return [json.loads(line) for line in found.splitlines()]


def only(found: list[dict], kind: str) -> dict:
    (record,) = (record[kind] for record in found if record["type"] == kind)
    return record


def test_the_report_follows_the_sweep(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [result("native")], waiting=1)
    reporter = Reporter(sweep, "day-sweep")
    reporter.update()
    reporter._join()
    assert "1 completed, 1 waiting" in (sweep / "report.md").read_text()
    (sweep / "0-native-dim512" / "result.json").write_text(json.dumps(result("native", step_ms=3.21)))
    verdict, place = reporter.close()
    assert verdict == "mlp, dim 512: only native has been measured, 3.21 ms a step; still to come: cuda."
    assert place == f"report     {sweep / 'report.html'}"


def test_a_report_that_fails_is_one_line_and_a_traceback_in_a_file(tmp_path, monkeypatch, capsys):
    sweep = write_sweep(tmp_path / "sweep", [result("native")])
    monkeypatch.setattr(report, "build", lambda folders: 1 / 0)
    reporter = Reporter(sweep, "day-sweep")
    reporter.update()
    assert reporter.close() == []
    assert capsys.readouterr().out == 2 * "warning: no report: division by zero (report-error.log)\n"
    assert (sweep / "report-error.log").read_text().count("ZeroDivisionError") == 2


@pytest.fixture
def summarized(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    sweep = rich_sweep(tmp_path / "sweep")
    wandb_summary.send(report.write([sweep], sweep), sweep, "day-sweep", OFFLINE)
    return sweep


def test_the_summary_in_wandb_has_table_plots_and_verdict(summarized):
    assert "WANDB_DATA_DIR" not in os.environ
    found = records(summarized)
    run = only(found, "run")
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("day-sweep", "summary", "day-sweep-summary")
    assert only(found, "exit").get("exit_code", 0) == 0
    (folder,) = summarized.glob("wandb/offline-run-*/files/media")
    assert {file.name.rpartition("_0_")[0] for file in folder.rglob("*.png")} == {
        "throughput", "speed_up", "memory", "time_by_kind",
    }  # fmt: skip
    table = json.loads(next(folder.rglob("*.table.json")).read_text())
    assert table["columns"][:3] == ["configuration", "impl", "ms/step"]
    assert ["mlp, dim 512", "triton", "8.08"] in [row[:3] for row in table["data"]]
    assert any("triton wins" in json.dumps(record) for record in found if record["type"] == "summary")


def test_wandb_in_the_way_of_nothing(tmp_path, monkeypatch, capsys):
    sweep = write_sweep(tmp_path / "sweep", [result("native")])
    written = report.write([sweep], sweep)
    wandb_summary.send(written, sweep, "day-sweep", OFFLINE | {"mode": "disabled"})
    monkeypatch.setitem(sys.modules, "wandb", None)
    wandb_summary.send(written, sweep, "day-sweep", OFFLINE)
    assert capsys.readouterr().out.count("warning: no Weights & Biases log") == 1
    assert not (sweep / "wandb").exists()


def test_a_killed_job_has_a_run_of_its_own_too_marked_failed_with_what_it_logged(tmp_path):
    reason = "killed by signal 9 (SIGKILL)"
    folder = write_run(tmp_path / "job", failed("triton", reason=reason))
    (folder / "metrics.csv").write_text("step,train/loss,val/loss\n10,5.25,\n20,4.5,4.0\n30,4.2")
    empty = folder / "wandb" / "offline-run-20261129_000000-abc"
    empty.mkdir(parents=True)
    (empty / "run-abc.wandb").write_bytes(b":W&B\x00\x00\x00"[:7])
    fields = json.loads((folder / "result.json").read_text())
    assert lost_run.record(folder, fields, OFFLINE) == next(folder.glob("wandb/offline-run-*"))
    found = records(folder)
    run = only(found, "run")
    assert (run["run_group"], run["job_type"], run["display_name"]) == ("day-sweep", "triton", "triton-dim512")
    assert only(found, "exit")["exit_code"] == 1
    text = json.dumps(found)
    assert reason in text
    logged = [record for record in found if record["type"] == "history"]
    assert "5.25" in json.dumps(logged[0])
    assert len(logged) == 2, "the cut-off line is no row"


@pytest.mark.parametrize(("mode", "more"), [("online", {}), ("disabled", {}), ("offline", {"wandb": None})])
def test_a_run_that_is_elsewhere_or_finished_is_left_alone(tmp_path, mode, more):
    folder = write_run(tmp_path / "job", failed("triton"))
    assert lost_run.record(folder, failed("triton") | more, OFFLINE | {"mode": mode}) is None
    assert not (folder / "wandb").exists()
