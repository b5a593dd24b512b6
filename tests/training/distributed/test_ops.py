"""The ops inside what trains them on several devices, with activation checkpointing, in one rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from conftest import ON_GPU
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fusedmlp import FusedLinearGeLU, FusedMLP, TritonSoftmax
from fusedmlp.training.strategies import shard


class Unit(nn.Module):
    def __init__(self, impl: str):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear, self.mlp = FusedLinearGeLU(16, 16, impl=impl), FusedMLP(16, impl=impl)
        self.softmax = TritonSoftmax(impl=impl)

    def forward(self, x):
        return x + self.softmax(self.mlp(self.linear(self.norm(x))))


class Net(nn.Module):
    def __init__(self, impl: str):
        super().__init__()
        self.units = nn.ModuleList(Unit(impl) for _ in range(2))

    def forward(self, x):
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False)
        return x


@pytest.fixture
def net(impl, device):
    if impl == "compiled" and not ON_GPU:
        pytest.skip("compiles for a minute on a CPU; test_losses.py trains with it")
    return Net(impl).to(device)


@pytest.fixture
def x(device):
    return torch.randn(4, 16, device=device)


@pytest.fixture(autouse=True)
def group(tmp_path, device):
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(net, x):
    net.zero_grad()
    (net(x) * torch.arange(16, device=x.device)).sum().backward()
    return [parameter.grad for parameter in net.parameters()]


def test_ddp_with_buckets_as_views_and_a_static_graph(net, x):
    expected = [gradient.clone() for gradient in gradients(copy.deepcopy(net), x)]
    wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    for _ in range(3):
        for got, wanted in zip(gradients(wrapped, x), expected, strict=True):
            torch.testing.assert_close(got, wanted)
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients(wrapped, x)}) == 1, "one bucket"


@pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed")
def test_fsdp_keeps_parameters_in_fp32_and_computes_in_bf16(net, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        expected = gradients(copy.deepcopy(net), x)
        shard(net, init_device_mesh(x.device.type, (1,)), "bf16-mixed")
        got = gradients(net, x)
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in got} == {torch.float32}
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())
