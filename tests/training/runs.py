"""Small training runs inside the test process."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from fusedmlp.training.cli import register_impls
from fusedmlp.training.failures import Ending
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.run import run

CONFIGS = Path(__file__).parents[2] / "configs"
FIRST_CHECKED_STEP = 5  # compilation and autotuning before it may wait
TINY = (
    "dim=32",
    "model.num_layers=2",
    "data.batch_size=8",
    "data.val_batches=2",
    "logger=none",
    "trainer.max_steps=6",
    "trainer.warmup_steps=2",
    "trainer.log_every=1",
    "trainer.val_every=0",
    "trainer.accelerator=cpu",
)
RANDOM_BYTES = ("data=synthetic", "data.num_tokens=20000")

# Lightning 2.6.6 meets a deprecation of torch 2.12 and later whenever it sets up a loader.
fits = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")


def config(*overrides: str) -> DictConfig:
    """configs/train.yaml with these overrides."""
    register_impls()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", list(overrides))


def train(folder: Path, *overrides: str, group: str | None = None) -> Ending:
    """A tiny run in `folder`, on random bytes unless the overrides choose other data, which is cached beside it."""
    data = () if any(override.startswith("data=") for override in overrides) else RANDOM_BYTES
    overrides = (*TINY, *data, f"data.cache_dir={folder.parent / 'cache'}", *overrides)
    result, ending = run(config(*overrides), folder, list(overrides), group)
    assert result.folder == folder
    return ending


def rows(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, as text."""
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def curve(folder: Path, name: str = "train/loss") -> dict[int, str]:
    """Step -> value of one metric, as text, so that equal means equal to the last bit."""
    return {int(row["step"]): row[name] for row in rows(folder) if row[name]}


def result(folder: Path) -> dict:
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads((folder / "result.json").read_text(), parse_constant=refuse)


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """From the fifth step to the last but one, every operation that waits for the GPU raises."""
    on_train_batch_end = Monitor.on_train_batch_end

    def checked(self, trainer, module, *rest):
        if trainer.global_step == FIRST_CHECKED_STEP:
            torch.cuda.set_sync_debug_mode("error")
        if trainer.global_step == module.options.max_steps - 1:
            # What ends a run may wait: the last values, and Lightning moving the optimizer's state to the host.
            torch.cuda.set_sync_debug_mode("default")
        on_train_batch_end(self, trainer, module, *rest)

    try:
        with mock.patch.object(Monitor, "on_train_batch_end", checked):
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
