"""Whether a model gives the same outputs and gradients as before, as far as its dtypes allow.

The measure is the oracle's: the model in float64, before anything is replaced. Errors of the new model may be twice
those of the old one plus a rounding band, for every output and every gradient.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

Results = dict[str, Tensor]  # outputs and gradients by name


@dataclass
class Snapshot:
    """Outputs and gradients of the model as it was, in its own dtypes and in float64."""

    own: Results
    exact: Results

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> "Snapshot":
        """Raises: whatever the model raises for the batch; RuntimeError if it cannot be copied or run in float64."""
        own = _results(_copy(model), batch)
        try:
            exact = _results(_copy(model).double(), _mapped(_widened, batch))
        except Exception as error:
            raise RuntimeError(
                f"verify=True compares with the model in float64, where it fails: {error}; use verify=False"
            ) from error
        return cls(own, {name: _within(t, own[name].dtype) if name in own else t for name, t in exact.items()})

    def difference(self, model: nn.Module, batch: Any) -> str | None:
        """What the model gives otherwise now, in words; None if it agrees."""
        try:
            got = _results(_copy(model), batch)
        except Exception as error:  # whatever it is, the model did not raise it before
            return f"the model raises {type(error).__name__} now: {str(error).strip().partition(chr(10))[0]}"
        if got.keys() != self.own.keys():
            return f"other outputs or gradients: {', '.join(sorted(got.keys() ^ self.own.keys())[:3])}"
        for name, mine in got.items():
            own, exact = self.own[name], self.exact[name]
            if mine.shape != own.shape or mine.dtype != own.dtype:
                return f"{name} is {mine.dtype} {tuple(mine.shape)}, was {own.dtype} {tuple(own.shape)}"
            if _lost_finiteness(mine, own, exact):
                return f"{name} has other values that are infinite or no numbers"
            off, bound = _size(mine.double() - exact), _bound(own, exact, self._largest(name))
            if off > bound:
                return f"{name} is off by {off:.2e}, accepted: {bound:.2e}"
        return None

    def _largest(self, name: str) -> float:
        """The largest value among the outputs, or among the gradients, as `name` is one or the other."""
        kind = name.partition(" ")[0] if name.startswith("gradient ") else "output"
        return max(_size(t) for other, t in self.exact.items() if other.startswith(kind))


def _bound(own: Tensor, exact: Tensor, largest: float) -> float:
    eps, inner = torch.finfo(own.dtype).eps, torch.finfo(torch.float32).eps
    # The last term is what sums of many terms leave where they cancel: the gradient of a key's bias is zero.
    return 2 * _size(own.double() - exact) + 2 * eps * _size(exact) + 8 * inner * largest


def _size(t: Tensor) -> float:
    """The largest of the finite values."""
    finite = t[t.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _within(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Infinite where it is too large for the dtype; masked scores are the smallest number of float64 there."""
    rounded = exact.to(dtype)
    return exact.where(rounded.isfinite(), rounded.double())


def _lost_finiteness(mine: Tensor, own: Tensor, exact: Tensor) -> bool:
    """Whether finite values no longer are, or infinite ones and NaNs have changed that the exact result has too."""
    rightly = ~own.isfinite() & _alike(own, exact.to(own.dtype))
    return bool(((own.isfinite() & ~mine.isfinite()) | (rightly & ~_alike(mine, own))).any())


def _alike(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _results(twin: nn.Module, batch: Any) -> Results:
    """Outputs and, where there are any, gradients of the parameters, from random incoming gradients.

    `twin` is a copy that nobody else uses: a call may change buffers, fill caches (with tensors of a graph that is gone
    afterwards) and count. The batch is copied too, and random numbers are left as they were.
    """
    with _same_random_numbers(twin), torch.enable_grad():
        outputs = dict(_tensors("output", _call(twin, _mapped(Tensor.clone, batch))))
        generator = torch.Generator().manual_seed(0)
        differentiable = [t for t in outputs.values() if t.requires_grad]
        incoming = [torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t) for t in differentiable]
        trained = {f"gradient of {n}": p for n, p in twin.named_parameters() if p.requires_grad}
        gradients: tuple[Tensor | None, ...] = (None,) * len(trained)
        if differentiable and trained:
            gradients = torch.autograd.grad(differentiable, list(trained.values()), incoming, allow_unused=True)
        named = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
        return {name: t.detach().clone() for name, t in (outputs | named).items()}


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"verify=True calls copies of the model, and copy.deepcopy fails: {error}; use verify=False"
        ) from error


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """Floating-point tensors in what a model returns."""
    if isinstance(value, Tensor):
        return [(name, value)] if value.is_floating_point() else []
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [pair for key, item in items for pair in _tensors(f"{name}.{key}", item)]


def _mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with `function` of each of its tensors."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(function, value) for key, value in batch.items()}
    return tuple(_mapped(function, one) for one in batch) if isinstance(batch, tuple | list) else batch


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _same_random_numbers(model: nn.Module) -> Iterator[None]:
    """The same dropouts, masks and skipped layers every time; all generators are put back, PyTorch's and others."""
    gpus = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(0)
        random.seed(0)
        if numpy is not None:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])
