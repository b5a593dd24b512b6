"""The network inside Lightning: when a step of what `step.py` does is due, and how far training has come.

Optimization is Lightning's "manual" kind, because a step that is replayed from a graph has no forward pass and no
optimizer call that Lightning could see.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim import Optimizer

from fusedmlp.profiling.ranges import Marker, no_range
from fusedmlp.training.capture import StepCapture
from fusedmlp.training.capture_choice import obstacle
from fusedmlp.training.cuda_graph import CudaGraphs
from fusedmlp.training.metrics import DeviceMetrics
from fusedmlp.training.optim import build_optimizer, learning_rate
from fusedmlp.training.options import TrainerOptions
from fusedmlp.training.step import Batch, TrainStep, next_token_loss, to_device
from fusedmlp.training.strategies import FSDP2Strategy, shard, synchronized

# Hooks of Lightning's that only its own calls of backward and of the optimizer reach.
_HOOKS_WITHIN_A_STEP = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


class _never_at_an_end:
    """Lightning takes a StopIteration in a step for the end of the data, and would begin the endless data for ever."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError("StopIteration in the model: next() of something that is empty") from error


class LanguageModelTask(LightningModule):
    """Trains a model on next tokens.

    Args:
        say: told what the user should know, in a line.
    Attributes:
        step_done: whether the last `training_step` ended an optimizer step (with accumulation not all do).
        samples, tokens: trained on so far in this process; tokens are those that the loss was taken over.
        learning_rate: of the last optimizer step.
        train_metrics, val_metrics: scalars since they were last read.
        range: names the parts of a step for whoever sets it, at any time; see `TrainStep`.
    """

    step: TrainStep
    capture: StepCapture
    train_metrics: DeviceMetrics
    val_metrics: DeviceMetrics

    def __init__(self, model: nn.Module, options: TrainerOptions, say: Callable[[str], None] = print):
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.options = options
        self.say = say
        self.step_done = True
        self.samples = self.tokens = 0
        self.learning_rate = 0.0
        self._range: Marker = no_range
        self._micro = 0

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module looks whether a value is a parameter, buffer or module: costly for the name of the current hook,
        # which Lightning sets and resets 40 times a step.
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def range(self) -> Marker:
        return self._range

    @range.setter
    def range(self, value: Marker) -> None:
        self._range = value
        if hasattr(self, "step"):
            self.step.range = value

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, FSDP2Strategy):
            shard(self.model, strategy.device_mesh["data_parallel"], str(self.trainer.precision))

    def configure_optimizers(self) -> Optimizer:
        optimizer = build_optimizer(self.model, self.options)
        self._chosen = [{name: group[name] for name in ("weight_decay", "betas")} for group in optimizer.param_groups]
        return optimizer

    def on_train_start(self) -> None:
        # A checkpoint brings those of its own run along; what was given for this one holds.
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        for group, chosen in zip(optimizer.param_groups, self._chosen, strict=True):
            group.update(chosen)

    def on_fit_start(self) -> None:
        world_size = getattr(self.trainer.strategy, "world_size", 1)
        self.train_metrics = DeviceMetrics(("train/loss", "train/grad_norm"), self.device, world_size)
        self.val_metrics = DeviceMetrics(("val/loss",), self.device, world_size)
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.step = TrainStep(self.model, optimizer, self.options, self.train_metrics)
        self.step.range = self._range
        if self._hooks_within_a_step():
            self.step.backward, self.step.apply = self.manual_backward, self._lightning_step
            self.step.plain = False
        if (wrapper := synchronized(self.trainer.strategy)) is not None:
            self.step.backward = self.manual_backward
            self.step.unsynchronized = wrapper.no_sync
        requested = self.options.cuda_graph
        against = obstacle(self.device, optimizer, self.options.strategy)
        graphs = CudaGraphs(self.device) if requested is not False and against is None else None
        self.capture = StepCapture(self.step, requested, graphs, against, self.say)
        # Looked up once: Lightning finds it through several properties.
        self._optimizer_steps = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress

    def _hooks_within_a_step(self) -> bool:
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return any(
            getattr(type(callback), name) is not getattr(Callback, name)
            for callback in callbacks
            for name in _HOOKS_WITHIN_A_STEP
        )

    def _lightning_step(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step()

    def transfer(self, batch: Batch, device: torch.device) -> Batch:
        """The batch on the device, for a data module's `transfer_batch_to_device`; the host does not wait for it.

        It is no hook here because Lightning warns of a model that has this one beside a data module.
        """
        if self.trainer.training:
            return self.capture.transfer(batch, device)
        return to_device(batch, device)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One micro-step; the last of an optimizer step updates the parameters."""
        last = self._micro == self.options.accumulate - 1
        if self._micro == 0:
            self.learning_rate = learning_rate(self.trainer.global_step, self.options)
            self.step.set_learning_rate(self.learning_rate)
        with _never_at_an_end():
            samples, positions = self.capture.run(batch, self._micro)
        if last and self.step.plain:
            # What Lightning's own call of the optimizer would count: trainer.global_step.
            self._optimizer_steps.increment_ready()
            self._optimizer_steps.increment_completed()
        self.samples += samples
        self.tokens += samples * positions
        self._micro = 0 if last else self._micro + 1
        self.step_done = last

    # Lightning asks for it before each step, and would have it worked out anew.
    training_step.__signature__ = inspect.signature(training_step)  # type: ignore[attr-defined]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, targets = batch
        with _never_at_an_end():
            self.val_metrics.add("val/loss", next_token_loss(self.model(inputs), targets), weight=len(inputs))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The learning rate may live on the device: a checkpoint is the same with and without capture.
        for state in checkpoint.get("optimizer_states", ()):
            state["param_groups"] = [
                {**group, "lr": self.learning_rate, "capturable": False} for group in state["param_groups"]
            ]
