"""How long the steps took and what was done in them: CUDA events on a GPU, the host's clock on a CPU.

The marks are set while the steps run and read once the device has passed them, so that nobody waits for them.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import torch

from fusedmlp.training.peaks import Peak

MAX_WARMUP_STEPS = 10
# Steps whose marks are read together, when nobody asks for them before.
READ_TOGETHER = 32


class HostEvent:
    """A point in time by the host's clock, with the interface of `torch.Event`."""

    __slots__ = ("_time",)

    def record(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        """Whether the moment has passed."""
        return True

    def elapsed_time(self, end_event: "HostEvent", /) -> float:
        """Milliseconds from here to `end_event`."""
        return (end_event._time - self._time) * 1e3


Span = tuple[Any, Any]  # begin and end, both torch.Events or both HostEvents


class Step:
    """An optimizer step: when it began and ended, when it waited for a batch, once per micro-batch, and whether a
    profiler looked at it, which takes time.

    Attributes:
        ms, wait_ms: how long it was and how long it waited; None until its marks have been read.
    """

    __slots__ = ("begin", "end", "ms", "profiled", "wait_ms", "waits")

    def __init__(self, begin: Any, end: Any, waits: list[Span], profiled: bool):
        self.begin, self.end, self.waits, self.profiled = begin, end, waits, profiled
        self.ms: float | None = None
        self.wait_ms: float | None = None


class StepClock:
    """Marks steps and the waits for batches in them; durations are asked for once the device has passed the marks.

    Time between `pause` and the next `resume` (validation, a checkpoint) belongs to no step.

    Attributes:
        profiled: whether a profiler looks at the steps that end from now on.
    """

    def __init__(self, device: torch.device):
        self.profiled = False
        # torch.cuda.Event does the same through a dozen Python calls, which three times a step is too many.
        self._event: Callable[[], Any] = HostEvent
        if device.type == "cuda":
            self._event = partial(torch.Event, device, enable_timing=True)
        self._last: Any = None
        self._asked: Any = None
        self._waits: list[Span] = []
        self._steps: list[Step] = []
        # Marks are used again: CUDA takes time to make and to destroy an event, and a long interval would keep many.
        self._unread: deque[Step] = deque()
        self._free: list[Any] = []

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._event()
        event.record()
        return event

    def resume(self) -> None:
        """The next step begins now, unless the clock is running already."""
        if self._last is None:
            self._last = self._mark()

    def ask(self) -> None:
        """The next batch is asked for, perhaps again, of data that have ended and begin anew."""
        if self._asked is None:
            self._asked = self._mark()

    def receive(self) -> None:
        """The batch is there, on the device; without an `ask` before (it was fetched ahead) nobody waited for it."""
        if self._asked is not None:
            self._waits.append((self._asked, self._mark()))
            self._asked = None

    def tick(self) -> None:
        """A step ends here, and the next one begins."""
        now = self._mark()
        if self._last is not None:
            step = Step(self._last, now, self._waits, self.profiled)
            # In this order, so that each of the others can be read: a signal may end the run at any line.
            self._unread.append(step)
            self._steps.append(step)
            if len(self._unread) % READ_TOGETHER == 0 and self._unread[READ_TOGETHER - 1].end.query():
                for _ in range(READ_TOGETHER):
                    self._read_next()
        self._last, self._waits = now, []

    def pause(self) -> None:
        self._last = None

    def restart(self) -> None:
        """The step that is under way begins now: what was before belongs to none."""
        self._last, self._waits = self._mark(), []

    def take(self) -> list[Step]:
        """The steps since the last call; for `durations`."""
        steps, self._steps = self._steps, []
        return steps

    def durations(self, steps: Sequence[Step]) -> "Durations":
        """Of steps that were taken. On a GPU they must have been passed, or PyTorch raises RuntimeError."""
        while steps and steps[-1].wait_ms is None:
            self._read_next()
        return Durations([step.ms for step in steps], [step.wait_ms for step in steps])  # type: ignore[misc]

    def _read_next(self) -> None:
        """Reads the marks of the first step that has any left."""
        step = self._unread[0]
        step.ms = step.begin.elapsed_time(step.end)
        step.wait_ms = sum(asked.elapsed_time(received) for asked, received in step.waits)
        # Only now, for the same reason.
        self._unread.popleft()
        # The end is where the next step begins.
        self._free.append(step.begin)
        for span in step.waits:
            self._free += span
        del step.begin, step.end, step.waits


@dataclass
class Durations:
    """Milliseconds of each step, and of the waiting for data in it."""

    step_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)

    def where(self, kept: list[bool]) -> "Durations":
        return Durations(list(compress(self.step_ms, kept)), list(compress(self.wait_ms, kept)))

    def extend(self, others: "Durations") -> None:
        self.step_ms += others.step_ms
        self.wait_ms += others.wait_ms

    @property
    def data_wait_percent(self) -> float:
        """Share of the steps' time in which the next batch was waited for."""
        return 100 * sum(self.wait_ms) / sum(self.step_ms)


