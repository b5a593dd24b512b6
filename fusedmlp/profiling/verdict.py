"""One plain sentence about what bounds the step, and the thresholds behind it."""

from dataclasses import dataclass

from fusedmlp.profiling import kinds
from fusedmlp.profiling.analysis import SHORT_US, Analysis

# Percent. Below this busy share the GPU waits for the CPU, and why decides; above it the kernels decide.
BUSY = 80.0
# Of the step that the CPU spends waiting for the GPU, for the waiting to be the cause of an idle GPU.
BLOCKED = 20.0
# Of the idle time that falls into waiting for a batch, for the data to be the cause.
DATA = 50.0
# Of the kernels' time; what is neither compute (GEMM, attention) nor communication is bound by memory traffic.
COMMUNICATION = 30.0
COMPUTE = 85.0
# Of the memory-bound time that the optimizer takes, for it to be what to look at.
OPTIMIZER = 50.0
# Of the kernels' time that short kernels take, for their size to be what to look at, whatever they compute.
SHORT = 70.0
# Of the step blocked, from where on a note says that the CPU cannot run ahead.
NOTED_BLOCKED = 5.0


@dataclass(frozen=True)
class Verdict:
    """`bound`: launch, sync, data, communication, size, memory, optimizer or GEMM; CPU where nothing ran on a GPU,
    unknown where the trace does not have what ran there."""

    bound: str
    sentence: str
    notes: tuple[str, ...] = ()


def judge(analysis: Analysis) -> Verdict:
    """The bound of a step, in one sentence; what a reader must know besides, in notes."""
    if not analysis.on_gpu and analysis.launches:
        sentence = (
            f"no GPU activity was recorded, though the CPU made {analysis.launches:,.0f} launches a step: "
            "another profiler has CUPTI, or this process may not use it"
        )
        return Verdict("unknown", sentence, _notes(analysis))
    if not analysis.on_gpu:
        return Verdict("CPU", _cpu_only(analysis), _notes(analysis))
    unprofiled = analysis.unprofiled_busy_percent
    busy = analysis.busy_percent if unprofiled is None else unprofiled
    bound, sentence = _idle(analysis, busy) if busy < BUSY else _busy(analysis)
    return Verdict(bound, sentence, _notes(analysis, bound))


def _cpu_only(analysis: Analysis) -> str:
    named = {name: ms for name, (ms, _) in analysis.ranges.items() if not name.startswith("block ")}
    text = f"CPU only: this trace holds no GPU activity; {analysis.cpu_step_ms:,.1f} ms a step"
    if not named or not analysis.cpu_step_ms:
        return text
    longest = max(named, key=lambda name: named[name])
    return f"{text}, {100 * named[longest] / analysis.cpu_step_ms:.0f} % of it {longest}"


def _idle(analysis: Analysis, busy: float) -> tuple[str, str]:
    state = f"GPU busy {busy:.0f} %"
    causes = analysis.idle_causes
    idle = sum(causes.values())
    if idle and 100 * causes.get("data", 0.0) / idle >= DATA:
        data_ms = analysis.ranges.get("data", (0.0, 0.0))[0]
        return "data", f"data-bound: {state}; {data_ms:.1f} ms a step go by waiting for a batch: set data.num_workers"
    if 100 * analysis.blocked_ms / max(analysis.step_ms, 1e-9) >= BLOCKED:
        return "sync", (
            f"sync-bound: {state}; the CPU waits for the GPU {_times(analysis.blocking_calls)} a step, "
            f"{analysis.blocked_ms:.1f} ms, and then the GPU for the CPU: read no values in the step"
        )
    if analysis.graph_launches:
        return "launch", (
            f"launch-bound: {state} though {_times(analysis.graph_launches, 'graph')} {_is(analysis.graph_launches)} "
            f"replayed a step: the CPU spends {analysis.cpu_step_ms:.1f} ms between replays"
        )
    return "launch", f"launch-bound: {state}; {analysis.launches:,.0f} launches a step: capture the step"


