"""AdamW and its learning rate."""

import logging
import math

import torch
from torch import nn

from fusedmlp.errors import UserError
from fusedmlp.training.adamw import TritonAdamW, fault, interpreted, unsupported
from fusedmlp.training.options import TrainerOptions

log = logging.getLogger(__name__)


def build_optimizer(model: nn.Module, options: TrainerOptions) -> torch.optim.AdamW:
    """AdamW as `trainer.adamw` says; only matrices decay, biases and norms do not.

    Raises: UserError for trainer.adamw=triton where that cannot run.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = options.beta1, options.beta2
    if resolve_adamw(options.adamw, parameters) == "triton":
        return TritonAdamW(groups, lr=options.learning_rate, betas=betas, max_grad_norm=options.max_grad_norm)
    # Complex parameters have no fused form.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=betas, fused=fused)


def resolve_adamw(name: str, parameters: list[nn.Parameter]) -> str:
    """`trainer.adamw` with "auto" decided: triton for parameters on a GPU that it can train, native for others.

    Raises: UserError for "triton" where it cannot run.
    """
    if name == "native" or (name == "auto" and not all(parameter.is_cuda for parameter in parameters)):
        return "native"
    reason = unsupported(parameters)
    if reason is None and name == "auto" and interpreted():
        return "native"
    # Kernels are compiled here that the first step would have to wait for.
    reason = reason or fault(parameters)
    if reason is None:
        return "triton"
    if name == "triton":
        raise UserError(f"trainer.adamw=triton cannot run here: {reason}; accepted: native, or auto")
    log.info("trainer.adamw=auto: native, because of triton's: %s", reason)
    return "native"


def learning_rate(step: int, options: TrainerOptions) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then half a cosine down to the minimum.

    It depends on nothing but the step, so a resumed run needs no state to go on.
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    progress = (step - options.warmup_steps) / max(options.max_steps - options.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return options.min_learning_rate + (options.learning_rate - options.min_learning_rate) * cosine
