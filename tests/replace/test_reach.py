"""Linear layers and GELUs that a model also takes otherwise than by their names stay what they are."""

import functools

import pytest
import torch
from replace.models import D, H
from torch import nn

from fusedmlp import replace_modules


class Base(nn.Module):
    """One pair that could be replaced, and what takes a part of it by itself: a scalar, added."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)

    def main(self, x):
        return self.fc2(self.act(self.fc1(x)) * 2)


class GetAttr(Base):
    def forward(self, x):
        return self.main(x) + sum(getattr(self, f"fc{i}")(x).mean() for i in (1,))


class GetAttrByName(Base):
    def forward(self, x):
        return self.main(x) + getattr(self, "fc1")(x).mean()  # noqa: B009 - that is the point


class Modules(Base):
    def forward(self, x):
        return self.main(x) + self._modules["fc1"](x).mean()


class Dict(Base):
    def forward(self, x):
        return self.main(x) + vars(self)["_modules"]["fc1"](x).mean()


class Alias(Base):
    def forward(self, x):
        me = self
        return self.main(x) + me.fc1(x).mean()


class NamedChildren(Base):
    def forward(self, x):
        y = self.main(x)
        for name, child in self.named_children():
            if name == "fc1":
                y = y + child(x).mean()
        return y


class GetSubmodule(Base):
    def forward(self, x):
        return self.main(x) + self.get_submodule("fc1")(x).mean()


class Property(Base):
    @property
    def first(self):
        return self.fc1

    def forward(self, x):
        return self.main(x) + self.first(x).mean()


class CachedProperty(Base):
    @functools.cached_property
    def first(self):
        return [self.fc1]

    def forward(self, x):
        return self.main(x) + self.first[0](x).mean()


class Static(Base):
    @staticmethod
    def other(module, x):
        return module.fc1(x).mean()

    def forward(self, x):
        return self.main(x) + self.other(self, x)


def other(x, module):
    return module.fc1(x).mean()


class HandedOn(Base):
    def forward(self, x):
        return self.main(x) + other(x, module=self)


class Locals(Base):
    def forward(self, x):
        hidden = self.fc1(x)
        act = self.act(hidden)
        return self.fc2(act * 2) + locals()["hidden"].mean()


class Features(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, H), nn.GELU(), nn.LayerNorm(H))

    def features(self, x):
        found = [x]
        for layer in self:
            found.append(layer(found[-1]))
        return torch.cat(found, 1)


class TakesFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Features()

    def forward(self, x):
        return self.net(x).sum() + self.net.features(x)


class Helper(nn.Module):
    def first(self, x):
        return other(x, self)


class Helped(Base, Helper):
    def forward(self, x):
        return self.main(x) + self.first(x)


TAKEN = [
    GetAttr, GetAttrByName, Modules, Dict, Alias, NamedChildren, GetSubmodule, Property, CachedProperty, Static,
    HandedOn, Locals, TakesFeatures, Helped,
]  # fmt: skip


@pytest.mark.parametrize("cls", TAKEN)
def test_what_is_taken_otherwise_is_left(cls):
    model, x = cls(), torch.randn(3, D)
    expected = model(x)
    report = replace_modules(model, impl="native")
    assert (len(report), len(report.left)) == (0, 1), report
    torch.testing.assert_close(model(x), expected)


class Saved(nn.Module):
    """What libraries derive all models from: it hands the model on, to save it for example."""

    def save(self, path):
        torch.save(self, path)


class Harmless(Base, Saved):
    """It looks at itself and takes nothing."""

    @property
    def device(self):
        return self.fc1.weight.device

    def train(self, mode=True):
        return nn.Module.train(self, mode)

    def count(self):
        return sum(isinstance(child, nn.Linear) for child in self.modules())

    def forward(self, x):
        if isinstance(self, Base) and hasattr(self, "fc3") and getattr(self, "checkpointing", False):
            raise RuntimeError(type(self).__name__)
        for _, parameter in self.named_parameters():
            x = x + 0 * parameter.sum()
        return self.main(x)


def test_a_module_may_look_at_itself():
    assert len(replace_modules(Harmless(), impl="native")) == 1


class Twice(Base):
    """All of its sums go through the same layer and the same GELU."""

    def forward(self, x):
        other = self.fc1(-x)
        other = self.act(other)
        return self.main(x) + self.fc2(self.act(self.fc1(x)) + other)


class Overridden(Base):
    def main(self, x):
        return self.fc2(self.act(self.fc1(x)) * 3)

    def forward(self, x):
        return self.main(x) + super().main(x)


class TwiceAndElsewhere(Base):
    def forward(self, x):
        return self.main(x) + self.fc2(self.act(self.fc1(-x))) + self.fc1(x).mean()


def test_a_layer_that_is_called_twice_with_its_gelu():
    for cls in (Twice, Overridden, TwiceAndElsewhere):
        model, x = cls(), torch.randn(3, D)
        expected = model(x)
        report = replace_modules(model, impl="native")
        assert len(report) == (cls is not TwiceAndElsewhere), report
        torch.testing.assert_close(model(x), expected)
        report.restore()
        torch.testing.assert_close(model(x), expected)
