"""Rows that follow one another closely, as a GPU's do, are written several at a time."""

import csv
import errno
import re
import signal

import pytest
from training.runs import curve, fits, result, rows, train
from training.test_run import poison_loss

from fusedmlp.training import monitor
from fusedmlp.training.checkpoint import Checkpoints
from fusedmlp.training.csv_sink import CsvSink
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.peers import Peers
from fusedmlp.training.task import LanguageModelTask

pytestmark = fits


@pytest.fixture
def written(monkeypatch):
    """Step at which a row was written -> steps of those rows, in a run that batches as on a GPU."""
    seen: dict[int, list[int]] = {}
    start, write, now = Monitor.on_train_start, CsvSink.write, []

    def batched(self, trainer, task):
        start(self, trainer, task)
        self._batch_rows = monitor.BATCH
        now.append(task)

    def noted(self, row):
        seen.setdefault(now[-1].steps, []).append(row["step"])
        write(self, row)

    monkeypatch.setattr(Monitor, "on_train_start", batched)
    monkeypatch.setattr(CsvSink, "write", noted)
    monkeypatch.setattr(monitor, "BATCH", 8)
    monkeypatch.setattr(monitor, "BATCH_S", 1e9)
    return seen


def test_eight_at_a_time_and_the_rest_at_the_end(tmp_path, written):
    train(tmp_path / "run", "trainer.max_steps=20")
    assert written == {8: [*range(1, 9)], 16: [*range(9, 17)], 20: [17, 18, 19, 20]}
    assert list(curve(tmp_path / "run")) == [*range(1, 21)]
    # Each has the speed of its own step.
    assert len({row["time/step_ms"] for row in rows(tmp_path / "run")}) > 10


def test_a_row_does_not_wait_longer_than_a_moment(tmp_path, written, monkeypatch):
    monkeypatch.setattr(monitor, "BATCH_S", 0.0)
    train(tmp_path / "run", "trainer.max_steps=6", "trainer.log_every=3")
    assert written == {3: [3], 6: [6]}


@pytest.mark.parametrize("every", ["trainer.checkpoint_every=3", "trainer.val_every=3"])
def test_rows_do_not_wait_for_a_checkpoint_or_validation(tmp_path, written, every):
    train(tmp_path / "run", "trainer.max_steps=5", every)
    assert written[3][:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("owner", "name", "settings"),
    [
        (Checkpoints, "on_save_checkpoint", ("trainer.checkpoint_every=3", "trainer.max_steps=4")),
        (LanguageModelTask, "validation_step", ("trainer.val_every=3", "trainer.max_steps=4")),
    ],
)
def test_rows_are_in_the_file_before_a_checkpoint_or_validation(tmp_path, written, monkeypatch, owner, name, settings):
    """Which may take long, and be killed."""
    found, work = [], getattr(owner, name)

    def looking(*arguments):
        found.append([int(row["step"]) for row in rows(tmp_path / "run") if row["train/loss"]])
        return work(*arguments)

    monkeypatch.setattr(owner, name, looking)
    train(tmp_path / "run", *settings)
    assert (found[0], found[-1]) == ([1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("lost", [False, True], ids=["alone", "a-rank-is-missing"])
def test_a_loss_that_was_nan_stops_the_run_with_its_batch(tmp_path, written, monkeypatch, lost):
    poison_loss(monkeypatch, micro_batch=3)
    # As on several ranks, of which one that diverges says so before it finishes.
    monkeypatch.setattr(Peers, "lost", lost)
    ending = train(tmp_path / "run", "trainer.max_steps=20", "trainer.checkpoint=false")
    assert "at step 3" in ending.reason
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == [*range(1, 9)]


def test_a_full_disk_keeps_no_row_of_its_batch_from_the_others(tmp_path, written, monkeypatch, capsys):
    def full(self, row):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.csv")

    monkeypatch.setattr(CsvSink, "write", full)
    ending = train(tmp_path / "run", "trainer.max_steps=20")
    assert ending.reason == "No space left on device: metrics.csv"
    assert re.findall(r"step +(\d+)/20", capsys.readouterr().out) == [str(step) for step in range(1, 9)]
    assert result(tmp_path / "run")["throughput"]["steady_steps"] == 7


def test_a_signal_while_a_batch_is_written_leaves_no_gap(tmp_path, written, monkeypatch):
    tell, calls = Monitor._tell, iter(range(100))

    def interrupted(self, row, pending, durations):
        if next(calls) == 2:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        tell(self, row, pending, durations)

    monkeypatch.setattr(Monitor, "_tell", interrupted)
    assert train(tmp_path / "run", "trainer.max_steps=20").status == "interrupted"
    assert list(curve(tmp_path / "run")) == [*range(1, 9)]
    assert result(tmp_path / "run")["throughput"]["steady_steps"] == 7


def test_rows_are_in_the_file_with_the_step_that_they_come_in(tmp_path):
    sink = CsvSink(tmp_path / "metrics.csv")
    sink.write({"step": 1, "lr": 0.5})
    sink.tick(1)
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [row["lr"] for row in csv.DictReader(file)] == ["0.5"]
    sink.close()


def test_validation_and_checkpoints_are_pauses(tmp_path, monkeypatch):
    ticks = []
    monkeypatch.setattr(CsvSink, "tick", lambda self, step, pause=False: ticks.append((step, pause)))
    every = ("trainer.val_every=2", "trainer.checkpoint_every=3", "trainer.checkpoint=true")
    assert train(tmp_path / "run", "trainer.max_steps=4", *every).status == "completed"
    assert [(step, False) for step in range(1, 5)] == [tick for tick in ticks if not tick[1]]
    assert {step for step, pause in ticks if pause} == {2, 3, 4}
