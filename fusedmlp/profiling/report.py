"""An analysis for people (lines), for result.json (plain values) and for a spreadsheet (CSV)."""

import csv
import json
from pathlib import Path
from typing import Any

from fusedmlp.profiling import trace
from fusedmlp.profiling.analysis import Analysis, KernelRow, analyse
from fusedmlp.profiling.steps import BLOCK
from fusedmlp.profiling.verdict import judge

KERNELS_FILE = "kernels.csv"
TOP = 10


def analyse_file(path: Path, unprofiled_step_ms: float | None = None) -> Analysis:
    """Analysis of a trace, or of the trace in a run's directory, whose result.json gives the step without profiler.

    Raises: UserError if there is no trace or it cannot be read.
    """
    file = trace.find(path)
    if unprofiled_step_ms is None:
        unprofiled_step_ms = step_ms_of_run(file.parent)
    return analyse(trace.read(file), unprofiled_step_ms)


def step_ms_of_run(folder: Path) -> float | None:
    """Median step of the run in this folder outside its profiler's window; None if it does not say."""
    try:
        step_ms = json.loads((folder / "result.json").read_text())["throughput"]["step_ms_median"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step_ms if isinstance(step_ms, int | float) else None


def lines(analysis: Analysis, top: int = TOP) -> list[str]:
    """The sentence, the numbers behind it and the longest kernels."""
    verdict = judge(analysis)
    text = [verdict.sentence, *(f"  {note}" for note in verdict.notes)]
    device = f", {analysis.device}" if analysis.device else ""
    text.append(f"  {analysis.steps} step{'s' if analysis.steps > 1 else ''}{device}; per step:")
    text += _gpu_lines(analysis) if analysis.on_gpu else []
    text += _range_lines(analysis)
    rows = merged(analysis.rows if analysis.on_gpu else analysis.cpu_ops)
    return text + _table(rows[:top], "kernel" if analysis.on_gpu else "operation", len(rows))


def _gpu_lines(analysis: Analysis) -> list[str]:
    step = f"  step {analysis.step_ms:.2f} ms under the profiler"
    if analysis.unprofiled_step_ms:
        step += f", {analysis.unprofiled_step_ms:.2f} ms without it (median of the run)"
    text = [step, f"  GPU busy {analysis.busy_ms:.2f} ms, {analysis.busy_percent:.1f} % of the step traced"]
    if analysis.unprofiled_busy_percent is not None:
        text[-1] += f", {analysis.unprofiled_busy_percent:.1f} % of the step without profiler"
    causes = ", ".join(f"{cause} {ms:.2f}" for cause, ms in analysis.idle_causes.items() if ms >= 0.005)
    text.append(
        f"  idle {analysis.idle_ms:.2f} ms in {analysis.gap_count:,.0f} gaps, "
        f"the longest {analysis.longest_gap_us:,.0f} us" + (f"; by cause, ms: {causes}" if causes else "")
    )
    text.append(
        f"  {analysis.kernels:,.0f} kernels, {analysis.copies:,.0f} copies and memsets, "
        f"{analysis.launches:,.0f} launches, {analysis.blocking_calls:.3g} calls that wait for the GPU "
        f"({analysis.blocked_ms:.2f} ms)"
    )
    if analysis.ahead_ms is not None:
        text.append(
            f"  from launch to start {analysis.ahead_ms[0]:.3f} ms (median), {analysis.ahead_ms[1]:.3f} ms (p90)"
        )
    shares = "  ".join(
        f"{kind} {ms:.2f} ms ({analysis.share(kind):.1f} %)" for kind, ms in analysis.kinds.items() if ms > 0
    )
    return [*text, f"  {shares}"]


def _range_lines(analysis: Analysis) -> list[str]:
    """Phases one by one, blocks in sum."""
    phases = [(name, times) for name, times in analysis.ranges.items() if not name.startswith(BLOCK)]
    for ending, label in (("", "blocks forward"), (" backward", "blocks backward")):
        blocks = [
            times
            for name, times in analysis.ranges.items()
            if name.startswith(BLOCK) and name.endswith(" backward") == bool(ending)
        ]
        if blocks:
            phases.append((f"{len(blocks)} {label}", (sum(t[0] for t in blocks), sum(t[1] for t in blocks))))
    if not phases:
        return []
    if not analysis.on_gpu:
        return ["  " + "  ".join(f"{name} {cpu:.2f} ms" for name, (cpu, _) in phases)]
    return ["  " + "  ".join(f"{name} {cpu:.2f} ms on the CPU, {gpu:.2f} on the GPU" for name, (cpu, gpu) in phases)]


def _table(rows: list[KernelRow], what: str, total: int) -> list[str]:
    if not rows:
        return []
    width = min(max(len(row.name) for row in rows), 72)
    text = [f"  {'ms':>9} {'count':>8} {'us each':>9}  {'kind':13} {what}"]
    for row in rows:
        name = row.name if len(row.name) <= width else f"{row.name[: width - 3]}..."
        text.append(f"  {row.ms:9.3f} {row.count:8.1f} {1e3 * row.ms / row.count:9.1f}  {row.kind:13} {name}")
    return [*text, f"  ... {total - len(rows)} more"] if total > len(rows) else text


def merged(rows: list[KernelRow]) -> list[KernelRow]:
    """Rows with kernels of the same short name and kind (such as one for each dtype) as one, the longest first."""
    groups: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        groups.setdefault((row.name, row.kind), []).append(row)
    sums = [
        KernelRow(name, group[0].full_name, kind, sum(row.count for row in group), sum(row.ms for row in group))
        for (name, kind), group in groups.items()
    ]
    return sorted(sums, key=lambda row: -row.ms)


def values(analysis: Analysis) -> dict[str, Any]:
    """The analysis as plain values, for result.json."""
    verdict = judge(analysis)
    found: dict[str, Any] = {
        "bound": verdict.bound,
        "sentence": verdict.sentence,
        "notes": list(verdict.notes),
        "steps": analysis.steps,
        "device": analysis.device,
        "cpu_step_ms": analysis.cpu_step_ms,
        "ranges": {name: {"cpu_ms": cpu, "gpu_ms": gpu} for name, (cpu, gpu) in analysis.ranges.items()},
    }
    if not analysis.on_gpu:
        return found | {"top_operations": [_row(row) for row in analysis.cpu_ops[:TOP]]}
    ahead = analysis.ahead_ms or (None, None)
    found |= {
        "step_ms": analysis.step_ms,
        "unprofiled_step_ms": analysis.unprofiled_step_ms,
        "gpu_busy_ms": analysis.busy_ms,
        "gpu_busy_percent": analysis.busy_percent,
        "gpu_busy_percent_unprofiled": analysis.unprofiled_busy_percent,
        "kernel_ms": analysis.kernel_ms,
        "kernel_us_mean": analysis.kernel_us,
        "short_kernels_percent": analysis.short_percent,
        "outside_percent": analysis.outside_percent,
        "kernels_per_step": analysis.kernels,
        "copies_per_step": analysis.copies,
        "launches_per_step": analysis.launches,
        "graph_launches_per_step": analysis.graph_launches,
        "blocking_calls_per_step": analysis.blocking_calls,
        "cpu_blocked_ms": analysis.blocked_ms,
        "idle_ms": analysis.idle_ms,
        "idle_causes_ms": analysis.idle_causes,
        "gaps_per_step": analysis.gap_count,
        "longest_gap_us": analysis.longest_gap_us,
        "launch_to_start_ms": {"median": ahead[0], "p90": ahead[1]},
        "kinds": {kind: {"ms": ms, "percent": analysis.share(kind)} for kind, ms in analysis.kinds.items()},
        "top_kernels": [_row(row) for row in merged(analysis.rows)[:TOP]],
    }
    return found


def _row(row: KernelRow) -> dict[str, Any]:
    return {"name": row.name, "kind": row.kind, "count": row.count, "ms": row.ms}


def write_kernels(analysis: Analysis, path: Path) -> None:
    """All kernels (on a CPU: operations), the longest first, one line for each full name."""
    rows = analysis.rows if analysis.on_gpu else analysis.cpu_ops
    total = sum(row.ms for row in rows)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "kind", "count_per_step", "ms_per_step", "us_each", "percent", "full_name"])
        for row in rows:
            numbers = (row.count, row.ms, 1e3 * row.ms / row.count, 100 * row.ms / total if total else 0.0)
            writer.writerow([row.name, row.kind, *(f"{number:.6g}" for number in numbers), row.full_name])
