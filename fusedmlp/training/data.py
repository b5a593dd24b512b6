"""The LightningDataModule: byte-level windows of a packed corpus, and a position that survives a resume."""

import os
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from fusedmlp.errors import UserError
from fusedmlp.training.corpus import VOCAB_SIZE, Corpus, default_cache_dir, load_or_build
from fusedmlp.training.corpus_sources import make_source, require_integers
from fusedmlp.training.data_windows import (
    BatchLoader,
    TrainBatches,
    ValBatches,
    ValLoader,
    WindowOrder,
    validation_starts,
)
from fusedmlp.training.options import require
from fusedmlp.training.paths import from_user_directory

# Each worker is a process: a slip of the hand must not fill the machine with them.
_WORKERS_PER_CORE = 16

# What a checkpoint's position depends on, as the user knows it.
_MEANING = {
    "fingerprint": "the corpus (its text and data.val_fraction)",
    "seed": "seed",
    "seq_len": "model.context",
    "global_batch_size": "data.batch_size x number of processes",
}


class TextDataModule(LightningDataModule):
    """Batches `(inputs, targets)`, each (B, T) int64, targets one token ahead of inputs; tokens are bytes.

    The training loader has no end, and its micro-batch i depends on the seed and i alone. The last `val_fraction` of
    the corpus is the validation split; ranks share its batches, as they do those of training.

    Args:
        source: "stdlib", "text", "hf" or "synthetic".
        batch_size: B, windows per micro-batch and rank.
        seq_len: T, tokens per window.
        seed: of the order of the training windows.
        val_fraction: share of the corpus kept for validation, between 0 and 1.
        val_batches: upper bound on the number of validation batches.
        num_workers: processes that gather training batches; 0 gathers in the training process.
        cache_dir: where packed corpora are kept; None for the platform's cache directory.
        options: keys of the source, such as `files` for "text".

    Raises: UserError for a value that is not accepted; `setup` also for a corpus too small for B or T.
    """

    def __init__(
        self,
        source: str = "stdlib",
        *,
        batch_size: int = 64,
        seq_len: int = 64,
        seed: int = 0,
        val_fraction: float = 0.1,
        val_batches: int = 20,
        num_workers: int = 0,
        cache_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_integers(1, batch_size=batch_size, seq_len=seq_len, val_batches=val_batches)
        require_integers(0, seed=seed, num_workers=num_workers)
        most = _WORKERS_PER_CORE * (os.cpu_count() or 1)
        require("data.num_workers", num_workers, num_workers <= most, f"at most {most}, for the cores of this machine")
        if not isinstance(val_fraction, float) or not 0 < val_fraction < 1:
            raise UserError(f"data.val_fraction={val_fraction} is not between 0 and 1; the default is 0.1")
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed
        self.val_fraction, self.val_batches, self.num_workers = val_fraction, val_batches, num_workers
        self.source = make_source(source, options)
        self.cache_dir = cache_dir
        self._corpus: Corpus | None = None
        self._resume_at: int | None = None
        self._ahead = 0

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def unigram_loss(self) -> float:
        """Cross-entropy of the validation split under the training split's byte frequencies, in nats per token."""
        return self.corpus.unigram_loss

    @property
    def num_train_tokens(self) -> int:
        return self.corpus.num_train_tokens

    @property
    def num_val_tokens(self) -> int:
        return self.corpus.num_val_tokens

    @property
    def corpus(self) -> Corpus:
        """The packed corpus, built on first use."""
        if self._corpus is None:
            directory = from_user_directory(self.cache_dir) if self.cache_dir else default_cache_dir()
            self._corpus = load_or_build(self.source, self.val_fraction, directory)
        return self._corpus

    @property
    def order(self) -> WindowOrder:
        """The order of the training windows on this rank."""
        rank, world_size = self._rank()
        return WindowOrder(self.num_train_tokens, self.seq_len, self.batch_size, self.seed, rank, world_size)

    def _rank(self) -> tuple[int, int]:
        """This rank and the number of ranks, as the strategy knows them."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, getattr(self.trainer.strategy, "world_size", 1)

    def prepare_data(self) -> None:
        """Build the corpus where the cache lacks it (one process per node, the others wait)."""
        _ = self.corpus

    def setup(self, stage: str | None = None) -> None:
        """Check that both splits hold what a batch needs."""
        _require_window("training", self.num_train_tokens, self.seq_len, "lower")
        _require_window("validation", self.num_val_tokens, self.seq_len, "raise")
        order = self.order
        if self.batch_size > order.max_batch_size:
            raise UserError(
                f"data.batch_size={self.batch_size} is larger than the data: {self.num_train_tokens:,} training tokens "
                f"give at most {order.max_batch_size:,} windows of {self.seq_len} tokens per process"
            )

    def train_dataloader(self) -> BatchLoader:
        """Micro-batches without end, from the first one that training has not used."""
        batches = TrainBatches(self.corpus, self.order, self._first_batch())
        return BatchLoader(batches, self.num_workers, self._pin_memory())

    def val_dataloader(self) -> ValLoader:
        """At most `val_batches` batches of equal size, always the same ones; of several ranks, this one's part."""
        rank, world_size = self._rank()
        starts = validation_starts(self.num_val_tokens, self.seq_len, self.batch_size * world_size, self.val_batches)
        # A split too small to share: every rank takes all of it, which gives the same mean.
        if starts.shape[1] % world_size == 0:
            starts = np.split(starts, world_size, axis=1)[rank]
        return ValLoader(ValBatches(self.corpus, starts, self.seq_len), self._pin_memory())

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Leaves it to a task that knows when a step reads its batch (step capture)."""
        transfer = getattr(self.trainer and self.trainer.lightning_module, "transfer", None)
        return transfer(batch, device) if transfer else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def state_dict(self) -> dict[str, Any]:
        """Position, in micro-batches used by finished optimizer steps, and what that position depends on."""
        return {"consumed": self._consumed(), "source": self.source.kind, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's position.

        Raises: UserError when the checkpoint's corpus, seed or batch shape differs, since a position in another order
            of batches means nothing.
        """
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return
        differences = [
            f"{_MEANING[key]} was {state_dict.get(key)}, is {mine}"
            for key, mine in self._identity().items()
            if state_dict.get(key) != mine
        ]
        if differences:
            raise UserError(
                f"cannot resume: the checkpoint (data={state_dict.get('source')}) was trained on other batches: "
                f"{'; '.join(differences)}. Use the settings of the original run, or start a new one."
            )
        self._resume_at = state_dict["consumed"]

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self.corpus.fingerprint,
            "seed": self.seed,
            "seq_len": self.seq_len,
            "global_batch_size": self.order.global_batch_size,
        }

    def _consumed(self) -> int:
        if self.trainer is None:
            return self._resume_at or 0
        # The gradients of an unfinished accumulation are not in a checkpoint: its micro-batches must be seen again.
        batches = _batch_progress(self.trainer)
        return self._ahead + batches.total.processed - batches.current.processed % self.trainer.accumulate_grad_batches

    def _first_batch(self) -> int:
        if self.trainer is None:
            return self._resume_at or 0
        counted = _batch_progress(self.trainer).total.processed
        if self._resume_at is None:
            first = self._ahead + counted
        else:
            first, self._resume_at = self._resume_at, None
            # The trainer counts as if this run had made all steps: with another accumulation that is another number.
            options = getattr(self.trainer.lightning_module, "options", None)
            counted = self.trainer.global_step * options.accumulate if options else first
            self._ahead = first - counted
        _rewind(self.trainer, counted)
        return first

    def _pin_memory(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"


def _batch_progress(trainer: Trainer) -> Any:
    return trainer.fit_loop.epoch_loop.batch_progress


def _rewind(trainer: Trainer, first: int) -> None:
    """Make the trainer count `first` micro-batches as done, and none as begun.

    Restored from a checkpoint of an interrupted step, Lightning's counters include what has to be repeated: the
    optimizer would step too early, and validation run out of turn.
    """
    batches = _batch_progress(trainer)
    repeated = batches.total.processed - first
    if repeated != 0 or batches.total.ready > batches.total.processed:
        for counter in (batches.total, batches.current):
            done = counter.processed - repeated
            counter.ready = counter.started = counter.processed = counter.completed = done


def _require_window(split: str, num_tokens: int, seq_len: int, change: str) -> None:
    if num_tokens <= seq_len:
        raise UserError(
            f"the {split} split has {num_tokens:,} tokens, fewer than the {seq_len + 1:,} of one window "
            f"(model.context + 1): {change} data.val_fraction, shorten model.context or give more text"
        )
