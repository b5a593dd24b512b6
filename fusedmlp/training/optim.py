"""AdamW and its learning rate."""

import math

import torch
from torch import nn

from fusedmlp.training.options import TrainerOptions


def build_optimizer(model: nn.Module, options: TrainerOptions) -> torch.optim.AdamW:
    """AdamW in its fused form (one kernel per group of parameters); only matrices decay, biases and norms do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        fused=all(parameter.device.type in ("cpu", "cuda") for parameter in parameters),
    )


def learning_rate(step: int, options: TrainerOptions) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then half a cosine down to the minimum.

    It depends on nothing but the step, so a resumed run needs no state to go on.
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(options.max_steps - options.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return options.min_learning_rate + (options.learning_rate - options.min_learning_rate) * cosine
