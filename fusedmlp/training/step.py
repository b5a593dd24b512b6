"""The work of an optimizer step on the device, in the order in which it happens.

Nothing here reads a value from the device or depends on one, so that the same code runs operation by operation or is
recorded once into a CUDA graph and replayed (`capture.py`).

`B` batch, `T` tokens of a sample, `P` positions with a prediction, `V` padded vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fusedmlp.profiling.ranges import Marker, no_range
from fusedmlp.training.adamw import TritonAdamW
from fusedmlp.training.metrics import DeviceMetrics
from fusedmlp.training.options import TrainerOptions

Batch = tuple[Tensor, Tensor]
_NOTHING: AbstractContextManager[None] = nullcontext()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in fp32, in nats per token, over the last P positions, for which there are logits.

    Args:
        logits: (B, P, V), any floating dtype.
        targets: (B, T) int64, T >= P.
    Returns: 0-dim fp32.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets[:, -logits.shape[1] :].flatten())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; from pinned memory the host does not wait for the copy."""
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


class TrainStep:
    """Micro-steps that accumulate gradients, the last of which clips them and updates the parameters.

    Args:
        metrics: receives "train/loss" of every micro-step and "train/grad_norm" of every update.
    Attributes:
        backward, apply: what differentiates a loss and what applies the gradients. A caller may put others in their
            place until `use_plain_calls`.
        plain: whether `apply` is PyTorch's own.
        unsynchronized: a context for the backward passes after which other ranks are not told of the gradients yet.
        range: marks the parts of the step: "forward", "backward", "optimizer"; of a step that is replayed from a graph
            "replay", and the others only while it is recorded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, options: TrainerOptions, metrics: DeviceMetrics):
        self.model, self.optimizer, self.metrics = model, optimizer, metrics
        self.accumulate, self.max_grad_norm = options.accumulate, options.max_grad_norm
        self.read_loss = options.read_loss_every_step
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.range: Marker = no_range
        self.plain = False
        self.unsynchronized: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._rate = 0.0
        self._device_rate: Tensor | None = None
        self.use_plain_calls()

    def use_plain_calls(self) -> None:
        self.backward: Callable[[Tensor], Any] = Tensor.backward
        self.apply: Callable[[], Any] = self.optimizer.step
        self.plain = True

    def micro_step(self, inputs: Tensor, targets: Tensor, *, last: bool) -> tuple[int, int]:
        """Forward and backward pass, and the update if this is the `last` micro-step of an optimizer step.

        Returns: B and P, from which follows how many tokens were trained on.
        """
        with self.range("forward"):
            logits = self.model(inputs)  # (B, P, V)
            loss = next_token_loss(logits, targets)
            self.metrics.add("train/loss", loss)
            if self.accumulate > 1:
                loss = loss / self.accumulate
        # Autocast is for the forward pass; the caller's may span all of this.
        with _without_autocast(inputs.device.type):
            with self.range("backward"), _NOTHING if last else self.unsynchronized():
                self.backward(loss)
            if last:
                with self.range("optimizer"):
                    self._update()
        if self.read_loss:
            # As a print of the loss does: the CPU waits here for everything that the GPU has been given.
            loss.item()
        return logits.shape[0], logits.shape[1]

    def _update(self) -> None:
        """Clips the gradients, updates the parameters and frees the gradients."""
        if isinstance(self.optimizer, TritonAdamW):
            self.apply()
            norm = self.optimizer.grad_norm
            assert norm is not None
            self.metrics.add("train/grad_norm", norm)
        else:
            self._clip()
            self.apply()
        self.free_gradients()

    def _clip(self) -> None:
        gradients = [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            # Each rank has the norm of its shards.
            norm = norm.full_tensor()
        self.metrics.add("train/grad_norm", norm)
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)

    def free_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def set_learning_rate(self, value: float) -> None:
        """Learning rate of the next update, in fp32: what a graph reads, and what is used without one."""
        self._rate = float(numpy.float32(value))
        if self._device_rate is not None:
            self._device_rate.fill_(self._rate)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate

    def make_capturable(self) -> None:
        """Moves what changes from step to step to the device, the learning rate (the step count is there already), and
        lets the metrics stay where they are."""
        self.metrics.stay()
        self._device_rate = torch.full((), self._rate, dtype=torch.float32, device=self.parameters[0].device)
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = self._device_rate, True

    def make_uncapturable(self) -> None:
        """Takes `make_capturable` back: AdamW warns when it steps in that form without a graph."""
        if self._device_rate is None:
            return
        self._device_rate = None
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = self._rate, False


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else _NOTHING
