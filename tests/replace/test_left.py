"""What replace_modules leaves alone, and the reason that it gives."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import raises
from replace.models import D, H, Mlp, NewGELU, QuickGELU
from torch import nn
from torch.nn.utils import parametrizations, prune

from fusedmlp import replace_modules
from fusedmlp.replace import layers


class LoRALinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.base_layer, self.a, self.b = linear, nn.Linear(D, 2, bias=False), nn.Linear(2, linear.out_features)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class QuantisedWeight(torch.Tensor):
    pass


class Clipped(nn.Module):
    def forward(self, x):
        return F.gelu(x).clip(-10, 10)


class Noisy(nn.Module):
    def forward(self, x):
        return F.gelu(x) + 0.1 * torch.randn_like(x) * self.training


def mlp(change):
    model = Mlp(norm=nn.LayerNorm(H))
    change(model)
    return model


def quantised(model):
    weight = torch.randn(H, D).as_subclass(QuantisedWeight)
    model.fc1._parameters["weight"] = nn.Parameter(weight)


def old_weight_norm(model):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.fc1)


class Uses(nn.Module):
    """Base of layers that use the result of the linear layer, or the parts, in another way too."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)


class TwoConsumers(Uses):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return self.fc2(y) + h


class CalledTwice(Uses):
    def forward(self, x):
        return self.act(self.fc1(x)) + self.fc1(x)


class ActElsewhere(Uses):
    def forward(self, x):
        return self.fc2(self.act(self.fc1(x))) + self.act(x)


class Conditional(Uses):
    def forward(self, x, gate=True):
        h = self.fc1(x)
        if gate:
            h = self.act(h)
        return self.fc2(h)


class ReadInTheNextRound(Uses):
    def forward(self, x):
        h = x
        for _ in range(2):
            x = x + h
            h = self.fc1(x)
            y = self.act(h)
        return self.fc2(y)


class ReadLater(Uses):
    def forward(self, x):
        h = self.fc1(x)
        y = self.act(h)
        if self.training:
            y = y + h
        return self.fc2(y)


class PassedOn(Uses):
    def forward(self, x):
        return self.fc2(self.helper(self.act, self.fc1(x)))

    def helper(self, act, x):
        return act(x)


class FunctionalGELU(Uses):
    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x))) + self.act(x)


