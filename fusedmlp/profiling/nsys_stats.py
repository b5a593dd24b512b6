"""What `nsys stats` prints of a report, to hold a trace of torch.profiler against it."""

import csv
from dataclasses import dataclass

from fusedmlp.profiling.analysis import Analysis

REPORTS = ("--report", "cuda_gpu_kern_sum,nvtx_sum", "--format", "csv")
_FIRST_COLUMN, _NAME, _COUNT, _TOTAL_NS = "Time (%)", "Name", "Instances", "Total Time (ns)"


@dataclass(frozen=True)
class KernelTime:
    """Kernels per step and their time per step."""

    count: float
    ms: float


def kernel_sum(text: str, steps: int) -> KernelTime | None:
    """All kernels in the table cuda_gpu_kern_sum, as CSV among other lines; None if it is not there.

    Args:
        steps: that the capture range holds.
    """
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith(_FIRST_COLUMN) and _COUNT in line), None)
    if begin is None:
        return None
    end = next((i for i in range(begin, len(lines)) if not lines[i].strip()), len(lines))
    rows = [row for row in csv.DictReader(lines[begin:end]) if row.get(_NAME)]
    total_ns = sum(float(row[_TOTAL_NS]) for row in rows)
    return KernelTime(sum(int(row[_COUNT]) for row in rows) / steps, total_ns / steps / 1e6)


def kernels_of(analysis: Analysis) -> KernelTime:
    """The same of a trace: without copies and memsets, which nsys lists apart."""
    rows = [row for row in analysis.rows if not row.full_name.startswith(("Memcpy", "Memset"))]
    return KernelTime(sum(row.count for row in rows), sum(row.ms for row in rows))
