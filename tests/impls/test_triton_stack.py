"""A stack of Linear+GELU with impl=triton: a layer's dGELU moves into the next one's dx product, and nothing shows it.

Every case runs with the link and without it: same gradients to rounding, and the number of fused products says whether
the link was there.
"""

import gc
import itertools
import subprocess
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ON_GPU, interpreter_environment, raises, skip_unless_available
from python_path import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fusedmlp import FusedLinearGeLU, functional

DEVICE = "cuda" if ON_GPU else "cpu"
M, D, LAYERS = 12, 16, 4
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]


@pytest.fixture(autouse=True)
def triton():
    skip_unless_available("triton")
    from fusedmlp.impls import triton

    return triton


@pytest.fixture(params=["linked", "merged"])
def link(monkeypatch, request):
    """The switch; linked layers with a kernel for each product, or with one for all of a layer's backward pass."""
    from fusedmlp.impls import _stack

    monkeypatch.setattr(_stack, "MERGE_STACK", "always" if request.param == "merged" else "never")

    def switch(value):
        monkeypatch.setattr(_stack, "LINK_STACK", value)

    switch("always")
    return switch


@pytest.fixture
def calls(monkeypatch):
    """How often a product with dGELU in its epilogue ran, alone or merged, and how often the pointwise kernel."""
    from fusedmlp.kernels import triton_ops

    found = SimpleNamespace(fused=0, merged=0, pointwise=0, results=[], dbias=[])
    fused, merged, pointwise = triton_ops.dgelu_gemm, triton_ops.stack_bwd, triton_ops.dgelu_dbias

    def count(function, need_dbias, *args):
        found.fused += 1
        found.dbias.append(need_dbias)
        results = function(*args)
        found.results += map(weakref.ref, results)
        return results

    def count_fused(*args):
        return count(fused, args[5], *args)

    def count_merged(*args):
        found.merged += 1
        return count(merged, args[6], *args)

    def count_pointwise(*args):
        found.pointwise += 1
        return pointwise(*args)

    monkeypatch.setattr(triton_ops, "dgelu_gemm", count_fused)
    monkeypatch.setattr(triton_ops, "stack_bwd", count_merged)
    monkeypatch.setattr(triton_ops, "dgelu_dbias", count_pointwise)
    return found


def merges(dtype):
    """Whether there is a kernel for all of a layer's backward pass here."""
    return dtype != torch.float32 and torch.cuda.get_device_capability() == (9, 0) if ON_GPU else True


def living(calls):
    """Addresses of what fused products have given and somebody still holds."""
    return {ref().data_ptr() for ref in calls.results if ref() is not None}


class Stack(nn.Module):
    """Layers of several widths and both forms of GELU; `between(i, act)` may do something to the act of layer i."""

    def __init__(self, dtype=torch.float32, layers=LAYERS, bias=True):
        super().__init__()
        torch.manual_seed(1)
        widths = [D, *(D + 8 * (i % 2) for i in range(layers))]
        self.layers = nn.ModuleList(
            FusedLinearGeLU(k, n, bias, ("none", "tanh")[i % 2], "triton", DEVICE, dtype)
            for i, (k, n) in enumerate(itertools.pairwise(widths))
        )
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(2.5)

    def forward(self, x, between=lambda i, act: act):
        for i, layer in enumerate(self.layers):
            x = between(i, layer(x))
        return x


def sample(*shape, dtype=torch.float32):
    return torch.randn(*(shape or (M, D)), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2)).to(dtype)


def backward(net, x, **options):
    """Gradients of x and all parameters."""
    x = x.detach().requires_grad_()
    net.zero_grad()
    y = net(x, **options)
    y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE, dtype=y.dtype).view_as(y))
    return [x.grad, *(p.grad for p in net.parameters())]


def assert_same(got, expected, roundings=32):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert type(one) is torch.Tensor
            assert one.dtype == other.dtype
            error, size = (one.double() - other.double()).abs().max(), other.double().abs().max()
            assert size > 0
            assert error <= roundings * torch.finfo(one.dtype).eps * size, (error / size).item()


