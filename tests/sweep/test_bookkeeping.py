"""What a sweep knows of its jobs, without a process."""

import json

import pytest
from conftest import raises
from omegaconf import OmegaConf

from fusedmlp.errors import UserError
from fusedmlp.signals import Signals
from fusedmlp.sweep import outcome, progress
from fusedmlp.sweep.isolated import IsolatedLauncher
from fusedmlp.sweep.job import Ended
from fusedmlp.sweep.launcher import SweepLauncher
from fusedmlp.sweep.ledger import Job, Ledger, labels
from fusedmlp.sweep.reporter import Reporter
from fusedmlp.training.cli import Jobs
from fusedmlp.training.options import SweepOptions, build
from fusedmlp.training.result import Result

SIZES = [["dim=32", "seed=1"], ["dim=64", "seed=1"]]
START = {"impl": "native", "dim": 32, "overrides": ["dim=32"], "group": "day-sweep"}


def test_repeats_are_interleaved(tmp_path):
    planned = Ledger.new(tmp_path, "").plan(SIZES, 2)
    assert [(job.index, job.overrides[0], job.repeat) for job in planned] == [
        (0, "dim=32", 0), (1, "dim=64", 0), (2, "dim=32", 1), (3, "dim=64", 1),
    ]  # fmt: skip


def test_a_sweep_that_is_read_again_knows_its_jobs_whatever_the_order_of_their_overrides(tmp_path):
    ledger = Ledger(tmp_path, "python train.py -m dim=32,64 seed=1")
    first, _ = ledger.plan(SIZES, 1)
    first.status, first.folder = "completed", "0-native-dim32"
    ledger.write()
    with raises(UserError, f"{tmp_path} holds a sweep already; go on with it with sweep.resume={tmp_path}"):
        Ledger.new(tmp_path, "")
    again = Ledger.read(tmp_path)
    assert again.command == ledger.command
    planned = again.plan([["seed=1", "dim=32"], ["dim=128", "seed=1"], ["dim=64", "seed=1"]], 1)
    assert [(job.index, job.done) for job in planned] == [(0, True), (2, False), (1, False)]
    assert planned[0].folder == "0-native-dim32"


def test_a_sweep_that_is_gone_on_with_can_be_repeated_more_often(tmp_path):
    ledger = Ledger(tmp_path, "")
    planned = ledger.plan(SIZES, 2)
    assert ledger.plan_again(1) == planned
    more = ledger.plan_again(3)
    assert more[:4] == planned
    assert [(job.index, job.overrides[0], job.repeat) for job in more[4:]] == [(4, "dim=32", 2), (5, "dim=64", 2)]
    assert ledger.jobs == more


def test_two_equal_jobs_are_two(tmp_path):
    ledger = Ledger(tmp_path, "")
    assert [job.index for job in ledger.plan([["dim=32"], ["dim=32"]], 1)] == [0, 1]
    assert [job.index for job in ledger.plan([["dim=32"], ["dim=32"]], 1)] == [0, 1]


def test_another_attempt_gets_another_folder(tmp_path):
    ledger, job = Ledger(tmp_path, ""), Job(0, ["dim=32"])
    assert ledger.claim(job, "0-dim32") == tmp_path / "0-dim32"
    assert ledger.claim(job, "0-dim32") == tmp_path / "0-dim32-2"
    assert job.folder == "0-dim32-2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "is damaged"),
        ('{"jobs": []}', "damaged"),
        ('{"command": "", "jobs": []}', "damaged"),
        ("[]", "damaged"),
        ('{"command": "", "jobs": [{"index": 0, "overrides": null}]}', "damaged"),
        ('{"command": "", "jobs": [{"index": 0, "overrides": [], "status": null}]}', "damaged"),
        ('{"command": "", "jobs": [{"index": 0, "overrides": [], "repeat": "1"}]}', "damaged"),
    ],
)
def test_a_directory_without_a_sweep_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "sweep.json").write_text(text)
    with raises(UserError, str(tmp_path), "sweep.json", words):
        Ledger.read(tmp_path)


