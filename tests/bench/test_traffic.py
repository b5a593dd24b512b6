"""Bytes that operators move, against the ledger, and the operators and kernels of a call."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from fusedmlp.bench import candidates, gate, launches, traffic
from fusedmlp.bench.cases import Case, make_tensors
from fusedmlp.bench.launches import Launched, launched
from fusedmlp.impls import manual

CPU = torch.device("cpu")


def run(case, impl, direction):
    tensors = make_tensors(case, CPU)
    op = candidates.impl_op(impl, case)
    dy = torch.randn_like(op(*tensors.values()))
    return candidates.call(op, tensors, dy, direction)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_manual_moves_what_its_ledger_says(approximate):
    case = Case("gelu", (64, 48), "fp32", approximate)
    moved = traffic.moved(run(case, "manual", "forward"), "forward", [])
    assert moved == 4 * sum(manual.ledger("gelu", 64, 48, approximate=approximate))


@pytest.mark.parametrize("direction", ["forward", "backward", "step"])
def test_native_gelu_moves_the_least(direction):
    case = Case("gelu", (64, 48), "bf16")
    assert traffic.moved(run(case, "native", direction), direction, []) == case.least_bytes(direction)


def test_an_expanded_tensor_is_read_once():
    x = torch.randn(1, 8).expand(1000, 8)
    assert traffic.moved(lambda: x.exp(), "forward", []) == 4 * (8 + 8000)


def test_compiled_gelu_moves_the_least():
    """Its kernels are not operators, so the compiler's own count is taken: one kernel each way."""
    case = Case("gelu", (64, 48), "fp32")
    tensors = make_tensors(case, CPU)
    op, dy = candidates.impl_op("compiled", case), torch.randn(64, 48)
    with traffic.static_uncached_compilation():
        with traffic.compiled_graphs() as graphs:
            gate.results(op, tensors, dy)
        assert [graph.backward for graph in graphs] == [False, True]
        for direction in ("forward", "backward", "step"):
            call = candidates.call(op, tensors, dy, direction)
            assert traffic.moved(call, direction, graphs) == case.least_bytes(direction)


def test_operators_of_a_call_on_a_cpu():
    a = torch.randn(4, 4)
    assert launched(lambda: (a.t() @ a).exp(), CPU) == [Launched("aten.mm"), Launched("aten.exp")]


def test_kernels_of_a_call_on_a_gpu(monkeypatch):
    """The profiler's list has the host's calls in it as well."""

    def event(name, device_type, us):
        return SimpleNamespace(name=name, device_type=device_type, time_range=SimpleNamespace(elapsed_us=lambda: us))

    found = [
        event("cudaLaunchKernel", DeviceType.CPU, 9.0),
        event("a_kernel", DeviceType.CUDA, 2.0),
        event("b_kernel", DeviceType.CUDA, 3.0),
    ]
    calls = []
    profiler = nullcontext(SimpleNamespace(events=lambda: found))
    monkeypatch.setattr(launches, "profile", lambda activities, acc_events: profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    kernels = launched(lambda: calls.append("call"), torch.device("cuda"))
    assert kernels == [Launched("a_kernel", 2.0), Launched("b_kernel", 3.0)]
    assert launches.longest(lambda: None, torch.device("cuda")) == Launched("b_kernel", 3.0)
    # One call to compile, one that is seen until its kernels are done.
    assert calls[:4] == ["call", "synchronize", "call", "synchronize"]
    found.clear()
    assert launches.longest(lambda: None, torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        # cuBLAS names its tiles for matrices stored by columns.
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", (256, 128)),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_tn", (64, 128)),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1", (128, 64)),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", None),
    ],
)
def test_tile_of_a_kernel(name, tile):
    assert Launched(name).tile == tile


def test_short_name():
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, char*>"
    assert Launched(name).short_name == "vectorized_elementwise_kernel (CUDAFunctor_add)"
