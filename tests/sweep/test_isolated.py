"""A sweep of processes as a user starts it: what goes wrong in one job, resuming, Ctrl-C."""

import csv
import html
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import ROOT, python_path
from training.runs import fits, train

TINY = (
    "model.num_layers=2", "data=synthetic", "data.num_tokens=20000", "data.batch_size=8", "data.val_batches=2",
    "trainer.warmup_steps=2", "trainer.log_every=1", "trainer.val_every=0", "trainer.accelerator=cpu",
)  # fmt: skip
# W&B takes two seconds a job, and three jobs tell.
QUIET = "logger: {mode: disabled}"
LONG = "trainer: {max_steps: 1000000, log_every: 100}"
EXPERIMENTS = {
    "good": "dim: 32\ntrainer: {max_steps: 6}",
    "raises": "dim: 32\nmodel: {_target_: misbehaving.raises}\ntrainer: {max_steps: 6}",
    "other": f"dim: 48\ntrainer: {{max_steps: 6}}\n{QUIET}",
    "killed": f"dim: 48\nmodel: {{_target_: misbehaving.killed}}\n{LONG}",
    "triton": f"defaults:\n  - override /impl: triton\n{QUIET}",
    "slow": f"dim: 32\nmodel: {{_target_: misbehaving.Slow}}\n{LONG}\n{QUIET}",
}


@pytest.fixture
def start(tmp_path):
    """Starts train.py in an empty directory with the experiments above, no GPU, and the cache there too."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name, text in EXPERIMENTS.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    environment = os.environ | {
        "FUSEDMLP_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"PYTHONPATH": python_path(Path(__file__).parent)}
    environment.pop("TRITON_INTERPRET", None)

    def begin(*arguments: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "--config-dir", "conf", *arguments], cwd=tmp_path,
            env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    return begin


def finish(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=300)[0]
    finally:
        process.kill()


def jobs(sweep: Path) -> dict[str, dict]:
    """The rows of sweep.json by the name of the experiment."""
    rows = json.loads((sweep / "sweep.json").read_text())["jobs"]
    return {row["overrides"][0].removeprefix("experiment="): row for row in rows}


def losses(folder: Path) -> list[str]:
    header, *lines = (folder / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("train/loss")
    return [value for line in lines if (value := line.split(",")[column])]


def reported(sweep: Path, rows: dict[str, dict]) -> None:
    """The report has every job with its status and reason."""
    with open(sweep / "results.csv", newline="") as file:
        found = {row["run"]: row for row in csv.DictReader(file)}
    page, text = (sweep / "report.html").read_text(), (sweep / "report.md").read_text()
    assert len(found) == len(rows)
    for row in rows.values():
        assert found[row["folder"]]["status"] == row["status"]
        assert found[row["folder"]]["reason"] == (row["reason"] or "")
        assert html.escape(row["reason"] or "", quote=False) in html.unescape(page)
        assert (row["reason"] or "") in text
    assert (sweep / "throughput.png").stat().st_size > 1000
    assert not (sweep / "report-error.log").exists()


def wandb_runs(sweep: Path) -> dict[str, int | None]:
    """The exit code in the W&B run of every job that has one, by experiment."""
    found = {}
    for run in sweep.glob("*/wandb/offline-run-*"):
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(run)]
        done = subprocess.run(inspect, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + "\n".join(map(str, run.rglob("*")))
        summary = json.loads(done.stdout)
        (job,) = (row for row in jobs(sweep).values() if row["folder"] == run.parts[-3])
        found[job["overrides"][0].removeprefix("experiment=")] = summary["exit_code"]
    return found


@fits
@pytest.mark.slow
def test_jobs_that_fail_leave_the_others_alone_and_a_resumed_sweep_runs_what_is_missing(start, tmp_path):
    process = start("-m", f"experiment={','.join(EXPERIMENTS)}", *TINY, "sweep.timeout=30", "hydra.sweep.dir='day/a=b'")
    out = finish(process)
    sweep = tmp_path / "day" / "a=b"
    assert process.returncode == 1, out
    rows = jobs(sweep)
    assert {name: row["status"] for name, row in rows.items()} == {
        "good": "completed", "raises": "failed", "other": "completed", "killed": "failed", "triton": "failed",
        "slow": "timed out",
    }, out  # fmt: skip
    assert rows["raises"]["reason"] == "RuntimeError: a bug of the user's"
    assert rows["killed"]["reason"] == "killed by signal 9 (SIGKILL)"
    assert rows["triton"]["reason"].startswith("impl=triton cannot run here")
    assert rows["slow"]["reason"] == "time limit: sweep.timeout=30 s"
    results = {name: json.loads((sweep / row["folder"] / "result.json").read_text()) for name, row in rows.items()}
    for name, row in rows.items():
        for key in ("status", "reason"):
            assert results[name][key] == row[key]
        assert results[name]["group"] == "day-a=b"
        loud = name in ("good", "raises", "killed")
        assert len(list((sweep / row["folder"]).glob("wandb/offline-run-*"))) == loud
        assert (sweep / row["folder"] / "console.log").exists()
    assert "a bug of the user's" in (sweep / rows["raises"]["folder"] / "train.log").read_text()
    assert "Traceback" in (sweep / rows["raises"]["folder"] / "train.log").read_text()
    assert Path(results["slow"]["checkpoint"]).exists()
    assert "[3/6 experiment=other] step 6/6 " in out
    reported(sweep, rows)
    assert f"report     {sweep.relative_to(tmp_path) / 'report.html'}" in out
    assert wandb_runs(sweep) == {"good": 0, "raises": 1, "killed": 1}
    assert len(list(sweep.glob("wandb/offline-run-*"))) == 1, "the summary"
    assert "sweep: 2 done, 4 failed, 0 left; best so far " in out

    assert train(tmp_path / "alone", "dim=48").status == "completed"
    assert len(losses(tmp_path / "alone")) == 6
    assert losses(tmp_path / "alone") == losses(sweep / rows["other"]["folder"])

    assert """-m 'sweep.resume='"'"'day/a=b'"'"'' sweep.timeout=30   # what has not completed""" in out
    folders = set(sweep.iterdir())
    process = start("-m", f"sweep.resume='{sweep}'", "sweep.timeout=60", "sweep.preload=2", WELL="1")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("[4/6 experiment=killed] step"):
            break
    process.send_signal(signal.SIGINT)
    out = "".join(lines) + finish(process)
    assert process.returncode == 130, out
    assert "Traceback" not in out
    again = jobs(sweep)
    changed = {name: row["status"] for name, row in again.items() if row != rows[name]}
    assert changed == {"raises": "completed", "killed": "interrupted"}, out
    # The two jobs after that one were held, and are withdrawn.
    new = {path.name for path in set(sweep.iterdir()) - folders if path.is_dir()}
    assert new - {"wandb"} == {again["raises"]["folder"], again["killed"]["folder"]}
    held = json.loads((sweep / again["killed"]["folder"] / "result.json").read_text())["seconds"]["import"]
    assert held < 4 * results["other"]["seconds"]["import"], "the time that it was held is not the imports'"
    stopped = json.loads((sweep / again["killed"]["folder"] / "result.json").read_text())
    assert Path(stopped["checkpoint"]).exists()
    reported(sweep, again)
    assert "slow" not in "".join(line for line in out.splitlines() if line.startswith("["))
    assert len([line for line in out.splitlines() if " completed  " in line]) == 3, "the table has those kept too"
