"""Drop-in modules: the parameters of `nn.Linear`, and one op call in `forward`."""

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from fusedmlp import functional, impls

# What PyTorch traces with stands for plain tensors.
_PLAIN = (nn.Parameter, Tensor, FakeTensor, FunctionalTensor)


def _refuse_script(module: nn.Module) -> nn.Module:
    """What torch.jit.script asks a module for."""
    raise RuntimeError(
        f"torch.jit.script cannot read {type(module).__name__}; use torch.compile, torch.export, or torch.jit.trace"
        " with impl='native'"
    )


class FusedLinearGeLU(nn.Module):
    """y = gelu(x @ weight.T + bias): `nn.Linear` followed by `nn.GELU`, in one op.

    Parameters, their initialisation (same seed, same weights) and the state dict are `nn.Linear`'s.

    Args:
        in_features: K, size of the last dimension of x.
        out_features: N, size of the last dimension of y.
        bias: whether there is a bias (N,).
        approximate: "none" (erf, as `nn.GELU`) or "tanh".
        impl: one of `fusedmlp.impl_names()`; it can be changed later through the attribute of this name.
        device, dtype: of the parameters.
    Shape: x (..., K) -> (..., N), in the dtype of x; under autocast in autocast's dtype.
    Raises: ValueError for an unknown impl or `approximate`; RuntimeError, with the reason, if impl cannot run here.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        approximate: str = "none",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        functional._check_approximate(approximate)
        impls.load(impl)
        self.in_features, self.out_features = in_features, out_features
        self.approximate, self.impl = approximate, impl
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    __prepare_scriptable__ = _refuse_script

    def reset_parameters(self) -> None:
        nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear_gelu(x, self.weight, self.bias, self.approximate, impl=self.impl)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"approximate={self.approximate!r}, impl={self.impl!r}"
        )


class FusedMLP(nn.Module):
    """y = gelu(x @ fc1.weight.T + fc1.bias) @ fc2.weight.T + fc2.bias, the MLP of a transformer block, in one op.

    Initialisation and state dict are those of two `nn.Linear` named fc1 and fc2. Where one of them has been given hooks
    or replaced by something else since (an adapter such as LoRA, a quantised layer, a layer sharded by itself), both
    are called, with the gelu op between them.

    Args:
        in_features: K, size of the last dimension of x.
        hidden_features: N, default 4 * in_features.
        out_features: N2, default in_features.
        bias: whether both layers have a bias.
        approximate: "none" (erf, as `nn.GELU`) or "tanh".
        impl: one of `fusedmlp.impl_names()`; it can be changed later through the attribute of this name.
        device, dtype: of the parameters.
    Shape: x (..., K) -> (..., N2), in the dtype of x; under autocast in autocast's dtype.
    Memory kept for the backward pass, beside x and the weights, for M rows: native keeps preact and act, 2 M N
        elements. So does triton by default; with `FUSEDMLP_MLP_KEEP=preact` it keeps M N and computes act again in the
        epilogue of the GEMM that gives dpreact (M N elements more of traffic), with `FUSEDMLP_MLP_KEEP=x` it keeps
        nothing and pays a seventh GEMM.
    Raises: ValueError for an unknown impl or `approximate`; RuntimeError, with the reason, if impl cannot run here.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        bias: bool = True,
        approximate: str = "none",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        functional._check_approximate(approximate)
        impls.load(impl)
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        out_features = in_features if out_features is None else out_features
        self.approximate, self.impl = approximate, impl
        # They hold the parameters only: `forward` gives all four to one op.
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias, device=device, dtype=dtype)

    __prepare_scriptable__ = _refuse_script

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if not (is_bare(fc1, nn.Linear) and is_bare(fc2, nn.Linear)):
            return fc2(functional.gelu(fc1(x), self.approximate, impl=self.impl))
        return functional.mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, self.approximate, impl=self.impl)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, impl={self.impl!r}"


def is_bare(layer: nn.Module, kind: type) -> bool:
    """Whether a layer is still no more than a `kind`, so that an op may take its parameters instead of calling it."""
    own = layer.__dict__
    if type(layer) is not kind or (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    ):
        return False
    # Weights quantised in place are of a class of their own, which PyTorch's operators know and our kernels do not.
    return all(parameter is None or type(parameter) in _PLAIN for parameter in own["_parameters"].values())


class TritonSoftmax(nn.Module):
    """y = softmax(x) along `dim`: `nn.Softmax`, by default through the Triton kernels.

    Args:
        dim: the dimension that sums to one.
        impl: one of `fusedmlp.impl_names()`; it can be changed later through the attribute of this name.
    Shape: any -> the same, in the dtype of x.
    Raises: ValueError for an unknown impl; RuntimeError, with the reason, if impl cannot run here.
    """

    def __init__(self, dim: int = -1, impl: str = "triton"):
        super().__init__()
        impls.load(impl)
        self.dim, self.impl = dim, impl

    __prepare_scriptable__ = _refuse_script

    def forward(self, x: Tensor) -> Tensor:
        return functional.softmax(x, self.dim, impl=self.impl)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, impl={self.impl!r}"
