"""The launcher for Slurm, with submitit's executor for this machine."""

import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import raises
from omegaconf import OmegaConf

from fusedmlp.errors import UserError
from fusedmlp.signals import Signals
from fusedmlp.sweep import slurm
from fusedmlp.sweep.job import Ended, run_alone
from fusedmlp.sweep.launcher import SweepLauncher
from fusedmlp.sweep.ledger import Job, Ledger
from fusedmlp.sweep.outcome import settle
from fusedmlp.sweep.reporter import Reporter

PARAMS = {"partition": None, "gpus_per_node": 0, "timeout_min": 5, "signal_delay_s": 30}


@pytest.fixture
def submitit():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs pip install 'fusedmlp[slurm]'")
    return pytest.importorskip("submitit", reason="needs pip install 'fusedmlp[slurm]'")


class Commands(slurm.SlurmLauncher):
    """The launcher, with a line of Python for each job in place of a training run."""

    report = staticmethod(lambda fields: None)

    def __init__(self, folder: Path, codes: list[str]):
        super().__init__("local", **PARAMS)
        self.ledger = Ledger(folder, "python train.py -m", [Job(index, [code]) for index, code in enumerate(codes)])
        self.jobs, self.names = self.ledger.jobs, dict.fromkeys(range(len(codes)), "")
        self.executor, _ = slurm.make_executor("local", PARAMS, folder / ".submitit")
        self.group, self.limit, self.limit_s = "day-sweep", "sweep.timeout=3 s", 3.0
        self.reporter, self.measured, self.speeds = Reporter(folder, "day-sweep"), [], {}

    def begin(self, job):
        job.start = {"impl": "native", "dim": 8, "overrides": [], "group": self.group}
        job.logger = {"mode": "disabled", "project": "x", "entity": None, "tags": []}
        folder = self.ledger.claim(job, str(job.index))
        return [sys.executable, "-c", job.overrides[0]], folder


def test_every_job_ends_as_itself_whatever_becomes_of_the_others(submitit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "_POLL_S", 0.1)
    well = (
        "import json, os; print('hello', os.environ['FUSEDMLP_SWEEP_GROUP']); from pathlib import Path; "
        f"Path({str(tmp_path / '0' / 'result.json')!r}).write_text(json.dumps(dict(status='completed', reason=None)))"
    )
    launcher = Commands(tmp_path, [
        well,
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",  # what runs it, as when Slurm's node dies
        "import time; time.sleep(600)",
    ])  # fmt: skip
    launcher.run_all(launcher.jobs, Signals())
    launcher.reporter.close()
    well, lost, slow = launcher.jobs
    assert (well.status, well.reason) == ("completed", None)
    assert (lost.status, lost.reason.partition(";")[0]) == ("failed", "lost by the cluster: finished")
    assert (slow.status, slow.reason) == ("timed out", "time limit: sweep.timeout=3 s")
    assert (tmp_path / "0" / "console.log").read_text() == "hello day-sweep\n"
    rows = json.loads((tmp_path / "sweep.json").read_text())["jobs"]
    assert [row["status"] for row in rows] == ["completed", "failed", "timed out"]
    out = capsys.readouterr().out
    assert "[1/3] completed\n" in out
    assert "[3/3] timed out: time limit: sweep.timeout=3 s\n" in out
    assert "sweep: 1 done, 2 failed, 0 left" in out
    assert (tmp_path / "report.html").exists()


