"""What launchers need around a kernel."""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NO_SWITCH: AbstractContextManager = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager:
    """A context in which Triton launches on the GPU of x. It launches on the current one, whichever x is on."""
    # Switching takes host time at every launch, so it is left out where there is nothing to switch.
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(x.device)


@functools.lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
