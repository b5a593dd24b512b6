"""The table of kernels that nsys stats prints, against a trace."""

import csv
from pathlib import Path

import pytest
from profiling.simulated import GELU, GEMM, SCENES, Kernel, Step, content

from fusedmlp.profiling import trace
from fusedmlp.profiling.analysis import analyse
from fusedmlp.profiling.nsys_stats import KernelTime, kernel_sum, kernels_of

PRINTED = f"""Generating SQLite file trace.sqlite from trace.nsys-rep
Processing [trace.sqlite] with [/opt/nsight-systems/reports/cuda_gpu_kern_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
71.5,2000000,36,55555.6,55000.0,50000,60000,100.0,{GEMM}
28.5,800000,24,33333.3,33000.0,30000,36000,100.0,"{GELU.replace('"', "")}"

Processing [trace.sqlite] with [/opt/nsight-systems/reports/nvtx_sum.py]...
Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
100.0,9000000,2,4500000.0,4500000.0,4500000,4500000,0.0,PushPop,:step
"""


def test_the_kernels_of_all_steps():
    assert kernel_sum(PRINTED, 2) == KernelTime(30, 1.4)


def test_a_real_table_of_five_steps():
    """Of the lecture's stack of 64 layers with impl=native on an H200, recorded through profile=nsys."""
    record = Path(__file__).parents[2] / "profiles" / "records" / "2026-11-29-h200-traces"
    text = (record / "nsys-stats.txt").read_text()
    found = kernel_sum(text, 5)
    # 2390 kernels, 29278867 ns: the sums of the columns, added up without the parser.
    assert found == KernelTime(478, pytest.approx(29.278867 / 5))
    # The capture range held the window and no more: each step once, each kernel in all of them.
    assert [line.split(",")[2] for line in text.splitlines() if line.endswith(",:step")] == ["5"]
    rows = [row for row in csv.reader(text.splitlines()) if len(row) == 9 and row[2].isdecimal()]
    assert len(rows) > 40
    assert [row for row in rows if int(row[2]) % 5] == []
    gelus = [int(row[2]) for row in rows if "GeluCUDAKernelImpl" in row[8] or "GeluBackwardCUDAKernelImpl" in row[8]]
    assert gelus == [5 * 64, 5 * 64]


@pytest.mark.parametrize("text", ["", "nsys: error: no such file", PRINTED.replace("Instances", "Count")])
def test_without_a_table_there_is_nothing(text):
    assert kernel_sum(text, 2) is None


def test_the_same_of_a_trace_leaves_copies_out():
    copy = Kernel("Memcpy HtoD (Pinned -> Device)", 50.0)
    steps = [Step((copy, Kernel(GEMM, 100.0), Kernel(GELU, 20.0)))] * 2
    found = kernels_of(analyse(trace.from_events(content(*steps)["traceEvents"])))
    assert (found.count, found.ms) == (2, pytest.approx(0.12))
    assert kernels_of(analyse(trace.from_events(content(*SCENES["launch"])["traceEvents"]))).count == 32
