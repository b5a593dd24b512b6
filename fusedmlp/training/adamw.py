"""AdamW that clips as it steps, in three Triton kernels: `torch.optim.AdamW` in all that a user sees."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fusedmlp import impls

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Bucket(NamedTuple):
    """Tensors that one launch can take: of the same dtypes, and all or not all beginning at a multiple of 16 bytes."""

    dtype: torch.dtype
    grad_dtype: torch.dtype
    aligned: bool


class _Plan(NamedTuple):
    """What a step launches for tensors at certain addresses.

    Attributes:
        words: all that was copied to the device; the others are views of it or tensors like it.
        table, max_norm, sums, clip: see `kernels/adamw.py`.
        parts: what each launch takes: its bucket, its chunks and its part of `sums`.
        sizes: elements of each tensor, in the table's order.  chunks: of all of them.
        hosts: the pinned memory that `words` and `chunks` come from, which a captured copy reads at each replay.
    """

    words: Tensor
    table: Tensor
    max_norm: Tensor
    sums: Tensor
    clip: Tensor
    parts: list[tuple[_Bucket, Tensor, Tensor]]
    sizes: list[int]
    chunks: Tensor
    hosts: tuple[Tensor, Tensor]


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
        if parameter.dtype not in _DTYPES:
            return f"a parameter is {str(parameter.dtype).removeprefix('torch.')}; accepted: fp32, bf16, fp16"
        if parameter.device.type not in impls.load("triton").DEVICES:
            return f"parameters are on {parameter.device}"
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
    _plan: _Plan | None = None
    _key: tuple[Any, ...] | None = None
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
        self._recorded: list[_Plan] = []
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clips and updates; returns what `closure`, which is called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        columns, rates, settings = self._collect()
        if columns[0]:
            self._launch(columns, rates, settings)
        elif self.param_groups[0]["params"]:
            self.grad_norm = self.param_groups[0]["params"][0].new_zeros((), dtype=torch.float32)
        return loss

    def _collect(self) -> tuple[list[list[Tensor]], list[tuple[Any, int]], list[tuple[float, ...]]]:
        """Parameters with gradients, these, both moments and step counts; then (learning rate, tensors) and settings
        of each group."""
        columns: list[list[Tensor]] = [[], [], [], [], []]
        rates, settings = [], []
        for group in self.param_groups:
            before = len(columns[0])
            self._init_group(group, *columns[:4], [], columns[4])
            rates.append((group["lr"], len(columns[0]) - before))
            beta1, beta2 = group["betas"]
            logs = (math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
            sign = -1.0 if group["maximize"] else 1.0
            settings.append((1 - beta1, 1 - beta2, *logs, group["eps"], group["weight_decay"], sign))
        parameters, gradients = columns[:2]
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if gradient.stride() != parameter.stride():
                gradients[i] = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        return columns, rates, settings

    def _launch(
        self, columns: list[list[Tensor]], rates: list[tuple[Any, int]], settings: list[tuple[float, ...]]
    ) -> None:
        from fusedmlp.kernels import adamw as kernels

        addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
        key = (addresses, [rate if isinstance(rate, float) else id(rate) for rate, _ in rates], settings)
        if columns[0][0].is_cuda and torch.cuda.is_current_stream_capturing():
            # Only replays fill its table, and what they read must stay. The other plan must stay too: pinned memory that
            # is freed while its stream is recorded breaks PyTorch's allocator.
            plan = self._make(columns, addresses, rates, settings, recording=True)
            self._recorded.append(plan)
        elif self._plan is None or key != self._key:
            plan = self._plan = self._make(columns, addresses, rates, settings, recording=False)
            self._key = key
        else:
            plan = self._plan
        for bucket, chunks, sums in plan.parts:
            kernels.square_sums(plan.table, chunks, sums, bucket.grad_dtype, bucket.aligned)
        kernels.clip(plan.table, plan.sums, plan.max_norm, plan.clip)
        for bucket, chunks, _ in plan.parts:
            kernels.adamw(plan.table, chunks, plan.clip, *bucket)
        self.grad_norm = plan.clip[0]

    def _make(
        self, columns: list[list[Tensor]], addresses: list[list[int]], rates: list[tuple[Any, int]],
        settings: list[tuple[float, ...]], recording: bool,
    ) -> _Plan:  # fmt: skip
        from fusedmlp.kernels import adamw as kernels

        parameters, gradients = columns[:2]
        device = parameters[0].device
        _check_state(columns)
        buckets = [
            _Bucket(p.dtype, g.dtype, not any(column[i] % 16 for column in addresses[:4]))
            for i, (p, g) in enumerate(zip(parameters, gradients, strict=True))
        ]
        order = sorted(range(len(buckets)), key=lambda i: (buckets.index(buckets[i]), i))
        count, groups = len(order), len(settings)
        table_words = count * kernels.COLUMNS
        words = torch.empty(table_words + 4 * groups + 1, dtype=torch.int64, device=device)
        host = self._host_memory(words, recording)
        numbers = host.numpy()
        floats = numbers[table_words:].view(numpy.float32)
        floats[:] = math.inf if self.max_grad_norm is None else self.max_grad_norm
        table = numbers[:table_words].reshape(count, kernels.COLUMNS)
        base, row = words.data_ptr() + 8 * table_words, 0
        filled = numpy.empty_like(table)
        filled[:, :5] = numpy.array(addresses, dtype=numpy.int64).T
        for group, ((rate, members), values) in enumerate(zip(rates, settings, strict=True)):
            floats[8 * group : 8 * group + 7] = values
            on_device = isinstance(rate, Tensor) and rate.device == device and rate.dtype == torch.float32
            floats[8 * group + 7] = 0.0 if on_device else float(rate)
            filled[row : row + members, 5] = rate.data_ptr() if on_device else base + 32 * group + 28
            filled[row : row + members, 6] = base + 32 * group
            row += members
        filled[:, 7] = [parameter.numel() for parameter in parameters]
        table[:] = filled[order]
        words.copy_(host, non_blocking=True)
        sizes = [parameters[i].numel() for i in order]
        if self._plan is not None and self._plan.sizes == sizes:
            chunks, pairs = self._plan.chunks, self._plan.hosts[1]
        else:
            chunks, pairs = _chunks_of(sizes, kernels.CHUNK, device)
        sums = torch.empty(chunks.shape[0], dtype=torch.float32, device=device)
        return _Plan(
            words, words[:table_words].view(count, -1), words[-1:].view(torch.float32)[:1], sums,
            torch.empty(2, dtype=torch.float32, device=device),
            _parts([buckets[i] for i in order], sizes, chunks, sums, kernels.CHUNK),
            sizes, chunks, (host, pairs),
        )  # fmt: skip

    def _host_memory(self, like: Tensor, recording: bool) -> Tensor:
        if not like.is_cuda:
            return torch.empty_like(like)
        spare, self._spare = self._spare, None
        if spare is None or spare.shape != like.shape:
            spare = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        if not recording:
            self._spare = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        return spare


def _chunks_of(sizes: list[int], chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(tensor, ordinal) of every chunk of tensors of these sizes, on the device and in the memory it comes from."""
    counts = [-(-size // chunk) for size in sizes]
    tensors = numpy.repeat(numpy.arange(len(sizes), dtype=numpy.int32), counts)
    ordinals = numpy.concatenate([numpy.arange(count, dtype=numpy.int32) for count in counts])
    pairs = torch.from_numpy(numpy.stack((tensors, ordinals), axis=1))
    if device.type == "cuda":
        # So that the host does not wait for the copy.
        pairs = pairs.pin_memory()
    return pairs.to(device, non_blocking=True), pairs


def _check_state(columns: Sequence[Sequence[Tensor]]) -> None:
    """Raises: RuntimeError for parameters whose moments lie in memory otherwise than they do."""
    for parameter, _, exp_avg, exp_avg_sq, step in zip(*columns, strict=True):
        for moment in (exp_avg, exp_avg_sq):
            if (moment.dtype, moment.stride()) != (parameter.dtype, parameter.stride()):
                raise RuntimeError(
                    f"TritonAdamW: a parameter of shape {tuple(parameter.shape)}, {parameter.dtype}, strides "
                    f"{parameter.stride()}, has a moment of {moment.dtype}, strides {moment.stride()}; parameters must "
                    "be dense, and keep dtype and layout"
                )
        if step.device != parameter.device or step.dtype != torch.float32:
            raise RuntimeError(f"TritonAdamW: a step count is {step.dtype} on {step.device}; expected fp32 on the GPU")


def _parts(
    buckets: list[_Bucket], sizes: list[int], chunks: Tensor, sums: Tensor, chunk: int
) -> list[tuple[_Bucket, Tensor, Tensor]]:
    """For each run of equal buckets its chunks and their sums."""
    found: list[tuple[_Bucket, Tensor, Tensor]] = []
    begin = end = 0
    for i, (bucket, size) in enumerate(zip(buckets, sizes, strict=True)):
        end += -(-size // chunk)
        if i + 1 == len(buckets) or buckets[i + 1] != bucket:
            if end > begin:
                found.append((bucket, chunks[begin:end], sums[begin:end]))
            begin = end
    return found