def _busy(analysis: Analysis) -> tuple[str, str]:
    communication, compute = analysis.share(kinds.COMMUNICATION), analysis.share(*kinds.COMPUTE)
    if communication >= COMMUNICATION:
        return "communication", (
            f"communication-bound: {communication:.0f} % of the kernels' time is communication between GPUs"
        )
    if analysis.short_percent >= SHORT:
        return "size", (f"small-kernel-bound: {_short(analysis)}: a larger batch or width, or fewer kernels")
    if compute >= COMPUTE:
        attention = analysis.share(kinds.ATTENTION)
        what = "GEMMs" if attention < 1 else f"GEMMs and attention ({attention:.0f} %)"
        return "GEMM", f"GEMM-bound: {compute:.0f} % in {what}, nothing left to fuse"
    optimizer, memory = analysis.share(kinds.OPTIMIZER), 100 - compute - communication
    if optimizer >= memory * OPTIMIZER / 100:
        return "optimizer", (
            f"optimizer-bound: the update takes {optimizer:.0f} % of the step: "
            "a larger batch shares it among more samples" + _less_traffic(analysis)
        )
    parts = sorted(((analysis.share(kind), kind) for kind in kinds.FUSIBLE), reverse=True)
    named = ", ".join(f"{kind} {share:.0f} %" for share, kind in parts[:3] if share >= 1)
    return "memory", (
        f"memory-bound kernels take {memory - optimizer:.0f} % of the GPU's time ({named}): "
        "fuse them with one another or into the GEMMs"
    )


def _less_traffic(analysis: Analysis) -> str:
    """What PyTorch's own clipping and AdamW could give way to."""
    natively = any("multi_tensor_apply" in row.name for row in analysis.rows)
    return ", and trainer.adamw=triton moves less memory" if natively else ""


def _short(analysis: Analysis) -> str:
    return (
        f"{analysis.short_percent:.0f} % of the kernels' time in kernels under {SHORT_US:.0f} us "
        f"({analysis.kernels:,.0f} a step, {analysis.kernel_us:.1f} us on average)"
    )


def _notes(analysis: Analysis, bound: str = "") -> tuple[str, ...]:
    notes = []
    if not analysis.steps_named:
        notes.append("the trace marks no steps: all of it counts as one")
    if analysis.graph_launches:
        notes.append(
            f"{_times(analysis.graph_launches, 'CUDA graph')} {_is(analysis.graph_launches)} replayed a step: "
            "the kernels are all here, but the operations and ranges (forward, backward, optimizer, blocks) that "
            "launched them ran once, at capture, and are not"
        )
    blocked = 100 * analysis.blocked_ms / max(analysis.step_ms, 1e-9)
    if analysis.on_gpu and blocked >= NOTED_BLOCKED:
        if bound != "sync":
            notes.append(
                f"the CPU waits for the GPU {_times(analysis.blocking_calls)} a step, {blocked:.0f} % of it, "
                "so it cannot run ahead"
            )
    elif analysis.ahead_ms is not None and analysis.ahead_ms[0] >= 0.1:
        notes.append(f"the CPU runs ahead: a kernel waits {analysis.ahead_ms[0]:.1f} ms for its turn (median)")
    if bound == "launch" and analysis.short_percent >= SHORT:
        notes.append(f"launched faster, small kernels will bound it: {_short(analysis)}")
    if analysis.outside_percent >= 5:
        notes.append(
            f"{analysis.outside_percent:.0f} % of the GPU's time in the window belongs to none of its steps: "
            "launched before them, or in validation or a checkpoint"
        )
    return tuple(notes)


def _times(count: float, what: str = "") -> str:
    number = f"{count:,.0f}" if count >= 1 and abs(count - round(count)) < 0.05 else f"{count:,.1f}"
    if what:
        return f"{number} {what}{'' if number == '1' else 's'}"
    return "once" if number == "1" else f"{number} times"


def _is(count: float) -> str:
    return "is" if f"{count:.0f}" == "1" else "are"
