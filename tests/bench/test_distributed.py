"""scripts/bench_distributed.py: its runs, and what becomes of each in the record."""

import json
import os
import signal
import sys

import pytest
from scripts_by_path import script

from fusedmlp.sweep.ahead import Run

SCRIPT = script("bench_distributed")
TINY = ("trainer.accelerator=cpu", "dim=32", "model.num_layers=2", "data=synthetic", "data.num_tokens=20000",
        "data.batch_size=4", "trainer.precision=32-true")  # fmt: skip
# By trainer: what a run's process does in place of training.
PROCESSES = {
    "default": "write(100.0)",
    "ddp": "write(103.0); os.kill(os.getpid(), signal.SIGKILL)",
    "fsdp": "print('no luck'); sys.exit(3)",
    "endless": "time.sleep(600)",
}
WRITE = """
import json, os, pathlib, signal, sys, time
def write(ms, **more):
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True)
    fields = {"status": "running" if ms > 100 else "completed", "reason": None, "hint": None}
    (folder / "result.json").write_text(json.dumps(fields | {"throughput": {"step_ms_median": ms}}))
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the script with processes that only pretend to train; its exit code and the runs in its record."""

    def run_of(setting, options) -> Run:
        folder, log = options.out / setting.name, options.out / f"{setting.name}.txt"
        return Run([sys.executable, "-c", WRITE + PROCESSES[setting.trainer], str(folder)], tmp_path, log, folder)

    monkeypatch.setattr(SCRIPT, "run_of", run_of)

    def run(*arguments: str) -> tuple[int, list[dict]]:
        code = SCRIPT.main(["--out", str(tmp_path), *arguments])
        return code, json.loads((tmp_path / "record.json").read_text())["runs"]

    return run


@pytest.mark.parametrize("preload", ["0", "2"])
def test_every_run_is_a_row_whatever_becomes_of_it(bench, preload):
    code, rows = bench("--parts", "overhead", "--repeats", "2", "--preload", preload)
    assert code == 1
    assert [(row["trainer"], row["repeat"]) for row in rows] == [
        (trainer, repeat) for repeat in range(2) for trainer in ("default", "ddp", "fsdp")
    ]
    good, killed, failed = rows[:3]
    assert (good["status"], good["exit_code"], good["step_ms_median"]) == ("completed", 0, 100.0)
    assert (killed["status"], killed["reason"]) == ("failed", "killed by signal 9 (SIGKILL)")
    assert (failed["status"], failed["reason"]) == ("failed", "exit code 3: no luck")
    assert "cost_percent" not in killed, "a run that failed compares with nothing"


def test_a_run_that_takes_too_long_is_a_row_and_the_next_one_comes(bench):
    code, rows = bench("--parts", "overhead", "--repeats", "1", "--trainers", "endless,fsdp", "--timeout", "1")
    assert code == 1
    assert [row["status"] for row in rows] == ["completed", "timed out", "failed"]
    assert rows[1]["reason"] == "time limit: --timeout=1 s"


def test_ctrl_c_ends_the_run_and_keeps_the_record(bench, monkeypatch):
    real = SCRIPT.Ahead.follow

    def follow(ahead, timeout_s):
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        seen.append(timeout_s)
        return real(ahead, timeout_s)

    seen: list[float] = []
    monkeypatch.setattr(SCRIPT.Ahead, "follow", follow)
    code, rows = bench("--parts", "overhead", "--trainers", "endless")
    assert code == 128 + signal.SIGINT
    assert [(row["trainer"], row["status"]) for row in rows] == [("default", "completed"), ("endless", "interrupted")]


def test_a_run_on_several_gpus_is_a_process_for_each(tmp_path):
    options = SCRIPT.parse(["--out", str(tmp_path), "--parts", "scaling,overhead", "--repeats", "1", "dim=64"])
    runs = [SCRIPT.run_of(setting, options) for setting in SCRIPT.plan(options)]
    assert [run.ranks for run in runs] == [1, 1, 1, 1, 2, 1, 2]
    assert all(f"trainer.devices={run.ranks}" in run.command and run.command[-1] == "dim=64" for run in runs)
    assert ["profile=torch" in run.command for run in runs] == [False] * 3 + [True] * 4


@pytest.mark.slow
def test_train_py_as_ranks_that_the_script_started(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = ("--parts", "scaling", "--trainers", "ddp", "--devices", "2", "--experiment", "lecture", "--steps", "20")
    assert SCRIPT.main(["--out", str(tmp_path), *words, *TINY]) == 0
    (row,) = json.loads((tmp_path / "record.json").read_text())["runs"]
    assert row["tokens_per_s"] > 0
    folder = tmp_path / "scaling-ddp-2-native-0"
    assert json.loads((folder / "result.json").read_text())["ranks"]["devices"] == 2
    assert sorted(file.name for file in folder.iterdir()) == sorted(SCRIPT.KEPT)


@pytest.mark.parametrize("words", ["--preload -1", "--repeats 0", "--steps 6", "--parts nope"])
def test_arguments_that_measure_nothing_are_refused(capsys, words):
    arguments = ["--out", "nowhere", *(() if "--parts" in words else ("--parts", "scaling")), *words.split()]
    with pytest.raises(SystemExit) as ended:
        SCRIPT.parse(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words.split()[1] in said
    assert "accepted: " in said
