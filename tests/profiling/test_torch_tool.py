"""profile=torch on a CPU, from the config to what is said about the trace."""

import csv
import itertools
import json

import pytest
import torch
from training.runs import fits, result, train

from fusedmlp.profiling import torch_tool, trace
from fusedmlp.profiling.__main__ import main
from fusedmlp.training.checkpoint import Checkpoints

pytestmark = fits

WINDOW = ("profile=torch", "profile.wait=1", "profile.warmup=1", "profile.active=3")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced") / "run"
    assert train(folder, *WINDOW, "dim=64", "data.batch_size=256").status == "completed"
    return folder


def test_the_trace_holds_the_window_and_its_ranges(run):
    found = trace.read(run / "trace.json.gz")
    assert found.ranges.names.count("step") == 3
    for name in ("data", "forward", "backward", "optimizer", "block layers.0", "block layers.1 backward"):
        assert found.ranges.names.count(name) == 3, name
    assert len(found.gpu) == 0
    assert "aten::addmm" in found.ops.names


def test_the_result_says_what_the_trace_says(run, capsys):
    saved = result(run)["trace"]
    assert (saved["tool"], saved["recorded_steps"], saved["steps"], saved["bound"]) == ("torch", 3, 3, "CPU")
    assert saved["sentence"].startswith("CPU only: this trace holds no GPU activity")
    phases = [saved["ranges"][name]["cpu_ms"] for name in ("data", "forward", "backward", "optimizer")]
    assert all(ms > 0 for ms in phases)
    assert sum(phases) < saved["cpu_step_ms"]
    blocks = sum(saved["ranges"][f"block layers.{i}"]["cpu_ms"] for i in (0, 1))
    assert 0 < blocks < saved["ranges"]["forward"]["cpu_ms"]
    backward = sum(saved["ranges"][f"block layers.{i} backward"]["cpu_ms"] for i in (0, 1))
    assert 0 < backward < saved["ranges"]["backward"]["cpu_ms"]
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(saved["sentence"])


def test_the_operations_are_in_a_table(run):
    with open(run / "kernels.csv", newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    # Two layers and the head, forward; each has two products in its backward pass.
    assert float(rows["aten::addmm"]["count_per_step"]) == 3
    assert float(rows["aten::mm"]["count_per_step"]) == 6
    assert float(rows["aten::gelu"]["count_per_step"]) == 2


def test_a_cut_and_a_picture_of_it(run, tmp_path, capsys):
    assert main(["cut", str(run), str(tmp_path / "cut.json.gz"), "--steps", "2"]) == 0
    assert main([str(tmp_path / "cut.json.gz"), "--json"]) == 0
    said = capsys.readouterr().out
    assert json.loads(said[said.index("{") :])["steps"] == 2
    assert main(["picture", str(run), str(tmp_path / "cpu.png")]) == 0
    assert main(["compare", str(run), str(tmp_path / "cut.json.gz")]) == 0


@pytest.mark.parametrize("name", ["compiled", "native"])
def test_profiling_changes_no_result(tmp_path, name):
    train(tmp_path / "with", *WINDOW, f"impl={name}", "trainer.accumulate=2")
    train(tmp_path / "without", f"impl={name}", "trainer.accumulate=2")
    with_it, without = result(tmp_path / "with"), result(tmp_path / "without")
    assert with_it["trace"]["steps"] == 3
    assert with_it["final_train_loss"] == without["final_train_loss"]


def test_a_run_that_breaks_in_the_window_leaves_what_was_recorded(tmp_path, monkeypatch):
    from fusedmlp.training.step import TrainStep

    update, updates = TrainStep._update, itertools.count()

    def broken(self):
        if next(updates) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        update(self)

    monkeypatch.setattr(TrainStep, "_update", broken)
    assert train(tmp_path / "run", *WINDOW).status == "failed"
    saved = result(tmp_path / "run")["trace"]
    assert saved["recorded_steps"] == 2
    assert (tmp_path / "run" / "trace.json.gz").exists()
    assert not list((tmp_path / "run").glob("*partial*"))


def test_what_a_run_does_as_it_is_stopped_is_not_taken_for_a_step(tmp_path, monkeypatch):
    end = Checkpoints.on_train_batch_end

    def asked(self, trainer, module, *rest):
        # Between the window's opening and its first step, where the checkpoint is written then.
        if trainer.global_step == 2:
            self.peers.stop.received = 15
        end(self, trainer, module, *rest)

    monkeypatch.setattr(Checkpoints, "on_train_batch_end", asked)
    assert train(tmp_path / "run", *WINDOW).status == "interrupted"
    saved = result(tmp_path / "run")["trace"]
    assert saved["recorded_steps"] == 0
    assert saved["reason"] == "the run ended before the window's first step did"
    assert "sentence" not in saved


def test_a_trace_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    assert train(tmp_path / "run", *WINDOW).status == "completed"
    assert "No space left" in result(tmp_path / "run")["trace"]["reason"]


def test_the_trace_goes_to_wandb_when_asked(tmp_path, monkeypatch):
    from fusedmlp.training.wandb_sink import WandbSink

    kept, summary = [], {}
    monkeypatch.setattr(WandbSink, "attach", lambda self, file: kept.append(file.name))
    monkeypatch.setattr(WandbSink, "finish", lambda self, values, code: summary.update(values))
    train(tmp_path / "a", *WINDOW)
    assert kept == []
    train(tmp_path / "b", *WINDOW, "profile.artifact=true")
    assert kept == ["trace.json.gz", "kernels.csv"]
    assert summary["trace/bound"] == "CPU"


@pytest.mark.parametrize("broken", ["start", "step", None])
def test_a_profiler_that_breaks_is_not_stopped(tmp_path, monkeypatch, broken):
    """One that has not started takes the process down when it is stopped."""
    stopped = []

    class Profile:
        def __init__(self, **_):
            pass

        def start(self):
            self._break("start")

        def step(self):
            self._break("step")

        def stop(self):
            stopped.append(self)

        def _break(self, name):
            if name == broken:
                raise RuntimeError("no CUPTI")

    monkeypatch.setattr(torch_tool, "profile", Profile)
    assert train(tmp_path / "run", *WINDOW).status == "completed"
    assert len(stopped) == (broken is None)
