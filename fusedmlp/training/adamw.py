"""AdamW that clips as it steps, in three Triton kernels: `torch.optim.AdamW` in all that a user sees."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fusedmlp import impls
from fusedmlp.training.adamw_plan import Columns, Group, Plan, check_state, host_memory


def unsupported(parameters: Iterable[Tensor]) -> str | None:
    """Why `TritonAdamW` cannot train these parameters, in words a user can act on; None if it can."""
    if (reason := impls.unavailable("triton")) is not None:
        # What follows is about impl.
        return reason.partition(";")[0]
    parameters = list(parameters)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return "parameters are sharded"
    if len(devices := {parameter.device for parameter in parameters}) > 1:
        return f"parameters are on {len(devices)} devices"
    for parameter in parameters:
        if type(parameter) not in (Tensor, nn.Parameter):
            return f"a parameter is a {type(parameter).__name__}; accepted: plain tensors"
        if parameter.dtype not in impls.DEFAULT_DTYPES:
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}; accepted: fp32, bf16, fp16"
        if parameter.device.type not in impls.load("triton").DEVICES:
            return f"parameters are on {parameter.device}"
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            return (
                f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; accepted: dense ones"
            )
    return None


def fault(parameters: Iterable[Tensor]) -> str | None:
    """Why a step fails on this machine, which may lack the compiler that Triton needs; tried on a few elements."""
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    try:
        for dtype, device in kinds:
            trial = torch.zeros(16, dtype=dtype, device=device, requires_grad=True)
            trial.grad = torch.zeros_like(trial)
            TritonAdamW([trial]).step()
    except Exception as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None


def interpreted() -> bool:
    """Whether Triton's kernels are interpreted, on CPU tensors too, which is for tests."""
    return "cpu" in impls.load("triton").DEVICES


class TritonAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` with the gradients clipped by their global norm within the step.

    The gradients themselves stay as they are. State, hyper-parameters and checkpoints are those of `torch.optim.AdamW`.
    In a CUDA graph the learning rate must be a tensor, and a step must have run before it is recorded.

    Args:
        params: dense fp32, bf16 or fp16 parameters on one GPU, or groups of them.
        lr: a float or a 0-dim fp32 tensor on that GPU.  betas, eps, weight_decay, maximize: as for AdamW.
        max_grad_norm: what the norm of all gradients together is clipped to, None for no clipping.
    Attributes:
        grad_norm: norm of all gradients before the last step's clipping, 0-dim fp32 on the device; None before any.
    Raises: ValueError for parameters that it cannot train.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    grad_norm: Tensor | None = None
    max_grad_norm: float | None = None
    _plan: Plan | None = None
    _key: tuple[Any, ...] | None = None
    _checked = b""
    # Pinned memory for the next recording, during which none can be had.
    _spare: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
    ):
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={max_grad_norm}: expected a number above 0, or None for no clipping")
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)
        # A GradScaler shall unscale the gradients itself.
        self._step_supports_amp_scaling = False
        self.max_grad_norm = max_grad_norm
        self._recorded: list[Plan] = []
        if (reason := unsupported(p for group in self.param_groups for p in group["params"])) is not None:
            raise ValueError(f"TritonAdamW: {reason}")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "_recorded": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State of any `torch.optim.AdamW`, fused or not. Raises: ValueError for that of the AMSGrad variant."""
        groups = state_dict["param_groups"]
        if any(group.get("amsgrad") for group in groups):
            raise ValueError("TritonAdamW has no AMSGrad, with which this state was made")
        ours = {"fused": True, "foreach": None, "differentiable": False}
        super().load_state_dict({**state_dict, "param_groups": [{**group, **ours} for group in groups]})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clips and updates; returns what `closure`, which is called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        columns, groups = self._collect()
        if columns[0]:
            self.grad_norm = self._planned(columns, groups).launch()
        elif self.param_groups[0]["params"]:
            self.grad_norm = self.param_groups[0]["params"][0].new_zeros((), dtype=torch.float32)
        return loss

    def _collect(self) -> tuple[Columns, list[Group]]:
        columns: Columns = [[], [], [], [], []]
        parameters, gradients, exp_avgs, exp_avg_sqs, steps = columns
        groups = []
        for group in self.param_groups:
            before = len(parameters)
            self._init_group(group, parameters, gradients, exp_avgs, exp_avg_sqs, [], steps)
            beta1, beta2 = group["betas"]
            logs = (math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
            sign = -1.0 if group["maximize"] else 1.0
            settings = (1 - beta1, 1 - beta2, *logs, group["eps"], group["weight_decay"], sign)
            groups.append(Group(group["lr"], len(parameters) - before, settings))
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if gradient.stride() != parameter.stride():
                gradients[i] = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        return columns, groups

    def _planned(self, columns: Columns, groups: list[Group]) -> Plan:
        """The plan for these tensors: that of the last step, where nothing has moved."""
        addresses = numpy.array([[tensor.data_ptr() for tensor in column] for column in columns], dtype=numpy.int64)
        # Most steps have other gradients and nothing else.
        if (kept := addresses[[0, 2, 3, 4]].tobytes()) != self._checked:
            check_state(columns)
            self._checked = kept
        rates = [rate.data_ptr() if isinstance(rate := group.rate, Tensor) else None for group in groups]
        key = (addresses.tobytes(), rates, [group[1:] for group in groups])
        if columns[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            # Only replays fill its table, and what they read must stay. The other plan stays too: pinned memory that is
            # freed while its stream is recorded breaks PyTorch's allocator.
            plan = Plan(columns, addresses, groups, self.max_grad_norm, self._plan, self._spare)
            self._spare = None
            self._recorded.append(plan)
            return plan
        if self._plan is None or key != self._key:
            self._plan = Plan(columns, addresses, groups, self.max_grad_norm, self._plan, None)
            self._key = key
        else:
            self._plan.set_rates(groups)
        if self._spare is None or self._spare.shape != self._plan.host.shape:
            self._spare = host_memory(self._plan.host, self._plan.table.device)
        return self._plan
