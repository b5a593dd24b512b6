"""`verify=True` with models that a call changes: the comparison must not see it, and the model must not keep it."""
# ruff: noqa: NPY002 - models in use draw from NumPy's global generator

import random

import numpy
import pytest
import torch
from conftest import raises
from replace.models import D, Mlp
from torch import nn

import fusedmlp
from fusedmlp import replace_modules


class Caching(nn.Module):
    """In eval it keeps what it has computed from a parameter, as vision models do with position biases."""

    def __init__(self):
        super().__init__()
        self.mlp, self.bias, self.cache = Mlp(), nn.Parameter(torch.randn(2 * D)), {}

    def forward(self, x):
        if "bias" not in self.cache:
            self.cache["bias"] = self.bias[::2] * 2
        return self.mlp(x) + self.cache["bias"]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.calls = Mlp(), 0

    def forward(self, x):
        self.calls += 1
        return self.mlp(x) * self.calls


class Writing(nn.Module):
    """It writes to its input."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x.mul_(2))


class Renewing(nn.Module):
    """It puts another buffer in the place of the one that was there."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x):
        if self.table.numel() != len(x):
            self.table = torch.arange(len(x), dtype=x.dtype)
        return self.mlp(x) + self.table[:, None]


class Masking(nn.Module):
    """Its random numbers are Python's and NumPy's, as those of speech models in training are."""

    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x) * random.random() + float(numpy.random.rand())


@pytest.mark.parametrize("cls", [Caching, Counting, Writing, Renewing, Masking])
def test_what_a_call_changes_is_no_difference_and_does_not_stay(cls):
    torch.manual_seed(0)
    model, x = cls(), torch.randn(5, D, dtype=torch.float64)
    model.double()
    given, numbers = x.clone(), (random.getstate(), numpy.random.get_state()[1].tolist())
    before = {name: value for name, value in vars(model).items() if name[0] != "_"}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = replace_modules(model, impl="manual", verify=True, batch=x)
    assert report.verified, report
    assert torch.equal(x, given)
    assert {name: value for name, value in vars(model).items() if name[0] != "_"} == before
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert numbers == (random.getstate(), numpy.random.get_state()[1].tolist())
    model(x).sum().backward()


class Masked(nn.Module):
    """Scores of -inf, or the smallest number there is; a NaN; and gradients that are NaN."""

    def __init__(self):
        super().__init__()
        self.mlp, self.scale = Mlp(), nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.mlp(x)
        low = torch.full_like(y[:, :1], torch.finfo(y.dtype).min)
        masked = torch.cat([y, low, torch.full_like(low, -torch.inf), torch.full_like(low, torch.nan)], 1)
        return masked, (self.scale * torch.tensor([1, torch.nan, torch.inf]).to(y)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_that_are_not_finite_are_compared_with_themselves(dtype, monkeypatch):
    model, x = Masked().to(dtype), torch.randn(5, D, dtype=dtype)
    report = replace_modules(model, impl="manual", verify=True, batch=x)
    assert report.verified, report
    report.restore()
    right = fusedmlp.functional.mlp
    for wrong in (lambda y: y * 1.01, lambda y: y.masked_fill(y == y.max(), torch.nan)):
        monkeypatch.setattr(fusedmlp.functional, "mlp", lambda *args, wrong=wrong, **kw: wrong(right(*args, **kw)))
        assert replace_modules(model, impl="manual", verify=True, batch=x).verified is False


def test_a_model_that_cannot_be_copied_says_so():
    model, x = Mlp(), torch.randn(3, D)
    model.auxiliary_loss = model(x).sum()
    with raises(RuntimeError, "verify=True", "verify=False"):
        replace_modules(model, impl="native", verify=True, batch=x)
    assert type(model) is Mlp


def test_a_model_that_does_not_run_in_float64_says_so():
    class Single(Mlp):
        def forward(self, x):
            return super().forward(x.float())

    model = Single()
    with raises(RuntimeError, "verify=True", "float64", "same dtype", "verify=False"):
        replace_modules(model, impl="native", verify=True, batch=torch.randn(3, D))
    assert type(model) is Single
