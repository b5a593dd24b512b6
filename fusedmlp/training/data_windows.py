"""Which windows of a token sequence make up a batch, and the iterables that gather them.

B windows per rank and micro-batch, T tokens per window, N tokens in a split, R ranks.
"""

import functools
import itertools
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fusedmlp.training.corpus import Corpus

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class WindowOrder:
    """The order in which training visits the N tokens: micro-batch i is a pure function of (seed, i).

    An epoch cuts the text into disjoint windows from a random offset and visits all of them once, shuffled; ranks take
    neighbouring slices of a micro-batch of B * R windows. A text too short for that many disjoint windows gets
    overlapping ones. An epoch's permutation takes 8 bytes per window in each process that loads data.
    """

    num_tokens: int
    seq_len: int
    batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size

    @property
    def max_batch_size(self) -> int:
        """The largest B for this text: its number of distinct windows of T + 1 tokens, per rank."""
        return max(0, self.num_tokens - self.seq_len) // self.world_size

    @functools.cached_property
    def stride(self) -> int:
        return min(self.seq_len, (self.num_tokens - self.seq_len) // self.global_batch_size)

    @functools.cached_property
    def windows_per_epoch(self) -> int:
        # One stride is kept free for the offset, so that every epoch has the same number of windows.
        return (self.num_tokens - self.seq_len) // self.stride

    def starts(self, index: int) -> np.ndarray:
        """First tokens of the windows of micro-batch `index` on this rank: (B,) int64."""
        first = index * self.global_batch_size + self.rank * self.batch_size
        epoch, position = divmod(first, self.windows_per_epoch)
        starts = self._epoch(epoch)[position : position + self.batch_size]
        while len(starts) < self.batch_size:
            epoch += 1
            starts = np.concatenate([starts, self._epoch(epoch)[: self.batch_size - len(starts)]])
        return starts

    def _epoch(self, epoch: int) -> np.ndarray:
        return _epoch_starts(self.seed, epoch, self.windows_per_epoch, self.stride)


# Two, because a micro-batch can lie across the boundary of two epochs.
@functools.lru_cache(maxsize=2)
def _epoch_starts(seed: int, epoch: int, windows: int, stride: int) -> np.ndarray:
    generator = np.random.default_rng((seed, epoch))
    offset = int(generator.integers(stride))
    starts = generator.permutation(windows)
    starts *= stride
    starts += offset
    starts.flags.writeable = False  # callers get views of what the cache holds
    return starts


def validation_starts(num_tokens: int, seq_len: int, batch_size: int, max_batches: int) -> np.ndarray:
    """First tokens of the validation windows: (batches, windows per batch) int64, spread evenly over the split.

    All batches have the same size, so that the plain mean of their losses is the mean over the windows. A split with
    less than one batch of disjoint windows gives one smaller batch.
    """
    disjoint = (num_tokens - 1) // seq_len
    size = min(batch_size, disjoint)
    batches = min(max_batches, disjoint // size)
    last = num_tokens - seq_len - 1
    starts = np.arange(batches * size) * last // max(1, batches * size - 1)
    return starts.reshape(batches, size)


def all_windows(tokens: np.ndarray, seq_len: int) -> np.ndarray:
    """The windows of (N,) tokens that begin at each of them, (N - T, T + 1), without a copy."""
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)


def gather(windows: np.ndarray, starts: np.ndarray) -> Batch:
    """Inputs and targets, each (B, T) int64, of the windows of uint8 tokens that begin at `starts`, (B,)."""
    chosen = windows[starts]  # (B, T + 1)
    # Converted by NumPy: torch would wake its thread pool for a few microseconds of work.
    return torch.from_numpy(chosen[:, :-1].astype(np.int64)), torch.from_numpy(chosen[:, 1:].astype(np.int64))


class TrainBatches(IterableDataset):
    """Training micro-batches `first`, `first + 1`, ... without end, in that order whatever the number of workers."""

    def __init__(self, corpus: Corpus, order: WindowOrder, first: int) -> None:
        self.corpus, self.order, self.first = corpus, order, first

    def __iter__(self) -> Iterator[Batch]:
        # A DataLoader takes one batch from each worker in turn.
        worker = get_worker_info()
        first, step = (self.first + worker.id, worker.num_workers) if worker else (self.first, 1)
        windows = all_windows(self.corpus.train_tokens(), self.order.seq_len)
        for index in itertools.count(first, step):
            yield gather(windows, self.order.starts(index))


class ValBatches(IterableDataset):
    """The validation batches whose windows begin at `starts`, (batches, windows)."""

    def __init__(self, corpus: Corpus, starts: np.ndarray, seq_len: int) -> None:
        self.corpus, self.starts, self.seq_len = corpus, starts, seq_len

    def __iter__(self) -> Iterator[Batch]:
        windows = all_windows(self.corpus.val_tokens(), self.seq_len)
        for starts in self.starts:
            yield gather(windows, starts)


class BatchLoader:
    """Iterates a dataset of ready batches: through a DataLoader where there are workers, which start on first use.

    It is not a DataLoader itself, because Lightning would advise more workers for batches that cost microseconds, and
    without workers it does without one, which costs as much as gathering a small batch does.
    """

    def __init__(self, batches: IterableDataset, num_workers: int, pin_memory: bool) -> None:
        self.batches, self.num_workers, self.pin_memory = batches, num_workers, pin_memory

    def __iter__(self) -> Iterator[Batch]:
        yield from self._loaded()

    def _loaded(self) -> Iterable[Batch]:
        if self.num_workers > 0:
            return DataLoader(
                self.batches, batch_size=None, num_workers=self.num_workers, pin_memory=self.pin_memory,
                worker_init_fn=_ignore_signals,
            )  # fmt: skip
        return map(_pinned, self.batches) if self.pin_memory else self.batches


def _ignore_signals(worker: int) -> None:
    """A terminal and a cluster signal every process of a run, and the step that is finished needs its batches.

    A worker ends when its loader does, or when the training process is no more.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _pinned(batch: Batch) -> Batch:
    inputs, targets = batch
    return inputs.pin_memory(), targets.pin_memory()


class ValLoader(BatchLoader):
    """A BatchLoader of known length."""

    def __init__(self, batches: ValBatches, pin_memory: bool) -> None:
        super().__init__(batches, 0, pin_memory)
        self.length = len(batches.starts)

    def __len__(self) -> int:
        return self.length
