"""The modules stand in for nn.Linear + nn.GELU: parameters, initialisation, state dict, results."""

import pytest
import torch
from conftest import raises
from replace.models import Adapter
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations, prune

from fusedmlp import FusedLinearGeLU, FusedMLP, TritonSoftmax, impl_names, modules


@pytest.mark.parametrize("bias", [True, False])
def test_linear_gelu_is_linear_then_gelu(impl, bias, device):
    torch.manual_seed(1)
    linear = nn.Linear(12, 20, bias=bias, device=device)
    torch.manual_seed(1)
    fused = FusedLinearGeLU(12, 20, bias=bias, impl=impl, device=device)
    assert list(fused.state_dict()) == list(linear.state_dict())
    for name, parameter in linear.named_parameters():
        assert torch.equal(parameter, fused.get_parameter(name))
    x = torch.randn(2, 5, 12, device=device)
    torch.testing.assert_close(fused(x), nn.functional.gelu(linear(x)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_mlp_is_two_linears(impl, bias, approximate, device):
    torch.manual_seed(1)
    fc1, fc2 = (nn.Linear(*sizes, bias=bias, device=device) for sizes in ((12, 48), (48, 12)))
    torch.manual_seed(1)
    fused = FusedMLP(12, bias=bias, approximate=approximate, impl=impl, device=device)
    names = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert list(fused.state_dict()) == [name for name in names if bias or "bias" not in name]
    assert torch.equal(fused.fc1.weight, fc1.weight)
    assert torch.equal(fused.fc2.weight, fc2.weight)
    x = torch.randn(7, 12, device=device)
    torch.testing.assert_close(fused(x), fc2(nn.functional.gelu(fc1(x), approximate=approximate)))


def test_softmax_is_nn_softmax(impl, device):
    x = torch.randn(3, 4, 5, device=device)
    for dim in (-1, 0, 1):
        torch.testing.assert_close(TritonSoftmax(dim, impl=impl)(x), nn.Softmax(dim)(x))


def test_state_dicts_load_across_implementations(impl):
    source = FusedMLP(8, 16, 4, impl="native")
    target = FusedMLP(8, 16, 4, impl=impl)
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(target.fc2.weight, source.fc2.weight)


def test_sizes_default_to_a_transformer_block():
    mlp = FusedMLP(8)
    assert (mlp.fc1.in_features, mlp.fc1.out_features, mlp.fc2.out_features) == (8, 32, 8)


def test_dtype_and_device_reach_the_parameters():
    for module in (
        FusedMLP(8, dtype=torch.bfloat16, device="meta"),
        FusedLinearGeLU(8, 8, dtype=torch.bfloat16, device="meta"),
    ):
        assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.bfloat16, "meta")}


def test_repr_names_the_implementation():
    assert "impl='native'" in repr(FusedMLP(8, impl="native"))
    expected = "FusedLinearGeLU(in_features=8, out_features=4, bias=False, approximate='tanh', impl='native')"
    assert repr(FusedLinearGeLU(8, 4, bias=False, approximate="tanh", impl="native")) == expected
    assert repr(TritonSoftmax(1, impl="native")) == "TritonSoftmax(dim=1, impl='native')"


def test_the_implementation_is_chosen_at_construction():
    for build in (
        lambda impl: FusedMLP(8, impl=impl),
        lambda impl: FusedLinearGeLU(8, 8, impl=impl),
        lambda impl: TritonSoftmax(impl=impl),
    ):
        with raises(ValueError, "'nativ'", *[name for name in impl_names() if name != "cuda"]):
            build("nativ")
    with raises(ValueError, "approximate='erf'"):
        FusedMLP(8, approximate="erf")


def test_the_implementation_can_be_changed_later():
    mlp, x = FusedMLP(8, impl="native"), torch.randn(3, 8)
    expected = mlp(x)
    mlp.impl = "manual"
    torch.testing.assert_close(mlp(x), expected)
    mlp.impl = "nativ"
    with raises(ValueError, "'nativ'"):
        mlp(x)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_jit_trace():
    """Where sizes are tensors."""
    for impl in ("auto", "native"):
        mlp, x = FusedMLP(8, impl=impl), torch.randn(3, 8)
        torch.testing.assert_close(torch.jit.trace(mlp, x)(x), mlp(x))