def test_ctrl_c_cancels_what_runs(submitit, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_POLL_S", 0.01)
    launcher, signals = Commands(tmp_path, ["", ""]), Signals()
    cancelled = []

    class Submitted:
        job_id, state = "7_0", "CANCELLED"
        paths = SimpleNamespace(stderr="log")

        def cancel(self, check):
            cancelled.append(self)

        def done(self):
            signals.received.append(2)  # while the jobs run
            return self in cancelled

        def exception(self):
            return RuntimeError("cancelled")

    launcher.executor = SimpleNamespace(batch=nullcontext, submit=lambda *_: Submitted())
    launcher.run_all(launcher.jobs, signals)
    assert len(cancelled) == 2
    assert {(job.status, job.reason) for job in launcher.jobs} == {("interrupted", "stopped with the sweep")}


def test_a_refusal_is_one_message_and_the_jobs_still_wait(submitit, tmp_path):
    launcher = Commands(tmp_path, ["", ""])

    class Refusing(nullcontext):
        def __exit__(self, *_):
            raise submitit.core.utils.FailedJobError("sbatch: error: invalid partition\n  specified: x")

    launcher.executor = SimpleNamespace(batch=Refusing, submit=lambda *_: None)
    with raises(UserError, "local does not take the jobs: sbatch: error: invalid partition specified: x"):
        launcher.run_all(launcher.jobs, Signals())
    assert [row["status"] for row in json.loads((tmp_path / "sweep.json").read_text())["jobs"]] == ["waiting"] * 2


def test_keys_go_to_sbatch_under_their_names(submitit, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    more = {"partition": "gpu", "mem_gb": 64, "setup": ["module load cuda"], "additional_parameters": {"nodelist": "a"}}
    executor, limit_s = slurm.make_executor("slurm", PARAMS | more, tmp_path)
    script = executor._executor._make_submission_file_text("COMMAND", "uid")
    for words in ("--partition=gpu", "--mem=64GB", "--nodelist=a", "--time=5", "--signal=USR2@30", "module load cuda"):
        assert words in script
    assert limit_s == 5 * 60 - 30 - 60, "the job's own limit comes before Slurm's"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partitoin": "gpu"}, ("hydra.launcher: ", "partitoin")),
        ({"mem_gb": "lots"}, ("hydra.launcher: ", "lots")),
        ({"timeout_min": 1}, ("hydra.launcher.timeout_min=1 leaves no time for a job", "60 s", "signal_delay_s=30")),
    ],
)
def test_wrong_values_are_one_message(submitit, tmp_path, change, words):
    with raises(UserError, *words):
        slurm.make_executor("slurm", PARAMS | change, tmp_path)


def test_without_slurm_or_submitit_it_says_what_is_missing(submitit, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with raises(UserError, "hydra/launcher=slurm cannot be used here"):
        slurm.make_executor("slurm", PARAMS, tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with raises(UserError, "hydra/launcher=slurm needs submitit", "pip install 'fusedmlp[slurm]'"):
        slurm.make_executor("slurm", PARAMS, tmp_path)


def test_what_the_cluster_says_of_a_lost_job_is_the_reason(tmp_path):
    lost = SimpleNamespace(
        exception=lambda: RuntimeError("gone"), state="OUT_OF_MEMORY", paths=SimpleNamespace(stderr="a/1_0_log.err")
    )
    ended = slurm.ending(lost, 5.0)
    assert ended == Ended(1, False, "", 5.0, "lost by the cluster: out of memory; a/1_0_log.err")
    fields = settle(tmp_path, {"impl": "native"}, ended, None, False)
    assert (fields["status"], fields["reason"]) == ("failed", ended.lost)
    (tmp_path / "result.json").write_text('{"status": "completed", "reason": null}')
    assert settle(tmp_path, {}, ended, None, False)["status"] == "completed", "it was lost after its end"


def test_signals_are_not_handed_on_where_the_cluster_sends_them(tmp_path):
    code = "import os, signal, time; signal.signal(15, lambda *_: print(1)); os.kill(os.getppid(), 15); time.sleep(0.5)"
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        run_alone([sys.executable, "-c", code], "day-sweep", tmp_path / "log", None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "log").read_text() == ""


def test_what_is_sent_needs_no_package_where_it_runs(submitit, tmp_path):
    import cloudpickle

    with slurm._by_value():
        sent = cloudpickle.dumps(
            partial(run_alone, [sys.executable, "-c", "print(1)"], "day-sweep", tmp_path / "log", None)
        )
    (tmp_path / "sent").write_bytes(sent)
    code = "import pickle, sys; sys.modules['fusedmlp'] = None; print(pickle.load(open('sent', 'rb'))().exit_code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert (tmp_path / "log").read_text() == "1\n"


def test_launchers_stand_beside_other_plugins_of_hydra(submitit):
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher

    from fusedmlp.sweep import plugin

    plugin.register(lambda fields: None)
    stock = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"
    for name, kind, more in (
        ("hydra_plugins.fusedmlp.IsolatedLauncher", SweepLauncher, {}),
        ("hydra_plugins.fusedmlp.SlurmLauncher", SweepLauncher, {"cluster": "local"}),
        (stock, Launcher, {}),
    ):
        config = OmegaConf.create({"_target_": name, **more})
        assert isinstance(Plugins.instance()._instantiate(config), kind)