class Reaches(nn.Module):
    """Takes parts of a child by itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D))

    def forward(self, x):
        return self.net(x) + self.net[0](x)


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = mlp(lambda model: None)

    def forward(self, x):
        return self.mlp(x) + self.mlp.fc1(x).mean()


def shared_linear():
    linear = nn.Linear(D, D)
    return nn.Sequential(linear, nn.GELU(), nn.LayerNorm(D), linear)


CASES = {
    "QuickGELU": (lambda: Mlp(act=QuickGELU), "QuickGELU is not GELU"),
    "ReLU": (lambda: Mlp(act=nn.ReLU), "ReLU is not GELU"),
    "clipped": (lambda: Mlp(act=Clipped), "Clipped is not GELU"),
    "noisy": (lambda: Mlp(act=Noisy), "Noisy is not GELU"),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.GELU(), nn.Conv2d(8, 3, 1)),
        "Conv2d is not a linear layer",
    ),
    "adapter": (lambda: mlp(lambda m: setattr(m, "fc1", LoRALinear(m.fc1))), "modules of its own (base_layer, a, b)"),
    "parametrized": (lambda: mlp(lambda m: parametrizations.weight_norm(m.fc1)), "is parametrized"),
    "spectral": (lambda: mlp(lambda m: parametrizations.spectral_norm(m.fc1)), "is parametrized"),
    "weight norm": (lambda: mlp(old_weight_norm), "Linear has"),
    "pruned": (lambda: mlp(lambda m: prune.l1_unstructured(m.fc1, "weight", 0.5)), "Linear has"),
    "quantised": (lambda: mlp(quantised), "of type QuantisedWeight"),
    "subclass": (lambda: mlp(lambda m: setattr(m, "fc1", ScaledLinear(D, H))), "does not compute x @ weight + bias"),
    "lazy": (lambda: mlp(lambda m: setattr(m, "fc1", nn.LazyLinear(H))), "no shape yet"),
    "integer": (
        lambda: mlp(lambda m: m.fc1._parameters.update(weight=nn.Parameter(torch.ones(H, D).int(), False))),
        "torch.int32",
    ),
    "hook": (lambda: mlp(lambda m: m.fc1.register_forward_hook(print)), "Linear has hooks (forward_hooks)"),
    "hook of the activation": (lambda: mlp(lambda m: m.act.register_forward_hook(print)), "GELU has hooks"),
    "backward hook": (lambda: mlp(lambda m: m.fc1.register_full_backward_hook(print)), "hooks (backward_hooks)"),
    "own forward": (lambda: mlp(lambda m: setattr(m.fc1, "forward", m.fc1.forward)), "replaced on the instance"),
    "two consumers": (TwoConsumers, "does not apply it to the result of a linear layer alone"),
    "called twice": (CalledTwice, "the result of fc1 goes elsewhere"),
    "activation elsewhere": (ActElsewhere, "uses act for something else too"),
    "conditional": (Conditional, "does not apply it to the result of a linear layer alone"),
    "read in the next round": (ReadInTheNextRound, "does not apply it to the result of a linear layer alone"),
    "read later": (ReadLater, "does not apply it to the result of a linear layer alone"),
    "forward of the instance": (
        lambda: mlp(lambda m: setattr(m, "forward", m.forward)),
        "forward of this Mlp is replaced on the instance",
    ),
    "passed on": (PassedOn, "does not apply it to the result of a linear layer alone"),
    "function": (FunctionalGELU, "a call of F.gelu in FunctionalGELU"),
    "indexed": (Reaches, "Reaches calls parts of Sequential by itself"),
    "called from outside": (Calls, "Calls calls parts of Mlp by itself"),
    "shared": (shared_linear, "0 is used in 2 places"),
    "softmax without dim": (lambda: nn.Sequential(nn.Softmax(), nn.Linear(D, D)), "it has no dim"),
    "lone GELU": (lambda: nn.Sequential(nn.LayerNorm(D), nn.GELU()), "LayerNorm is not a linear layer"),
}


@pytest.mark.parametrize("name", CASES)
def test_left_alone_with_the_reason(name):
    build, why = CASES[name]
    model = build()
    text = repr(model)
    report = replace_modules(model, impl="native")
    assert not report.replaced, report
    assert any(why in entry.why for entry in report.left), report
    assert repr(model) == text


def test_a_second_linear_layer_that_is_more_leaves_the_first_to_be_replaced():
    model = Mlp()
    model.fc2 = LoRALinear(model.fc2)
    model.fc2.a = nn.Linear(H, 2, bias=False)
    x = torch.randn(3, D)
    expected = model(x)
    report = replace_modules(model, impl="native")
    assert [entry.by for entry in report.replaced] == ["FusedLinearGeLU(impl='native')"]
    torch.testing.assert_close(model(x), expected)


def test_two_layers_of_different_dtypes_are_no_mlp():
    model = Mlp()
    model.fc2.bfloat16()
    assert [entry.by for entry in replace_modules(model, impl="native")] == ["FusedLinearGeLU(impl='native')"]


def test_a_dtype_that_the_implementation_has_not(monkeypatch):
    from fusedmlp.impls import manual

    monkeypatch.setattr(manual, "DTYPES", (torch.float32,))
    report = replace_modules(Mlp().double(), impl="manual")
    assert not report
    assert any("impl=manual does not compute in torch.float64" in entry.why for entry in report.left)


def test_a_class_without_source():
    """As one that was typed into an interpreter."""
    scope = {"nn": nn, "D": D}
    exec(
        "class Typed(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc, self.act = nn.Linear(D, D), nn.GELU()\n"
        "    def forward(self, x):\n"
        "        return self.act(self.fc(x))\n",
        scope,
    )
    report = replace_modules(scope["Typed"](), impl="native")
    assert not report
    assert any("source of Typed" in entry.why for entry in report.left)


@pytest.mark.parametrize(
    ("act", "approximate"),
    [
        (nn.GELU(), "none"), (nn.GELU("tanh"), "tanh"), (NewGELU(), "tanh"), (F.gelu, "none"), (QuickGELU(), None),
        (nn.SiLU(), None), (nn.Identity(), None), (Clipped(), None), (Noisy(), None), (nn.Dropout(), None),
        (nn.Softmax(-1), None), (nn.Linear(4, 4), None), (torch.relu, None), (None, None), (print, None),
    ],
)  # fmt: skip
def test_gelus_are_known_by_their_values(act, approximate):
    assert layers.gelu(act) == approximate


def test_scripted_modules_are_left():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which warning it is depends on the version
        scripted = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.GELU()))
    assert not replace_modules(nn.Sequential(scripted), impl="native")


def test_verify_reports_what_the_model_raises():
    model = Mlp()
    with raises(RuntimeError, "shape"):
        replace_modules(model, impl="native", verify=True, batch=torch.randn(3, D + 1))
    assert not hasattr(model, "impl")
