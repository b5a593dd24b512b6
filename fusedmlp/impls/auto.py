"""auto: for each call the implementation that was measured to be the fastest at its sizes; see `fusedmlp.auto`.

Here is what every call goes through: a key from the arguments, and a dictionary from keys to functions. What the key
holds is known without looking at the tensors' values, so nothing waits for the GPU. All else happens at the first call
of a kind.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedmlp import impls
from fusedmlp.auto.moment import transformed
from fusedmlp.impls import native

DTYPES = native.DTYPES

_MOST = 4096  # kinds of calls remembered by exact shape; beyond it all are looked up again

# Set by `fusedmlp.auto.replayed`.
replayed = False

_functions: dict[tuple, Callable[..., Tensor]] = {}


def unavailable() -> str | None:
    return None


def gelu(x: Tensor, approximate: str) -> Tensor:
    return _run("gelu", approximate, x)


def softmax(x: Tensor, dim: int) -> Tensor:
    return _run("softmax", dim, x)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return _run("linear_gelu", approximate, x, weight, bias)


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, approximate: str
) -> Tensor:
    return _run("mlp", approximate, x, weight1, bias1, weight2, bias2)


def resolved() -> str:
    """What ran in this process, joined by "+" where calls differ; before any call native without a GPU, else "auto"."""
    from fusedmlp.auto import policy

    ran = sorted(set(policy.used().values()))
    if ran:
        return "+".join(ran)
    asked = policy.mode()
    if asked not in ("measure", "known"):
        return asked
    return "auto" if torch.cuda.is_available() else "native"


def forget() -> None:
    """Looks every kind of call up again."""
    _functions.clear()


def _run(op: str, option: str | int, *tensors: Any) -> Tensor:
    if torch.compiler.is_compiling():
        return _traced(op, option, *tensors)
    # Under a transform the tensors look as usual.
    if transformed():
        return getattr(native, op)(*tensors, option)
    grad = torch.is_grad_enabled()
    x = tensors[0]
    # All tensors have the dtype and device of x.
    kinds = [None if t is None else (type(t), t.shape, t.is_contiguous(), grad and t.requires_grad) for t in tensors]
    key = (op, option, replayed, x.dtype, x.device, *kinds)
    try:
        function = _functions.get(key)
    except TypeError:  # symbolic sizes have no hash
        function = getattr(native, op)
    if function is None:
        function = _first(op, option, tensors, grad, key)
    return function(*tensors, option)


def _first(op: str, option: str | int, tensors: tuple[Any, ...], grad: bool, key: tuple) -> Callable[..., Tensor]:
    from fusedmlp.auto import policy
    from fusedmlp.auto.call import Call

    needs = tuple(t is not None and grad and t.requires_grad for t in tensors)
    choice = policy.choose(Call(op, option, tensors, needs, replayed))
    function = getattr(impls.load(choice.impl), op)
    if choice.final:
        if len(_functions) >= _MOST:
            _functions.clear()
        _functions[key] = function
    return function


def _traced(op: str, option: str | int, *tensors: Any) -> Tensor:
    x = tensors[0]
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    name = _known(op, option, x.dtype, x.device.type, needs_grad)
    # `_known` has imported it; `impls.load` keeps books that TorchDynamo does not see changing.
    return getattr(getattr(impls, name), op)(*tensors, option)


def _known(op: str, option: str | int, dtype: torch.dtype, device_type: str, gradients: bool) -> str:
    from fusedmlp.auto import policy

    name = policy.while_traced(op, option, dtype, device_type, gradients)
    impls.load(name)
    return name


# TorchDynamo runs it and takes the result for a constant; see `impls._load`.
_known._dynamo_marked_constant = True  # type: ignore[attr-defined]
