"""Modules that changed after they were replaced still compute what they would have."""

import copy
import functools

import pytest
import torch
from replace.models import Adapter, Conv1D, D, FunctionAttribute, H, Mlp
from torch import nn

from fusedmlp import replace_modules


def doubled(module, args, y):
    return 2 * y


def plain():
    return nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))


CHANGES = {
    "adapter of the first": (Mlp, lambda m: setattr(m, "fc1", Adapter(m.fc1))),
    "adapter of the second": (Mlp, lambda m: setattr(m, "fc2", Adapter(m.fc2))),
    "hook of the first": (Mlp, lambda m: m.fc1.register_forward_hook(doubled)),
    "hook of the second": (Mlp, lambda m: m.fc2.register_forward_hook(doubled)),
    "hook of the GELU": (Mlp, lambda m: m.act.register_forward_hook(doubled)),
    "hook of a dropout": (Mlp, lambda m: m.drop1.register_forward_hook(doubled)),
    "other activation": (Mlp, lambda m: setattr(m, "act", nn.SiLU())),
    "longer": (plain, lambda m: m.append(nn.LayerNorm(D))),
    "shorter": (plain, lambda m: m.pop(-1)),
    "other layer": (plain, lambda m: m.__setitem__(2, nn.Linear(H, 3))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_children_counts(name):
    build, change = CHANGES[name]
    model = build().eval()
    twin = copy.deepcopy(model)
    assert len(replace_modules(model, impl="manual")) == 1
    for one in (model, twin):
        torch.manual_seed(1)
        change(one)
    x = torch.randn(3, D)
    y, expected = model(x), twin(x)
    torch.testing.assert_close(y, expected)
    for loss in (y.square().sum(), expected.square().sum()):
        loss.backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_slice_of_a_sequential_is_a_sequential():
    model, x = plain(), torch.randn(3, D)
    expected = model[:2](x)
    replace_modules(model, impl="native")
    assert type(model[:2]) is nn.Sequential
    torch.testing.assert_close(model[:2](x), expected)
    assert model[-1] is list(model)[2]


def twice(forward):
    @functools.wraps(forward)
    def doubled(self, x):
        return 2 * forward(self, x)

    return doubled


class NoGrad(Mlp):
    @torch.no_grad()
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Twice(Mlp):
    @twice
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


@pytest.mark.parametrize("cls", [NoGrad, Twice])
def test_a_decorator_of_forward_stays(cls):
    model, x = cls(), torch.randn(3, D)
    expected = model(x)
    report = replace_modules(model, impl="native")
    assert not any("FusedMLP" in entry.by for entry in report.replaced), report
    y = model(x)
    torch.testing.assert_close(y, expected)
    assert y.requires_grad == expected.requires_grad


def test_within_a_context_of_the_meta_device():
    model, x = nn.Sequential(Mlp(), FunctionAttribute(), plain(), nn.Softmax(-1)), torch.randn(3, D)
    expected = model(x)
    with torch.device("meta"):
        assert len(replace_modules(model, impl="native")) == 4
    torch.testing.assert_close(model(x), expected)


def test_a_softmax_is_no_activation_and_its_result_is_contiguous():
    model = nn.Sequential(nn.Linear(D, D), nn.Softmax(-1))
    report = replace_modules(model, impl="manual")
    assert (len(report), report.left) == (1, [])
    x = torch.randn(4, 3, D).transpose(0, 1)
    assert model[1](x).stride() == nn.Softmax(-1)(x).stride()


@pytest.mark.parametrize(
    "build", [lambda: Mlp(drop=0.5), plain, lambda: Mlp(norm=nn.LayerNorm(H)), lambda: Mlp(linear=Conv1D)]
)
def test_torch_fx_traces_what_was_replaced(build):
    """The graph follows the parameters, and its dropouts drop in training, whenever it was traced."""
    model = nn.Sequential(build(), nn.Softmax(-1)).eval()
    twin, x = copy.deepcopy(model), torch.randn(64, D)
    assert len(replace_modules(model, impl="manual")) == 2
    traced = torch.fx.symbolic_trace(model)
    for one in (traced, twin):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1.5)
        one.train()
    results = []
    for one in (traced, twin):
        torch.manual_seed(0)
        y = one(x)
        y.square().sum().backward()
        results.append([y, *(p.grad for p in one.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
