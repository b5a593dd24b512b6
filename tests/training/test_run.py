"""A training run inside the process: what it records, when it is left alone and when it breaks."""

import io
import logging
import math
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from conftest import raises
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset
from training.runs import RANDOM_BYTES, config, curve, fits, result, rows, train

from fusedmlp import impls
from fusedmlp.errors import UserError
from fusedmlp.training import step, task
from fusedmlp.training.csv_sink import COLUMNS, CsvSink
from fusedmlp.training.failures import ending_of
from fusedmlp.training.log_file import log_file
from fusedmlp.training.metrics import DeviceMetrics
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.readings import Reading, Transfer
from fusedmlp.training.result import Result
from fusedmlp.training.run import run
from fusedmlp.training.throughput import StepClock
from fusedmlp.training.trainer import AtomicCheckpointIO

pytestmark = fits


def test_a_run_records_itself(tmp_path):
    folder = tmp_path / "run"
    ending = train(folder, "trainer.max_steps=8", "trainer.log_every=3", "trainer.val_every=4", "trainer.accumulate=2")
    assert (ending.status, ending.exit_code) == ("completed", 0)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "metrics.csv",
        "result.json",
        "train.log",
    ]
    found = result(folder)
    assert found["status"] == "completed"
    assert (found["impl"], found["impl_resolved"]) == ("auto", "native")
    assert (found["model"], found["dim"]) == ("MLPLanguageModel", 32)
    assert (found["steps"], found["seed"], found["reason"]) == (8, 0, None)
    assert found["num_params"] == sum(
        tensor.numel() for tensor in torch.load(found["checkpoint"], weights_only=True)["state_dict"].values()
    )
    assert found["data"]["unigram_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert found["throughput"]["steady_steps"] == 7
    assert found["throughput"]["samples_per_s"] == pytest.approx(found["throughput"]["tokens_per_s"])
    assert 0 < found["throughput"]["step_ms_p10"] <= found["throughput"]["step_ms_median"]
    seconds = found["seconds"]
    assert list(seconds) == ["import", "data", "setup", "first_steps", "warmup", "train", "total"]
    parts = sum(seconds[name] for name in ("data", "setup", "first_steps", "warmup", "train"))
    assert 0 < parts <= seconds["total"]
    assert found["environment"]["torch"] == torch.__version__
    assert "impl_resolved: " not in (folder / "config.yaml").read_text()

    assert tuple(rows(folder)[0]) == COLUMNS
    assert list(curve(folder)) == [3, 6, 8], "every third step, and the last"
    assert list(curve(folder, "val/loss")) == [4, 8], "every fourth step; the last falls on one"
    assert found["final_train_loss"] == float(curve(folder)[8])
    assert found["final_val_loss"] == float(curve(folder, "val/loss")[8])


def test_the_loss_of_the_first_steps_is_kept_whatever_is_logged(tmp_path):
    for every in (1, 4, 50):
        train(tmp_path / str(every), "trainer.max_steps=7", f"trainer.log_every={every}")
    every_step = [float(value) for value in curve(tmp_path / "1").values()]
    early = {every: result(tmp_path / str(every))["early_train_loss"] for every in (1, 4, 50)}
    assert early[1] == {"steps": 1, "loss": every_step[0]}
    assert early[4] == {"steps": 4, "loss": pytest.approx(sum(every_step[:4]) / 4, rel=1e-6)}
    assert early[50] == {"steps": 5, "loss": pytest.approx(sum(every_step[:5]) / 5, rel=1e-6)}
    assert float(curve(tmp_path / "50")[7]) == pytest.approx(sum(every_step) / 7, rel=1e-6), "and the interval went on"


def test_a_run_that_ends_before_has_no_loss_of_the_first_steps(tmp_path):
    train(tmp_path / "run", "trainer.max_steps=3", "trainer.log_every=50")
    assert result(tmp_path / "run")["early_train_loss"] == {"steps": 5, "loss": None}


def test_the_last_step_is_validated_though_it_is_no_multiple(tmp_path):
    train(tmp_path / "run", "trainer.max_steps=5", "trainer.val_every=2")
    assert list(curve(tmp_path / "run", "val/loss")) == [2, 4, 5]


def test_tokens_are_those_with_a_loss(tmp_path):
    train(tmp_path / "run", "model=gpt", "model.num_heads=2", "model.context=16")
    speed = result(tmp_path / "run")["throughput"]
    assert speed["tokens_per_s"] == pytest.approx(16 * speed["samples_per_s"])


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path):
    """4 micro-batches of 2 windows are the same windows as one batch of 8, so the mean loss and the update agree."""
    train(tmp_path / "whole", "data.batch_size=8", "trainer.max_steps=4")
    train(tmp_path / "parts", "data.batch_size=2", "trainer.max_steps=4", "trainer.accumulate=4")
    for name in ("train/loss", "train/grad_norm"):
        whole, parts = curve(tmp_path / "whole", name), curve(tmp_path / "parts", name)
        assert [float(value) for value in parts.values()] == pytest.approx(
            [float(value) for value in whole.values()], rel=1e-5
        )


