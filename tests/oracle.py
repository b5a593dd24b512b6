"""The oracle, `manual` in float64 on the same quantised inputs, and the bound that an implementation has to keep.

The bound follows from the dtype, not from experience: twice the error of the eager computation in that dtype, plus a
rounding band of the dtype's resolution. It is asked of the largest and of the root mean square error, so that neither
one bad element nor a small bias everywhere passes. Where terms cancel (softmax's gradient for a constant dy is zero),
what is left is the rounding of the fp32 arithmetic inside, in proportion to the incoming gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusedmlp import functional


@dataclass(frozen=True)
class Case:
    """One call of an op: its tensors by name, and what is not a tensor."""

    op: str
    tensors: dict[str, Tensor | None]
    options: dict = field(default_factory=dict)

    def call(self, impl: str, tensors: dict[str, Tensor | None]) -> Tensor:
        return getattr(functional, self.op)(*tensors.values(), **self.options, impl=impl)


def gradients(case: Case, impl: str, dtype: torch.dtype | None = None, dy: Tensor | None = None) -> dict:
    """Output and gradients of every tensor of the case, computed from fresh leaves (in `dtype` if given)."""
    leaves = {
        name: None if tensor is None else leaf(tensor if dtype is None else tensor.to(dtype))
        for name, tensor in case.tensors.items()
    }
    y = case.call(impl, leaves)
    dy = torch.ones_like(y) if dy is None else dy
    y.backward(dy if dtype is None else dy.to(dtype))
    return {"y": y.detach(), **{f"d{name}": t.grad for name, t in leaves.items() if t is not None}}


def leaf(tensor: Tensor) -> Tensor:
    """The same values and strides, as a leaf that takes a gradient."""
    return tensor.detach().requires_grad_()


def check(case: Case, impl: str, dy: Tensor | None = None, label: str = "", roundings: int = 2) -> dict:
    """Hold an implementation's output and all gradients against the oracle; returns what it computed.

    `roundings` is how often a right algorithm rounds a result one after the other, beside what the eager one does.
    """
    got = gradients(case, impl, dy=dy)
    expected = gradients(case, "manual", dtype=torch.float64, dy=dy)
    eager = gradients(case, "native", dy=dy)
    for name in expected:
        where = f"{case.op} {label} {name} impl={impl}"
        assert got[name].dtype == eager[name].dtype, where
        assert got[name].shape == expected[name].shape, where
        incoming = 1.0 if dy is None or dy.numel() == 0 else dy.abs().max().item()
        assert_within(got[name], expected[name], eager[name], where, incoming, roundings)
    return got


def assert_within(
    got: Tensor, expected: Tensor, eager: Tensor, where: str, incoming: float = 1.0, roundings: int = 2
) -> None:
    """|got - expected| <= 2 |eager - expected| + roundings eps |expected| + eps32 |dy|: the maximum and the RMS."""
    if expected.numel() == 0:
        return
    eps, inner_eps = torch.finfo(got.dtype).eps, min(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps)
    got, eager = got.double(), eager.double()
    assert torch.isfinite(got).all() or not torch.isfinite(eager).all(), f"{where}: not finite"
    norms: dict[str, Callable[[Tensor], Tensor]] = {
        "max": lambda t: t.abs().max(),
        "rms": lambda t: t.square().mean().sqrt(),
    }
    for norm, size in norms.items():
        error = size(got - expected)
        bound = 2 * size(eager - expected) + roundings * eps * size(expected) + inner_eps * incoming
        assert error <= bound, f"{where}: {norm} error {error:.3e} exceeds {bound:.3e}"
