"""The table of kernels that nsys stats prints, against a trace."""

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


@pytest.mark.parametrize("text", ["", "nsys: error: no such file", PRINTED.replace("Instances", "Count")])
def test_without_a_table_there_is_nothing(text):
    assert kernel_sum(text, 2) is None


def test_the_same_of_a_trace_leaves_copies_out():
    copy = Kernel("Memcpy HtoD (Pinned -> Device)", 50.0)
    steps = [Step((copy, Kernel(GEMM, 100.0), Kernel(GELU, 20.0)))] * 2
    found = kernels_of(analyse(trace.from_events(content(*steps)["traceEvents"])))
    assert (found.count, found.ms) == (2, pytest.approx(0.12))
    assert kernels_of(analyse(trace.from_events(content(*SCENES["launch"])["traceEvents"]))).count == 32