def both(link, run):
    """What `run` gives without the link and with it."""
    link("never")
    expected = run()
    link("always")
    return run(), expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(M, D), (2, M // 2, D), (1, D), (70, D)], ids=str)
def test_plain_stack(link, calls, dtype, shape):
    from fusedmlp.impls import _stack

    net, x = Stack(dtype), sample(*shape, dtype=dtype)
    got, expected = both(link, lambda: backward(net, x))
    assert_same(got, expected, roundings=32 if dtype == torch.float32 else 8)
    assert calls.merged == (calls.fused if _stack.MERGE_STACK == "always" and merges(dtype) else 0)
    # Without the link each layer once; with it only the last layer, which has no other behind it.
    assert (calls.fused, calls.pointwise) == (LAYERS - 1, LAYERS + 1)
    assert all(torch.equal(one, other) for one, other in zip(backward(net, x), got, strict=True))


def test_layers_of_one_kernel_and_of_several_in_one_stack(link, calls, monkeypatch):
    """Partial sums go from one to the other whatever comes next."""
    from fusedmlp.impls import _stack

    if not merges(torch.float16):
        pytest.skip("there is no kernel for all of a layer's backward pass here")
    turns = []
    one_kernel = _stack.merges

    def every_second(*args):
        turns.append(len(turns) % 2 == 0)
        return turns[-1] and one_kernel(*args)

    monkeypatch.setattr(_stack, "MERGE_STACK", "always")
    monkeypatch.setattr(_stack, "merges", every_second)
    net, x = Stack(torch.float16), sample(dtype=torch.float16)
    got, expected = both(link, lambda: backward(net, x))
    assert_same(got, expected, roundings=8)
    assert turns == [True, False, True]
    assert (calls.merged, calls.fused) == (2, 3)


def test_where_the_fused_product_has_no_rows(link):
    net = Stack()
    x = sample(0, D)
    gradients = backward(net, x)
    assert all(g is not None and not g.any() for g in gradients)


def residual(i, act, kept={}):  # noqa: B006
    kept[i] = act
    return act + kept[i - 2] if i == 2 else act


def test_a_residual_around_a_layer(link, calls):
    """The act of layer 0 goes into layer 1 and is added to that of layer 2."""
    net, x = Stack(), sample()
    got, expected = both(link, lambda: backward(net, x, between=residual))
    assert_same(got, expected)
    # Layer 3 sees a sum, so layer 2 is not linked; layer 0 is, and finds that the gradient is another.
    assert (calls.fused, calls.pointwise) == (2, LAYERS + 3)


def test_an_act_that_two_layers_take(link, calls):
    net, other, x = Stack(layers=2), Stack(layers=3), sample()

    def run():
        leaf = x.detach().requires_grad_()
        shared = net.layers[0](leaf)
        branches = functional.linear_gelu(shared, net.layers[1].weight, impl="triton"), net.layers[1](shared)
        y = other(sum(branches)[:, :D]).sum() + shared.square().sum()
        return torch.autograd.grad(y, [leaf, *net.parameters(), *other.parameters()])

    got, expected = both(link, run)
    assert_same(got, expected)
    assert calls.fused == 4


def test_the_same_act_as_input_and_as_weight(link, calls):
    net, x = Stack(layers=1), sample()

    def run():
        leaf = x.detach().requires_grad_()
        act = net.layers[0](leaf)
        return torch.autograd.grad(functional.linear_gelu(act, act, impl="triton").sum(), [leaf, *net.parameters()])

    got, expected = both(link, run)
    assert_same(got, expected)
    assert calls.fused == 1


def returning(g):
    return 2 * g


def in_place(g):
    g.mul_(2)


def unseen(g):
    g.data.mul_(2)


@pytest.mark.parametrize("hook", [returning, in_place, unseen])
def test_hooks_that_change_the_gradient(link, calls, hook):
    net, x = Stack(), sample()
    plain = backward(net, x)
    calls.fused = 0

    def between(i, act):
        if i == 1:
            act.register_hook(hook)
        return act

    got, expected = both(link, lambda: backward(net, x, between=between))
    assert_same(got, expected)
    assert_same(got[:1], [2 * plain[0]])
    assert calls.fused == LAYERS - 2


@pytest.mark.parametrize("hook", [lambda g: (2 * g[0], *g[1:]), lambda g: in_place(g[0])], ids=["other", "in place"])
def test_hooks_on_the_node_that_change_the_gradient(link, hook):
    net, x = Stack(), sample()

    def between(i, act):
        if i == 1:
            act.grad_fn.register_prehook(hook)
        return act

    got, expected = both(link, lambda: backward(net, x, between=between))
    assert_same(got, expected)


def test_hooks_of_modules(link):
    net, x = Stack(), sample()
    seen = []
    net.layers[1].register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0]) or (3 * dx[0],))
    got, expected = both(link, lambda: backward(net, x))
    assert_same(got, expected)
    assert len(seen) == 2
    assert all(type(g) is torch.Tensor for g in seen)


