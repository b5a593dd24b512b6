"""What a step does on the host that a CUDA graph, which holds the work of the GPU, would not do in every replay."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedmlp.training.host_values import MODULE_TABLES, KeptTensor, host_values


@contextmanager
def watch_host(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Appends to `found` what happens inside, in words: random numbers drawn on the CPU, values in Python that change.

    Nothing of that fails in a recording. Layers that are dropped at random would from then on be always those that were
    dropped in the step that was recorded, and a mean that is kept in a buffer, or a schedule that counts the steps,
    would not go on.
    """
    states, buffers, values = _random_states(), dict(model.named_buffers()), host_values(model)
    yield
    for name, state in _random_states().items():
        if state != states[name]:
            found.append(f"draws random numbers on the CPU, from {name}, and a replay would not")
    for name, buffer in model.named_buffers():
        if name in buffers and buffer is not buffers[name]:
            found.append(f"puts another tensor in the place of the buffer {name}, and a replay would not")
    for name, value in host_values(model).items():
        if name in values and value != values[name]:
            what = f"the tensor {name}, which is no buffer" if isinstance(value, KeptTensor) else f"{name}, on the CPU"
            found.append(f"changes {what}, and a replay would not")


@contextmanager
def nothing_left(model: nn.Module) -> Iterator[None]:
    """Inside, reading a tensor with a graph that a step has left in an attribute raises RuntimeError.

    Many modules leave such tensors for others to look at, and that is no harm. One that reads them before it leaves new
    ones would in every replay read those of the step before the recording. Only for recordings, which compute nothing.
    """
    lefts = [
        (holder, key, holder[key], _Left(f"{name}.{path}".lstrip(".")))
        for name, module in model.named_modules()
        for path, holder, key in _kept(module)
    ]
    for holder, key, _, left in lefts:
        holder[key] = left
    try:
        yield
    finally:
        for holder, key, tensor, left in lefts:
            with suppress(LookupError):
                if holder[key] is left:
                    holder[key] = tensor


def _kept(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Where tensors with a graph are in the attributes of a module, and in their lists and dictionaries."""
    attributes = vars(module)
    for name, value in attributes.items():
        if _has_graph(value):
            yield name, attributes, name
        elif type(value) in (list, dict) and name not in MODULE_TABLES:
            for key, inner in list(value.items() if type(value) is dict else enumerate(value)):
                if _has_graph(inner):
                    yield f"{name}[{key!r}]", value, key


def _has_graph(value: Any) -> bool:
    return issubclass(type(value), Tensor) and value.grad_fn is not None


class _Left:
    """Stands in the place of a tensor, and raises where that would be read."""

    def __init__(self, name: str):
        self.error = RuntimeError(f"it reads the tensor {name}, which the step before has left")

    def __getattr__(self, _: str) -> Any:
        raise self.error

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(leaf.error for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls)


def _random_states() -> dict[str, Any]:
    # The legacy generator is the one that numpy.random's functions draw from.
    state: Any = numpy.random.get_state()  # noqa: NPY002
    return {
        "Python's random": random.getstate(),
        "numpy.random": (state[1].tobytes(), state[2]),
        "torch": torch.get_rng_state().tolist(),
    }
