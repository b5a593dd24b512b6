"""Batches of the data module: their shape and order, who sees what, and a position that survives a resume."""

import contextlib
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from fusedmlp.errors import UserError
from fusedmlp.training.data import TextDataModule
from fusedmlp.training.data_windows import TrainBatches, WindowOrder, validation_starts

# Python 3.12 and later warn of every fork beside threads; a DataLoader's workers are forks on Linux.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
# Lightning 2.6.6 meets a deprecation of torch 2.12 and later whenever it sets up a loader.
fits = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def make_data(tmp_path):
    def make(**changes) -> TextDataModule:
        settings = {"source": "synthetic", "num_tokens": 1000, "batch_size": 4, "seq_len": 8, "seed": 1}
        data = TextDataModule(**{**settings, "cache_dir": str(tmp_path), **changes})
        data.prepare_data()
        data.setup()
        return data

    return make


def first_batches(data: TextDataModule, count: int) -> list[torch.Tensor]:
    return [inputs for inputs, _ in islice(data.train_dataloader(), count)]


def test_batches_are_shifted_windows_of_their_split(make_data):
    data = make_data(val_fraction=0.2)
    assert (data.vocab_size, data.num_train_tokens, data.num_val_tokens) == (256, 800, 200)
    text = np.random.default_rng(0).bytes(1000)
    for loader, split in ((data.train_dataloader(), text[:800]), (data.val_dataloader(), text[800:])):
        for inputs, targets in islice(loader, 50):
            assert inputs.shape == targets.shape == (4, 8)
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.is_contiguous()
            assert targets.is_contiguous()
            for row in torch.cat([inputs, targets[:, -1:]], dim=1):
                assert bytes(row.tolist()) in split
            assert torch.equal(inputs[:, 1:], targets[:, :-1])


# Many windows, one batch an epoch, batches across epochs, and a text too short for disjoint windows.
SIZES = [(1000, 8, 4, 1), (1000, 8, 3, 4), (41, 8, 4, 1), (60, 8, 5, 1), (30, 8, 7, 3), (9, 8, 1, 1)]


