"""Whether a step can be captured in a CUDA graph at all, and whether that is worth it."""

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

import fusedmlp

# "auto" captures where launching takes at least this share of the step. Where kernels bound the step, launching it into
# an empty queue takes a fraction of its time; where launches do, it takes nearly all of it.
LAUNCH_SHARE = 0.7

# What PyTorch says of it is true and helps nobody.
_FAILURES = {
    "CUDAGeneratorImpl::current_seed during": "it looks up the state of the GPU's random numbers, as "
    "torch.utils.checkpoint does without preserve_rng_state=False",
    "If capturable=True, params and state_steps": "AdamW keeps its count of steps on the CPU for parameters that are "
    "complex",
}


def in_words(error: BaseException) -> str:
    """Why a recording has failed, and where, if that is in code of somebody else's."""
    place = _place(error)
    for said, reason in _FAILURES.items():
        if said in str(error):
            return reason + place
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first}{place}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*torch.__path__, *fusedmlp.__path__, "<"))]
    return f", at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def obstacle(device: torch.device, optimizer: Optimizer, strategy: str = "single") -> str | None:
    """Why no step of a run on `device` can be captured, whatever the model; None if nothing speaks against it."""
    if device.type != "cuda":
        return f"a CUDA graph needs an NVIDIA GPU, and this run is on the {device.type.upper()}"
    if strategy != "single":
        return f"a step under trainer={strategy} is not captured, because its communication is not part of a graph"
    if "capturable" not in optimizer.defaults:
        return f"the optimizer {type(optimizer).__name__} has no capturable form"
    return None


@dataclass
class Probe:
    """What an uncaptured step took: the host to launch it, and the GPU between its first and last kernel."""

    launch_ms: float = 0.0
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def gpu_ms(self) -> float:
        return sum(begin.elapsed_time(end) for begin, end in self.spans)


def worthwhile(launch_ms: float, gpu_ms: float) -> bool:
    """Whether launches bound a step that the host launched in `launch_ms` and the GPU went through in `gpu_ms`."""
    return launch_ms >= LAUNCH_SHARE * gpu_ms
