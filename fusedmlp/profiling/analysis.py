"""What a trace says: how busy the GPU is, with what, and who waits for whom."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusedmlp.profiling import kinds, steps
from fusedmlp.profiling.idle import idle_causes
from fusedmlp.profiling.intervals import clipped, gaps, holder, total, union
from fusedmlp.profiling.steps import Steps
from fusedmlp.profiling.trace import KERNEL, Trace

# A kernel shorter than this spends a good part of its time starting and running dry, whatever it computes.
SHORT_US = 10.0


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one name; per step."""

    name: str
    full_name: str
    kind: str
    count: float
    ms: float


@dataclass
class Analysis:
    """Numbers of a trace. Times are ms per step unless they say otherwise; a step on the GPU lasts from its first
    kernel to the first kernel of the next.

    Attributes:
        unprofiled_step_ms: median step of the same run outside the window, if it is known; a profiler makes the CPU
            slower, so what the GPU's share really is, this tells.
        busy_ms: in which at least one kernel or copy ran, in the time of a step.
        kernels, copies, launches, graph_launches, blocking_calls: counts per step.
        kinds: kind -> ms of its kernels; overlapping kernels all count.
        idle_causes: why the GPU was idle: "launch" (the CPU had not launched the next kernel), "sync" (because it had
            waited for the GPU), "data" (because it waited for a batch), "queue" (between kernels already launched).
        ahead_ms: how long kernels waited between their launch and their start: median and 90th percentile.
        blocked_ms: in which the CPU waited for the GPU.
        short_percent: of the time of the kernels, in those that take less than SHORT_US.
        kernel_us: mean duration of a kernel.
        outside_percent: of the time of all activities between the first and the last step on the GPU, those launched
            in none of the steps.
        ranges: range -> ms on the CPU, and of the kernels launched in it.
    """

    steps: int
    steps_named: bool
    device: str | None
    step_ms: float
    cpu_step_ms: float
    busy_ms: float = 0.0
    kernels: float = 0.0
    copies: float = 0.0
    launches: float = 0.0
    graph_launches: float = 0.0
    blocking_calls: float = 0.0
    blocked_ms: float = 0.0
    gap_count: float = 0.0
    longest_gap_us: float = 0.0
    idle_causes: dict[str, float] = field(default_factory=dict)
    ahead_ms: tuple[float, float] | None = None
    kinds: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    rows: list[KernelRow] = field(default_factory=list)
    cpu_ops: list[KernelRow] = field(default_factory=list)
    outside_percent: float = 0.0
    short_percent: float = 0.0
    kernel_us: float = 0.0
    unprofiled_step_ms: float | None = None

    @property
    def on_gpu(self) -> bool:
        return bool(self.rows)

    @property
    def busy_percent(self) -> float:
        return 100 * self.busy_ms / self.step_ms if self.step_ms else 0.0

    @property
    def unprofiled_busy_percent(self) -> float | None:
        return None if not self.unprofiled_step_ms else min(100.0, 100 * self.busy_ms / self.unprofiled_step_ms)

    @property
    def kernel_ms(self) -> float:
        return sum(self.kinds.values())

    @property
    def idle_ms(self) -> float:
        return self.step_ms - self.busy_ms

    def share(self, *chosen: str) -> float:
        """Percent of the kernels' time that these kinds take."""
        return 100 * sum(self.kinds.get(kind, 0.0) for kind in chosen) / self.kernel_ms if self.kernel_ms else 0.0


def analyse(trace: Trace, unprofiled_step_ms: float | None = None) -> Analysis:
    """Numbers of a trace, on a GPU or of the CPU alone."""
    found = steps.find_steps(trace)
    cpu_step_ms = float(np.mean(found.cpu[1] - found.cpu[0])) / 1e3
    result = Analysis(found.count, found.named, trace.device, cpu_step_ms, cpu_step_ms)
    result.unprofiled_step_ms = unprofiled_step_ms
    _calls(trace, found, result)
    if len(trace.gpu) and (found.of >= 0).any():
        window, periods = _window(trace, found)
        _busy(trace, found, window, periods, result)
        _kernels(trace, found, result)
        _shares(trace, found, window, result)
    elif len(trace.ops):
        result.cpu_ops = _cpu_ops(trace, found)
    _ranges(trace, found, result)
    return result


def _window(trace: Trace, found: Steps) -> tuple[tuple[float, float], int]:
    """Time on the GPU that holds a whole number of steps, and that number.

    From the first kernel of the first step to that of the last one: the last has no next to end at. A single step ends
    with its last kernel, or on the CPU if that took longer.
    """
    inside = found.of >= 0
    kernel = inside & np.array([category == KERNEL for category in trace.gpu.categories], bool)
    # A batch is copied on a stream of its own while the step before still computes, sooner or later as it comes.
    begins_step = kernel if kernel.any() else inside
    first = np.full(found.count, np.inf)
    np.minimum.at(first, found.of[begins_step], trace.gpu.start[begins_step])
    first = first[np.isfinite(first)]
    if len(first) > 1:
        return (float(first.min()), float(first.max())), len(first) - 1
    begins = float(first[0])
    lasts = float(trace.gpu.end[inside].max())
    return (begins, max(lasts, begins + float(np.max(found.cpu[1] - found.cpu[0])))), 1


