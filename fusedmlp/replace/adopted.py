"""Modules that take the place of others: `FusedMLP`, `FusedLinearGeLU` and `TritonSoftmax` over what is there already.

A module is not exchanged, it changes its class. So parameters, names, hooks, the state dict, and whoever holds a
reference to the module, an optimizer or a parent, see the same object as before, and undoing it is changing back.
"""

import copyreg
import functools
import inspect
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
import torch.fx
from torch import Tensor, nn

from fusedmlp import functional
from fusedmlp.modules import FusedLinearGeLU, FusedMLP, TritonSoftmax, is_bare

# As in `functional`: to torch.fx each is one node, with the parameters themselves as its arguments.
for _op in ("_linear_gelu_op", "_mlp_op", "_softmax_op"):
    torch.fx.wrap(_op)


def _linear_gelu_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, approximate: str, impl: str
) -> Tensor:
    return functional.linear_gelu(x, weight.t() if transposed else weight, bias, approximate, impl=impl)


def _mlp_op(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None,
    transposed: tuple[bool, bool], approximate: str, impl: str,
) -> Tensor:  # fmt: skip
    weight1, weight2 = (w.t() if t else w for w, t in zip((weight1, weight2), transposed, strict=True))
    return functional.mlp(x, weight1, bias1, weight2, bias2, approximate, impl=impl)


def _softmax_op(x: Tensor, dim: int, impl: str) -> Tensor:
    """What `nn.Softmax` gives: contiguous whatever the strides of x, and under autocast on a GPU computed in fp32."""
    x = x.contiguous()
    if x.is_cuda and x.dtype != torch.float64 and torch.is_autocast_enabled("cuda"):
        x = x.float()
    return functional.softmax(x, dim, impl=impl)


class FusedConv1DGeLU(FusedLinearGeLU):
    """As `FusedLinearGeLU`, for a weight that is stored (in_features, out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        return _linear_gelu_op(x, self.weight, self.bias, True, self.approximate, self.impl)


def linear_gelu(module: nn.Module, transposed: bool, approximate: str, impl: str) -> type:
    """Makes a linear layer one with GELU behind it; returns the class that it had."""
    before = type(module)
    weight: Any = module.weight
    sizes = weight.shape if transposed else weight.shape[::-1]
    module.__class__ = FusedConv1DGeLU if transposed else FusedLinearGeLU
    vars(module).update(approximate=approximate, impl=impl, in_features=sizes[0], out_features=sizes[1])
    return before


class AdoptedSoftmax(TritonSoftmax):
    """As `TritonSoftmax`, with what `nn.Softmax` does besides: see `_softmax_op`."""

    def forward(self, x: Tensor) -> Tensor:
        return _softmax_op(x, self.dim, self.impl)


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
        chain: names of the children that a value goes through.
        first, second: positions of the linear layers; behind the first one comes the GELU, and between it and the
            second one are dropouts and identities only.
        found: `mark` of each child.
        transposed: whether the weight of the first, and of the second, is stored (in, out).
    """

    chain: tuple[str, ...]
    first: int
    second: int
    found: tuple[Any, ...]
    transposed: tuple[bool, bool]
    approximate: str
    impl: str


