"""Modules that take the place of others: `FusedMLP`, `FusedLinearGeLU` and `TritonSoftmax` over what is there already.

A module is not exchanged, it changes its class. So parameters, names, hooks, the state dict, and whoever holds a
reference to the module, an optimizer or a parent, see the same object as before, and undoing it is changing back.
"""

import copyreg
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedmlp import functional
from fusedmlp.modules import FusedLinearGeLU, FusedMLP, TritonSoftmax


class FusedConv1DGeLU(FusedLinearGeLU):
    """As `FusedLinearGeLU`, for a weight that is stored (in_features, out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear_gelu(x, self.weight.t(), self.bias, self.approximate, impl=self.impl)


def linear_gelu(module: nn.Module, transposed: bool, approximate: str, impl: str) -> type:
    """Makes a linear layer one with GELU behind it; returns the class that it had."""
    before = type(module)
    weight: Any = module.weight
    sizes = weight.shape if transposed else weight.shape[::-1]
    module.__class__ = FusedConv1DGeLU if transposed else FusedLinearGeLU
    vars(module).update(approximate=approximate, impl=impl, in_features=sizes[0], out_features=sizes[1])
    return before


class AdoptedSoftmax(TritonSoftmax):
    """As `TritonSoftmax`; under autocast on a GPU it computes and returns fp32, as `nn.Softmax` does there."""

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
            x = x.float()
        return super().forward(x)


def softmax(module: nn.Module, impl: str) -> type:
    """Makes an `nn.Softmax` the softmax op; returns the class that it had."""
    before = type(module)
    module.__class__ = AdoptedSoftmax
    vars(module)["impl"] = impl
    return before


@dataclass
class Span:
    """Where in a chain of children the MLP is, and how it runs.

    Attributes:
        before, between, after: names of children before the first linear layer; of the dropouts and identities between
            the GELU and the second one; after it.
        first, second: names of the linear layers.
        transposed: whether the weight of the first, and of the second, is stored (in, out).
    """

    before: list[str]
    first: str
    between: list[str]
    second: str
    after: list[str]
    transposed: tuple[bool, bool]
    approximate: str
    impl: str


class _Adopted:
    """What all modules with an MLP over their own children share; their classes are made by `mlp_class`."""

    _fused: Span
    _replaced: tuple[type, str]  # the class that the module had, and the method in which the MLP is

    @property
    def impl(self) -> str:
        return self._fused.impl

    @impl.setter
    def impl(self, name: str) -> None:
        self._fused.impl = name

    @property
    def approximate(self) -> str:
        return self._fused.approximate

    def _mlp(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = (*args, *kwargs.values())
        span = self._fused
        x = self._through(span.before, x)
        weight1, bias1 = self._parameters_of(span.first, span.transposed[0])
        between = [getattr(self, name) for name in span.between]
        # A dropout that drops is kept, and the MLP is in two parts then.
        if any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in between):
            act = functional.linear_gelu(x, weight1, bias1, span.approximate, impl=span.impl)
            x = getattr(self, span.second)(self._through(span.between, act))
        else:
            weight2, bias2 = self._parameters_of(span.second, span.transposed[1])
            x = functional.mlp(x, weight1, bias1, weight2, bias2, span.approximate, impl=span.impl)
        return self._through(span.after, x)

    def _through(self, names: list[str], x: Tensor) -> Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x

    def _parameters_of(self, name: str, transposed: bool) -> tuple[Tensor, Tensor | None]:
        layer = getattr(self, name)
        return layer.weight.t() if transposed else layer.weight, layer.bias

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, impl={self.impl!r}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle and deepcopy, which look a class up by its name: this one is made anew."""
        return _rebuild, self._replaced, vars(self)


OURS = (FusedMLP, FusedLinearGeLU, TritonSoftmax, _Adopted)


@functools.cache
def mlp_class(cls: type, method: str) -> type:
    """A subclass of `cls` whose `method` runs the MLP. Where that is `forward` it is a `FusedMLP` too."""
    whole = method == "forward"
    bases = (_Adopted, FusedMLP, cls) if whole else (_Adopted, cls)
    name = "FusedMLP" if whole else f"Fused{cls.__name__}"

    # With the signature of what it stands for: some models count the parameters of their methods.
    @functools.wraps(getattr(cls, method))
    def run(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self._mlp(*args, **kwargs)

    return type(name, bases, {method: run, "__doc__": cls.__doc__, "__module__": __name__})


def _rebuild(cls: type, method: str) -> nn.Module:
    return copyreg.__newobj__(mlp_class(cls, method))  # type: ignore[attr-defined]


def mlp(module: nn.Module, method: str, span: Span) -> type:
    """Lets a module's method run the MLP in one op; returns the class that it had."""
    before = type(module)
    module.__class__ = mlp_class(before, method)  # type: ignore[arg-type]
    vars(module).update(_fused=span, _replaced=(before, method))
    return before
