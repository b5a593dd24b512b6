"""The speed that a run reports, in a time set by hand: what is not a step does not change it."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from training.runs import fits, result, rows, train

from fusedmlp.models import MLPLanguageModel
from fusedmlp.training import data_windows, environment, step
from fusedmlp.training.checkpoint import Checkpoints
from fusedmlp.training.data import TextDataModule
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.optim import learning_rate
from fusedmlp.training.task import LanguageModelTask
from fusedmlp.training.throughput import HostEvent

pytestmark = fits

# A batch of 8 takes 2 ms to fetch and 8 ms to train on.
FETCH_MS, TRAIN_MS = 0.25, 1.0
STEADY = {
    "step_ms_median": 10.0,
    "step_ms_p10": 10.0,
    "step_ms_p90": 10.0,
    "samples_per_s": 800.0,
    "tokens_per_s": 800.0,
    "data_wait_percent": 20.0,
    "tflops_per_s": 800 * 6 * (2 * 32**2 + 32 * 256) / 1e12,
}
ROW = {
    "time/step_ms": 10.0,
    "time/data_wait_percent": 20.0,
    "throughput/samples_per_s": 800.0,
    "throughput/tokens_per_s": 800.0,
    "throughput/tflops_per_s": STEADY["tflops_per_s"],
}


@pytest.fixture
def now(monkeypatch):
    """The time of the marks, in ms: batches and micro-batches take theirs, validation and checkpoints an hour each."""
    now = [0.0]

    def takes(owner, name, ms, condition=lambda *_: True):
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            done = function(*args, **kwargs)
            now[0] += ms(*args) if condition(*args) else 0.0
            return done

        monkeypatch.setattr(owner, name, timed)

    hour = lambda *_: 3.6e6  # noqa: E731 - a duration like the others
    monkeypatch.setattr(HostEvent, "record", lambda self: setattr(self, "_time", now[0] / 1e3))
    takes(data_windows, "gather", lambda windows, starts: FETCH_MS * len(starts))
    takes(LanguageModelTask, "micro_step", lambda self, batch: TRAIN_MS * len(batch[0]))
    takes(LanguageModelTask, "validation_step", hour)
    takes(Checkpoints, "on_save_checkpoint", hour)
    takes(Checkpoints, "on_load_checkpoint", hour)
    takes(Monitor, "settle", hour)
    return now


def assert_steady(folder, first_step: int = 1):
    """Rows from `first_step` on, and the result, are those of steps of 8 + 2 ms."""
    found = result(folder)["throughput"]
    assert {name: found[name] for name in STEADY} == pytest.approx(STEADY)
    for row in rows(folder):
        if row["train/loss"] and int(row["step"]) >= first_step:
            assert {name: float(row[name]) for name in ROW} == pytest.approx(ROW), row


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_accumulation_changes_nothing(tmp_path, now, accumulate):
    settings = ("trainer.max_steps=8", "trainer.log_every=2", "trainer.checkpoint=false")
    train(tmp_path / "run", *settings, f"trainer.accumulate={accumulate}", f"data.batch_size={8 // accumulate}")
    assert_steady(tmp_path / "run")


def test_a_step_of_three_micro_batches_takes_three_times_as_long(tmp_path, now):
    train(tmp_path / "run", "trainer.accumulate=3", "trainer.log_every=2")
    found = result(tmp_path / "run")["throughput"]
    assert {name: found[name] for name in STEADY} == pytest.approx(
        STEADY | {"step_ms_median": 30.0, "step_ms_p10": 30.0, "step_ms_p90": 30.0}
    )


class Foreign(TextDataModule):
    """Loads its batches with PyTorch's DataLoader, which knows of no clock, and has an end."""

    def train_dataloader(self):
        return DataLoader(FourBatches(super().train_dataloader()), batch_size=None)


