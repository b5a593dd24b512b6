"""Offline W&B runs: readable, marked as they ended, and never in the way of training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training.runs import fits, result, rows, train

from fusedmlp.training import step

pytestmark = fits

OFFLINE = ("logger=wandb", "logger.tags=[test,2026]")


def inspect(folder, *options: str) -> str:
    """What W&B itself reads from a run's offline file."""
    (path,) = folder.glob("wandb/offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def summary(folder) -> dict:
    return json.loads(inspect(folder, "--summary"))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two runs in one process, the second of which diverges."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "online")  # must not override logger.mode
        train(folder / "good", *OFFLINE, "trainer.val_every=6")
        patch.setattr(step, "next_token_loss", lambda logits, targets: logits.sum() * float("nan"))
        assert train(folder / "bad", *OFFLINE, "impl=manual", group="a-sweep").status == "diverged"
    return folder


def test_metrics_and_config_can_be_read_from_the_offline_file(two_runs):
    found = summary(two_runs / "good")
    assert (found["state"], found["exit_code"], found["name"]) == ("finished", 0, "auto-dim32")
    assert found["tags"] == ["test", "2026"]
    assert found["config"]["model"]["num_layers"] == 2
    last = rows(two_runs / "good")[-2]
    assert found["summary"]["step"] == 6
    assert found["summary"]["train/loss"] == float(last["train/loss"])
    assert found["summary"]["val/loss"] == result(two_runs / "good")["final_val_loss"]
    assert found["summary"]["status"] == "completed"
    assert found["summary"]["throughput/tflops_per_s"] == float(rows(two_runs / "good")[-2]["throughput/tflops_per_s"])
    recorded = result(two_runs / "good")
    assert found["summary"]["steady/tflops_per_s"] == recorded["throughput"]["tflops_per_s"]
    assert found["summary"]["seconds/first_steps"] == recorded["seconds"]["first_steps"]
    assert result(two_runs / "good")["wandb"] == str(next((two_runs / "good" / "wandb").glob("offline-run-*")))


def test_a_run_that_ended_badly_is_a_run_of_its_own_and_marked_failed(two_runs):
    good, bad = summary(two_runs / "good"), summary(two_runs / "bad")
    assert bad["run_id"] != good["run_id"]
    assert (bad["name"], bad["exit_code"]) == ("manual-dim32", 1)
    assert bad["summary"]["status"] == "diverged"
    records = map(json.loads, inspect(two_runs / "bad").splitlines())
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["run_group"], run["job_type"]) == ("a-sweep", "manual")


def test_training_goes_on_without_wandb(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train(tmp_path / "run", *OFFLINE).status == "completed"
    assert len(rows(tmp_path / "run")) == 6
    assert capsys.readouterr().out.count("warning: no Weights & Biases log") == 1


MISSING = """
import sys
from pathlib import Path

sys.modules["wandb"] = None

from fusedmlp.training.options import LoggerOptions
from fusedmlp.training.wandb_sink import WandbSink

WandbSink(LoggerOptions("offline", "fusedmlp", None, []), Path(), "name", "summary", None, {}, print)
"""


def test_where_there_is_no_log_a_summary_without_wandb_is_one_line():
    """pytest has handlers of its own, and logging prints only where there is none."""
    done = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("warning: no Weights & Biases log")


def test_training_goes_on_when_wandb_breaks_on_the_way(tmp_path, monkeypatch, capsys):
    class Broken:
        dir = str(tmp_path / "files")
        calls = 0

        def define_metric(self, *_, **__):
            pass

        def log(self, row):
            self.calls += 1
            raise ConnectionError("the service went away")

    import wandb

    broken = Broken()
    monkeypatch.setattr(wandb, "init", lambda **_: broken)
    assert train(tmp_path / "run", *OFFLINE).status == "completed"
    assert broken.calls == 1
    assert capsys.readouterr().out.count("warning: no Weights & Biases log (the service went away)") == 1


KILLING = """
import os, signal, sys
from pathlib import Path

from fusedmlp.training.options import LoggerOptions
from fusedmlp.training.wandb_sink import WandbSink


def sink(name):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    return WandbSink(LoggerOptions("offline", "fusedmlp", None, []), folder, name, "native", None, {}, print)


killed = sink("killed")
killed.write({"step": 1})
for process in Path("/proc").glob("[0-9]*"):
    try:
        command = (process / "cmdline").read_bytes().split(b"\\0")
    except OSError:
        continue
    if b"wandb-core" in command[0] and str(os.getpid()).encode() in command:
        os.kill(int(process.name), signal.SIGKILL)
while killed._run is not None:
    killed.write({"step": 2})
killed.finish({}, 0)
after = sink("after")
after.write({"step": 1})
after.finish({}, 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for the process in /proc")
def test_a_service_that_was_killed_is_another_one_for_the_next_run(tmp_path):
    """As when memory runs out. W&B itself would end the process with a traceback."""
    done = subprocess.run(
        [sys.executable, "-c", KILLING, str(tmp_path)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning: no Weights & Biases log") == 1
    assert "Traceback" not in done.stderr.partition("Weights & Biases stopped")[0]
    assert "teardown" not in done.stderr
    assert summary(tmp_path / "after")["state"] == "finished"
