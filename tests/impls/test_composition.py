"""Every implementation inside what PyTorch wraps around a model: compile, checkpointing, CUDA graphs, DDP, FSDP2."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedmlp import FusedLinearGeLU, FusedMLP, TritonSoftmax, functional, impls


class Net(nn.Module):
    """All four ops in a row."""

    def __init__(self, impl, device=None, dtype=None):
        super().__init__()
        self.impl = impl
        self.linear = FusedLinearGeLU(16, 32, impl=impl, device=device, dtype=dtype)
        self.mlp = FusedMLP(32, 64, 16, impl=impl, device=device, dtype=dtype)
        self.softmax = TritonSoftmax(impl=impl)

    def forward(self, x):
        return self.softmax(functional.gelu(self.mlp(self.linear(x)), impl=self.impl))


def run(net, x):
    x = x.detach().requires_grad_()
    y = net(x)
    (y * torch.arange(y.shape[-1], device=y.device)).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in net.parameters())]
    net.zero_grad()
    return [y.detach(), *gradients]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def net(impl, device):
    return Net(impl, device=device)


@pytest.fixture
def x(device):
    return torch.randn(12, 16, device=device)


def test_torch_compile_without_a_graph_break(net, x, monkeypatch):
    expected = run(net, x)
    # As in a process whose first call of the op is under torch.compile.
    monkeypatch.setattr(impls, "_loaded", {})
    assert_same(run(torch.compile(net, fullgraph=True), x), expected)


def test_torch_compile_with_tied_tensors(impl, device):
    """The same tensor as two arguments gets the sum of both gradients."""
    if impl == "compiled":
        pytest.skip("an outer torch.compile goes through it as through manual")
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((8, 8), (8, 8), (8,)))

    def tied(x, weight, bias):
        hidden = functional.linear_gelu(x, x, bias, impl=impl)
        return functional.mlp(hidden, weight, bias, weight, bias, impl=impl)

    results = []
    for function in (tied, torch.compile(tied, backend="aot_eager", fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        function(*leaves).sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_activation_checkpointing(net, x):
    expected = run(net, x)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    assert_same(run(Checkpointed(), x), expected)


def test_copy_and_pickle(net, x):
    expected = run(net, x)
    assert_same(run(copy.deepcopy(net), x), expected)
    assert_same(run(pickle.loads(pickle.dumps(net)), x), expected)
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    fresh = Net(net.impl, device=x.device)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same(run(fresh, x), expected)


def test_meta_device_then_real(impl, device):
    net = Net(impl, device="meta")
    assert all(parameter.is_meta for parameter in net.parameters())
    net.to_empty(device=device)
    net.linear.reset_parameters()
    assert not net.linear.weight.is_meta


@pytest.fixture
def process_group(tmp_path, device):
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_distributed_wrappers(net, x, wrapper, process_group):
    expected = run(net, x)
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(x.device.type, (1,))
        wrapped = fully_shard(net, mesh=mesh)
    got = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in run(wrapped, x)]
    assert_same(got, expected)


@pytest.mark.gpu
def test_cuda_graph(net, x):
    # In a copy: what accumulates a parameter's gradient stays on the stream of its first backward pass.
    expected = run(copy.deepcopy(net), x)
    static = x.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            net.zero_grad(set_to_none=True)
            static.grad = None
            y = net(static)
            (y * torch.arange(16, device="cuda")).sum().backward()
    # Its graph keeps what accumulates gradients on the stream of the first backward pass.
    del y
    torch.cuda.current_stream().wait_stream(stream)
    net.zero_grad(set_to_none=True)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    weights = torch.arange(16, device="cuda")
    with torch.cuda.graph(graph, stream=stream):
        y = net(static)
        (y * weights).sum().backward()
    with torch.no_grad():
        static.copy_(torch.randn_like(static))
        graph.replay()
        static.copy_(x)
        graph.replay()
    assert_same([y.detach(), static.grad, *(p.grad for p in net.parameters())], expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_second_device_while_the_first_is_current(impl, x):
    net = Net(impl, device="cuda:0")
    expected = run(net, x)
    got = run(copy.deepcopy(net).to("cuda:1"), x.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert_same([t.to("cuda:0") for t in got], expected)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements(impl):
    """Offsets beyond 32 bits: the last elements are right, forward and backward."""
    rows, columns = 2**15 + 1, 2**16 + 8
    x = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    for op, arguments in ((functional.gelu, ()), (functional.softmax, (-1,))):
        if impl == "manual":
            pytest.skip("its fp32 intermediates of this size fill the card; native covers the same torch kernels")
        y = op(x, *arguments, impl=impl)
        (dx,) = torch.autograd.grad(y, x, torch.ones((), device="cuda", dtype=y.dtype).expand_as(y))
        tail = x[-1:].detach().requires_grad_()
        expected = op(tail, *arguments, impl="native")
        (expected_dx,) = torch.autograd.grad(expected, tail, torch.ones_like(expected))
        torch.testing.assert_close(y[-1:], expected)
        torch.testing.assert_close(dx[-1:], expected_dx)
        del y, dx
