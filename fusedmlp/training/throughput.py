"""How long the steps took: CUDA events on a GPU, the host's clock on a CPU, read when the metrics are."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

MAX_WARMUP_STEPS = 10


class HostEvent:
    """A point in time by the host's clock, with the interface of `torch.cuda.Event`."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: "HostEvent", /) -> float:
        """Milliseconds from here to `end_event`."""
        return (end_event._time - self._time) * 1e3


Step = tuple[Any, Any]  # begin and end, both CUDA events or both HostEvents


class StepClock:
    """Marks the ends of optimizer steps; the durations are asked for later, when the device has passed the marks.

    Time between `pause` and the next `resume` (validation, a checkpoint) belongs to no step.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._last: Any = None
        self._steps: list[Step] = []

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True) if self._cuda else HostEvent()
        event.record()
        return event

    def resume(self) -> None:
        """The next step begins now, unless the clock is running already."""
        if self._last is None:
            self._last = self._mark()

    def tick(self) -> None:
        """A step ends here, and the next one begins."""
        now = self._mark()
        if self._last is not None:
            self._steps.append((self._last, now))
        self._last = now

    def pause(self) -> None:
        self._last = None

    def take(self) -> list[Step]:
        """Begin and end of the steps since the last call; for `milliseconds`."""
        steps, self._steps = self._steps, []
        return steps


def milliseconds(steps: list[Step]) -> list[float]:
    """Duration of each step. On a GPU its marks must have been passed, or CUDA raises RuntimeError."""
    return [begin.elapsed_time(end) for begin, end in steps]


@dataclass(frozen=True)
class Throughput:
    """Speed over the steady window: all steps but the first ones, which compile, autotune and fill caches."""

    step_ms_median: float
    step_ms_p10: float
    step_ms_p90: float
    samples_per_s: float
    tokens_per_s: float
    steady_steps: int
    warmup_s: float


def summarize(step_ms: list[float], samples_per_step: int, tokens_per_step: int) -> Throughput | None:
    """Throughput of a run from the durations of its steps in order; None below 2, which leave no steady window."""
    if len(step_ms) < 2:
        return None
    warmup = max(1, min(MAX_WARMUP_STEPS, len(step_ms) // 5))
    steady = step_ms[warmup:]
    seconds = sum(steady) / 1e3
    deciles = statistics.quantiles(steady, n=10, method="inclusive") if len(steady) > 1 else steady * 9
    return Throughput(
        step_ms_median=statistics.median(steady),
        step_ms_p10=deciles[0],
        step_ms_p90=deciles[8],
        samples_per_s=len(steady) * samples_per_step / seconds,
        tokens_per_s=len(steady) * tokens_per_step / seconds,
        steady_steps=len(steady),
        warmup_s=sum(step_ms[:warmup]) / 1e3,
    )
