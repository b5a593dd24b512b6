"""The functions that are timed for a case: every implementation's, peers', and what bounds them."""

import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmlp import impls
from fusedmlp.bench.cases import Case, option
from fusedmlp.bench.clock import Function

Tensors = dict[str, Tensor | None]
Op = Callable[..., Tensor]

# Other libraries' ops with the same mathematics: name -> op, or op and kind of GELU -> (package, module, function).
PEERS = {
    "cublaslt": {
        "linear_gelu tanh": ("nvmath", "fusedmlp.bench.cublaslt", "linear_gelu"),
        "mlp tanh": ("nvmath", "fusedmlp.bench.cublaslt", "mlp"),
    },
    "liger": {"softmax": ("liger_kernel", "liger_kernel.transformers.functional", "liger_softmax")},
    "quack": {"softmax": ("quack", "quack.softmax", "softmax")},
}


def impl_op(impl: str, case: Case) -> Op:
    """The implementation's function of the case's tensors. Raises: RuntimeError if it cannot run here."""
    function = getattr(impls.load(impl), case.op)
    return lambda *tensors: function(*tensors, option(case))


def peer_op(peer: str, case: Case) -> Op | None:
    """A peer's function of the case's tensors; None where it has no such op or is not installed."""
    ops = PEERS[peer]
    package, module, name = ops.get(case.op) or ops.get(f"{case.op} {case.approximate}") or ("", "", "")
    if not package or importlib.util.find_spec(package) is None:
        return None
    return getattr(importlib.import_module(module), name)


def installed(peer: str) -> bool:
    """Whether a peer can be imported."""
    return any(importlib.util.find_spec(package) is not None for package, _, _ in PEERS[peer].values())


def leaves(tensors: Tensors) -> list[Tensor | None]:
    """The same values as leaves that take a gradient."""
    return [None if t is None else t.detach().requires_grad_() for t in tensors.values()]


def call(op: Op, tensors: Tensors, dy: Tensor, direction: str) -> Function:
    """A function without arguments that runs one direction of `op`."""
    if direction == "forward":
        plain = [None if t is None else t.detach() for t in tensors.values()]

        def forward() -> Tensor:
            with torch.no_grad():
                return op(*plain)

        return forward
    inputs = leaves(tensors)
    wanted = [t for t in inputs if t is not None]
    if direction == "step":
        return lambda: torch.autograd.grad(op(*inputs), wanted, dy)
    y = op(*inputs)
    return lambda: torch.autograd.grad(y, wanted, dy, retain_graph=True)


def limit(case: Case, tensors: Tensors, dy: Tensor, direction: str) -> tuple[Function, float]:
    """What bounds the case, as a function, and by how much its time has to be multiplied.

    For gelu and softmax a copy, scaled to the bytes that have to be moved; for the others their matrix products alone.
    """
    x = tensors["x"]
    assert x is not None
    if not case.has_gemm:
        y = torch.empty_like(x)
        return lambda: y.copy_(x), case.least_bytes(direction) / case.least_bytes("forward")
    products = _products(case, tensors, dy)
    chosen = {"forward": products[0], "backward": products[1], "step": products[0] + products[1]}[direction]

    def gemms() -> None:
        with torch.no_grad():
            for product in chosen:
                product()

    return gemms, 1.0


def _products(case: Case, tensors: Tensors, dy: Tensor) -> tuple[list[Function], list[Function]]:
    """Matrix products of the forward and of the backward pass, on tensors of the right shapes."""
    x, first, *rest = (t.detach() for t in tensors.values() if t is not None and t.ndim == 2)
    if not rest:
        return [lambda: F.linear(x, first)], [lambda: dy @ first, lambda: dy.t() @ x]
    (second,) = rest
    hidden = torch.randn(x.shape[0], first.shape[0], device=x.device).to(x.dtype)
    forward: list[Function] = [lambda: F.linear(x, first), lambda: F.linear(hidden, second)]
    backward: list[Function] = [
        lambda: dy @ second,
        lambda: dy.t() @ hidden,
        lambda: hidden @ first,
        lambda: hidden.t() @ x,
    ]
    return forward, backward
