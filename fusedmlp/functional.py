"""The ops as functions: arguments are checked once here, then the chosen implementation runs.

`M` rows (all leading dimensions of x flattened), `K` in_features, `N` out_features or hidden features, `N2` the MLP's
out_features. Under `torch.autocast` the GEMM ops compute in autocast's dtype, as `nn.Linear` does, and gradients come
back in the parameters' dtypes; gelu and softmax keep the dtype of x (they compute in fp32 inside, so there is nothing
for autocast to protect).
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor

from fusedmlp import impls

APPROXIMATE = ("none", "tanh")

# Each call is one node of a graph that torch.fx traces; what is in it looks at tensors' values, which are not there.
for _op in ("gelu", "softmax", "linear_gelu", "mlp"):
    torch.fx.wrap(_op)


def gelu(x: Tensor, approximate: str = "none", *, impl: str = "auto") -> Tensor:
    """y = x * Phi(x), with Phi the standard normal distribution function or its tanh approximation.

    Args:
        x: any shape; fp32, bf16 or fp16 (fp64 where the implementation has it).
        approximate: "none" (erf, as `nn.GELU`) or "tanh".
        impl: one of `fusedmlp.impl_names()`.
    Returns: like x.
    Raises: TypeError for a dtype; ValueError for `approximate` or an unknown impl; RuntimeError if it cannot run here.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv 1606.08415.
    """
    module = impls.load(impl)
    _check_tensor("x", x, module)
    _check_approximate(approximate)
    if x.numel() == 0:
        return x.clone()
    return _without_autocast(x, module.gelu, x, approximate)


def softmax(x: Tensor, dim: int = -1, *, impl: str = "auto") -> Tensor:
    """y = exp(x) / sum(exp(x)) along `dim`, computed relative to the maximum.

    Args:
        x: any shape; fp32, bf16 or fp16 (fp64 where the implementation has it).
        dim: the dimension that sums to one, -x.ndim <= dim < x.ndim.
        impl: one of `fusedmlp.impl_names()`.
    Returns: like x. A row of -inf, or one with +inf or NaN, gives what torch gives: NaN.
    Raises: TypeError for a dtype; ValueError for `dim` or an unknown impl; RuntimeError if impl cannot run here.
    """
    module = impls.load(impl)
    _check_tensor("x", x, module)
    dim = _positive_dim(dim, x.ndim)
    if x.numel() == 0:
        return x.clone()
    return _without_autocast(x, module.softmax, x, dim)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none", *, impl: str = "auto"
) -> Tensor:
    """y = gelu(x @ weight.T + bias).

    Args:
        x: (..., K), fp32, bf16 or fp16 (fp64 where the implementation has it).
        weight: (N, K), dtype of x.  bias: (N,), dtype of x, or None.
        approximate: "none" (erf, as `nn.GELU`) or "tanh".
        impl: one of `fusedmlp.impl_names()`.
    Returns: (..., N), dtype of x, accumulated in fp32.
    Raises: ValueError for a shape, device, `approximate` or unknown impl; TypeError for a dtype; RuntimeError if impl
        cannot run here.
    """
    module = impls.load(impl)
    _check_approximate(approximate)
    x, weight, bias = _distinct(*_autocast(x, weight, bias))
    _check_tensor("x", x, module)
    _check_linear("x", x, "weight", weight, "bias", bias)
    return _without_autocast(x, module.linear_gelu, x, weight, bias, approximate)


def mlp(
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    approximate: str = "none",
    *,
    impl: str = "auto",
) -> Tensor:
    """y = gelu(x @ weight1.T + bias1) @ weight2.T + bias2.

    Args:
        x: (..., K), fp32, bf16 or fp16 (fp64 where the implementation has it).
        weight1: (N, K), dtype of x.  bias1: (N,), dtype of x, or None.
        weight2: (N2, N), dtype of x.  bias2: (N2,), dtype of x, or None.
        approximate: "none" (erf, as `nn.GELU`) or "tanh".
        impl: one of `fusedmlp.impl_names()`.
    Returns: (..., N2), dtype of x, accumulated in fp32.
    Raises: ValueError for a shape, device, `approximate` or unknown impl; TypeError for a dtype; RuntimeError if impl
        cannot run here.
    """
    module = impls.load(impl)
    _check_approximate(approximate)
    x, weight1, bias1, weight2, bias2 = _distinct(*_autocast(x, weight1, bias1, weight2, bias2))
    _check_tensor("x", x, module)
    _check_linear("x", x, "weight1", weight1, "bias1", bias1)
    _check_linear("act", weight1.t(), "weight2", weight2, "bias2", bias2)
    return _without_autocast(x, module.mlp, x, weight1, bias1, weight2, bias2, approximate)


def _check_tensor(name: str, x: Any, module: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    accepted = getattr(module, "DTYPES", impls.DEFAULT_DTYPES)
    if x.dtype not in accepted:
        impl = module.__name__.rpartition(".")[2]
        raise TypeError(f"{name} is {x.dtype}; impl={impl!r} accepts {', '.join(map(str, accepted))}")
    devices = getattr(module, "DEVICES", None)
    # On the meta device nothing is computed: fake kernels give the shape.
    if devices is not None and x.device.type not in (*devices, "meta"):
        impl = module.__name__.rpartition(".")[2]
        raise ValueError(f"{name} is on {x.device}; impl={impl!r} accepts tensors on {' or '.join(devices)}")
    if x.layout is not torch.strided or x.is_nested:
        raise _layout_error(name, x)


def _layout_error(name: str, x: Tensor) -> TypeError:
    layout = "torch.strided, nested" if x.layout == torch.strided else x.layout
    return TypeError(f"{name} has layout {layout}; accepted: torch.strided (a dense tensor)")


def _check_approximate(approximate: str) -> None:
    if approximate not in APPROXIMATE:
        raise ValueError(f'approximate={approximate!r} is unknown; accepted: "none" (erf) and "tanh"')


def _positive_dim(dim: Any, ndim: int) -> int:
    if not isinstance(dim, int) and hasattr(dim, "__index__"):  # NumPy's integers
        dim = operator.index(dim)
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an int, got {dim!r}")
    # A tensor without dimensions takes 0 and -1, as in torch.
    bound = max(ndim, 1)
    if not -bound <= dim < bound:
        raise ValueError(f"dim={dim} is out of range for x with {ndim} dimensions; accepted: {-bound} to {bound - 1}")
    return dim % bound


def _check_linear(x_name: str, x: Tensor, weight_name: str, weight: Any, bias_name: str, bias: Any) -> None:
    """weight is (out, in) and bias (out,) or None, in the dtype and on the device of x (..., in)."""
    for name, tensor in ((weight_name, weight), (bias_name, bias)):
        if name == bias_name and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} is {tensor.dtype} and {x_name} is {x.dtype}; all tensors must have one dtype")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and {x_name} on {x.device}; all must be on one device")
        if tensor.layout is not torch.strided:
            raise _layout_error(name, tensor)
    if weight.ndim != 2:
        raise ValueError(f"{weight_name} must be (out_features, in_features), got shape {tuple(weight.shape)}")
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        got, accepted = tuple(x.shape), f"(..., {weight.shape[1]})"
        if x_name != "x":
            raise ValueError(f"{weight_name} has shape {tuple(weight.shape)}; accepted: (N2, {x.shape[-1]})")
        raise ValueError(f"{x_name} has shape {got} and {weight_name} {tuple(weight.shape)}; accepted: {accepted}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{bias_name} has shape {tuple(bias.shape)}; accepted: ({weight.shape[0]},) or None")


def _autocast(x: Any, *rest: Any) -> tuple[Any, ...]:
    """All tensors in autocast's dtype where autocast is on for the device of x; fp64 is left alone, as torch does."""
    tensors = (x, *rest)
    if not isinstance(x, Tensor) or not _is_autocast_on(x):
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def _distinct(*tensors: Any) -> tuple[Any, ...]:
    """A tensor that comes twice, as tied weights do, as two while torch.compile traces.

    An autograd function that gets one tensor twice loses one of its gradients in the graph of PyTorch 2.11, and newer
    versions refuse it (pytorch/pytorch#183604). In eager mode it gets the sum.
    """
    if not torch.compiler.is_compiling():
        return tensors
    return tuple(
        t.view_as(t) if isinstance(t, Tensor) and any(t is other for other in tensors[:i]) else t
        for i, t in enumerate(tensors)
    )


def _is_autocast_on(x: Tensor) -> bool:
    # The meta device has no autocast, and PyTorch raises when it is asked for.
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _without_autocast(x: Tensor, op: Callable[..., Tensor], *args: Any) -> Tensor:
    if _is_autocast_on(x):
        with torch.autocast(x.device.type, enabled=False):
            return op(*args)
    return op(*args)
