"""The network inside Lightning: its loss, one optimizer step, and the scalars that the step leaves on the device.

Optimization is Lightning's "manual" kind: the whole step stands in `training_step`, in the order in which it happens,
so that what is measured, traced or captured is what can be read here.
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedmlp.profiling.ranges import Marker, no_range
from fusedmlp.training.metrics import DeviceMetrics
from fusedmlp.training.optim import build_optimizer, learning_rate
from fusedmlp.training.options import TrainerOptions

Batch = tuple[Tensor, Tensor]


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in fp32, in nats per token, over the last P positions, for which there are logits.

    Args:
        logits: (B, P, V), any floating dtype.
        targets: (B, T) int64, T >= P.
    Returns: 0-dim fp32.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets[:, -logits.shape[1] :].flatten())


class LanguageModelTask(LightningModule):
    """Trains a model on next tokens.

    Attributes:
        step_done: whether the last `training_step` ended an optimizer step (with accumulation not all do).
        samples, tokens: trained on so far in this process; tokens are those that the loss was taken over.
        learning_rate: of the last optimizer step.
        train_metrics, val_metrics: scalars since they were last read.
        range: marks the parts of a step for a profiler while its window is open.
    """

    train_metrics: DeviceMetrics
    val_metrics: DeviceMetrics

    def __init__(self, model: nn.Module, options: TrainerOptions):
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.options = options
        self.step_done = True
        self.samples = self.tokens = 0
        self.learning_rate = 0.0
        self._accumulated = 0
        self.range: Marker = no_range

    def configure_optimizers(self) -> Optimizer:
        return build_optimizer(self.model, self.options)

    def on_fit_start(self) -> None:
        self.train_metrics = DeviceMetrics(("train/loss", "train/grad_norm"), self.device)
        self.val_metrics = DeviceMetrics(("val/loss",), self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, targets = batch
        with self.range("forward"):
            logits = self.model(inputs)  # (B, P, V)
            loss = next_token_loss(logits, targets)
        self.samples += logits.shape[0]
        self.tokens += logits.shape[0] * logits.shape[1]
        self.train_metrics.add("train/loss", loss)
        # Lightning's autocast spans the whole of training_step; the backward pass must run outside it.
        with torch.autocast(self.device.type, enabled=False):
            with self.range("backward"):
                self.manual_backward(loss / self.options.accumulate)
            self._accumulated += 1
            self.step_done = self._accumulated == self.options.accumulate
            if self.step_done:
                self._accumulated = 0
                with self.range("optimizer"):
                    self._update()
        if self.options.read_loss_every_step:
            # As a print of the loss does: the CPU waits here for everything that the GPU has been given.
            loss.item()

    def _update(self) -> None:
        """Clips the gradients, updates the parameters and frees the gradients."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        self.learning_rate = learning_rate(self.trainer.global_step, self.options)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        self.train_metrics.add("train/grad_norm", norm)
        if self.options.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.options.max_grad_norm, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        inputs, targets = batch
        self.val_metrics.add("val/loss", next_token_loss(self.model(inputs), targets), weight=len(inputs))
