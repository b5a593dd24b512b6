"""What a layer is, by what it computes and owns, whatever its class is called."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmlp.modules import TritonSoftmax

# Methods that a class of linear layers may define beside `forward` without being more than a linear layer.
_HARMLESS_METHODS = {"forward", "reset_parameters", "extra_repr"}
# Those of the state dict stay with the module, which is kept.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer; `transposed` where its weight is (in, out)."""

    transposed: bool


def linear(module: Any) -> LinearLayer | str:
    """What kind of linear layer a module is, or why it is none, or none that can be taken over."""
    kind = type(module).__name__
    if not isinstance(module, nn.Module) or not isinstance(getattr(module, "weight", None), Tensor):
        return f"{kind} is not a linear layer"
    if hasattr(module, "parametrizations"):
        return f"{kind} is parametrized"
    if module._modules:
        return f"{kind} has modules of its own ({', '.join(list(module._modules)[:3])})"
    if isinstance(module.weight, nn.UninitializedParameter):
        return f"the weight of {kind} has no shape yet; call the model once before"
    if (reason := hooked(module)) is not None:
        return reason
    weight, bias = module.weight, getattr(module, "bias", None)
    if (
        set(module._parameters) - {"weight", "bias"}
        or module._buffers
        or module._parameters.get("weight") is not weight
    ):
        return f"{kind} has more, or others, than the parameters weight and bias"
    if any(type(p) is not nn.Parameter for p in (weight, bias) if p is not None):
        return f"the parameters of {kind} are of type {type(weight).__name__}"
    if weight.ndim != 2:
        return f"{kind} is not a linear layer"
    if not weight.is_floating_point():
        return f"the weight of {kind} is {weight.dtype}"
    if type(module) is nn.Linear:
        return LinearLayer(False)
    if _own_methods(type(module)) - _HARMLESS_METHODS:
        return f"{kind} is more than a linear layer"
    transposed = _layout(module, weight, bias)
    return f"{kind} does not compute x @ weight + bias" if transposed is None else LinearLayer(transposed)


def _own_methods(cls: type) -> set[str]:
    bases = [base for base in cls.__mro__ if base is not nn.Linear and base not in nn.Module.__mro__]
    return {
        name
        for base in bases
        for name, value in vars(base).items()
        if isinstance(value, FunctionType | property) and not (name.startswith("__") and name.endswith("__"))
    }


def _layout(module: nn.Module, weight: Tensor, bias: Tensor | None) -> bool | None:
    """Whether the weight is (in, out) and not (out, in), found by computing with small stand-ins; None if neither."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    for transposed, out in ((True, weight.shape[1]), (False, weight.shape[0])):
        tensors = [
            normal(2, 3),
            normal(*((3, out) if transposed else (out, 3))),
            *([] if bias is None else [normal(out)]),
        ]

        def expected(x: Tensor, weight: Tensor, bias: Tensor | None = None, transposed: bool = transposed) -> Tensor:
            return F.linear(x, weight.t() if transposed else weight, bias)

        def call(twin: nn.Module, x: Tensor, *parameters: Tensor) -> Any:
            named = dict(zip(("weight", "bias"), parameters, strict=False))
            return torch.func.functional_call(twin, named, (x,))

        if _computes(call, module, expected, tensors, 1e-12):
            return transposed
    return None


def gelu(act: Any) -> str | None:
    """The `approximate` of a GELU, a module or a function, found by its values; None for anything else."""
    if type(act) is nn.GELU and hooked(act) is None:
        return act.approximate
    if not callable(act) or (isinstance(act, nn.Module) and not plain(act)):
        return None
    # Other methods may do more than compute, and are called with nothing but a value to find out.
    if isinstance(act, MethodType) and "gelu" not in act.__name__.lower():
        return None
    line = torch.linspace(-8, 8, 201, dtype=torch.float64, device="cpu")
    points = torch.cat([line, line.new_tensor([-1e4, -50.0, 50.0, 1e4])]).view(5, -1)
    for approximate in ("none", "tanh"):
        # Constants written out to some digits differ by far less than the two forms do (5e-4).
        if _computes(_call, act, functools.partial(F.gelu, approximate=approximate), [points], 1e-7):
            return approximate
    return None


def _call(act: Callable[[Tensor], Any], x: Tensor) -> Any:
    return act(x)


def _computes(
    call: Callable[..., Any], thing: Any, expected: Callable[..., Tensor], tensors: list[Tensor], tolerance: float
) -> bool:
    """Whether `call(thing, *tensors)` gives the values and the gradients of `expected`, in training and in eval."""
    for training in (True, False) if isinstance(thing, nn.Module) else (True,):
        try:
            got = _with_gradients(functools.partial(call, _twin(thing, training)), tensors)
        except Exception:  # it does not take such a tensor, or cannot be copied: it is something else
            return False
        for mine, right in zip(got, _with_gradients(expected, tensors), strict=True):
            if mine.shape != right.shape or mine.dtype != right.dtype:
                return False
            if not torch.allclose(mine, right, rtol=tolerance, atol=tolerance):
                return False
    return True


def _twin(thing: Any, training: bool) -> Any:
    """A module's shallow copy in training or in eval: calling it changes no attribute of the module."""
    if not isinstance(thing, nn.Module):
        return thing
    twin = copy.copy(thing)
    twin.training = training
    return twin


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Its result and the gradients of its arguments, on the CPU, whatever mode the caller is in."""
    with (
        torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):  # fmt: skip
        leaves = [t.clone().requires_grad_() for t in tensors]
        # Not the leaves themselves, which cannot be written in place.
        y = function(*(t.clone() for t in leaves))
        incoming = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64, device="cpu").view(y.shape)
        return [y.detach(), *torch.autograd.grad(y, leaves, incoming)]


def is_activation(act: Any) -> bool:
    """Whether this is a function of each element: a module without parameters, neither identity nor dropout."""
    if not isinstance(act, nn.Module) or not plain(act):
        return False
    if isinstance(act, nn.modules.dropout._DropoutNd | nn.Softmax | TritonSoftmax):
        return False
    points = torch.linspace(-3, 3, 12, dtype=torch.float64, device="cpu").view(3, 4)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            got = copy.copy(act)(points.clone())
    except Exception:  # it does not take such a tensor
        return False
    return isinstance(got, Tensor) and got.shape == points.shape and not torch.equal(got.to(points), points)


def plain(module: nn.Module) -> bool:
    """Without parameters, buffers, children and hooks."""
    return not (module._parameters or module._buffers or module._modules or hooked(module))


def hooked(module: nn.Module) -> str | None:
    """What is attached to a module and would be lost, or would see other values, if it were not called itself."""
    kind = type(module).__name__
    if "forward" in vars(module):
        return f"the forward of this {kind} is replaced on the instance"
    found = [name for name in _HOOKS if getattr(module, name, None)]
    return f"{kind} has hooks ({found[0].strip('_')})" if found else None


def passes_on(module: Any) -> bool:
    """Whether a module is a dropout or an identity: it may be left out while it does nothing."""
    return type(module) in (nn.Dropout, nn.Identity) and hooked(module) is None
