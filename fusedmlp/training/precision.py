"""Lightning's precision plugins with the context of a training step made once: Lightning makes two for every step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision


def make_precision(name: str, device: torch.device) -> Precision:
    """The plugin for `trainer.precision`: "32-true", "bf16-mixed" or "bf16-true"."""
    if name == "bf16-true":
        return TrueBF16()
    return MixedBF16(device.type) if name == "bf16-mixed" else FP32()


class FP32(Precision):
    """Everything in fp32."""

    _context: AbstractContextManager[Any] = nullcontext()

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._context


class MixedBF16(MixedPrecision):
    """Parameters in fp32; autocast computes in bf16 what it may."""

    def __init__(self, device_type: str):
        super().__init__("bf16-mixed", device_type)
        self._context = self.autocast_context_manager()

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._context


class TrueBF16(HalfPrecision):
    """Parameters, and what a step makes without saying of which dtype, in bf16."""

    precision: Literal["bf16-true"] = "bf16-true"

    def __init__(self) -> None:
        super().__init__("bf16-true")
        self._context = _DefaultDtype(torch.bfloat16)

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._context


class _DefaultDtype:
    """PyTorch's default dtype while it is the active context. May be entered again once it was left."""

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def __enter__(self) -> None:
        self._outside = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self._outside)