def _busy(trace: Trace, found: Steps, window: tuple[float, float], periods: int, result: Analysis) -> None:
    """Busy and idle time, and who is to blame for the gaps."""
    running = union(trace.gpu.start, trace.gpu.end)
    idle = gaps(running, *window)
    result.step_ms = (window[1] - window[0]) / periods / 1e3
    result.busy_ms = total(clipped(running, *window)) / periods / 1e3
    result.gap_count = len(idle[0]) / periods
    result.longest_gap_us = float(np.max(idle[1] - idle[0], initial=0.0))
    result.idle_causes = {cause: ms / periods for cause, ms in idle_causes(trace, found, idle).items()}
    launched = found.launch >= 0
    waited = trace.gpu.start[launched] - trace.calls.start[found.launch[launched]] if len(trace.calls) else np.empty(0)
    # Of the kernels that one replay of a graph starts, the first alone tells how far ahead its launch was.
    _, one_each = np.unique(found.launch[launched], return_index=True)
    waited = waited[one_each] if len(waited) else waited
    if len(waited):
        result.ahead_ms = tuple(float(value) / 1e3 for value in np.percentile(waited, [50, 90]))  # type: ignore[assignment]


def _calls(trace: Trace, found: Steps, result: Analysis) -> None:
    """Launches, and calls that wait for the GPU."""
    inside = holder(found.cpu, trace.calls.start) >= 0
    for pattern, name in ((steps.LAUNCH, "launches"), (steps.GRAPH_LAUNCH, "graph_launches")):
        chosen = trace.calls.correlation[inside & steps.calls_named(trace.calls, pattern)]
        # A call of the runtime and the one of the driver below it are one launch.
        setattr(result, name, (len(np.unique(chosen[chosen >= 0])) + int((chosen < 0).sum())) / found.count)
    blocking = inside & steps.calls_named(trace.calls, steps.BLOCKING)
    result.blocking_calls = float(blocking.sum() / found.count)
    result.blocked_ms = float(trace.calls.duration[blocking].sum() / found.count / 1e3)


def _kernels(trace: Trace, found: Steps, result: Analysis) -> None:
    """Counts, kinds and the table of kernels, from all activities launched in a step."""
    inside = found.of >= 0
    in_optimizer = (
        holder(union(*steps.ranges_named(trace, steps.OPTIMIZER)), steps.launch_times(trace, found.launch)) >= 0
    )
    groups: dict[tuple[str, str], list[int]] = {}
    for i in np.flatnonzero(inside):
        kind = kinds.kind_of(trace.gpu.names[i])
        # Clipping and freeing gradients is of the update too.
        if in_optimizer[i] and kind in (kinds.OTHER, kinds.REDUCTION, kinds.COPY):
            kind = kinds.OPTIMIZER
        groups.setdefault((trace.gpu.names[i], kind), []).append(int(i))
    for (name, kind), members in groups.items():
        ms = float(trace.gpu.duration[members].sum()) / found.count / 1e3
        result.kinds[kind] = result.kinds.get(kind, 0.0) + ms
        result.rows.append(KernelRow(kinds.short_name(name), name, kind, len(members) / found.count, ms))
    result.rows.sort(key=lambda row: -row.ms)
    result.kinds = dict(sorted(result.kinds.items(), key=lambda item: -item[1]))
    kernel = np.array([category == KERNEL for category in trace.gpu.categories], bool)
    result.kernels = float((inside & kernel).sum() / found.count)
    result.copies = float((inside & ~kernel).sum() / found.count)


def _shares(trace: Trace, found: Steps, window: tuple[float, float], result: Analysis) -> None:
    """How much of the GPU's time is short kernels, and how much belongs to no step."""
    inside = found.of >= 0
    shown = np.clip(trace.gpu.end, *window) - np.clip(trace.gpu.start, *window)
    result.outside_percent = float(100 * shown[~inside].sum() / max(shown.sum(), 1e-9))
    kernel = np.array([category == KERNEL for category in trace.gpu.categories], bool)
    durations = trace.gpu.duration[inside & kernel]
    if len(durations):
        result.kernel_us = float(durations.mean())
        result.short_percent = float(100 * durations[durations < SHORT_US].sum() / max(durations.sum(), 1e-9))


def _ranges(trace: Trace, found: Steps, result: Analysis) -> None:
    launched = steps.launch_times(trace, found.launch)
    for name in dict.fromkeys((*steps.PHASES, *(n for n in trace.ranges.names if n.startswith(steps.BLOCK)))):
        start, end = steps.ranges_named(trace, name)
        if len(start):
            kept = holder(found.cpu, start) >= 0
            start, end = start[kept], end[kept]
            inside = holder(union(start, end), launched) >= 0
            gpu_ms = float(trace.gpu.duration[inside].sum()) / found.count / 1e3
            result.ranges[name] = (float((end - start).sum()) / found.count / 1e3, gpu_ms)


def _cpu_ops(trace: Trace, found: Steps) -> list[KernelRow]:
    """Operations on the CPU by the time spent in themselves, not in others that they call."""
    ops = trace.ops[holder(found.cpu, trace.ops.start) >= 0]
    own = ops.duration.copy()
    for lane in np.unique(ops.lane):
        _subtract_nested(np.flatnonzero(ops.lane == lane), ops.start, ops.end, own)
    sums: dict[str, list[float]] = {}
    for name, us in zip(ops.names, own, strict=True):
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += 1
        entry[1] += float(us)
    rows = [
        KernelRow(name, name, "CPU", count / found.count, us / found.count / 1e3) for name, (count, us) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.ms)


def _subtract_nested(lane: NDArray[np.int64], start: Any, end: Any, own: Any) -> None:
    """Takes the duration of each event of one thread off the event that holds it."""
    open_events: list[int] = []
    for i in lane:
        while open_events and end[open_events[-1]] <= start[i]:
            open_events.pop()
        if open_events:
            own[open_events[-1]] -= end[i] - start[i]
        open_events.append(int(i))
