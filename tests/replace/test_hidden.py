"""What a model does with its parts that its values on one batch, in one mode, do not show."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import raises
from replace.models import D, H, Mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedmlp import replace_modules


class NoisyInTraining(nn.Module):
    def forward(self, x):
        return F.gelu(x) + self.training * torch.ones_like(x)


class Detached(nn.Module):
    def forward(self, x):
        return F.gelu(x.detach())


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return F.gelu(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class StraightThrough(nn.Module):
    def forward(self, x):
        return _StraightThrough.apply(x)


class DropConnect(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * (0.5 if self.training else 1.0), self.bias)


class DetachedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x.detach(), self.weight, self.bias)


def own_forward():
    act = nn.GELU()
    act.forward = F.silu
    return act


def normed(**options):
    return Mlp(norm=nn.LayerNorm(H), **options)


@pytest.mark.parametrize("act", [NoisyInTraining, Detached, StraightThrough, own_forward])
@pytest.mark.parametrize("build", [Mlp, normed])
def test_a_gelu_in_eval_or_in_its_values_alone_is_none(build, act):
    report = replace_modules(build(act=act).eval(), impl="native")
    assert not report.replaced, report
    assert report.left


@pytest.mark.parametrize("linear", [DropConnect, DetachedLinear])
@pytest.mark.parametrize("build", [Mlp, normed])
def test_a_linear_layer_in_eval_or_in_its_values_alone_is_none(build, linear):
    report = replace_modules(build(linear=linear).eval(), impl="native")
    assert not report.replaced, report
    assert "does not compute x @ weight + bias" in report.left[0].why


def test_backward_hooks_of_a_gelu_stay():
    model, seen = normed(), []
    model.act.register_full_backward_hook(lambda *_: seen.append(1))
    assert "has hooks" in replace_modules(model, impl="native").left[0].why
    model(torch.randn(2, D)).sum().backward()
    assert seen == [1]


class Parts(nn.Module):
    """Base of modules that take parts of others by themselves."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D))
        self.blocks = nn.ModuleList([normed(), normed()])
        self.stages = nn.ModuleList([self.net])


class Iterated(Parts):
    def forward(self, x):
        features = []
        for layer in self.net:
            x = layer(x)
            features.append(x)
        return torch.stack(features)


class Numbered(Parts):
    def forward(self, x):
        found = []
        for _, layer in enumerate(self.net.children()):
            x = layer(x)
            found.append(x)
        return torch.stack(found)


class Nested(Parts):
    def forward(self, x):
        return torch.stack([layer(x) for stage in self.stages for layer in stage])


class Sliced(Parts):
    def forward(self, x):
        found = [x]
        for layer in self.net[1:]:
            found.append(layer(found[-1]))
        return torch.cat(found, 1)


class SlicedInALoop(Parts):
    def forward(self, x):
        for block in self.blocks[:1]:
            x = block(x) + block.fc1(x).mean()
        return x


class InALoop(Parts):
    def forward(self, x):
        for block in self.blocks:
            x = block(x) + block.fc1(x).mean()
        return x


class UnderAnotherName(Parts):
    def forward(self, x):
        block = self.blocks[0]
        return block(x) + block.fc1(x).mean()


class Checkpointed(Parts):
    def forward(self, x):
        return self.blocks[0](x) + checkpoint(self.blocks[0].fc1, x, use_reentrant=False).mean()


@pytest.mark.parametrize(
    "cls", [Iterated, Numbered, Nested, Sliced, SlicedInALoop, InALoop, UnderAnotherName, Checkpointed]
)
def test_what_is_taken_in_parts_is_left(cls):
    model, x = cls(), torch.randn(3, D)
    expected = model(x)
    report = replace_modules(model, impl="native")
    assert any(f"{cls.__name__} calls parts of" in entry.why for entry in report.left), report
    torch.testing.assert_close(model(x), expected)


