"""What Lightning does in a step of ours: how often it is called, and what was taken out of its way still holds."""

import itertools
import sys
from collections import Counter

import pytest
import torch
from lightning.pytorch import Trainer
from training.runs import curve, fits, result, rows, train

from fusedmlp.training.data import TextDataModule
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.precision import make_precision
from fusedmlp.training.task import LanguageModelTask
from fusedmlp.training.trainer import LocalTrainer

pytestmark = fits

CPU = torch.device("cpu")
STEPS = 10


@pytest.fixture
def calls(monkeypatch):
    """Calls of Lightning's functions per step, over `STEPS` steps of a run."""
    seen: Counter = Counter()
    end = Monitor.on_train_batch_end

    def count(frame, event, argument):
        if event == "call" and "lightning" in frame.f_code.co_filename:
            seen[frame.f_code.co_name] += 1

    def counted(self, trainer, task, *rest):
        end(self, trainer, task, *rest)
        if task.steps == 10:
            sys.setprofile(count)
        elif task.steps == 10 + STEPS:
            sys.setprofile(None)

    monkeypatch.setattr(Monitor, "on_train_batch_end", counted)
    yield seen
    sys.setprofile(None)


@pytest.mark.parametrize("val_every", [0, 1000])
def test_lightning_is_called_a_hundred_times_a_step_and_not_three_hundred(tmp_path, calls, val_every):
    train(tmp_path / "run", "trainer.max_steps=24", "trainer.log_every=1000", f"trainer.val_every={val_every}")
    per_step = {name: count / STEPS for name, count in calls.items()}
    assert sum(per_step.values()) < 105, sorted(per_step.items(), key=lambda item: -item[1])[:20]
    # What was seen to cost most.
    assert not per_step.keys() & {
        "is_overridden",
        "get_instance",
        "is_param_in_hook_signature",
        "state_key",
        "strategy",
    }


def test_what_is_settled_is_what_lightning_says_and_only_while_it_fits(tmp_path, monkeypatch):
    names = ("strategy", "lightning_module", "num_training_batches", "enable_validation", "lr_scheduler_configs")
    trainers, settled = [], []
    step = LanguageModelTask.micro_step

    def looking(self, batch):
        trainer = self.trainer
        trainers.append(trainer)
        settled.append({name: vars(trainer)[name] for name in names})
        assert settled[-1] == {name: getattr(Trainer, name).fget(trainer) for name in names}
        assert self.steps == trainer.global_step
        step(self, batch)

    monkeypatch.setattr(LanguageModelTask, "micro_step", looking)
    train(tmp_path / "run", "trainer.max_steps=4", "trainer.val_every=2", "trainer.accumulate=2")
    assert len(settled) == 8
    assert settled[0]["enable_validation"]
    assert not vars(trainers[0]).keys() & set(names)
    assert trainers[0].strategy is settled[0]["strategy"]


def test_it_ends_with_a_failure_too(tmp_path, monkeypatch):
    trainers = []

    def fail(self, batch):
        trainers.append(self.trainer)
        raise IndexError

    monkeypatch.setattr(LanguageModelTask, "micro_step", fail)
    assert train(tmp_path / "run").status == "failed"
    assert "strategy" not in vars(trainers[0])


def test_the_stage_of_the_trainer():
    trainer = LocalTrainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert not trainer.training
    trainer.training = True
    assert trainer.training
    trainer.validating = True
    assert not trainer.training
    assert trainer.validating


class Hooked(TextDataModule):
    """Has a say in what becomes of a batch."""

    seen: tuple[str, ...] = ()

    def _see(self, name, batch):
        if self.trainer.training:
            Hooked.seen += (name,)
        return batch

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return self._see("before", batch)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return self._see("after", batch)


def test_the_hooks_of_a_data_module_are_called_where_it_has_them(tmp_path, monkeypatch):
    train(tmp_path / "plain", "trainer.max_steps=3")
    monkeypatch.setattr(Hooked, "seen", ())
    train(tmp_path / "hooked", "trainer.max_steps=3", "trainer.val_every=2", f"data._target_={__name__}.Hooked")
    assert result(tmp_path / "hooked")["status"] == "completed"
    assert Hooked.seen == ("before", "after") * 3
    assert curve(tmp_path / "hooked") == curve(tmp_path / "plain")


class Finite(TextDataModule):
    """Has an end, which nobody can foresee."""

    def train_dataloader(self):
        return FourBatches(itertools.islice(super().train_dataloader(), 4))


class FourBatches:
    def __init__(self, batches):
        self.batches = list(batches)

    def __iter__(self):
        return iter(self.batches)


def test_data_that_end_begin_again(tmp_path):
    train(tmp_path / "run", "trainer.max_steps=6", f"data._target_={__name__}.Finite")
    assert [row["step"] for row in rows(tmp_path / "run")] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_precisions_are_lightnings(precision):
    ours = make_precision(precision, CPU)
    theirs = Trainer(
        accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).precision_plugin
    assert isinstance(ours, type(theirs))
    assert ours.precision == theirs.precision == precision
    for _ in range(2):  # the second time it is entered again, after an error
        inside = []
        for plugin in (ours, theirs):
            with pytest.raises(IndexError):
                look_and_fail(plugin, inside)
        assert inside[0] == inside[1]
        assert (torch.get_default_dtype(), torch.is_autocast_enabled("cpu")) == (torch.float32, False)


def look_and_fail(plugin, seen):
    with plugin.train_step_context():
        seen.append((torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        raise IndexError