def test_the_network_learns(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefg" * 500)
    train(
        tmp_path / "run", "data=text", f"data.files={text}", "trainer.max_steps=60", "trainer.val_every=60",
        "trainer.learning_rate=3e-3", "trainer.log_every=10",
    )  # fmt: skip
    found = result(tmp_path / "run")
    assert found["final_val_loss"] < 0.3 < found["data"]["unigram_loss"]


class Reads(TorchDispatchMode):
    """Counts the values that are read from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def count_reads(tmp_path, monkeypatch):
    """Trains 12 steps of 2 micro-batches, and counts the values read after the loop has begun."""

    def count() -> int:
        reads = Reads()
        on_train_start = Monitor.on_train_start

        def start_counting(self, trainer, module):
            on_train_start(self, trainer, module)
            reads.count = 0

        monkeypatch.setattr(Monitor, "on_train_start", start_counting)
        with reads:
            ending = train(
                tmp_path / "run", "trainer.max_steps=12", "trainer.accumulate=2", "trainer.log_every=5",
                "trainer.checkpoint=false",
            )  # fmt: skip
        assert ending.status == "completed", ending.reason
        return reads.count

    return count


def test_no_value_is_read_from_the_device(count_reads, tmp_path):
    assert count_reads() == 0
    assert list(curve(tmp_path / "run")) == [5, 10, 12]


def test_without_the_mechanism_values_are_read_in_every_micro_batch(count_reads, monkeypatch):
    """The counter sees what it is there for: metrics that are read at once."""
    add = DeviceMetrics.add
    monkeypatch.setattr(
        DeviceMetrics, "add", lambda self, name, value, weight=1.0: add(self, name, torch.tensor(value.item()), weight)
    )
    assert count_reads() >= 24


@pytest.mark.parametrize("log_every", [1, 5])
def test_no_row_is_waited_for_before_the_end(tmp_path, monkeypatch, log_every):
    """Waiting for an event is nothing that PyTorch could be asked to forbid. Here no row arrives by itself."""
    tick, sums, now, asked = StepClock.tick, Transfer.sums, [0], []

    def counted(self):
        now[0] += 1
        tick(self)

    def noted(self, row):
        asked.append(now[0])
        return sums(self, row)

    monkeypatch.setattr(StepClock, "tick", counted)
    monkeypatch.setattr(Transfer, "arrived", lambda self: False)
    monkeypatch.setattr(Transfer, "sums", noted)
    settings = ("trainer.max_steps=12", "trainer.val_every=4", f"trainer.log_every={log_every}")
    train(tmp_path / "run", *settings, "trainer.checkpoint=false")
    assert set(asked) == {12}
    assert list(curve(tmp_path / "run")) == ([5, 10, 12] if log_every == 5 else [*range(1, 13)])
    assert list(curve(tmp_path / "run", "val/loss")) == [4, 8, 12]


def poison_loss(monkeypatch, micro_batch: int, value: float = math.nan):
    """From this micro-batch on the loss is not finite."""
    calls = [0]
    loss = step.next_token_loss

    def poisoned(logits, targets):
        calls[0] += 1
        return loss(logits, targets) * (value if calls[0] >= micro_batch else 1.0)

    monkeypatch.setattr(step, "next_token_loss", poisoned)


@pytest.mark.parametrize("log_every", [1, 3, 50])
def test_nan_loss_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, log_every):
    poison_loss(monkeypatch, 6)
    ending = train(
        tmp_path / "run", "trainer.max_steps=50", "trainer.checkpoint_every=4", f"trainer.log_every={log_every}"
    )
    assert (ending.status, ending.exit_code) == ("diverged", 1)
    found = result(tmp_path / "run")
    assert found["status"] == "diverged"
    assert "train/loss is nan" in found["reason"]
    assert "learning_rate" in found["hint"]
    assert found["steps"] <= 8, "detected at the next log point or checkpoint"
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["fusedmlp"]["step"] == 4
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())


def test_rows_that_arrive_after_the_loss_was_nan_are_written_too(tmp_path, monkeypatch):
    """On a GPU rows come some steps late."""
    poison_loss(monkeypatch, 3)
    monkeypatch.setattr(Reading, "ready", lambda self: False)
    ending = train(tmp_path / "run")
    assert ending.reason.startswith("train/loss is nan and train/grad_norm is nan at step 3")
    assert [row["step"] for row in rows(tmp_path / "run")] == ["1", "2", "3", "4", "5", "6"]
    assert "lost" not in (tmp_path / "run" / "train.log").read_text()


def test_infinite_gradients_count_as_divergence(tmp_path, monkeypatch):
    """The loss of that step is finite, and the parameters are NaN after it."""
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: backward(loss * torch.tensor(math.inf)))
    ending = train(tmp_path / "run")
    assert ending.status == "diverged"
    assert "train/grad_norm" in ending.reason
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried 9 GB"),
        RuntimeError("Storage size calculation overflowed with sizes=[256, 4611686018427387904]"),
    ],
)
def test_out_of_memory_has_its_reason_and_a_hint(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(task.LanguageModelTask, "micro_step", fail)
    ending = train(tmp_path / "run")
    assert (ending.status, ending.exit_code) == ("failed", 1)
    found = result(tmp_path / "run")
    assert found["reason"].startswith("out of memory")
    assert "data.batch_size" in found["hint"]
    assert "Traceback" not in (tmp_path / "run" / "train.log").read_text()


def test_a_bug_keeps_its_traceback_in_the_log_and_the_checkpoint_before_it(tmp_path, monkeypatch):
    micro_step = task.LanguageModelTask.micro_step

    def fail(self, batch):
        if self.trainer.global_step == 5:
            raise IndexError("nobody thought of this")
        micro_step(self, batch)

    monkeypatch.setattr(task.LanguageModelTask, "micro_step", fail)
    ending = train(tmp_path / "run", "trainer.checkpoint_every=2")
    assert (ending.status, ending.reason) == ("failed", "IndexError: nobody thought of this")
    found = result(tmp_path / "run")
    assert found["steps"] == 5
    assert len(rows(tmp_path / "run")) == 5, "nothing computed is lost"
    assert "Traceback" in (tmp_path / "run" / "train.log").read_text()
    assert torch.load(found["checkpoint"], weights_only=True)["fusedmlp"]["step"] == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_reason_that_names_the_file_and_the_row_is_shown_all_the_same(tmp_path, monkeypatch, capsys):
    write = CsvSink.write

    def filling(self, row):
        if row["step"] == 3:
            with open("/dev/full", "w") as full:
                os.dup2(full.fileno(), self._file.fileno())
        write(self, row)

    monkeypatch.setattr(CsvSink, "write", filling)
    ending = train(tmp_path / "run")
    reason = f"No space left on device: {tmp_path / 'run' / 'metrics.csv'}"
    assert (ending.status, ending.reason) == ("failed", reason)
    assert result(tmp_path / "run")["status"] == "failed"
    assert "step 3/6" in capsys.readouterr().out


def test_a_row_is_in_the_file_as_it_was(tmp_path):
    row = {
        "time/step_ms": 1 / 3,
        "step": 3,
        "train/loss": torch.tensor(0.1).item(),
        "throughput/tokens_per_s": 1e12 / 7,
    }
    sink = CsvSink(tmp_path / "metrics.csv")
    with pytest.raises(KeyError, match="no column for train/accuracy"):
        sink.write(row | {"train/accuracy": 1.0})
    sink.write(row)
    sink.write({"step": 4, "val/loss": math.nan})
    sink.close()
    first, second = rows(tmp_path)
    assert list(first) == list(COLUMNS)
    assert {name: float(value) for name, value in first.items() if value} == row
    assert {name: value for name, value in second.items() if value} == {"step": "4", "val/loss": "nan"}


def test_a_file_that_is_not_there_is_not_told_to_free_space():
    assert "hydra.run.dir" in ending_of(OSError(28, "No space left on device", "metrics.csv")).hint
    ending = ending_of(FileNotFoundError(2, "No such file or directory", "weights.pt"))
    assert (ending.reason, ending.hint) == ("No such file or directory: weights.pt", None)


def test_a_keyboard_interrupt_that_no_signal_brought_is_one_all_the_same(tmp_path, monkeypatch):
    """As `quit` in a debugger raises it; Lightning makes a SystemExit of it."""

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(task.LanguageModelTask, "micro_step", fail)
    ending = train(tmp_path / "run")
    assert (ending.status, ending.reason, ending.exit_code) == ("interrupted", "stopped by SIGINT", 130)


class Broken(IterableDataset):
    def __iter__(self):
        raise ValueError("the window is broken\nin many places")
        yield


def test_a_failure_in_a_data_worker_says_what_it_was():
    with pytest.raises(ValueError, match="Caught") as caught:
        next(iter(DataLoader(Broken(), batch_size=None, num_workers=1)))
    assert ending_of(caught.value).reason == "ValueError: the window is broken, in data worker 0"


def test_a_result_that_cannot_be_written_is_the_runs_failure(tmp_path, monkeypatch):
    write = Result.write

    def full(self, **fields):
        if fields.get("status") == "completed":
            raise OSError(28, "No space left on device", "result.json")
        write(self, **fields)

    monkeypatch.setattr(Result, "write", full)
    ending = train(tmp_path / "run")
    assert (ending.status, ending.exit_code) == ("failed", 1)
    assert ending.reason == "result.json cannot be written: No space left on device"
    assert torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["fusedmlp"]["step"] == 6


def test_a_metrics_file_that_cannot_be_closed_leaves_the_ending(tmp_path, monkeypatch):
    close = CsvSink.close

    def full(self):
        close(self)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CsvSink, "close", full)
    assert train(tmp_path / "run").status == result(tmp_path / "run")["status"] == "completed"


def test_signals_while_a_run_is_finished_leave_its_result(tmp_path, monkeypatch):
    """The first is held back, the second ends what hangs, such as an upload."""

    close = CsvSink.close

    def hang(self):
        close(self)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one does not come back")

    monkeypatch.setattr(CsvSink, "close", hang)
    assert train(tmp_path / "run").status == "completed"
    found = result(tmp_path / "run")
    assert (found["status"], found["steps"]) == ("completed", 6)


def test_a_key_that_was_taken_away_is_named(tmp_path):
    cfg = config()
    del cfg.sweep
    with raises(UserError, "sweep is missing", "trainer"):
        run(cfg, tmp_path / "run", [])


def test_a_log_of_another_locale_holds_every_sign(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stacklevel=2: encoding or "ascii")
    with log_file(tmp_path / "train.log"):
        logging.getLogger().warning("a tip \N{ELECTRIC LIGHT BULB}")
    assert "a tip \N{ELECTRIC LIGHT BULB}" in (tmp_path / "train.log").read_text(encoding="utf-8")


def test_a_disk_that_takes_no_more_of_a_checkpoint_says_so(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    limits, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(OSError, match="File too large") as caught:
            AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.filename == str(path)
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_a_checkpoint_that_breaks_off_leaves_the_one_before(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, path)
    with pytest.raises(AttributeError, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"step": 2, "not to be pickled": lambda: None}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("dim=33",), ("model: dim=33", "context=16", "32")),
        (("model=gpt", "model.num_heads=3"), ("model: dim=32", "num_heads=3", "33")),
        (("trainer.max_steps=0",), ("trainer.max_steps=0",)),
        (("seed=-1",), ("seed=-1", "from 0")),
        (("seed=one",), ("seed=one", "an integer")),
        (("data.batch_size=1000000",), ("data.batch_size=1000000", "at most")),
        (("model.vocab_size=100",), ("model.vocab_size=100", "at least 256")),
        (("data.seq_len=8",), ("data.seq_len=8", "model.context=16")),
        (("sweep.resume=place",), ("sweep.resume=place", "a sweep, with -m")),
        (("data=text", "data.files=''"), ("data=text needs data.files",)),
        (("data=hf", "data.name=text", "data.data_files=5"), ("data.data_files=5", "a list")),
    ],
)
def test_what_the_user_can_put_right_is_one_message(tmp_path, overrides, words):
    ending = train(tmp_path / "run", *overrides)
    assert (ending.status, ending.exit_code, ending.bug) == ("failed", 1, False)
    assert "\n" not in ending.reason
    for word in words:
        assert word in ending.reason
    assert result(tmp_path / "run")["reason"] == ending.reason
    assert "Traceback" not in (tmp_path / "run" / "train.log").read_text()


def test_a_network_without_parameters_is_one_message(tmp_path):
    words = ("model=torch_module", "model.target=torch.nn.Identity", "logger=none", *RANDOM_BYTES)
    _, ending = run(config(*words, f"data.cache_dir={tmp_path}"), tmp_path / "run", [])
    assert (ending.status, ending.bug) == ("failed", False)
    assert "model=torch.nn.Identity: expected a network with parameters" in ending.reason


def test_an_impl_that_cannot_run_here_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(
        impls, "unavailable", lambda name: "it lacks a compiler; install one" if name == "cuda" else None
    )
    ending = train(tmp_path / "run", "impl=cuda")
    assert ending.reason == "impl=cuda cannot run here: it lacks a compiler; install one"
    assert result(tmp_path / "run")["environment"]["torch"] == torch.__version__


def test_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ending = train(tmp_path / "run", "trainer.accelerator=gpu")
    assert "trainer.accelerator=gpu: expected cpu or auto" in ending.reason


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_low_precision_on_the_cpu(tmp_path, precision):
    train(tmp_path / "full", "trainer.max_steps=4")
    assert train(tmp_path / "low", "trainer.max_steps=4", f"trainer.precision={precision}").status == "completed"
    low, full = ([float(value) for value in curve(tmp_path / name).values()] for name in ("low", "full"))
    assert low == pytest.approx(full, rel=0.01)
    assert low != full
    checkpoint = torch.load(tmp_path / "low" / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["model.head.bias"].dtype == (
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    )


def test_runs_in_one_process_do_not_influence_one_another(tmp_path):
    train(tmp_path / "alone", "trainer.max_steps=4")
    train(tmp_path / "other", "seed=3", "dim=64", "trainer.max_steps=4")
    train(tmp_path / "again", "trainer.max_steps=4")
    assert curve(tmp_path / "again") == curve(tmp_path / "alone") != curve(tmp_path / "other")


def test_without_checkpoints_none_are_written(tmp_path):
    train(tmp_path / "run", "trainer.checkpoint=false")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert result(tmp_path / "run")["checkpoint"] is None
