"""On a GPU: times against the profiler's, the columns that only a GPU has, and the kernels that are said to run."""

import pytest
import torch

from fusedmlp import impls
from fusedmlp.bench import candidates, measure, traffic
from fusedmlp.bench.cards import Card
from fusedmlp.bench.cases import Case, make_tensors
from fusedmlp.bench.clock import Pace, in_turns
from fusedmlp.bench.launches import launched

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PACE = Pace(rounds=2, settle_ms=20, rep_ms=5)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_times_are_those_of_the_kernels(direction):
    """Narrow rows backward cost the host more than the GPU."""
    case = Case("softmax", (32768, 1024), "bf16")
    tensors = make_tensors(case, CUDA)
    call = candidates.call(candidates.impl_op("native", case), tensors, torch.randn_like(tensors["x"]), direction)
    measured = in_turns({"native": call}, CUDA, PACE)["native"]
    seen = sum(kernel.us for kernel in launched(call, CUDA)) / 1e3
    assert measured.timing.p50 == pytest.approx(seen, rel=0.3, abs=0.005)
    assert measured.host_us > 1


def test_columns_that_only_a_gpu_has():
    case = Case("gelu", (4096, 4096), "fp32")
    with traffic.static_uncached_compilation():
        rows = measure.measure_case(case, measure.Bench(CUDA, PACE, ["manual", "native"]))
    found = {(row["impl"], row["direction"]): row for row in rows}
    assert all(row["failure"] is None for row in rows)
    # scaled, erf, + 1, half, product
    assert found["manual", "forward"]["kernels"] == 5
    assert found["native", "forward"]["kernels"] == found["native", "backward"]["kernels"] == 1
    assert found["native", "forward"]["peak_mib"] == pytest.approx(64, rel=0.05)
    assert found["manual", "forward"]["ms"] > 2 * found["native", "forward"]["ms"]
    assert all(0.02 < row["share_of_limit"] < 1.3 for row in rows)


@pytest.mark.parametrize(
    "case",
    [
        Case("gelu", (1024, 1024), "bf16"),
        Case("softmax", (1024, 1000), "bf16"),
        Case("softmax", (512, 50257), "bf16"),
        Case("mlp", (4096, 768, 3072, 768), "bf16", "tanh"),
    ],
    ids=str,
)
def test_the_kernels_that_are_inspected_are_those_that_run(case):
    if reason := impls.unavailable("triton"):
        pytest.skip(reason)
    from fusedmlp.bench.inspection import triton_kernels
    from fusedmlp.impls import triton

    here = torch.cuda.get_device_properties(CUDA)
    card = Card(here.name, 10 * here.major + here.minor, here.multi_processor_count, 0.0, here.L2_cache_size >> 20)
    said = [launch.kernel.__name__ for launch in triton_kernels.record(triton, case, "step", card)]
    tensors, op = make_tensors(case, CUDA), candidates.impl_op("triton", case)
    dy = torch.randn_like(op(*tensors.values()))
    ran = [kernel.name for kernel in launched(candidates.call(op, tensors, dy, "step"), CUDA)]
    own = [name for name in ran if name in set(said)]
    assert own == said
