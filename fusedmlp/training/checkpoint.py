"""Checkpoints: when they are written, what is in them beside Lightning's state, and which one may be resumed."""

import pickle
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, Trainer

from fusedmlp.errors import UserError
from fusedmlp.training.interrupt import Interrupted
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.options import TrainerOptions
from fusedmlp.training.paths import from_user_directory
from fusedmlp.training.peers import Peers
from fusedmlp.training.task import LanguageModelTask

LAST = "last.ckpt"
KEY = "fusedmlp"  # our part of a checkpoint
_STATE = {"state_dict", "optimizer_states", "lr_schedulers", "loops"}  # Lightning's part that going on needs


class Checkpoints(Callback):
    """Writes last.ckpt: every `checkpoint_every` steps, at the end, and when the run is asked to stop.

    Only a state whose loss and gradients are known to be finite is written, so the file always holds the last good
    state. Where validation follows a step, the checkpoint waits for it: resuming then does not validate twice.

    Args:
        run_folder: its checkpoints/ receives last.ckpt.
        model_config: what the model was built from, without impl: every impl can load it.
        peers: the ranks, one of which may have got a signal to stop.
    """

    state_key = "Checkpoints"  # Lightning's property, asked for before every hook
    on_train_batch_start = None  # type: ignore[assignment]  # Lightning calls what is there

    def __init__(
        self,
        run_folder: Path,
        options: TrainerOptions,
        monitor: Monitor,
        peers: Peers,
        model_config: Mapping[str, Any],
    ):
        self.path = run_folder / "checkpoints" / LAST
        self.options, self.monitor, self.peers = options, monitor, peers
        self.model_config = dict(model_config)
        self.written: Path | None = None
        self._rng: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, task: LanguageModelTask) -> None:  # type: ignore[override]
        if self._rng is not None and self.peers.is_first:
            _set_rng_state(self._rng)
        elif not self.peers.is_first:
            # What is random in a forward pass differs from rank to rank.
            _seed(self.peers.place.rank, trainer.global_step)
        self.peers.begin(trainer.global_step + 1)
        self.peers.stop.install()
        self.peers.stop.deferred = True

    def on_train_batch_end(self, trainer: Trainer, task: LanguageModelTask, *_: Any) -> None:  # type: ignore[override]
        if not task.step_done:
            return
        step = task.steps
        if step == self.options.max_steps:
            # The last step is validated whatever its number: Lightning validates when it is asked to stop.
            trainer.should_stop = True
        if not self._validation_follows(step):
            self._step_end(trainer, task)

    def on_validation_end(self, trainer: Trainer, task: LanguageModelTask) -> None:  # type: ignore[override]
        self._step_end(trainer, task)

    def _validation_follows(self, step: int) -> bool:
        every = self.options.val_every
        return every > 0 and (step % every == 0 or step == self.options.max_steps)

    def _step_end(self, trainer: Trainer, task: LanguageModelTask) -> None:
        step, every = task.steps, self.options.checkpoint_every
        stopped = self.peers.stop_after(step)
        if stopped is not None or step == self.options.max_steps or (every > 0 and step % every == 0):
            self.monitor.clock.pause()
            self.monitor.settle(step, task)
            if self.options.checkpoint:
                trainer.save_checkpoint(self.path, weights_only=False)
                self.written = self.path
            self.monitor.clock.resume()
        if stopped is not None:
            raise Interrupted(stopped)

    def on_save_checkpoint(self, trainer: Trainer, task: LanguageModelTask, checkpoint: dict[str, Any]) -> None:  # type: ignore[override]
        checkpoint[KEY] = {"model": self.model_config, "step": trainer.global_step, "rng": _rng_state()}

    def on_load_checkpoint(self, trainer: Trainer, task: LanguageModelTask, checkpoint: dict[str, Any]) -> None:  # type: ignore[override]
        self._rng = checkpoint[KEY]["rng"]