class Whole(Parts):
    """Loops that take nothing apart."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for stage in self.stages[: len(self.stages)]:
            x = stage(x)
        for parameter in self.net.parameters():
            x = x + 0 * parameter.sum()
        return x


def test_loops_over_whole_modules_take_no_parts():
    assert len(replace_modules(Whole(), impl="native")) == 3


class Method(nn.Module):
    """Its GELU is a method; another one keeps books."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.calls = nn.Linear(D, D), nn.Linear(D, D), []

    def gelu(self, x):
        return F.gelu(x)

    def noted(self, x):
        self.calls.append(1)
        return x

    def forward(self, x):
        return self.noted(self.w2(x)) + self.gelu(self.w1(x))


class Registered(nn.Module):
    def __init_subclass__(cls, key, **options):
        super().__init_subclass__(**options)


class InARegistry(Mlp, Registered, key="mlp"):
    pass


class AsksForItsClass(Mlp):
    def train(self, mode=True):
        return super(type(self), self).train(mode)


class AsksForItsClassToo(Mlp):
    def extra_repr(self):
        return super(self.__class__, self).extra_repr()


class OwnAttribute(Mlp):
    impl = "flash"


def test_methods_are_restored_and_not_called_to_find_out():
    model, x = Method(), torch.randn(3, D)
    expected, before = model(x), set(vars(model))
    model.calls.clear()
    report = replace_modules(model, impl="native")
    assert len(report) == 1
    assert model.calls == []
    torch.testing.assert_close(model(x), expected)
    report.restore()
    assert set(vars(model)) == before


@pytest.mark.parametrize("cls", [InARegistry, OwnAttribute, AsksForItsClass, AsksForItsClassToo])
def test_a_class_that_notices_is_not_subclassed(cls):
    model, x = cls(), torch.randn(3, D)
    expected = model(x)
    report = replace_modules(model, impl="native")
    assert [entry.by for entry in report.replaced] == ["FusedLinearGeLU(impl='native')"]
    assert type(model) is cls
    torch.testing.assert_close(model.train()(x), expected)
    assert cls.__name__ in repr(model)


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch):
    from fusedmlp.replace.walk import Walk

    def fails(self):
        raise KeyboardInterrupt

    model = nn.Sequential(Mlp(), normed())
    text = repr(model)
    monkeypatch.setattr(Walk, "_what_else", fails)
    with pytest.raises(KeyboardInterrupt):
        replace_modules(model, impl="native")
    assert repr(model) == text


def test_a_call_with_other_arguments_says_so():
    model = Mlp()
    replace_modules(model, impl="native")
    torch.testing.assert_close(model(x=torch.ones(1, D)), model(torch.ones(1, D)))
    for args, kwargs in (((), {}), ((1, 2), {}), ((), {"y": 1})):
        with raises(TypeError, "Mlp.forward(x) takes that one argument"):
            model(*args, **kwargs)


class WithHandle(Mlp):
    """Keeps what cannot be copied, and says so."""

    def __init__(self):
        super().__init__()
        self.handle = (n for n in range(3))

    def __getstate__(self):
        return vars(self) | {"handle": None}


def test_copies_ask_the_class():
    model = WithHandle()
    replace_modules(model, impl="native")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.handle is None


def test_a_gelu_that_changes_its_form():
    model, x = Mlp(), 3 * torch.randn(3, D)
    twin = copy.deepcopy(model)
    replace_modules(model, impl="native")
    for one in (model, twin):
        one.act.approximate = "tanh"
    torch.testing.assert_close(model(x), twin(x), rtol=0, atol=1e-6)


def test_restore_refuses_where_the_activation_was_exchanged():
    model = normed()
    report = replace_modules(model, impl="native")
    model.act = nn.ReLU()
    with raises(RuntimeError, "act has become a ReLU since"):
        report.restore()


def test_a_graph_module_says_why_it_is_left():
    report = replace_modules(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(D, D), nn.GELU())), impl="native")
    assert "trace then" in report.left[0].why
