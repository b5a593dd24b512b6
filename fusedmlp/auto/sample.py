"""Tensors like those of a call, and whether an implementation agrees with the oracle on them.

The sample has the call's shapes, strides and dtypes but values of its own: what the user's tensors hold (zeros, NaN, a
weight that is not loaded yet) decides nothing, and their memory is left alone. The whole sample goes through the
implementation, as the call will. The oracle, `manual` in float64, computes some of its rows: the incoming gradient is
zero in all others, so that the gradients of weights and biases depend on those rows alone too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmlp import impls
from fusedmlp.auto.call import Call
from fusedmlp.impls import manual

CHECKED_ROWS = 32


@dataclass(frozen=True)
class Sample:
    """A call on tensors of its own, its incoming gradient, and what its result is held against.

    Attributes:
        call: the call, on the sample's tensors; leaves that require gradients as the original's did.
        dy: a gradient of the output for timing; None where none is wanted.
    """

    call: Call
    dy: Tensor | None

    @property
    def wanted(self) -> list[Tensor]:
        """The tensors whose gradients are wanted."""
        return [t for t, need in zip(self.call.tensors, self.call.needs, strict=True) if t is not None and need]

    def run(self, impl: str, dy: Tensor | None) -> list[Tensor]:
        """Output and wanted gradients."""
        y = getattr(impls.load(impl), self.call.op)(*self.call.args)
        return [y.detach(), *(torch.autograd.grad(y, self.wanted, dy) if dy is not None else ())]


def like(call: Call) -> Sample:
    """A sample of `call`; random, from a generator of its own."""
    x = call.x
    generator = torch.Generator(x.device).manual_seed(0)
    tensors: list[Tensor | None] = []
    for index, (tensor, need) in enumerate(zip(call.tensors, call.needs, strict=True)):
        if tensor is None:
            tensors.append(None)
            continue
        scale = 1.0 if tensor.ndim < 2 or index == 0 else tensor.shape[1] ** -0.5
        tensors.append(_normal_like(tensor, scale, generator).requires_grad_(need))
    sample = Call(call.op, call.option, tuple(tensors), call.needs, call.replayed)
    dy = None
    if any(call.needs):
        last = tensors[-2] if len(tensors) > 1 else None
        shape = x.shape if last is None else (*x.shape[:-1], last.shape[0])
        dy = torch.empty(shape, dtype=x.dtype, device=x.device).normal_(generator=generator)
    return Sample(sample, dy)


def _normal_like(tensor: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Normal values in the same shape and strides, overlapping where the original's overlap."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(extent, dtype=tensor.dtype, device=tensor.device).normal_(0, scale, generator=generator)
    return storage.as_strided(tensor.shape, tensor.stride()).detach()


class Oracle:
    """Holds an implementation's results against float64, with native's error as the measure.

    Args:
        sample: what to compute.
    """

    def __init__(self, sample: Sample):
        self.sample = sample
        num_rows = self._rows(sample.call.x).shape[0]
        # In fp64 whatever the default dtype, which a trainer may have set to bf16: that rounds 8191 to 8192.
        spread = torch.linspace(0, num_rows - 1, min(CHECKED_ROWS, num_rows), dtype=torch.float64)
        self.rows = spread.long().to(sample.call.x.device)
        self.dy = None
        if sample.dy is not None:
            rows = self._rows(sample.dy)
            kept = torch.zeros_like(rows)
            kept[self.rows] = rows[self.rows]
            dim = sample.call.dim
            shape = sample.dy.movedim(dim, -1).shape if sample.dy.ndim else sample.dy.shape
            self.dy = kept.view(shape).movedim(-1, dim) if sample.dy.ndim else kept.view(shape)
        self.expected = self._expected()
        self.native = self._picked(sample.run("native", self.dy))

    def disagreement(self, impl: str) -> str | None:
        """Which result of `impl` is wrong, and by how much; None if it agrees."""
        names = ["y", *(f"gradient {i}" for i in range(len(self.expected) - 1))]
        got = self._picked(self.sample.run(impl, self.dy))
        for name, mine, native, expected in zip(names, got, self.native, self.expected, strict=True):
            error, bound = _error(mine, expected), self._bound(native, expected)
            if not error <= bound:
                return f"{name} is off by {error:.2e}, accepted: {bound:.2e}"
        return None

    def _rows(self, t: Tensor) -> Tensor:
        """The tensor's rows, (rows, columns)."""
        if t.ndim == 0:
            return t.view(1, 1)
        t = t.movedim(self.sample.call.dim, -1)
        return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)

    def _picked(self, results: list[Tensor]) -> list[Tensor]:
        """The results that the oracle has too: some rows of what has x's rows, all of the weights' gradients."""
        like_x = 1 + (self.dy is not None and self.sample.call.needs[0])
        return [self._rows(t)[self.rows] if i < like_x else t for i, t in enumerate(results)]

    def _expected(self) -> list[Tensor]:
        call = self.sample.call
        x, *parameters = (None if t is None else t.detach() for t in call.tensors)
        assert x is not None
        rows = self._rows(x)[self.rows]
        leaves = [None if t is None else t.double() for t in (rows, *parameters)]
        for leaf, need in zip(leaves, call.needs, strict=True):
            if leaf is not None:
                leaf.requires_grad_(need)
        y = getattr(manual, call.op)(*leaves, 1 if call.op == "softmax" else call.option)
        if self.dy is None:
            return [y]
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, wanted, self._rows(self.dy)[self.rows].double())]

    def _bound(self, native: Tensor, expected: Tensor) -> float:
        """Twice native's error plus a rounding band; where terms cancel, what is left is fp32's rounding inside."""
        eps, inner = torch.finfo(native.dtype).eps, min(torch.finfo(native.dtype).eps, torch.finfo(torch.float32).eps)
        incoming = 1.0 if self.dy is None else self.dy.abs().max().item()
        return 2 * _error(native, expected) + 2 * eps * _size(expected) + inner * incoming


def _error(got: Tensor, expected: Tensor) -> float:
    return _size(got.double() - expected)


def _size(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0
