"""How runs of two ranks end when one of them dies, fails or is asked to stop: with its reason, and nobody left."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import ROOT, python_path
from training.distributed.pair import ACCELERATOR, ON_GPUS

TINY = (
    "dim=32", "model.num_layers=2", "data=synthetic", "data.num_tokens=20000", "data.batch_size=8", "logger=none",
    "trainer.warmup_steps=2", "trainer.log_every=1", "trainer.val_every=0", ACCELERATOR,
    "trainer.devices=2", "trainer.rank_timeout=60", "impl=native",
)  # fmt: skip
DYING = "model: {_target_: training.distributed.dying.Dying, how: %s, rank: %d}\ntrainer: {max_steps: 6}"
EXPERIMENTS = {
    "second_killed": DYING % ("killed", 1),
    "second_raises": DYING % ("raises", 1),
    "first_killed": DYING % ("killed", 0),
    "first_stuck": DYING % ("stuck", 1),
    "first_stopped": DYING % ("stopped", 1),
}


@pytest.fixture
def start(tmp_path):
    """Starts train.py in an empty directory; afterwards no process that it started is there."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name, text in EXPERIMENTS.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    mark = f"FUSEDMLP_TEST={tmp_path}"
    environment = os.environ | {
        "FUSEDMLP_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(ROOT / "tests"), "FUSEDMLP_TEST": str(tmp_path),
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    if not ON_GPUS:
        environment["CUDA_VISIBLE_DEVICES"] = ""

    def begin(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), "--config-dir", "conf", *arguments, *TINY], cwd=tmp_path,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    yield begin
    left = marked(mark)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "processes are left"


def marked(mark: str) -> list[int]:
    """The processes with this in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def finish(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=240)[0]
    finally:
        process.kill()


@pytest.mark.slow
def test_a_rank_that_dies_ends_its_job_and_not_the_sweep(start, tmp_path):
    process = start("-m", f"experiment={','.join(EXPERIMENTS)}", "trainer=ddp", "hydra.sweep.dir=sweep")
    out = finish(process)
    assert process.returncode == 1, out
    rows = {row["overrides"][0].removeprefix("experiment="): row
            for row in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]}  # fmt: skip
    endings = {name: (row["status"], row["reason"]) for name, row in rows.items()}
    assert endings == {
        "second_killed": ("failed", "rank 1 was killed by signal 9 (SIGKILL)"),
        "second_raises": ("failed", "rank 1: RuntimeError: a bug of the user's"),
        "first_killed": ("failed", "rank 0 was killed by signal 9 (SIGKILL)"),
        "first_stuck": ("failed", "rank 1: RuntimeError: a bug of the user's"),
        "first_stopped": ("failed", "rank 1: RuntimeError: a bug of the user's"),
    }, out
    assert out.count("hint: the machine may have run out of memory") == 2, "whichever rank was killed"
    told = "failed: rank 1: RuntimeError: a bug of the user's"
    assert re.search(rf"first_stopped\S*\] {told}$", out, re.MULTILINE), "though it was asked to stop meanwhile"
    for name, row in rows.items():
        folder = tmp_path / "sweep" / row["folder"]
        found = json.loads((folder / "result.json").read_text())
        assert (found["status"], found["reason"]) == endings[name]
        assert row["seconds"] < 60, "nobody waits for a rank that is no more"
    for name in ("second_raises", "first_stuck"):
        log = (tmp_path / "sweep" / rows[name]["folder"] / "train.log").read_text()
        assert "dying.py" in log, "the traceback of the rank that failed"
    assert len(list((tmp_path / "sweep").glob("*/result.json"))) == len(EXPERIMENTS), "one of each job"


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_after_the_same_step(start, tmp_path):
    process = start("trainer=fsdp", "trainer.max_steps=1000000", "trainer.log_every=20", "hydra.run.dir=run")
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step"):
            break
    # As a terminal does: to every process of the group, and train.py hands it on besides.
    os.killpg(process.pid, signal.SIGINT)
    out = "".join(lines) + finish(process)
    assert process.returncode == 130, out
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (found["status"], found["reason"]) == ("interrupted", "stopped by SIGINT"), out
    assert Path(tmp_path / found["checkpoint"]).exists()
    assert re.search(r"next +python \S*train\.py resume=\S*run\b", out), out
    assert "Traceback" not in out