class FourBatches(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return itertools.islice(self.batches, 4)


def test_the_wait_for_a_loader_of_the_users_own(tmp_path, now):
    settings = ("trainer.max_steps=12", "trainer.log_every=2", "trainer.accumulate=2", "data.batch_size=4")
    train(tmp_path / "run", *settings, f"data._target_={__name__}.Foreign")
    assert_steady(tmp_path / "run")


@pytest.mark.parametrize("checkpoint", ["true", "false"])
def test_validation_and_checkpoints_belong_to_no_step(tmp_path, now, checkpoint):
    train(
        tmp_path / "run", "trainer.max_steps=12", "trainer.log_every=4", "trainer.val_every=3",
        "trainer.checkpoint_every=5", f"trainer.checkpoint={checkpoint}",
    )  # fmt: skip
    assert now[0] > 3.6e6
    assert_steady(tmp_path / "run")


def test_the_first_interval_after_a_resume_is_as_fast_as_the_others(tmp_path, now):
    settings = ("trainer.log_every=3", "trainer.val_every=2", "trainer.accumulate=2", "data.batch_size=4")
    train(tmp_path / "first", *settings, "trainer.max_steps=4")
    train(tmp_path / "second", *settings, "trainer.max_steps=10", f"resume={tmp_path / 'first'}")
    assert_steady(tmp_path / "second")


def test_a_second_fit_in_the_process(tmp_path, now):
    for name in ("one", "two"):
        train(tmp_path / name, "trainer.max_steps=8", "trainer.log_every=2")
        now[0] += 3.6e6
    one, two = (result(tmp_path / name) for name in ("one", "two"))
    assert one["throughput"] == pytest.approx(two["throughput"])
    assert one["seconds"]["import"] == two["seconds"]["import"], "the process has started once"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system has no peak that can be reset")
@pytest.mark.parametrize("steps", [1, 2])
def test_one_step_has_no_steady_window_and_that_is_said(tmp_path, now, capsys, steps):
    train(tmp_path / "run", f"trainer.max_steps={steps}")
    assert (result(tmp_path / "run")["throughput"] is None) == (steps == 1)
    assert capsys.readouterr().out.count("warning: throughput is left out") == (steps == 1)


def test_the_peak_memory_of_a_run_is_not_that_of_what_was_before_it(tmp_path):
    filled = torch.ones(2**27)  # 0.5 GiB
    before = environment.peak_memory_gib(filled.device)
    del filled
    train(tmp_path / "run", "trainer.max_steps=2")
    found = result(tmp_path / "run")["peak_memory_gib"]
    assert float(rows(tmp_path / "run")[-1]["memory/peak_gib"]) <= found < before - 0.25


def test_seconds_apart(tmp_path, now, monkeypatch):
    """The first step compiles for 5 s."""
    step = LanguageModelTask.micro_step

    def compiling(self, batch):
        step(self, batch)
        now[0] += 5000.0 if self.trainer.global_step == 1 else 0.0

    monkeypatch.setattr(LanguageModelTask, "micro_step", compiling)
    train(tmp_path / "run", "trainer.max_steps=11")
    assert_steady(tmp_path / "run", first_step=2)
    seconds = result(tmp_path / "run")["seconds"]
    assert list(seconds) == ["import", "data", "setup", "first_steps", "warmup", "train", "total"]
    # Two steps of warm-up at 10 ms, and what the first took beyond that.
    assert (seconds["warmup"], seconds["first_steps"]) == pytest.approx((0.02, 5.0))


def test_mfu_on_a_card_that_is_known(tmp_path, now, monkeypatch, capsys):
    pretend_gpu(monkeypatch, "NVIDIA L4")
    train(tmp_path / "run", "trainer.precision=bf16-mixed", "trainer.max_steps=4")
    found = result(tmp_path / "run")["throughput"]
    assert (found["peak_tflops"], found["peak_source"]) == (121, "table")
    assert found["mfu_percent"] == pytest.approx(100 * found["tflops_per_s"] / 121)
    assert float(rows(tmp_path / "run")[-1]["throughput/mfu_percent"]) == pytest.approx(found["mfu_percent"])
    out = capsys.readouterr().out
    assert "% MFU)" in out
    assert "warning" not in out


@pytest.mark.parametrize(("share", "peak"), [("convolution_share", 60), ("half_share", 121), ("fp8_share", 242.5)])
def test_mfu_of_what_an_fp32_run_computes_in_another_type(tmp_path, now, monkeypatch, share, peak):
    monkeypatch.setattr(MLPLanguageModel, share, 1.0, raising=False)
    pretend_gpu(monkeypatch, "NVIDIA L4")
    train(tmp_path / "run", "trainer.precision=32-true", "trainer.max_steps=4")
    assert result(tmp_path / "run")["throughput"]["peak_tflops"] == peak


def test_mfu_of_a_part_of_a_card_is_missing(tmp_path, monkeypatch, capsys):
    pretend_gpu(monkeypatch, "AMD Instinct MI300X", gpu_multiprocessors=38)
    train(tmp_path / "run")
    assert "no peak rate is known of AMD Instinct MI300X" in capsys.readouterr().out
    assert result(tmp_path / "run")["throughput"]["mfu_percent"] is None


def test_mfu_of_an_unknown_card_is_missing_and_said_once(tmp_path, monkeypatch, capsys):
    pretend_gpu(monkeypatch, "NVIDIA L9")
    train(tmp_path / "run")
    assert capsys.readouterr().out.count("no peak rate is known of NVIDIA L9") == 1
    found = result(tmp_path / "run")["throughput"]
    assert (found["mfu_percent"], found["peak_tflops"], found["peak_source"]) == (None, None, None)
    assert found["tflops_per_s"] > 0
    assert all(row["throughput/mfu_percent"] == "" for row in rows(tmp_path / "run"))


def test_mfu_on_a_cpu_is_missing_without_a_word_unless_the_config_has_a_peak(tmp_path, capsys):
    train(tmp_path / "run")
    assert result(tmp_path / "run")["throughput"]["mfu_percent"] is None
    assert "warning" not in capsys.readouterr().out
    train(tmp_path / "given", "trainer.peak_tflops=0.5")
    found = result(tmp_path / "given")["throughput"]
    assert (found["peak_tflops"], found["peak_source"]) == (0.5, "config")
    assert found["mfu_percent"] == pytest.approx(100 * found["tflops_per_s"] / 0.5)
    assert "warning" not in capsys.readouterr().out


def test_a_peak_that_the_device_exceeds_is_said_to_be_none(tmp_path, capsys):
    train(tmp_path / "run", "trainer.peak_tflops=1e-9")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "% MFU: the device has done more than 1e-09 TFLOP/s" in line
    assert "trainer.peak_tflops" in line


@pytest.mark.parametrize(("accumulate", "fails_at"), [(1, 7), (2, 13), (2, 14), (4, 28)])
def test_a_run_that_breaks_off_between_two_log_points(tmp_path, now, monkeypatch, accumulate, fails_at):
    """In its step 7: the six before are in a row, at their speed, whatever was done of that step."""
    calls, loss = [], step.next_token_loss

    def failing(logits, targets):
        calls.append(targets)
        if len(calls) == fails_at:
            raise MemoryError
        return loss(logits, targets)

    monkeypatch.setattr(step, "next_token_loss", failing)
    settings = (f"trainer.accumulate={accumulate}", f"data.batch_size={8 // accumulate}", "trainer.checkpoint=false")
    assert train(tmp_path / "run", "trainer.max_steps=50", "trainer.log_every=50", *settings).status == "failed"
    (row,) = rows(tmp_path / "run")
    # The seventh's learning rate is another one.
    last = learning_rate(5, SimpleNamespace(learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=2, max_steps=50))
    assert (row["step"], row["lr"]) == ("6", str(last))
    assert_steady(tmp_path / "run")
    assert result(tmp_path / "run")["final_train_loss"] > 0


def test_a_model_that_does_not_count_its_flops(tmp_path, monkeypatch):
    monkeypatch.delattr(MLPLanguageModel, "flops_per_sample")
    assert train(tmp_path / "run", "trainer.peak_tflops=1").status == "completed"
    found = result(tmp_path / "run")["throughput"]
    assert (found["flops_per_sample"], found["tflops_per_s"], found["mfu_percent"]) == (None, None, None)
    assert all(row["throughput/tflops_per_s"] == "" for row in rows(tmp_path / "run"))


@pytest.mark.parametrize("told", [lambda self: None, lambda self: 0, lambda self: float("nan"), lambda self, b: 1, "?"])
def test_a_model_whose_flops_cannot_be_counted_is_said_once(tmp_path, monkeypatch, capsys, told):
    monkeypatch.setattr(MLPLanguageModel, "flops_per_sample", told)
    assert train(tmp_path / "run", "trainer.peak_tflops=1").status == "completed"
    assert capsys.readouterr().out.count("warning: the FLOPs of MLPLanguageModel cannot be counted") == 1
    found = result(tmp_path / "run")["throughput"]
    assert (found["flops_per_sample"], found["tflops_per_s"], found["mfu_percent"]) == (None, None, None)


@pytest.mark.parametrize("told", [777, lambda self: torch.tensor(777), lambda self: 777.0])
def test_a_model_may_tell_its_flops_as_any_number(tmp_path, monkeypatch, told):
    monkeypatch.setattr(MLPLanguageModel, "flops_per_sample", told)
    assert train(tmp_path / "run").status == "completed"
    assert result(tmp_path / "run")["throughput"]["flops_per_sample"] == 777


def pretend_gpu(monkeypatch, name: str, **facts):
    describe = environment.describe
    monkeypatch.setattr(environment, "describe", lambda device: describe(device) | {"gpu": name} | facts)
    assert describe(torch.device("cpu"))["gpu"] is None