def test_a_job_that_cannot_begin_is_a_row_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    launcher, told = IsolatedLauncher(), []
    launcher.ledger, launcher.options = Ledger(tmp_path, ""), SweepOptions(None, None, 1, 2)
    launcher.jobs = launcher.ledger.plan(SIZES, 1)
    launcher.names, launcher.measured, launcher.speeds = labels(launcher.jobs), [], {}
    launcher.reporter = Reporter(tmp_path, "group")
    monkeypatch.setattr(Reporter, "update", lambda self: None)
    monkeypatch.setattr(IsolatedLauncher, "report", told.append, raising=False)

    def begin(self, job):
        job.start = {"impl": "native", "dim": 32}
        if job.index == 0:
            raise OSError(36, "File name too long", "9" * 300)
        OmegaConf.create({"subdir": "${nothing}"}).subdir  # noqa: B018

    monkeypatch.setattr(IsolatedLauncher, "begin", begin)
    launcher.run_all(launcher.jobs, Signals())
    rows = [(job.status, job.reason) for job in Ledger.read(tmp_path).jobs]
    assert rows[0] == ("failed", "its directory cannot be made: File name too long")
    assert rows[1][0] == "failed"
    assert "'nothing' not found" in rows[1][1]
    assert [fields["status"] for fields in told] == ["failed", "failed"]
    assert "[1/2 dim=32] failed: its directory cannot be made" in capsys.readouterr().out


def test_a_full_disk_does_not_end_a_sweep(tmp_path, monkeypatch):
    Result(tmp_path, **START).write(status="running")
    monkeypatch.setattr(Result, "write", no_space)
    assert outcome.settle(tmp_path, START, Ended(1, False, "", 1), None, False)["status"] == "running"


def no_space(self, **fields):
    raise OSError(28, "No space left on device")


def test_a_sweep_over_an_empty_list_is_refused():
    with raises(UserError, "no jobs", "empty"):
        SweepLauncher().launch([], 0)


def test_a_value_for_the_whole_sweep_is_one():
    with raises(UserError, "sweep.repeats=1, sweep.repeats=2", "one value"):
        SweepLauncher().launch([["dim=32", "sweep.repeats=1"], ["dim=32", "sweep.repeats=2"]], 0)


def test_a_job_is_called_by_what_sets_it_apart():
    jobs = [Job(0, ["impl=manual", "dim=32", "seed=1"]), Job(1, ["impl=triton", "dim=64", "seed=1"])]
    assert labels(jobs) == {0: "manual dim=32", 1: "triton dim=64"}
    assert labels([Job(0, ["dim=32", "seed=1"]), Job(1, ["dim=32", "seed=1"], repeat=1)]) == {
        0: "dim=32 repeat=1", 1: "dim=32 repeat=2",
    }  # fmt: skip
    assert labels([Job(0, ["impl=manual", "dim=32", "seed=1"])]) == {0: "manual dim=32"}


