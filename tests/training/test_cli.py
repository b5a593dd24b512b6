"""Messages for what Hydra refuses, and the last lines, without a process of their own."""

import io
import shlex
import sys

import hydra
import pytest
from conftest import raises
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from training.runs import CONFIGS, config

from fusedmlp.errors import UserError
from fusedmlp.training.cli import Jobs, explain, last_lines, launch, multirun_first, past_hydra
from fusedmlp.training.explain import of_config
from fusedmlp.training.failures import Ending
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.result import Result


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("impl=tritn", ("impl=tritn is unknown", "triton", "manual")),
        ("model=gtp", ("model=gtp is unknown", "gpt, mlp")),
        ("data=stdlb", ("data=stdlb is unknown", "stdlib", "synthetic")),
        ("logger=wandbb", ("logger=wandbb is unknown", "wandb")),
        ("experiment=lectures", ("experiment=lectures is unknown", "lecture", "gpt")),
        ("trainer.max_stps=3", ("trainer.max_stps: no such key", "keys of trainer: max_steps")),
        ("model.numlayers=3", ("model.numlayers: no such key", "keys of model: num_layers")),
        ("data.batchsize=3", ("data.batchsize: no such key", "keys of data: batch_size")),
        ("modle=gpt", ("modle: no such key", "keys and groups: model")),
        ("dims=3", ("dims: no such key", "keys and groups: dim")),
        ("trainer.max_steps.x=3", ("trainer.max_steps is a value", "no keys")),
        ("hydra.run.dir=null", ("hydra.run.dir", "not Optional")),
        ("word", ("cannot read the override 'word'", "KEY=VALUE")),
        ("data=text data.files=~/a.txt", ("needs quotes: 'data.files=\"~/a.txt\"'",)),
        ("data=text data.files=a[1].txt", ("needs quotes: 'data.files=\"a[1].txt\"'",)),
        ("trainer.max_steps=[3", ("cannot read the override 'trainer.max_steps=[3'",)),
    ],
)
def test_a_typo_lists_the_choices_the_closest_first(override, words):
    with pytest.raises(HydraException) as caught:
        config(*override.split())
    message = explain(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def fail(error):
    def main():
        raise error

    return main


def test_an_interval_is_no_sweep():
    (override,) = OverridesParser.create().parse_overrides(["trainer.learning_rate=interval(1,2)"])
    with pytest.raises(OmegaConfBaseException) as caught:
        OmegaConf.structured(override.value())
    assert "KEY=range(1,10)" in of_config(caught.value)


@pytest.mark.parametrize(
    ("main", "code"),
    [
        (lambda: None, 0),
        (fail(UserError("no directory")), 1),
        (fail(Interrupted(15)), 143),
        (fail(KeyboardInterrupt()), 130),
        (lambda: config("impl=nothing"), 2),
        (lambda: config("=3"), 2),
        (lambda: config("model=null"), 2),
        (lambda: OmegaConf.to_container(config("seed=${nothing}"), resolve=True), 2),
        (fail(PermissionError(13, "Permission denied", "/runs")), 1),
        (fail(OSError(28, "No space left on device")), 1),
    ],
)
def test_exit_codes(main, code, monkeypatch, capsys):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as caught:
        launch(main, Jobs())
    assert caught.value.code == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "None" not in said


def test_what_a_job_raises_passes_hydra_by(capsys):
    @past_hydra
    def job(cfg):
        raise UserError("no directory")

    def main():
        try:
            job(None)
        except Exception:
            print("Hydra tells of it too")
            raise

    with pytest.raises(SystemExit) as caught:
        launch(main, Jobs())
    assert caught.value.code == 1
    assert capsys.readouterr() == ("", "error: no directory\n")


def test_a_terminal_that_cannot_show_a_path_shows_it_otherwise(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    with pytest.raises(SystemExit) as caught:
        launch(lambda: print("run é"), Jobs())
    assert caught.value.code == 0
    assert shown.getvalue() == b"run \\xe9\n"


def test_a_bug_is_no_matter_of_hydra():
    with pytest.raises(ZeroDivisionError):
        launch(fail(ZeroDivisionError()), Jobs())


def test_a_closed_stdout_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as caught:
        launch(lambda: print("a line", flush=True), Jobs())
    assert caught.value.code == 0
    sys.stdout.close()


def test_the_name_of_another_config(capsys):
    with pytest.raises(SystemExit), hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        launch(lambda: hydra.compose("nope"), Jobs())
    assert "--config-name nope" in capsys.readouterr().err


def test_the_next_commands_call_the_program_as_it_was_called(tmp_path, monkeypatch):
    fields = {"impl": "native", "dim": 32, "group": None, "status": "completed", "overrides": [], "hint": None}
    monkeypatch.setattr(sys, "argv", ["../fusedmlp/train.py"])
    commands = [line for line in last_lines(Result(tmp_path, **fields)) if line.startswith("next")]
    assert commands
    assert all("python ../fusedmlp/train.py " in line for line in commands)


def test_the_exit_code_of_a_sweep_is_that_of_its_worst_job(tmp_path):
    jobs = Jobs()
    for ending in (Ending("completed"), Ending("failed", "reason", exit_code=1), Ending("completed")):
        jobs.ended(Result(tmp_path, impl="native", dim=32, group="g", status=ending.status, overrides=[]), ending)
    assert jobs.exit_code == 1
    assert len(jobs.table()) == 4


def test_a_job_without_a_dim_or_a_result_has_its_line_too(tmp_path):
    jobs = Jobs()
    jobs.ended(Result(tmp_path, impl="native", dim=None, group="g", status="failed", overrides=[]), Ending("failed"))
    jobs.ended_under(1)
    assert [line.split() for line in jobs.table()[1:]] == [
        ["native", "None", "failed", "-", "-", "-"], ["None", "None", "None", "-", "-", "-"],
    ]  # fmt: skip


def test_multirun_may_stand_anywhere():
    assert multirun_first(["dim=32", "-m", "impl=native,manual"]) == ["-m", "dim=32", "impl=native,manual"]


def test_an_interrupted_job_starts_no_other(tmp_path):
    with raises(Interrupted, "SIGINT"):
        Jobs().ended(
            Result(tmp_path, impl="native", dim=32, group="g", status="interrupted", overrides=[]),
            Ending("interrupted", "stopped by SIGINT", exit_code=130),
        )


def test_next_steps_keep_the_overrides_but_the_one_they_change(tmp_path):
    result = Result(
        tmp_path, status="completed", impl="native", dim=64, group=None, steps=5,
        overrides=["impl=native", "dim=64", "resume=x", "data.files=[a b.txt]"], checkpoint=tmp_path / "last.ckpt",
    )  # fmt: skip
    lines = [line for line in last_lines(result) if line.startswith("next")]
    assert "python train.py impl=compiled dim=64 'data.files=[a b.txt]'" in lines[0]
    assert "python train.py -m impl=compiled,manual,native dim=64" in lines[1] or "triton" in lines[1]
    assert f"resume={tmp_path} trainer.max_steps=10 impl=native dim=64" in lines[2]


@pytest.mark.parametrize("name", ["a b", "lr=1e-3", "é", "it's"])
def test_the_printed_command_goes_on_from_a_folder_of_any_name(tmp_path, name):
    (folder := tmp_path / name).mkdir()
    fields = {"impl": "native", "dim": 64, "group": None, "overrides": [], "checkpoint": folder / "last.ckpt"}
    line = last_lines(Result(folder, status="interrupted", **fields))[-1]
    (override,) = [word for word in shlex.split(line) if word.startswith("resume=")]
    assert config(override).resume == str(folder)


@pytest.mark.parametrize(
    ("rate", "mfu", "line"),
    [
        (412.3, 41.69, "412 TFLOP/s (41.7 % MFU), 0.5 % of the time waiting for data"),
        (0.5, None, "0.5 TFLOP/s, 0.5 % of the time waiting for data"),
        (None, None, "0.5 % of the time waiting for data"),
    ],
)
def test_the_last_lines_tell_what_is_known_of_the_speed(tmp_path, rate, mfu, line):
    speed = {"tokens_per_s": 1234.5, "step_ms_median": 2.0, "step_ms_p10": 1.5, "step_ms_p90": 2.5}
    speed |= {"tflops_per_s": rate, "mfu_percent": mfu, "data_wait_percent": 0.5}
    result = Result(
        tmp_path, status="completed", impl="native", dim=64, group="g", overrides=[], throughput=speed,
        peak_memory_gib=1.5,
    )  # fmt: skip
    lines = last_lines(result)
    assert "1,234 tokens/s, 2.00 ms/step (p10 1.50, p90 2.50), peak 1.50 GiB" in lines
    assert line in lines