@pytest.mark.parametrize(("num_tokens", "seq_len", "batch_size", "world_size"), SIZES)
def test_every_epoch_visits_each_window_once_over_all_ranks(num_tokens, seq_len, batch_size, world_size):
    ranks = [WindowOrder(num_tokens, seq_len, batch_size, 5, rank, world_size) for rank in range(world_size)]
    windows, stride = ranks[0].windows_per_epoch, ranks[0].stride
    count = -(-3 * windows // (batch_size * world_size))
    visited = np.concatenate([order.starts(index) for index in range(count) for order in ranks])
    assert visited.min() >= 0
    assert visited.max() + seq_len + 1 <= num_tokens
    for epoch in range(3):
        starts = np.sort(visited[epoch * windows : (epoch + 1) * windows])
        assert (np.diff(starts) == stride).all(), "a window is missing or doubled"
        assert starts[0] < stride
        assert num_tokens - starts[-1] <= 2 * stride + seq_len, "the end of the text is never visited"


def test_epochs_differ_in_order_and_offset():
    order = WindowOrder(num_tokens=100_000, seq_len=64, batch_size=32, seed=0)
    size = order.windows_per_epoch // 32 + 1
    offsets = {int(order.starts(epoch * size + 1)[0]) % 64 for epoch in range(5)}
    assert len(offsets) > 1
    assert not np.array_equal(order.starts(0), WindowOrder(100_000, 64, 32, seed=1).starts(0))


@forks
def test_a_batch_depends_on_seed_and_index_alone(make_data):
    # 111 windows an epoch, so that 60 batches of 4 cross two boundaries.
    expected = first_batches(make_data(), 60)
    assert torch.equal(torch.stack(expected), torch.stack(first_batches(make_data(), 60)))
    assert torch.equal(torch.stack(expected), torch.stack(first_batches(make_data(num_workers=2), 60)))
    later = make_data()
    later.load_state_dict({**later.state_dict(), "consumed": 57})
    assert torch.equal(torch.stack(expected[57:]), torch.stack(first_batches(later, 3)))
    assert not torch.equal(expected[0], first_batches(make_data(seed=2), 1)[0])


def test_a_worker_is_sent_no_tokens_and_no_permutation(make_data):
    data = make_data(num_tokens=1_000_000)
    batches = TrainBatches(data.corpus, data.order, 0)
    next(iter(batches))
    assert len(pickle.dumps(batches)) < 2000


@pytest.mark.parametrize(
    ("num_tokens", "batch_size", "shape"),
    [(10_000, 4, (20, 4)), (200, 4, (6, 4)), (81, 4, (2, 4)), (25, 4, (1, 3)), (9, 4, (1, 1))],
)
def test_validation_windows_are_disjoint_and_batches_equal(num_tokens, batch_size, shape):
    starts = validation_starts(num_tokens, seq_len=8, batch_size=batch_size, max_batches=20)
    assert starts.shape == shape
    flat = starts.ravel()
    assert (np.diff(flat) >= 8).all()
    assert flat[0] == 0
    assert flat[-1] + 9 <= num_tokens
    if flat.size > 1:
        assert flat[-1] + 9 == num_tokens, "the end of the split is never visited"


def test_validation_is_the_same_every_time_and_has_a_length(make_data):
    loader = make_data(val_batches=2).val_dataloader()
    first, second = list(loader), list(loader)
    assert len(first) == len(loader) == 2
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_the_largest_batch_works_and_one_more_is_refused(make_data):
    data = make_data(num_tokens=100, val_fraction=0.1, batch_size=82)
    assert sorted(data.order.starts(0)) == list(range(82)), "90 training tokens have 82 windows of 8 + 1"
    with pytest.raises(UserError, match=r"batch_size=83 is larger than the data: 90 .* at most 82 "):
        make_data(num_tokens=100, val_fraction=0.1, batch_size=83)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 200}, "validation split has 100 tokens, fewer than the 201"),
        ({"seq_len": 900}, "training split has 900 tokens, fewer than the 901"),
        ({"val_fraction": 0.001}, "validation split has 1 tokens.*raise data.val_fraction"),
        ({"val_fraction": 1.0}, "not between 0 and 1"),
        ({"val_fraction": 0.0}, "not between 0 and 1"),
        ({"val_fraction": "a"}, "not between 0 and 1"),
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"seq_len": 1.5}, "data.seq_len=1.5"),
        ({"num_workers": -1}, "data.num_workers=-1"),
        ({"num_workers": 10**6}, "data.num_workers=1000000: expected at most"),
        ({"seed": -1}, "data.seed=-1"),
        ({"files": "a.txt"}, "data.files means nothing to data=synthetic"),
    ],
)
def test_user_errors(changes, message, make_data):
    with pytest.raises(UserError, match=message):
        make_data(**changes)


class Recorder(LightningModule):
    """A tiny model that lists the batches it trains on, and the steps at which it validates."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(256, 4)
        self.events: list = []
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise ZeroDivisionError
        inputs, targets = batch
        self.events.append(inputs.tolist())
        return (self.embedding(inputs) * self.embedding(targets)).sum(-1).tanh().mean()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.events.append(f"validation after {self.global_step} steps")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Interrupt(Callback):
    """Save a checkpoint and stop after a number of micro-batches, or save when training raises."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


def fit(data, tmp_path, callbacks=(), max_steps=6, ckpt_path=None, accumulate=1, fail_at=None) -> Recorder:
    module = Recorder(fail_at)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        val_check_interval=2 * accumulate,
        check_val_every_n_epoch=None,
        callbacks=list(callbacks),
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with contextlib.suppress(ZeroDivisionError):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module


# (accumulate, workers, micro-batches done when interrupted, how): within and between accumulations, at a validation.
INTERRUPTIONS = [
    (1, 0, 3, "stop"),
    (1, 2, 3, "stop"),
    (1, 0, 4, "stop"),
    (1, 0, 3, "error"),
    (1, 0, 4, "error"),
    (2, 0, 6, "stop"),
    (2, 2, 5, "stop"),
    (2, 0, 5, "stop"),
    (2, 0, 6, "error"),
    (2, 0, 5, "error"),
]