@pytest.mark.parametrize(
    ("wrote", "ended", "stopped", "status", "reason"),
    [
        ({"status": "completed"}, Ended(0, False, "", 1), False, "completed", None),
        ({"status": "completed"}, Ended(-15, True, "", 1), False, "completed", None),
        ({"status": "completed"}, Ended(-11, False, "", 1), False, "failed",
         "killed by signal 11 (SIGSEGV) after training"),
        ({"status": "failed", "reason": "no"}, Ended(1, False, "", 1), False, "failed", "no"),
        ({"status": "diverged", "reason": "nan"}, Ended(1, False, "", 1), False, "diverged", "nan"),
        ({"status": "interrupted", "reason": "stopped by SIGTERM"}, Ended(143, True, "", 1), False, "timed out",
         "time limit: sweep.timeout=5 s"),
        ({"status": "interrupted", "reason": "stopped by SIGINT"}, Ended(130, False, "", 1), True, "interrupted",
         "stopped by SIGINT"),
        ({"status": "interrupted", "reason": "stopped by SIGTERM"}, Ended(143, False, "", 1), False, "interrupted",
         "stopped by SIGTERM"),
        ({"status": "running"}, Ended(-9, False, "", 1), False, "failed", "killed by signal 9 (SIGKILL)"),
        ({"status": "running"}, Ended(-9, True, "", 1), False, "timed out", "time limit: sweep.timeout=5 s"),
        (None, Ended(-2, False, "", 1), True, "interrupted", "stopped with the sweep"),
        (None, Ended(1, False, "ImportError: no", 1), False, "failed", "exit code 1: ImportError: no"),
        ("", Ended(-42, False, "", 1), False, "failed", "killed by signal 42 (unknown)"),
        (None, Ended(0, False, "", 1), False, "failed", "exit code 0"),
    ],
)  # fmt: skip
def test_every_ending_has_a_status_and_a_reason_in_result_json(tmp_path, wrote, ended, stopped, status, reason):
    if wrote == "":
        (tmp_path / "result.json").touch()
    elif wrote is not None:
        Result(tmp_path, **START, checkpoint="last.ckpt").write(**wrote)
    fields = outcome.settle(tmp_path, START, ended, "sweep.timeout=5 s", stopped)
    kept = json.loads((tmp_path / "result.json").read_text())
    assert fields == kept
    assert (kept["status"], kept["reason"]) == (status, reason)
    assert (kept["impl"], kept["group"]) == ("native", "day-sweep")
    assert kept.get("checkpoint") == ("last.ckpt" if wrote else None)


def test_progress_between_two_jobs():
    jobs = [Job(0, [], status="completed"), Job(1, [], status="timed out"), Job(2, [], status="running"), Job(3, [])]
    names = {0: "triton dim=64", 1: "", 2: "", 3: ""}
    line = progress.line(jobs, {0: 1234567.0}, names, [10.0, 30.0])
    assert line == "sweep: 1 done, 1 failed, 2 left, about 40 s; best so far 1,234,567 tokens/s (triton dim=64)"
    assert progress.line(jobs[3:], {}, names, []) == "sweep: 0 done, 0 failed, 1 left"


@pytest.mark.parametrize(("seconds", "words"), [(89, "89 s"), (90, "2 min"), (3600, "60 min"), (7500, "2 h 05 min")])
def test_durations(seconds, words):
    assert progress.duration(seconds) == words


def test_jobs_of_other_processes_are_in_the_table_and_the_exit_code(capsys):
    jobs = Jobs()
    speed = {"tokens_per_s": 1000.0, "step_ms_median": 2.0}
    jobs.ended_elsewhere(START | {"status": "completed", "reason": None, "throughput": speed, "final_val_loss": 1.5})
    assert jobs.exit_code == 0
    jobs.ended_elsewhere(START | {"status": "timed out", "reason": "time limit: sweep.timeout=5 s"})
    assert jobs.exit_code == 1
    _, first, second = jobs.table()
    assert first.split() == ["native", "32", "completed", "1,000", "2.00", "1.500"]
    assert second.endswith("  time limit: sweep.timeout=5 s")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"timeout": 0}, ("sweep.timeout=0", "seconds above 0, or null")),
        ({"timeout": "1h"}, ("sweep.timeout=1h", "a number or null")),
        ({"repeats": 0}, ("sweep.repeats=0", "at least 1")),
        ({"repeats": 1.5}, ("sweep.repeats=1.5", "an integer")),
        ({"resume": 3}, ("sweep.resume=3", "a string or null")),
        ({"preload": -1}, ("sweep.preload=-1", "0 or more")),
        ({"repeat": 3}, ("sweep.repeat: no such key", "repeats")),
    ],
)
def test_options(changes, words):
    with raises(UserError, *words):
        build("sweep", {"timeout": None, "resume": None, "repeats": 1, "preload": 0} | changes, SweepOptions)