def test_torch_fx_sees_one_op_a_module(impl, device):
    """As `nn.Linear` and `nn.Softmax` are one node each: feature extractors and quantisation trace like that."""
    options = {"impl": impl, "device": device}
    net = nn.Sequential(FusedLinearGeLU(8, 12, **options), FusedMLP(12, 16, 8, **options), TritonSoftmax(impl=impl))
    traced = torch.fx.symbolic_trace(net)
    assert sum(node.op == "call_function" for node in traced.graph.nodes) == 3
    x = torch.randn(3, 8, device=device)
    torch.testing.assert_close(traced(x), net(x))
    with torch.no_grad():
        traced.get_parameter("0.weight").mul_(2)
    assert_gradients_agree(traced, net, x)


def assert_gradients_agree(one, other, x):
    for module in (one, other):
        module.zero_grad()
        module(x).square().sum().backward()
        gradients = [p.grad.clone() for p in module.parameters()]
        if module is one:
            expected = gradients
    assert gradients
    torch.testing.assert_close(gradients, expected)


def adapter(mlp):
    mlp.fc1, mlp.fc2 = Adapter(mlp.fc1), Adapter(mlp.fc2)


def doubled(module, args, y):
    return 2 * y


def own_forward(mlp):
    forward = mlp.fc1.forward
    mlp.fc1.forward = lambda x: 3 * forward(x)


def weight_norm(mlp):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(mlp.fc1)


CHANGES = {
    "adapter": adapter,
    "hook of fc1": lambda mlp: mlp.fc1.register_forward_hook(doubled),
    "hook of fc2": lambda mlp: mlp.fc2.register_forward_hook(doubled),
    "pre-hook": lambda mlp: mlp.fc2.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "forward of its own": own_forward,
    "weight norm": weight_norm,
    "pruned": lambda mlp: prune.l1_unstructured(mlp.fc1, "weight", 0.5),
    "parametrized": lambda mlp: parametrizations.weight_norm(mlp.fc2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_became_of_the_layers_since_counts(change):
    mlp, x = FusedMLP(8, impl="manual"), torch.randn(3, 8)
    CHANGES[change](mlp)
    for _ in range(2):  # the second backward pass needs what the layer computes anew in every call
        y = mlp(x)
        torch.testing.assert_close(y, mlp.fc2(nn.functional.gelu(mlp.fc1(x))))
        y.sum().backward()


class Quantised(torch.Tensor):
    """As torchao's: PyTorch's operators compute with what it stands for."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not nn.functional.linear:
            return super().__torch_function__(function, types, args, kwargs or {})
        plain = [2 * a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
        return function(*plain, **(kwargs or {}))


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_weights_quantised_in_place_are_left_to_their_layer(name):
    mlp, x = FusedMLP(8, impl="manual").requires_grad_(False), torch.randn(3, 8)
    layer = getattr(mlp, name)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Quantised), requires_grad=False)
    torch.testing.assert_close(mlp(x), mlp.fc2(nn.functional.gelu(mlp.fc1(x))))


def test_a_fake_model_goes_through_the_op(monkeypatch):
    """As in torch.export and estimates of memory, where parameters are stand-ins."""
    called = []
    monkeypatch.setattr(modules.functional, "mlp", lambda x, *_, **__: called.append(type(x)) or x)
    with FakeTensorMode():
        FusedMLP(8, impl="manual")(torch.randn(3, 8))
    assert called == [FakeTensor]


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
def test_torch_jit_script_is_refused_in_words():
    for module in (FusedMLP(8), FusedLinearGeLU(8, 8), TritonSoftmax(impl="native")):
        with raises(RuntimeError, "torch.jit.script", type(module).__name__, "torch.jit.trace"):
            torch.jit.script(nn.Sequential(module))
