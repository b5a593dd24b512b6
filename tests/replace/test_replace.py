"""replace_modules: what is found, that nothing but the computation changes, and that it can be undone."""

import copy
import functools
import io
import pickle

import pytest
import torch
from conftest import raises
from replace.models import REPLACED, D, Inline, Mlp, NewGELU, QuickGELU, sequential
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmlp
from fusedmlp import FusedLinearGeLU, FusedMLP, TritonSoftmax, replace_modules


def batch():
    return torch.randn(3, 5, D)


def results(model, x, seed=0):
    torch.manual_seed(seed)
    y = model(x)
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return [y.detach(), *gradients]


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture(params=REPLACED)
def case(request):
    build, counts = REPLACED[request.param]
    return build(), counts


@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_everything_else_stay(case, training):
    model, counts = case
    model.train(training)
    x, keys, text = batch(), list(model.state_dict()), repr(model)
    before, parameters = results(model, x), dict(model.named_parameters())
    modules = dict(model.named_modules())
    report = replace_modules(model, impl="manual", verify=True, batch=x)
    assert report.verified, report
    words = [entry.by.partition("(")[0] for entry in report.replaced]
    assert tuple(map(words.count, ("FusedMLP", "FusedLinearGeLU", "softmax"))) == counts, report
    assert not report.left, report
    assert_same(results(model, x), before)
    assert list(model.state_dict()) == keys
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert all(module.training == training for module in model.modules())
    with torch.no_grad():
        eager = model(x)
    report.restore()
    assert repr(model) == text
    assert dict(model.named_modules()) == modules
    assert all("impl" not in vars(module) for module in model.modules())
    assert_same(results(model, x), before)
    if not training:
        torch.testing.assert_close(eager, before[0])
    report.restore()


def test_what_is_put_in_are_our_modules(case):
    model, (mlps, linears, softmaxes) = case
    replace_modules(model, impl="native")
    ours = [m for m in model.modules() if getattr(m, "impl", None) == "native"]
    assert len(ours) == mlps + linears + softmaxes
    assert all(isinstance(m, nn.Module) for m in ours)
    assert sum(isinstance(m, FusedLinearGeLU) for m in ours) == linears
    assert sum(isinstance(m, TritonSoftmax) for m in ours) == softmaxes
    assert "impl='native'" in repr(model)


def test_every_implementation_can_be_put_in(impl, device):
    if impl == "compiled" and device == "cpu":
        pytest.skip("its C++ compiler takes seconds for every kernel")
    model = nn.Sequential(sequential(0.0), Inline(), nn.Softmax(-1)).to(device).eval()
    x = batch().to(device)
    expected = model(x)
    replace_modules(model, impl=impl)
    torch.testing.assert_close(model(x), expected)
    for module in model.modules():
        if hasattr(module, "impl"):
            module.impl = "native"  # can be changed later
    torch.testing.assert_close(model(x), expected)


def test_state_dicts_go_both_ways(case):
    model, _ = case
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.eval(), other.eval()
    x = batch()
    expected = other(x)
    replace_modules(model, impl="native")
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), expected)
    other.load_state_dict(copy.deepcopy(model).state_dict())
    # Also where loading replaces the parameters rather than fills them, and they are shared with nothing else.
    model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
    torch.testing.assert_close(model(x), other(x))


def test_copies_and_pickles(case):
    model, _ = case
    model.eval()
    x = batch()
    expected = model(x)
    replace_modules(model, impl="native")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert repr(twin) == repr(model)
        torch.testing.assert_close(twin(x), expected)
        twin.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), expected)


def test_a_training_step_with_an_optimizer_built_before():
    model = nn.Sequential(Mlp(), Inline(), sequential()).eval()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    replace_modules(model, impl="manual")
    x = batch()
    for _ in range(2):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            m(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.slow
def test_torch_compile_of_the_result():
    model = nn.Sequential(Mlp(drop=0.0), Inline(), REPLACED["method"][0](), REPLACED["function"][0]()).eval()
    x = batch()
    expected = results(model, x)
    replace_modules(model, impl="native")
    assert_same(results(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected)


def test_activation_checkpointing_and_autocast():
    model = Mlp()
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        replace_modules(model, impl="native")
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(checkpoint(model, x, use_reentrant=False), expected)


def test_tied_and_frozen_weights_stay():
    model = nn.ModuleDict({"a": Mlp(), "b": Mlp()})
    model["b"].fc1.weight = model["a"].fc1.weight
    model["a"].fc2.weight.requires_grad_(False)
    replace_modules(model, impl="manual")
    assert model["b"].fc1.weight is model["a"].fc1.weight
    model["b"](model["a"](batch())).sum().backward()
    assert model["a"].fc2.weight.grad is None
    assert model["a"].fc1.weight.grad is not None


def test_meta_tensors_and_dtypes_survive():
    model = nn.Sequential(Mlp(), Inline()).to("meta")
    assert len(replace_modules(model, impl="native")) == 2
    assert model(torch.empty(2, D, device="meta")).shape == (2, D)
    model.to_empty(device="cpu")
    model.to(torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert model(batch().bfloat16()).dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_changes_after_it_survives_restore():
    model = nn.Sequential(Mlp(), Inline())
    report = replace_modules(model, impl="native")
    model.double().eval()
    report.restore()
    assert not any(module.training for module in model.modules())
    assert model(batch().double()).dtype == torch.float64


def test_hooks_of_the_mlp_stay():
    model, seen = Mlp(), []
    model.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    model.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0].shape))
    assert replace_modules(model, impl="native")
    model(batch().requires_grad_()).sum().backward()
    assert seen == [(3, 5, D), (3, 5, D)]