def test_retain_grad(link, calls):
    net, x = Stack(), sample()
    acts = []

    def between(i, act):
        act.retain_grad()
        acts.append(act)
        return act

    def run():
        acts.clear()
        return backward(net, x, between=between) + [act.grad for act in acts]

    got, expected = both(link, run)
    assert_same(got, expected)
    assert calls.fused == LAYERS - 1


@pytest.mark.parametrize("with_parameters", [False, True])
def test_the_gradient_of_an_inner_act(link, calls, with_parameters):
    net, x = Stack(), sample()

    def run():
        acts = []
        y = net(x.detach().requires_grad_(), between=lambda i, act: acts.append(act) or act)
        wanted = [acts[1], *(net.parameters() if with_parameters else [])]
        gradients = torch.autograd.grad(y.sum(), wanted)
        # The graph is still there, and what was made ready for a layer that was not asked is not.
        assert not any("ready" in vars(act.grad_fn) for act in acts)
        return list(gradients), acts

    (got, acts), (expected, _) = both(link, run)
    assert_same(got, expected)
    assert calls.fused == (LAYERS - 1 if with_parameters else 2)
    assert living(calls) <= {g.data_ptr() for g in got}, "only what was asked for outlives the backward pass"
    del acts


def test_the_gradient_of_the_last_layer_alone(link, calls):
    net, x = Stack(), sample()

    def run():
        return torch.autograd.grad(net(x).sum(), list(net.layers[-1].parameters()))

    got, expected = both(link, run)
    assert_same(got, expected)
    assert calls.fused == 0


def test_a_node_called_by_hand(link):
    net, x = Stack(layers=2), sample()

    def run():
        y = net(x.detach().requires_grad_())
        return [*y.grad_fn.apply(torch.ones_like(y), None)[:3]]

    got, expected = both(link, run)
    assert_same(got, expected)


def test_batched_gradients(link):
    net, x = Stack(), sample()

    def run():
        leaf = x.detach().requires_grad_()
        y = net(leaf)
        dys = torch.stack([torch.ones_like(y), torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y)])
        return torch.autograd.grad(y, [leaf, *net.parameters()], dys, is_grads_batched=True)

    got, expected = both(link, run)
    assert_same(got, expected)


