"""The Lightning Trainer with everything off that costs host time per step or reads a value from the GPU."""

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import RunningStage

from fusedmlp import impls
from fusedmlp.errors import UserError
from fusedmlp.training.options import TrainerOptions, choose, require
from fusedmlp.training.place import Place
from fusedmlp.training.precision import make_precision
from fusedmlp.training.strategies import Ranks, make_strategy

_TRAINING = RunningStage.TRAINING


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the old file and renames, so that a full disk or a kill leaves the old one whole.

    Lightning's own also copies the whole checkpoint in memory and through the system's temporary directory.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        partial = path.with_name(f"{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                torch.save(checkpoint, file)
            os.replace(partial, path)
        except RuntimeError as error:
            # PyTorch cannot end an archive that the disk did not take, and says that instead.
            if isinstance(refused := error.__context__, OSError) and refused.errno is not None:
                raise OSError(refused.errno, refused.strerror, str(path)) from error
            raise
        finally:
            partial.unlink(missing_ok=True)


class NoProfiler(PassThroughProfiler):
    """Lightning's default, without the generator that it makes for every hook of every callback and module."""

    _nothing: AbstractContextManager[None] = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return self._nothing


class _UntilSettled:
    """A property of Lightning's Trainer that an attribute of an instance takes the place of, where it has one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._property = getattr(Trainer, name)

    def __get__(self, trainer: Trainer | None, owner: type | None = None) -> Any:
        return self if trainer is None else self._property.__get__(trainer, owner)


class LocalTrainer(Trainer):
    """A Trainer that knows of one device, and from `settle` on without looking what no step changes.

    Where it knew of more devices, Lightning's loop (2.6.6) would broadcast in every step whether a SIGTERM has come,
    and wait for the GPU to read the answer. Ranks agree on when to stop in `peers.py`; the strategy knows how many
    there are.
    """

    # Lightning asks for these up to forty times a step, each time through several objects.
    strategy, lightning_module, lr_scheduler_configs = _UntilSettled(), _UntilSettled(), _UntilSettled()
    num_training_batches, enable_validation = _UntilSettled(), _UntilSettled()

    def settle(self) -> None:
        """Once training has begun: nothing of this changes until `fit` returns."""
        settled = [name for name, value in vars(LocalTrainer).items() if isinstance(value, _UntilSettled)]
        self.__dict__.update({name: getattr(self, name) for name in settled})

    def fit(self, *args: Any, **kwargs: Any) -> None:
        # Lightning says that its offer to let a step fetch its batch may change; pyproject.toml bounds its version.
        warnings.filterwarnings("ignore", ".*`dataloader_iter`")
        try:
            super().fit(*args, **kwargs)
        finally:
            for name in [name for name in vars(self) if isinstance(vars(LocalTrainer).get(name), _UntilSettled)]:
                del self.__dict__[name]

    @property
    def world_size(self) -> int:
        return 1

    @property
    def training(self) -> bool:
        # Lightning compares the values of the two in lower case.
        return self.state.stage is _TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        Trainer.training.fset(self, value)  # type: ignore[attr-defined]


def choose_device(accelerator: str, place: Place | None = None) -> torch.device:
    """The device of `trainer.accelerator` for a rank. Raises: UserError for a GPU where there is none for it."""
    gpu = torch.cuda.is_available()
    require("trainer.accelerator", accelerator, accelerator != "gpu" or gpu, "cpu or auto: PyTorch finds no GPU here")
    if not gpu or accelerator == "cpu":
        return torch.device("cpu")
    if place is None or place.local_world_size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    # Slurm may let a task see its own GPU only.
    require("trainer.devices", place.local_world_size, count in (1, *range(place.local_world_size, count + 1)),
            f"at most {count}, the GPUs that PyTorch finds here")  # fmt: skip
    return torch.device("cuda", 0 if count == 1 else place.local_rank)


def choose_precision(precision: str, device: torch.device) -> str:
    """`trainer.precision` with "auto" decided: bf16-mixed on a GPU that computes in bf16, 32-true elsewhere."""
    if precision != "auto":
        return precision
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if bf16 else "32-true"


def resolve_impl(name: str) -> str:
    """The implementation that runs for `name`. Raises: UserError for an unknown one or one that cannot run here."""
    choose("impl", name, impls.names())
    reason = impls.unavailable(name)
    if reason is not None:
        raise UserError(f"impl={name} cannot run here: {reason}")
    return impls.resolved(name)


def model_identity(section: Mapping[str, Any]) -> dict[str, Any]:
    """What two models must share to load each other's checkpoints: all of the section but impl."""
    return {name: value for name, value in section.items() if name != "impl"}


def make_trainer(
    options: TrainerOptions, device: torch.device, folder: Path, callbacks: list[Callback], place: Place | None = None
) -> Trainer:
    """A Trainer for the device of a rank; logging, progress and checkpoints are the callbacks' business."""
    place = place or Place()
    return LocalTrainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=[device.index] if device.type == "cuda" else 1,
        strategy=make_strategy(options.strategy, device, place, options.rank_timeout),
        max_steps=options.max_steps,
        max_epochs=-1,
        # In micro-batches; validation after the last step is asked for by the Checkpoints callback.
        val_check_interval=max(options.val_every, 1) * options.accumulate,
        check_val_every_n_epoch=None,
        limit_val_batches=1.0 if options.val_every else 0,
        num_sanity_val_steps=0,
        logger=False,
        log_every_n_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_autolog_hparams=False,
        use_distributed_sampler=False,
        profiler=NoProfiler(),
        default_root_dir=folder,
        # Also inside a Slurm job: Lightning's Slurm support would requeue it and resume by itself.
        plugins=[
            Ranks(place),
            AtomicCheckpointIO(),
            make_precision(choose_precision(options.precision, device), device),
        ],
        callbacks=callbacks,
    )