@fits
@forks
@pytest.mark.parametrize(("accumulate", "workers", "done", "how"), INTERRUPTIONS)
def test_an_interrupted_run_continues_as_if_it_had_not_been(accumulate, workers, done, how, make_data, tmp_path):
    whole = fit(make_data(num_workers=workers), tmp_path, accumulate=accumulate)
    path = tmp_path / "interrupted.ckpt"
    interrupt = Interrupt(path, after=done if how == "stop" else -1)
    fail_at = done if how == "error" else None
    fit(make_data(num_workers=workers), tmp_path, [interrupt], accumulate=accumulate, fail_at=fail_at)
    state = torch.load(path, weights_only=True)["TextDataModule"]
    assert state["consumed"] == done - done % accumulate

    resumed = fit(make_data(num_workers=workers), tmp_path, ckpt_path=path, accumulate=accumulate)
    assert resumed.events == whole.events[-len(resumed.events) :]
    batches = [event for event in resumed.events if not isinstance(event, str)]
    assert len(batches) == 6 * accumulate - state["consumed"]
    assert torch.equal(resumed.embedding.weight, whole.embedding.weight)


@fits
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_model_checkpoint_s_position_and_a_longer_run(make_data, tmp_path):
    def saver():
        return ModelCheckpoint(dirpath=tmp_path / "saved", filename="{step}", every_n_train_steps=2, save_top_k=-1)

    fit(make_data(), tmp_path, [saver()], max_steps=4)
    positions = {}
    for step in (2, 4):
        checkpoint = torch.load(tmp_path / "saved" / f"step={step}.ckpt", weights_only=True)
        positions[step] = checkpoint["TextDataModule"]["consumed"]
    assert positions == {2: 2, 4: 4}
    whole = fit(make_data(), tmp_path)
    longer = fit(make_data(), tmp_path, [saver()], ckpt_path=tmp_path / "saved" / "step=4.ckpt")
    assert longer.events[-3:] == whole.events[-3:]
    assert torch.equal(longer.embedding.weight, whole.embedding.weight)


@fits
def test_resuming_on_other_batches_is_refused(make_data, tmp_path):
    fit(make_data(), tmp_path, [Interrupt(tmp_path / "run.ckpt", after=1)])
    others = {
        "data.batch_size x number of processes was 4, is 5": {"batch_size": 5},
        "model.context was 8, is 7": {"seq_len": 7},
        "seed was 1, is 2": {"seed": 2},
        "the corpus .* was .*-100, is .*-200": {"val_fraction": 0.2},
    }
    for message, changes in others.items():
        with pytest.raises(UserError, match=f"cannot resume.*{message}"):
            fit(make_data(**changes), tmp_path, ckpt_path=tmp_path / "run.ckpt")


@fits
def test_validating_a_checkpoint_on_other_batches_is_allowed(make_data, tmp_path):
    fit(make_data(), tmp_path, [Interrupt(tmp_path / "run.ckpt", after=1)])
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    module = Recorder()
    data = make_data(batch_size=5, val_fraction=0.2)
    trainer.validate(module, datamodule=data, ckpt_path=tmp_path / "run.ckpt", weights_only=True)
    assert module.events == ["validation after 0 steps"]


OVERRIDES = {
    "stdlib": [],
    "text": ["data.files=[a.txt,b.txt]"],
    "hf": ["data.name=json", "data.data_files=rows.json", "data.column=body"],
    "synthetic": ["data.num_tokens=100"],
}


def test_every_config_builds_its_source():
    assert {path.stem for path in (CONFIGS / "data").glob("*.yaml")} == set(OVERRIDES)
    for name, overrides in OVERRIDES.items():
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            added = [f"+data={name}", "+model.context=16", "+seed=3", "data.batch_size=2", *overrides]
            config = compose(overrides=added)
        data = instantiate(config.data)
        assert isinstance(data, TextDataModule)
        assert (data.source.kind, data.seq_len, data.seed, data.batch_size) == (name, 16, 3, 2)


def test_importing_the_module_does_not_import_datasets():
    script = "import sys, fusedmlp.training.data; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
