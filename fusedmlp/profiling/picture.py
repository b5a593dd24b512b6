"""A trace as a picture: the ranges and the calls of the CPU above, the kernels of the GPU below, by kind."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from fusedmlp.errors import UserError
from fusedmlp.profiling import kinds, steps
from fusedmlp.profiling.analysis import analyse
from fusedmlp.profiling.intervals import Intervals
from fusedmlp.profiling.trace import Trace
from fusedmlp.profiling.verdict import judge

_COLOURS = {
    kinds.GEMM: "#1f4e9c", kinds.FUSED_GEMM: "#5b9bd5", kinds.ATTENTION: "#2a9d8f", kinds.GELU: "#e76f51",
    kinds.SOFTMAX: "#f4a261", kinds.NORM: "#e9c46a", kinds.REDUCTION: "#b5838d", kinds.LOSS: "#9d4edd",
    kinds.OPTIMIZER: "#6a994e", kinds.COPY: "#8d99ae", kinds.INDEXING: "#006d77",
    kinds.COMMUNICATION: "#d00000", kinds.OTHER: "#7f5539",
}  # fmt: skip
_RANGES = {steps.DATA: "#adb5bd", steps.FORWARD: "#90be6d", steps.BACKWARD: "#f9c74f", steps.OPTIMIZER: "#f28482"}
_RANGES["replay"] = "#c77dff"  # of a captured step, in place of the phases
_LAUNCHES, _WAITS, _OPS = "#343a40", "#d00000", "#577590"
_STREAMS = 4
# Inches and dots per inch: read at 900 pixels, which is what a README page has.
_WIDTH, _DPI = 9.0, 200


def draw(
    trace: Trace,
    target: Path,
    shown_steps: int = 2,
    title: str = "",
    step_ms: float | None = None,
    between: tuple[float, float] | None = None,
) -> None:
    """Writes a picture of the first steps; its kind (png, svg, pdf) is that of the file's name.

    Args:
        step_ms: median step of the run without profiler, for the sentence.
        between: ms after the begin of the first step, to look at a part.

    Raises: UserError for another kind of file, one that cannot be written, or a part outside the steps.
    """
    if target.is_dir() or not target.suffix:
        raise UserError(f"{target}: expected the name of a file that says what kind it is, such as timeline.png")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = steps.find_steps(trace)
    low, high = _extent(trace, found, max(1, min(shown_steps, found.count)))
    origin = low
    if between is not None:
        low, high = _part(target, low, high, between)
    lanes = [*_cpu_lanes(trace), *_gpu_lanes(trace)]
    figure, axes = plt.subplots(figsize=(_WIDTH, 1.6 + 0.55 * len(lanes)), layout="constrained")
    try:
        labels: dict[str, str] = {}
        for row, (_, bars) in enumerate(lanes):
            for label, colour, intervals in bars:
                if _bars(axes, intervals, low, high, len(lanes) - 1 - row, colour):
                    labels.setdefault(label, colour)
        axes.set_yticks([len(lanes) - 1 - row for row in range(len(lanes))], [name for name, _ in lanes])
        axes.set(
            xlim=(0, (high - low) / 1e3),
            ylim=(-0.6, len(lanes) - 0.4),
            xlabel="ms" if low == origin else f"ms, from {(low - origin) / 1e3:g} ms after the begin of the step",
        )
        heading = f"{title}\n" if title else ""
        axes.set_title(heading + _wrapped(judge(analyse(trace, step_ms)).sentence), fontsize=9, loc="left", x=-0.12)
        handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in labels.values()]
        figure.legend(handles, labels.keys(), ncols=7, fontsize=8, loc="outside lower center")
        _distances(axes, trace, found, low, high)
        figure.savefig(target, dpi=_DPI)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{target}: the picture cannot be written: {reason}") from error
    finally:
        plt.close(figure)


def _extent(trace: Trace, found: steps.Steps, count: int) -> tuple[float, float]:
    """From the begin of the first step on the CPU to the end of the last one shown, on the CPU and on the GPU."""
    low, high = float(found.cpu[0][0]), float(found.cpu[1][count - 1])
    inside = (found.of >= 0) & (found.of < count)
    return low, max([high, *trace.gpu.end[inside].tolist()])


def _part(target: Path, low: float, high: float, between: tuple[float, float]) -> tuple[float, float]:
    begin, end = low + 1e3 * between[0], low + 1e3 * between[1]
    if not low <= begin < min(end, high):
        raise UserError(
            f"{target}: the part from {between[0]:g} to {between[1]:g} ms is none of the steps shown, "
            f"which last {(high - low) / 1e3:.3g} ms"
        )
    return begin, min(end, high)


def _wrapped(sentence: str) -> str:
    return "\n".join(textwrap.wrap(sentence, 115))


def _distances(axes: Any, trace: Trace, found: steps.Steps, low: float, high: float) -> None:
    """A line from the launch of each step's first kernel to its start: how far the CPU is ahead."""
    launched = steps.launch_times(trace, found.launch)
    lowest_of_cpu = len(_gpu_lanes(trace))
    for step in range(found.count):
        members = np.flatnonzero((found.of == step) & (found.launch >= 0))
        if len(members) and low <= trace.gpu.start[members[0]] <= high:
            times = [(launched[members[0]] - low) / 1e3, (trace.gpu.start[members[0]] - low) / 1e3]
            axes.plot(times, [lowest_of_cpu - 0.4, lowest_of_cpu - 0.6], color="black", linewidth=1.2, clip_on=True)


