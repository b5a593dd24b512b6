"""The network inside Lightning: when a step of what `step.py` does is due, and how far training has come.

Optimization is Lightning's "manual" kind, because a step that is replayed from a graph has no forward pass and no
optimizer call that Lightning could see.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.optim import Optimizer

from fusedmlp.profiling.ranges import Marker, no_range
from fusedmlp.training.capture import StepCapture
from fusedmlp.training.capture_choice import obstacle
from fusedmlp.training.cuda_graph import CudaGraphs
from fusedmlp.training.data import TextDataModule
from fusedmlp.training.metrics import BATCH, DeviceMetrics
from fusedmlp.training.optim import build_optimizer, learning_rate
from fusedmlp.training.options import TrainerOptions
from fusedmlp.training.step import Batch, TrainStep, next_token_loss, to_device
from fusedmlp.training.strategies import FSDP2Strategy, shard, synchronized
from fusedmlp.training.trainer import LocalTrainer

# Hooks of Lightning's that only its own calls of backward and of the optimizer reach.
_HOOKS_WITHIN_A_STEP = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def _not_the_end() -> RuntimeError:
    """Lightning takes a StopIteration in a step for the end of the data, and would begin the endless data for ever."""
    return RuntimeError("StopIteration in the model: next() of something that is empty")


def _unobserved() -> None:
    pass


# Hooks of Lightning's for a batch on its way to the device.
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _leaves_transfer(data: Any) -> bool:
    """Whether all that a data module does with a batch on its way to the device is to ask the task for it."""
    return isinstance(data, TextDataModule) and all(
        getattr(type(data), name) is getattr(TextDataModule, name) for name in _TRANSFER_HOOKS
    )


class LanguageModelTask(LightningModule):
    """Trains a model on next tokens.

    Args:
        say: told what the user should know, in a line.
    Attributes:
        step_done: whether the last micro-step ended an optimizer step (with accumulation not all do).
        samples, tokens: trained on so far in this process; tokens are those that the loss was taken over.
        steps: optimizer steps so far, also those before a resume: trainer.global_step, at hand.
        learning_rate: of the last optimizer step.
        train_metrics, val_metrics: scalars since they were last read.
        on_fetch, on_batch: called when a micro-step asks for its batch, and when it has it on the device.
        range: names the parts of a step for whoever sets it, at any time; see `TrainStep`.
    """

    step: TrainStep
    capture: StepCapture
    train_metrics: DeviceMetrics
    val_metrics: DeviceMetrics

    # Lightning's property, which it asks for seven times a step.
    automatic_optimization = False
    # No such hooks: Lightning would prepare and call its own empty ones.
    on_train_batch_start = on_train_batch_end = None  # type: ignore[assignment]

    def __init__(self, model: nn.Module, options: TrainerOptions, say: Callable[[str], None] = print):
        super().__init__()
        self.model = model
        self.options = options
        self.say = say
        self.step_done = True
        self.samples = self.tokens = self.steps = 0
        self.learning_rate = 0.0
        self.on_fetch: Callable[[], None] = _unobserved
        self.on_batch: Callable[[], None] = _unobserved
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
        self.steps = self.trainer.global_step
        if isinstance(self.trainer, LocalTrainer):
            self.trainer.settle()

    def on_fit_start(self) -> None:
        world_size = getattr(self.trainer.strategy, "world_size", 1)
        batch = BATCH if self.device.type == "cuda" and world_size == 1 else 1
        self.train_metrics = DeviceMetrics(("train/loss", "train/grad_norm"), self.device, world_size, batch)
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
        direct = _leaves_transfer(self.trainer.datamodule)  # type: ignore[attr-defined]
        self._transfer = partial(self.capture.transfer, device=self.device) if direct else self._transfer_by_hooks
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

    def _transfer_by_hooks(self, batch: Any) -> Batch:
        """As Lightning itself would."""
        trainer: Any = self.trainer
        batch = trainer.precision_plugin.convert_input(batch)
        return trainer.strategy.batch_to_device((trainer.datamodule or self).on_before_batch_transfer(batch, 0))

    def training_step(self, dataloader_iter: Iterator[Any]) -> None:
        """One micro-step on the next batch.

        It fetches the batch itself: Lightning would look before each whose hooks it has to call, and what arguments
        this function takes.
        """
        # In case there is none: Lightning calls the hooks for the end of a batch all the same.
        self.__dict__["step_done"] = False
        self.on_fetch()
        batch, _, _ = next(dataloader_iter)
        batch = self._transfer(batch)
        self.on_batch()
        self.micro_step(batch)

    def micro_step(self, batch: Batch) -> None:
        """Trains on a batch that is on the device; the last micro-step of an optimizer step updates the parameters."""
        micro, last = self._micro, self._micro == self.options.accumulate - 1
        # nn.Module looks at each value that is assigned whether it is a parameter, buffer or module.
        state = self.__dict__
        if micro == 0:
            state["learning_rate"] = rate = learning_rate(self.steps, self.options)
            self.step.set_learning_rate(rate)
        try:
            samples, positions = self.capture.run(batch, micro)
        except StopIteration as error:
            raise _not_the_end() from error
        if last and self.step.plain:
            # What Lightning's own call of the optimizer would count: trainer.global_step.
            self._optimizer_steps.increment_ready()
            self._optimizer_steps.increment_completed()
        state["samples"] += samples
        state["tokens"] += samples * positions
        state["steps"] += last
        state["_micro"], state["step_done"] = (0, True) if last else (micro + 1, False)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, targets = batch
        try:
            loss = next_token_loss(self.model(inputs), targets)
        except StopIteration as error:
            raise _not_the_end() from error
        self.val_metrics.add("val/loss", loss, weight=len(inputs))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The learning rate may live on the device: a checkpoint is the same with and without capture.
        for state in checkpoint.get("optimizer_states", ()):
            state["param_groups"] = [
                {**group, "lr": self.learning_rate, "capturable": False} for group in state["param_groups"]
            ]