def test_parts_of_a_graph_that_has_been_freed(link):
    """Layer 0 has been through its backward pass; the gradient of its act can still be had."""
    net, x = Stack(layers=2), sample()

    def run():
        act = net.layers[0](x.detach().requires_grad_())
        y = net.layers[1](act)
        act.sum().backward()
        (gradient,) = torch.autograd.grad(y.sum(), act, retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
        return [gradient]

    got, expected = both(link, run)
    assert_same(got, expected)


@pytest.mark.parametrize("frozen", ["", "weight", "bias", "weight bias"])
@pytest.mark.parametrize("bias", [True, False])
def test_frozen_parameters_and_missing_biases(link, calls, frozen, bias):
    net, x = Stack(bias=bias), sample()
    for name in frozen.split():
        if getattr(net.layers[1], name) is not None:
            getattr(net.layers[1], name).requires_grad_(False)
    got, expected = both(link, lambda: backward(net, x))
    assert_same(got, expected)
    # From the last layer down; one whose weight is frozen does not keep x, and is not linked to the layer before.
    wanted = [bias, bias and "bias" not in frozen, *([] if "weight" in frozen else [bias])]
    assert calls.dbias == wanted


def test_a_hook_below_a_layer_whose_weight_is_frozen(link):
    net, x = Stack(), sample()
    net.layers[2].weight.requires_grad_(False)

    def between(i, act):
        if i == 1:
            act.register_hook(unseen)
        return act

    got, expected = both(link, lambda: backward(net, x, between=between))
    assert_same(got, expected)


def test_layers_without_a_gradient_below(link, calls):
    net, x = Stack(), sample()
    for parameter in net.layers[:2].parameters():
        parameter.requires_grad_(False)

    def run():
        net.zero_grad()
        net(x).sum().backward()
        return [p.grad for p in net.parameters()]

    got, expected = both(link, run)
    assert_same(got, expected)
    assert calls.fused == 1


def test_two_backward_passes_through_one_graph(link, calls):
    net, x = Stack(), sample()
    y = net(x.requires_grad_()).sum()
    first = torch.autograd.grad(y, [x, *net.parameters()], retain_graph=True)
    second = torch.autograd.grad(y, [x, *net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert calls.fused == 2 * (LAYERS - 1)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x)


def test_create_graph(link, calls):
    net, x = Stack(), sample()
    leaf = x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
    link("never")
    leaf = x.detach().requires_grad_()
    assert_same([dx.detach()], torch.autograd.grad(net(leaf).sum(), leaf))
    assert calls.fused == 0
    with raises(RuntimeError, "first derivatives only"):
        dx.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_activation_checkpointing(link, calls, reentrant, whole):
    net, x = Stack(), sample()

    class Checkpointed(nn.Module):
        def forward(self, x):
            if whole:
                return checkpoint(net, x, use_reentrant=reentrant)
            for layer in net.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

        def zero_grad(self):
            net.zero_grad()

        def parameters(self):
            return net.parameters()

    got, expected = both(link, lambda: backward(Checkpointed(), x))
    assert_same(got, expected)
    # A re-entrant one runs an ordinary forward and backward pass of its part.
    assert calls.fused == (LAYERS - 1 if whole and reentrant else 0)


def test_hooks_on_saved_tensors(link, calls):
    """Each is packed once and unpacked once, as without the link."""
    net, x = Stack(), sample()

    def run():
        seen = {"packed": 0, "unpacked": 0}

        def hook(name, tensor):
            seen[name] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(partial(hook, "packed"), partial(hook, "unpacked")):
            gradients = backward(net, x)
        assert seen == {"packed": 3 * LAYERS, "unpacked": 3 * LAYERS}
        return gradients

    got, expected = both(link, run)
    assert_same(got, expected)
    assert calls.fused == 0


def test_hooks_on_the_saved_tensors_of_one_layer_only(link, calls):
    net, x = Stack(), sample()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)

    class Partly(Stack):
        def forward(self, x):
            for i, layer in enumerate(self.layers):
                if i == 1:
                    hooks.__enter__()
                x = layer(x)
                if i == 1:
                    hooks.__exit__()
            return x

    got, expected = both(link, lambda: backward(Partly(), x))
    assert_same(got, expected)
    assert calls.fused == 1, "layers 2 and 3 alone; 1 with 0, and 2 with 1, are not"
    assert_same(got, backward(net, x))


def test_autocast(link, calls):
    net, x = Stack(), sample()

    def run():
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            y = net(leaf := x.detach().requires_grad_())
        net.zero_grad()
        y.float().square().sum().backward()
        return [leaf.grad, *(p.grad for p in net.parameters())]

    got, expected = both(link, run)
    assert calls.fused == LAYERS - 1
    assert all(g.dtype == torch.float32 for g in got)
    assert_same(got, expected, roundings=8 * torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps)


def test_torch_compile(link):
    net, x = Stack(), sample()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_same(backward(compiled, x), backward(net, x))


def test_compiled_autograd(link):
    from torch._dynamo.compiled_autograd import _enable

    net, x = Stack(layers=2), sample()
    expected = backward(net, x)
    with _enable(partial(torch.compile, fullgraph=True, backend="aot_eager")):
        assert_same(backward(net, x), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp2 by layer"])
def test_distributed_wrappers(link, calls, wrapper, tmp_path):
    net, x = Stack(), sample()
    expected = backward(net, x)
    calls.fused = 0
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        if wrapper == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        else:
            mesh = dist.device_mesh.init_device_mesh(DEVICE, (1,))
            for layer in net.layers if wrapper == "fsdp2 by layer" else ():
                dist.fsdp.fully_shard(layer, mesh=mesh)
            wrapped = dist.fsdp.fully_shard(net, mesh=mesh)
        got = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in backward(wrapped, x)]
    finally:
        dist.destroy_process_group()
    assert_same(got, expected)
    assert calls.fused == (0 if wrapper == "fsdp2 by layer" else LAYERS - 1)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode(link, calls):
    net, x = Stack(), sample()

    def run():
        with torch.autograd.detect_anomaly(check_nan=True):
            return backward(net, x)

    got, expected = both(link, run)
    assert_same(got, expected)
    assert calls.fused == LAYERS - 1


def test_a_backward_pass_in_inference_mode(link):
    net, x = Stack(), sample()

    def run():
        leaf = x.detach().requires_grad_()
        y = net(leaf).sum()
        with torch.inference_mode():
            return torch.autograd.grad(y, [leaf, *net.parameters()])

    got, expected = both(link, run)
    assert_same(got, expected)


def test_an_act_changed_in_place_is_another_tensor(link, calls):
    net, x = Stack(), sample()
    got, expected = both(link, lambda: backward(net, x, between=lambda i, act: act.mul_(2) if i == 1 else act))
    assert_same(got, expected)
    assert calls.fused == LAYERS - 2


def test_the_preact_is_no_act(link, triton):
    """It comes from the same node as act, but no GELU lies between."""
    net, x = Stack(layers=1), sample()
    leaf = x.detach().requires_grad_()
    layer = net.layers[0]
    _, preact = triton._LinearGelu.apply(leaf, layer.weight, layer.bias, "none")
    y, _ = triton._LinearGelu.apply(preact, sample(8, preact.shape[1]), None, "none")
    assert y.grad_fn.linked is False


def test_a_gradient_from_another_stream_is_not_taken(link, calls, monkeypatch):
    from fusedmlp.impls import _stack

    streams = iter(range(100))
    monkeypatch.setattr(_stack, "_current_stream", lambda tensor: next(streams))
    net, x = Stack(), sample()
    got, expected = both(link, lambda: backward(net, x))
    assert_same(got, expected)
    assert (calls.fused, calls.pointwise) == (LAYERS - 1, 2 * LAYERS)


def test_flops_are_the_same(link):
    net, x = Stack(), sample()

    def run():
        with FlopCounterMode(display=False) as counter:
            backward(net, x)
        return counter.get_total_flops()

    got, expected = both(link, run)
    assert got == expected == sum(6 * M * layer.weight.numel() for layer in net.layers)


def test_nothing_outlives_the_backward_pass(link, calls):
    """Without the garbage collector: no reference cycle keeps an activation or a gradient."""
    net, x = Stack(), sample()
    gc.collect()
    gc.disable()
    try:
        acts = []
        backward(net, x, between=lambda i, act: acts.append(weakref.ref(act)) or act)
        assert len(acts) == LAYERS
        assert not any(ref() is not None for ref in acts)
        assert living(calls) <= {p.grad.data_ptr() for p in net.parameters()}
    finally:
        gc.enable()


@pytest.fixture
def kernels_in_torch(monkeypatch):
    """The same operators in PyTorch: Triton's interpreter keeps what a kernel was last called with."""
    from fusedmlp.kernels import triton_ops

    gelu_backward = torch.ops.aten.gelu_backward

    def linear_gelu_fwd(x, weight, bias, approximate, _):
        preact = nn.functional.linear(x, weight, bias)
        return nn.functional.gelu(preact, approximate=approximate), preact

    def dgelu_dbias(dy, preact, approximate, _):
        dpreact = gelu_backward(dy, preact, approximate=approximate)
        return dpreact, dpreact.sum(0)

    def dgelu_gemm(dy, weight, preact, approximate, *_):
        dx = dy @ weight
        dpreact = gelu_backward(dx, preact, approximate=approximate)
        return dpreact, dx, dpreact.sum(0)

    def stack_bwd(dy, weight, x, preact, sums, approximate, _):
        dweight = dy.t() @ x
        dpreact, dx, dbias = dgelu_gemm(dy, weight, preact, approximate)
        return dpreact, dx, dbias[None], dweight, dy.new_empty(0) if sums is None else sums.sum(0)

    for operator in (linear_gelu_fwd, dgelu_dbias, dgelu_gemm, stack_bwd):
        monkeypatch.setattr(triton_ops, operator.__name__, operator)


@pytest.mark.skipif(ON_GPU, reason="the CPU's allocator reports every tensor")
def test_peak_memory(link, kernels_in_torch):
    """In units of an act: twice the layers at the end of the forward pass, and two more in the backward pass.

    Where one kernel gives dx and dweight, x is there beside dx.
    """
    from fusedmlp.impls import _stack

    beside = _stack.MERGE_STACK == "always"
    layers, rows, width = 6, 1024, 32
    net = nn.Sequential(*(FusedLinearGeLU(width, width, impl="triton") for _ in range(layers)))
    x, dy = sample(rows, width).requires_grad_(), sample(rows, width)

    def held():
        """Acts held over time, in whole ones: what is smaller does not count."""
        net.zero_grad()
        x.grad = None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            net(x).backward(dy)
        events = profiler.profiler.kineto_results.events()
        steps = [event.nbytes() / (4 * x.numel()) for event in events if event.name() == "[memory]"]
        return list(itertools.accumulate(step for step in steps if abs(step) >= 1))

    got, expected = both(link, held)
    assert max(expected) == max(got) - beside == 2 * layers + 1
    # Layer for layer it goes down; at the end y and the gradient of x are left.
    assert max(got[-8:]) <= 6 + beside
    assert max(got[-4:]) <= 4
    assert got[-1] == expected[-1] == 1


def test_the_switch_and_its_rule(link, monkeypatch):
    from fusedmlp.impls import _stack
    from fusedmlp.kernels import configs

    net, x = Stack(), sample(M, D)
    link("on")
    with raises(ValueError, "LINK_STACK", "FUSEDMLP_LINK_STACK", "'on'", "auto, always, never"):
        net(x)
    link("auto")
    monkeypatch.setattr(configs, "has_tma", lambda device: device == 0)

    def pays(bits=16, width=512, rows=512, device=0):
        given = SimpleNamespace(is_cuda=True, element_size=lambda: bits // 8, device=SimpleNamespace(index=device))
        return _stack._wanted(given, SimpleNamespace(shape=(rows, width)))

    assert pays()
    assert not pays(bits=32)
    assert not pays(width=500)
    assert not pays(rows=500)
    assert not pays(device=1)


def test_the_switch_for_one_kernel_and_its_rule(monkeypatch):
    from fusedmlp.impls import _stack

    asked = []
    monkeypatch.setattr(_stack, "takes_stack", lambda *args, always=False: asked.append(always) or True)
    for value, merges, always in (("auto", True, [False]), ("always", True, [True]), ("never", False, [])):
        monkeypatch.setattr(_stack, "MERGE_STACK", value)
        assert _stack.merges(*(sample() for _ in range(3))) is merges
        assert asked == always
        asked.clear()
    monkeypatch.setattr(_stack, "LINK_STACK", "always")
    monkeypatch.setattr(_stack, "MERGE_STACK", "off")
    with raises(ValueError, "MERGE_STACK", "FUSEDMLP_MERGE_STACK", "'off'", "auto, always, never"):
        backward(Stack(), sample())


def test_without_the_engine_s_internals_layers_compute_for_themselves(monkeypatch):
    """In a PyTorch that has renamed them."""
    code = (
        "import torch; del torch._C._will_engine_execute_node; from fusedmlp import FusedLinearGeLU; "
        "net = torch.nn.Sequential(*(FusedLinearGeLU(8, 8, impl='triton') for _ in range(2))); "
        "net(torch.ones(2, 8)).sum().backward(); from fusedmlp.impls import _stack; "
        "assert not _stack._LINKABLE and all(p.grad is not None for p in net.parameters())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=interpreter_environment(), cwd=ROOT)