Bars = list[tuple[str, str, Intervals]]


def _cpu_lanes(trace: Trace) -> list[tuple[str, Bars]]:
    ranges: Bars = [(name, colour, steps.ranges_named(trace, name)) for name, colour in _RANGES.items()]
    lanes = [("CPU: ranges", ranges)] if any(len(intervals[0]) for _, _, intervals in ranges) else []
    blocks = np.array([name.startswith(steps.BLOCK) for name in trace.ranges.names], bool)
    if blocks.any():
        chosen = np.flatnonzero(blocks)
        halves: Bars = [
            ("block", shade, (trace.ranges.start[chosen[i::2]], trace.ranges.end[chosen[i::2]]))
            for i, shade in enumerate(("#cdb4db", "#a2d2ff"))
        ]
        lanes.append(("CPU: blocks", halves))
    calls = [
        (label, colour, steps.calls_named(trace.calls, pattern))
        for label, colour, pattern in (
            ("launch", _LAUNCHES, steps.LAUNCH),
            ("waits for the GPU", _WAITS, steps.BLOCKING),
        )
    ]
    if len(trace.calls):
        bars = [(label, colour, (trace.calls.start[mask], trace.calls.end[mask])) for label, colour, mask in calls]
        return [*lanes, ("CPU: calls", bars)]
    return [*lanes, ("CPU: operations", [("operation", _OPS, (trace.ops.start, trace.ops.end))])]


def _gpu_lanes(trace: Trace) -> list[tuple[str, Bars]]:
    """The streams that do most."""
    kind = np.array([kinds.kind_of(name) for name in trace.gpu.names], dtype=object)
    streams = {int(lane): float(trace.gpu.duration[trace.gpu.lane == lane].sum()) for lane in np.unique(trace.gpu.lane)}
    lanes = []
    for lane in sorted(sorted(streams, key=lambda lane: -streams[lane])[:_STREAMS]):
        bars: Bars = []
        for name in kinds.KINDS:
            mask = (trace.gpu.lane == lane) & (kind == name)
            # The optimizer is a range on the CPU, too, in another colour.
            label = f"{name} kernels" if name in _RANGES else name
            bars.append((label, _COLOURS[name], (trace.gpu.start[mask], trace.gpu.end[mask])))
        lanes.append((f"GPU: stream {lane}", bars))
    return lanes


def _bars(axes: Any, intervals: Intervals, low: float, high: float, row: int, colour: str) -> bool:
    """Draws what lies between two times; False if nothing does."""
    start, end = intervals
    seen = (end > low) & (start < high)
    if not seen.any():
        return False
    start, end = np.maximum(start[seen], low), np.minimum(end[seen], high)
    # An edge of a third of a point, so that a kernel of a microsecond can be seen.
    spans = list(zip((start - low) / 1e3, (end - start) / 1e3, strict=True))
    axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolors=colour, linewidth=0.3)
    return True
