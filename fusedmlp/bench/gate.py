"""Correctness before speed: results and all gradients against `manual` in float64 on the same quantised inputs.

The bound follows from the dtype: twice the error of the native op in that dtype, plus a rounding band, asked of the
largest and of the root mean square error. Whole tensors are compared, in slices of rows so that float64 fits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmlp.bench.candidates import Op, Tensors, impl_op, leaves
from fusedmlp.bench.cases import Case

# Elements of the widest tensor of one slice: float64 and the steps of manual take some twenty times its size.
_SLICE = 1 << 25


class WrongResult(Exception):
    """A result further from float64 than its dtype allows."""


@dataclass(frozen=True)
class Oracle:
    """Expected results in float64, and the bounds of their errors as (largest, root mean square)."""

    expected: dict[str, Tensor]
    bounds: dict[str, tuple[float, float]]

    def check(self, got: dict[str, Tensor]) -> float:
        """Largest error of any result in proportion to that result's largest value. Raises: WrongResult."""
        worst = 0.0
        for name, expected in self.expected.items():
            largest, rms = errors(got[name], expected)
            for kind, error, bound in zip(("largest", "rms"), (largest, rms), self.bounds[name], strict=True):
                if not error <= bound:
                    raise WrongResult(f"{kind} error of {name} {error:.3e} exceeds {bound:.3e}")
            worst = max(worst, largest / max(float(expected.abs().max()), 1e-30))
        return worst


def results(op: Op, tensors: Tensors, dy: Tensor) -> dict[str, Tensor]:
    """y and the gradient of every tensor: {"y", "dx", "dweight", ...}."""
    inputs = leaves(tensors)
    y = op(*inputs)
    named = {name: t for name, t in zip(tensors, inputs, strict=True) if t is not None}
    gradients = torch.autograd.grad(y, list(named.values()), dy)
    return {"y": y.detach()} | {f"d{name}": g for name, g in zip(named, gradients, strict=True)}


def make_oracle(case: Case, tensors: Tensors, dy: Tensor) -> Oracle:
    """The oracle for these tensors: `manual` in float64, and native in the case's dtype for the bound."""
    expected = _in_slices(impl_op("manual", case), case, tensors, dy)
    eager = results(impl_op("native", case), tensors, dy)
    eps = torch.finfo(dy.dtype).eps
    inner_eps = min(eps, torch.finfo(torch.float32).eps) * float(dy.abs().max())
    bounds = {}
    for name, wanted in expected.items():
        sizes = float(wanted.abs().max()), float(wanted.square().mean().sqrt())
        native = errors(eager[name], wanted)
        bounds[name] = (2 * native[0] + 2 * eps * sizes[0] + inner_eps, 2 * native[1] + 2 * eps * sizes[1] + inner_eps)
    return Oracle(expected, bounds)


def errors(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest and root mean square of got - expected; infinite where `got` is not finite or has another shape."""
    if got.shape != expected.shape:
        return float("inf"), float("inf")
    largest, squares = torch.zeros((), device=got.device), torch.zeros((), device=got.device, dtype=torch.float64)
    rows = max(1, _SLICE // max(expected[0].numel(), 1))
    for ours, theirs in zip(got.split(rows), expected.split(rows), strict=True):
        difference = (ours.double() - theirs).abs()
        largest = torch.maximum(largest, difference.max())
        squares = squares + difference.square().sum()
    if not bool(torch.isfinite(squares)):
        return float("inf"), float("inf")
    return float(largest), float(squares / max(expected.numel(), 1)) ** 0.5


def _in_slices(op: Callable[..., Tensor], case: Case, tensors: Tensors, dy: Tensor) -> dict[str, Tensor]:
    """Float64 results, computed for some rows at a time; the gradients of parameters are sums over all of them."""
    x = tensors["x"]
    assert x is not None
    rows = max(1, _SLICE // max(case.shape[1:]))
    parameters = {name: None if t is None else t.double() for name, t in tensors.items() if name != "x"}
    parts: dict[str, list[Tensor]] = {"y": [], "dx": []}
    sums: dict[str, Tensor] = {}
    for x_part, dy_part in zip(x.split(rows), dy.split(rows), strict=True):
        for name, value in results(op, {"x": x_part.double(), **parameters}, dy_part.double()).items():
            if name in parts:
                parts[name].append(value)
            else:
                sums[name] = sums[name] + value if name in sums else value
    return {name: torch.cat(values) for name, values in parts.items()} | sums
