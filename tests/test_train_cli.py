"""train.py as a user runs it: one process per test, so there are few of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = (
    "dim=32", "model.num_layers=2", "data.batch_size=8", "data.val_batches=2", "trainer.warmup_steps=2",
    "trainer.log_every=1", "logger=none", "trainer.accelerator=cpu",
)  # fmt: skip
SYNTHETIC = ("data=synthetic", "data.num_tokens=20000")


@pytest.fixture
def command(tmp_path):
    """Starts train.py in an empty directory, with its cache there too and no GPU, where impl=cuda cannot run."""
    environment = os.environ | {"FUSEDMLP_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *arguments], cwd=tmp_path, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    return start


@pytest.fixture
def train(command):
    """Runs train.py to its end: exit code, stdout, stderr; neither output ever holds a traceback."""

    def run(*arguments: str) -> tuple[int, str, str]:
        process = command(*arguments)
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
        assert "Traceback" not in out + err, out + err
        return process.returncode, out, err

    return run


def results(folder: Path) -> dict[str, dict]:
    """result.json of every run below profiles/runs/, by the name of its directory."""
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("profiles/runs/**/result.json")}


def losses(path: Path) -> list[float]:
    header, *lines = path.read_text().splitlines()
    column = header.split(",").index("train/loss")
    return [float(value) for line in lines if (value := line.split(",")[column])]


def test_gpt_on_the_users_text(train, tmp_path):
    """Also: what the last lines say can be found where they say it is."""
    code, out, err = train(
        *TINY, "model=gpt", "model.num_heads=2", "data=text", f"data.files={ROOT / 'LICENSE'}",
        "trainer.max_steps=20", "trainer.log_every=5", "trainer.precision=bf16-mixed",
    )  # fmt: skip
    assert code == 0, err
    ((name, found),) = results(tmp_path).items()
    assert re.fullmatch(r"\d\d-\d\d-\d\d-auto-dim32", name)
    assert (found["status"], found["model"], found["steps"]) == ("completed", "GPT", 20)
    assert found["command"].startswith("python ")
    assert found["seconds"]["import"] > 0.5
    assert len(re.findall(r"^step .*loss .*tokens/s .*left .*ms/step", out, flags=re.M)) == 4
    assert re.search(rf"validation loss {found['final_val_loss']:.3f} .* {found['data']['unigram_loss']:.3f}", out)
    for label in ("run", "metrics", "result", "log", "checkpoint"):
        (place,) = re.findall(rf"^ *{label} +(\S+)$", out, flags=re.M)
        assert (tmp_path / place).exists()
    assert re.search(r"^next +python \S*train.py impl=compiled dim=32 .*model=gpt", out, flags=re.M)


@pytest.mark.slow
def test_a_sweep_in_one_process_trains_every_impl_to_the_same_loss_and_survives_a_job_that_cannot_run(train, tmp_path):
    code, out, _ = train(
        "-m", "hydra/launcher=basic", "impl=manual,native,compiled,cuda", "dim=32,48", *TINY[1:], *SYNTHETIC,
        "logger.mode=offline", "trainer.max_steps=20",
    )  # fmt: skip
    assert code == 1, "a job failed"
    found = results(tmp_path)
    names = [f"{number}-{impl}-dim{dim}" for number, (impl, dim) in enumerate(
        (impl, dim) for impl in ("manual", "native", "compiled", "cuda") for dim in (32, 48)
    )]  # fmt: skip
    assert sorted(found) == names
    (sweep,) = tmp_path.glob("profiles/runs/*/*-sweep")
    for name in names:
        assert found[name]["group"] == f"{sweep.parent.name}-{sweep.name}"
        if "cuda" in name:
            assert found[name]["status"] == "failed"
            assert "impl=cuda cannot run here" in found[name]["reason"]
        else:
            assert found[name]["status"] == "completed"
    for dim in (32, 48):
        curves = [losses(path) for path in sorted(sweep.glob(f"*-dim{dim}/metrics.csv")) if "cuda" not in str(path)]
        assert [len(curve) for curve in curves] == [20, 20, 20]
        for curve in curves[1:]:
            assert curve == pytest.approx(curves[0], rel=1e-4)
    assert len(list(sweep.glob("*/wandb/offline-run-*"))) == 8, "one W&B run per job, failed ones too"
    assert re.search(r"^native +48 completed +[\d,]+ ", out, flags=re.M)
    assert re.search(r"^cuda +32 failed ", out, flags=re.M)


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("trainer.max_stps=3", 2, "error: trainer.max_stps: no such key; keys of trainer: max_steps, "),
        (
            f"hydra.run.dir={ROOT / 'LICENSE' / 'run'}",
            1,
            f"error: the run's directory cannot be made: {ROOT}/LICENSE/run: "
            "Not a directory; choose another with hydra.run.dir=DIR",
        ),
    ],
)
def test_what_cannot_start_is_one_line_on_stderr(train, tmp_path, override, code, words):
    exit_code, out, err = train(override)
    assert (exit_code, out) == (code, "")
    assert err.startswith(words)
    assert err.count("\n") == 1
    assert not results(tmp_path)


def interrupted_at(process: subprocess.Popen, step: int, *signals: int) -> tuple[str, str]:
    """Sends the signals to the whole process group, as a terminal does, once this step was shown."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(f"step {step:>6}/100000"):
            break
    for number in signals:
        os.killpg(process.pid, number)
        time.sleep(0.2)
    out, err = process.communicate(timeout=120)
    return "".join(lines) + out, err


def test_ctrl_c_leaves_a_checkpoint_and_the_printed_command_goes_on(command, train, tmp_path):
    settings = (*TINY, *SYNTHETIC, "trainer.max_steps=100000", "logger.mode=offline")
    process = command(*settings)
    out, err = interrupted_at(process, 3, signal.SIGINT)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    ((_, found),) = results(tmp_path).items()
    assert found["status"] == "interrupted"
    assert Path(found["checkpoint"]).exists()
    assert found["steps"] >= 3
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", found["wandb"]]
    assert json.loads(subprocess.run(inspect, capture_output=True, check=True).stdout)["exit_code"] == 130
    (again,) = re.findall(r"^next +python \S*train.py (.*)$", out, flags=re.M)
    code, out, err = train(*again.split(), f"trainer.max_steps={found['steps'] + 2}")
    assert code == 0, out + err
    assert f"step {found['steps'] + 1}/" in out


def test_sigterm_is_143(command, tmp_path):
    process = command(*TINY, *SYNTHETIC, "trainer.max_steps=100000")
    out, err = interrupted_at(process, 2, signal.SIGTERM)
    assert process.returncode == 143
    assert "Traceback" not in out + err
    ((_, found),) = results(tmp_path).items()
    assert (found["status"], found["reason"]) == ("interrupted", "stopped by SIGTERM")


def test_a_reader_that_leaves_is_no_error_of_ours(command):
    with command("--help") as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