def mark(child: Any) -> Any:
    """What tells whether a child is still of the kind that it was: its class, or itself where it is a function."""
    return type(child) if isinstance(child, nn.Module) else child


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

    def _mlp(self, x: Tensor) -> Tensor:
        span = self._fused
        # A sequential may have got longer or shorter since.
        chain = tuple(self._modules) if isinstance(self, nn.Sequential) else span.chain
        children = [getattr(self, name) for name in chain]
        if chain != span.chain or not _is(children[span.first + 1], span.found[span.first + 1]):
            return _through(children, x)
        act = children[span.first + 1]
        if type(act) is nn.GELU and act.approximate != span.approximate:
            return _through(children, x)
        x = _through(children[: span.first], x)
        x = self._span(children[span.first : span.second + 1], span, x)
        return _through(children[span.second + 1 :], x)

    def _span(self, children: list[Any], span: Span, x: Tensor) -> Tensor:
        """The MLP in one op; in parts where one of them has to be called itself (hooks, adapters, dropout)."""
        first, _, *between, second = children
        if not _is(first, span.found[span.first]):
            act = functional.gelu(first(x), span.approximate, impl=span.impl)
            return second(_through(between, act))
        options = span.approximate, span.impl
        if not _is(second, span.found[span.second]) or not all(_idle(one, x) for one in between):
            return second(_through(between, _linear_gelu_op(x, first.weight, first.bias, span.transposed[0], *options)))
        return _mlp_op(x, first.weight, first.bias, second.weight, second.bias, span.transposed, *options)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, impl={self.impl!r}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle and deepcopy, which look a class up by its name: this one is made anew."""
        # Classes may say what of them cannot be copied; before Python 3.11 the others say nothing.
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _rebuild, self._replaced, state


def _is(child: Any, found: Any) -> bool:
    """Whether a child is still no more than what was found."""
    # A method is another object each time it is asked for, but an equal one.
    return is_bare(child, found) if isinstance(found, type) else child == found


def _idle(between: Any, x: Any) -> bool:
    """Whether a dropout or identity does nothing at the moment; a graph of torch.fx outlasts the moment."""
    if is_bare(between, nn.Dropout):
        return between.p == 0 or not (between.training or isinstance(x, torch.fx.Proxy))
    return is_bare(between, nn.Identity)


def _through(children: Iterable[Any], x: Tensor) -> Tensor:
    for child in children:
        x = child(x)
    return x


# Classes whose `__init_subclass__` does nothing to the subclass.
_QUIET = (object, Generic, Protocol)
_OUR_NAMES = ("impl", "approximate", "_fused", "_replaced", "_mlp", "_span")


def can_change_class(module: nn.Module) -> bool:
    """Whether a subclass of a module's class can be made without anybody noticing, and the module become one."""
    cls = type(module)
    if hasattr(cls, "__slots__") or hasattr(module, "parametrizations"):
        return False
    # Some register what is made of them.
    told_of_subclasses = any("__init_subclass__" in vars(base) for base in cls.__mro__ if base not in _QUIET)
    return not told_of_subclasses and type(cls) in (type, ABCMeta) and own_name(module) is None


def own_name(module: nn.Module) -> str | None:
    """An attribute of a module that would have another meaning once the module is one of ours."""
    return next((name for name in _OUR_NAMES if hasattr(module, name)), None)


OURS = (FusedMLP, FusedLinearGeLU, TritonSoftmax, _Adopted)


@functools.cache
def mlp_class(cls: type, method: str) -> type:
    """A subclass of `cls` whose `method` runs the MLP. Where that is `forward` it is a `FusedMLP` too."""
    whole = method == "forward"
    bases = (_Adopted, FusedMLP, cls) if whole else (_Adopted, cls)
    name = "FusedMLP" if whole else f"Fused{cls.__name__}"

    _, parameter = inspect.signature(getattr(cls, method)).parameters

    # With the signature of what it stands for: some models count the parameters of their methods.
    @functools.wraps(getattr(cls, method))
    def run(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if len(args) == 1 and not kwargs:
            return self._mlp(args[0])
        if args or list(kwargs) != [parameter]:
            got = ", ".join(["..."] * len(args) + [f"{name}=..." for name in kwargs])
            raise TypeError(
                f"{cls.__name__}.{method}({parameter}) takes that one argument, and was called with ({got})"
            )
        return self._mlp(kwargs[parameter])

    body: dict[str, Any] = {method: run, "__doc__": cls.__doc__, "__module__": __name__}
    if issubclass(cls, nn.Sequential):

        def part(self: Any, index: Any) -> Any:
            if isinstance(index, slice):  # a sequential of its own, no MLP
                return cls(OrderedDict(list(self._modules.items())[index]))
            return cls.__getitem__(self, index)

        body["__getitem__"] = part
    return type(name, bases, body)


def _rebuild(cls: type, method: str) -> nn.Module:
    return copyreg.__newobj__(mlp_class(cls, method))  # type: ignore[attr-defined]


def mlp(module: nn.Module, method: str, span: Span) -> type:
    """Lets a module's method run the MLP in one op; returns the class that it had."""
    before = type(module)
    module.__class__ = mlp_class(before, method)  # type: ignore[arg-type]
    vars(module).update(_fused=span, _replaced=(before, method))
    return before