def test_a_module_in_several_places_is_replaced_once():
    """As ALBERT's layers."""
    shared = Mlp()
    model = nn.Sequential(shared, shared)
    expected = model(x := batch())
    assert len(replace_modules(model, impl="native")) == 1
    torch.testing.assert_close(model(x), expected)


def test_a_second_call_finds_nothing_more():
    model = nn.Sequential(Mlp(), Inline(), sequential(), nn.Softmax(-1))
    assert len(replace_modules(model, impl="native")) == 4
    second = replace_modules(model, impl="native")
    assert (len(second), second.left) == (0, [])


def test_the_encoder_layers_fast_path_stays():
    layer = nn.TransformerEncoderLayer(D, 2, 32, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, mask = batch(), torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x), model(x, src_key_padding_mask=mask)
        replace_modules(model, impl="native")
        assert torch.equal(model(x), expected[0])
        assert torch.equal(model(x, src_key_padding_mask=mask), expected[1])
    assert isinstance(model.layers[0], nn.TransformerEncoderLayer)


def test_softmax_under_autocast_keeps_its_precision():
    model = nn.Softmax(-1)
    replace_modules(model, impl="native")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(batch()).dtype == nn.Softmax(-1)(batch()).dtype


def test_disagreement_is_undone(monkeypatch):
    model = nn.Sequential(Mlp(), Inline())
    text = repr(model)
    right = fusedmlp.functional.linear_gelu
    monkeypatch.setattr(fusedmlp.functional, "linear_gelu", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    report = replace_modules(model, impl="native", verify=True, batch=batch())
    assert report.verified is False
    assert "is off by" in report.difference
    assert "undone" in str(report)
    assert not report
    assert len(report.left) == 2
    assert repr(model) == text


def test_verify_leaves_no_trace():
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), Mlp(drop=0.3))
    x = torch.randn(6, D)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert replace_modules(model, impl="native", verify=True, batch=(x,)).verified
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_wrong_arguments():
    with raises(TypeError, "torch.nn.Module", "int"):
        replace_modules(3)
    with raises(ValueError, "'nativ'", "native"):
        replace_modules(Mlp(), impl="nativ")
    with raises(ValueError, "verify=True", "batch="):
        replace_modules(Mlp(), impl="native", verify=True)


def test_restore_refuses_what_was_wrapped_since():
    model = Mlp()
    report = replace_modules(model, impl="native")
    model.__class__ = type("Wrapped", (type(model),), {})
    with raises(RuntimeError, "has become a Wrapped"):
        report.restore()


@pytest.mark.parametrize("name", ["0", "1.fc1", "3"])
def test_restore_refuses_where_forward_was_wrapped_on_the_instance(name):
    """As libraries do that move a module's arguments between devices: it holds on to the method of our class."""
    model, x = nn.Sequential(Mlp(), Inline(), sequential(), nn.Softmax(-1)).eval(), batch()
    expected = model(x)
    report = replace_modules(model, impl="native")
    module = model.get_submodule(name)
    forward = module.forward
    module.forward = functools.partial(lambda forward, *args: forward(*args), forward)
    with raises(RuntimeError, f"the forward of {name} has been replaced on the instance"):
        report.restore()
    torch.testing.assert_close(model(x), expected)
    module.forward = forward  # as they leave it
    report.restore()
    torch.testing.assert_close(model(x), expected)


def test_what_runs_with_another_implementation_is_reported():
    model = nn.Sequential(Mlp(), nn.Softmax(-1))
    replace_modules(model, impl="native")
    second = replace_modules(model, impl="manual")
    assert len(second) == 0
    assert [(one.name, one.why.partition(" already")[0]) for one in second.left] == [
        ("0", "it runs with impl='native'"), ("1", "it runs with impl='native'"),
    ]  # fmt: skip


def test_the_report_reads():
    model = nn.Sequential(*[Mlp() for _ in range(12)], Mlp(act=QuickGELU), Mlp(act=NewGELU))
    report = replace_modules(model, impl="native")
    text = str(report)
    assert text.startswith("replaced 13, left alone 1 (impl=native)")
    assert "*: Mlp (fc1, act, fc2) -> FusedMLP(impl='native')  (13 times)" in text
    assert "12.fc1: Linear and QuickGELU left alone: QuickGELU is not GELU" in text
    assert [type(entry).__name__ for entry in report] == ["Replaced"] * 13 + ["Left"]
    assert isinstance(model[0], Mlp)
    assert isinstance(model[0], FusedMLP)