@dataclass(frozen=True)
class Cost:
    """What turns samples per second into TFLOP/s and MFU.

    Args:
        flops_per_sample: of the model, forward and backward; None if the model does not say.
        peak: of one device.
        devices: that train together, against whose peaks MFU is taken.
    """

    flops_per_sample: int | None = None
    peak: Peak = field(default_factory=Peak)
    devices: int = 1

    def tflops_per_s(self, samples_per_s: float) -> float | None:
        return None if self.flops_per_sample is None else self.flops_per_sample * samples_per_s / 1e12

    def mfu_percent(self, samples_per_s: float) -> float | None:
        """Model FLOPs utilization: share of the peak that the model's FLOPs make up; None if one of them is unknown."""
        rate = self.tflops_per_s(samples_per_s)
        return None if rate is None or self.peak.tflops is None else 100 * rate / (self.peak.tflops * self.devices)


@dataclass(frozen=True)
class Throughput:
    """Speed over the steady window: all steps but the first ones, which compile, autotune and fill caches, and those
    that a profiler looks at.

    The time of those is in two parts: `warmup_s` at the pace of the steady median, `first_steps_s` what they took
    beyond it. Rates are those of all devices together, unless their names say otherwise; times are those of one.
    """

    step_ms_median: float
    step_ms_p10: float
    step_ms_p90: float
    samples_per_s: float
    tokens_per_s: float
    tflops_per_s: float | None
    mfu_percent: float | None
    devices: int
    tokens_per_s_per_device: float
    tflops_per_s_per_device: float | None
    data_wait_percent: float
    flops_per_sample: int | None
    peak_tflops: float | None
    peak_source: str | None
    steady_steps: int
    warmup_steps: int
    warmup_s: float
    first_steps_s: float


def summarize(
    durations: Durations, samples_per_step: int, tokens_per_step: int, cost: Cost, first_steps: int = 0
) -> Throughput | None:
    """Throughput of a run from its steps in order; None below 2, which leave no steady window.

    Args:
        first_steps: that run otherwise than the rest, and belong to the warm-up where others follow.
    """
    count = len(durations.step_ms)
    if count < 2:
        return None
    warmup = min(max(1, min(MAX_WARMUP_STEPS, count // 5), first_steps), count - 1)
    first_ms = sum(durations.step_ms[:warmup])
    steady = Durations(durations.step_ms[warmup:], durations.wait_ms[warmup:])
    steps_per_s = len(steady.step_ms) / sum(steady.step_ms) * 1e3
    median = statistics.median(steady.step_ms)
    warmup_ms = min(warmup * median, first_ms)
    deciles = statistics.quantiles(steady.step_ms, n=10, method="inclusive") if count - warmup > 1 else [median] * 9
    tflops = cost.tflops_per_s(steps_per_s * samples_per_step)
    return Throughput(
        step_ms_median=median,
        step_ms_p10=deciles[0],
        step_ms_p90=deciles[8],
        samples_per_s=steps_per_s * samples_per_step,
        tokens_per_s=steps_per_s * tokens_per_step,
        tflops_per_s=tflops,
        mfu_percent=cost.mfu_percent(steps_per_s * samples_per_step),
        devices=cost.devices,
        tokens_per_s_per_device=steps_per_s * tokens_per_step / cost.devices,
        tflops_per_s_per_device=None if tflops is None else tflops / cost.devices,
        data_wait_percent=steady.data_wait_percent,
        flops_per_sample=cost.flops_per_sample,
        peak_tflops=cost.peak.tflops,
        peak_source=cost.peak.source,
        steady_steps=count - warmup,
        warmup_steps=warmup,
        warmup_s=warmup_ms / 1e3,
        first_steps_s=(first_ms - warmup_ms) / 1e3,
    )