def find(resume: str) -> Path:
    """The checkpoint that `resume` means: a file, or a run's directory with checkpoints/last.ckpt.

    Raises: UserError if there is none.
    """
    path = from_user_directory(resume)
    if path.is_dir():
        for candidate in (path / "checkpoints" / LAST, path / LAST):
            if candidate.is_file():
                return candidate
        raise UserError(f"resume={resume}: this directory holds no checkpoint (no checkpoints/{LAST})")
    if not path.is_file():
        raise UserError(f"resume={resume}: no such file or directory; give a checkpoint or a run's directory")
    return path


def check(path: Path, model_config: Mapping[str, Any], max_steps: int, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The step of checkpoint `path`, if a run with this model, whose tensors have these shapes, can go on from it.

    Raises: UserError if it is no checkpoint, is of another model (saying what differs) or leaves nothing to train.
    """
    try:
        damage = _damage(path)
        checkpoint = None if damage else torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        checkpoint, damage = None, "it holds other objects than tensors and plain values"
    except (RuntimeError, EOFError, zipfile.BadZipFile, ValueError, KeyError) as error:
        checkpoint, damage = None, _first_line(error)
    except OSError as error:
        raise UserError(f"resume={path}: cannot be read: {error.strerror}") from error
    if damage:
        raise UserError(f"resume={path}: this file is not a checkpoint, or is damaged: {damage}")
    parts: dict[str, Any] = checkpoint if isinstance(checkpoint, dict) else {}
    ours: Any = parts.get(KEY)
    kinds: dict[str, type] = {"model": dict, "step": int, "rng": dict}
    written = isinstance(ours, dict) and all(isinstance(ours.get(name), kind) for name, kind in kinds.items())
    if not written or not parts.keys() >= _STATE:
        raise UserError(f"resume={path}: this checkpoint was not written by train.py")
    theirs = ours["model"]
    names = sorted(theirs.keys() | model_config.keys())
    differences = [
        f"{name} is {theirs.get(name)} there, {model_config.get(name)} here"
        for name in names
        if theirs.get(name) != model_config.get(name)
    ]
    if differences:
        raise UserError(f"resume={path}: the checkpoint is of another model: {'; '.join(differences)}")
    if unlike := _unlike(parts["state_dict"], shapes):
        raise UserError(f"resume={path}: the checkpoint is of another model, though its config is the same: {unlike}")
    if ours["step"] >= max_steps:
        raise UserError(
            f"resume={path}: it is at step {ours['step']} already and trainer.max_steps={max_steps}; "
            "give a larger trainer.max_steps"
        )
    return ours["step"]


def _unlike(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Where the tensors of a checkpoint are not those of the model, because its code has changed; "" if they are."""
    theirs = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in tensors.items()}
    unlike = [name for name in {**shapes, **theirs} if theirs.get(name) != shapes.get(name)]
    words = [f"{name} is {theirs.get(name, 'missing')} there, {shapes.get(name, 'missing')} here" for name in unlike]
    return "; ".join(words[:3]) + (f"; and {len(words) - 3} more" if len(words) > 3 else "")


def _damage(path: Path) -> str | None:
    """What is wrong with the file. PyTorch itself does not look at the checksums, and would train on with it."""
    if not zipfile.is_zipfile(path):
        return "it is no zip archive, or the end of it is missing"
    with zipfile.ZipFile(path) as archive:
        record = archive.testzip()
    return None if record is None else f"{record} in it is not what was written (its checksum differs)"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _rng_state() -> dict[str, Any]:
    """States of the global random number generators, as plain types and tensors."""
    # The legacy generator is the one that seed_everything seeds.
    numpy_state: Any = numpy.random.get_state()  # noqa: NPY002
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype("int64")), *rest),
        "torch": torch.get_rng_state(),
        # Of the device at hand: asking all of them would take memory on each.
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
    }


def _seed(rank: int, step: int) -> None:
    torch.manual_seed(torch.initial_seed() + 7919 * rank + 1_000_003 * step)


def _set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        # Older checkpoints have one for every device.
        own = torch.cuda.current_device() if len(state["cuda"]) > 1 else 0
        torch.cuda.set_rng_state(state["cuda"][min(own, len(state["cuda"]) - 1)])
