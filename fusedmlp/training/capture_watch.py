"""What a step does on the host that a CUDA graph, which holds the work of the GPU, would not do in every replay."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fusedmlp.training.host_values import KeptTensor, host_values, tensors_with_graph


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
    """Inside, reading a tensor with a graph that a step has left somewhere in the model raises RuntimeError.

    Many modules leave such tensors for others to look at, and that is no harm. One that reads them before it leaves new
    ones would in every replay read those of the step before the recording. Only for recordings, which compute nothing.
    """
    left = [(name, tensor, type(tensor)) for name, tensor in tensors_with_graph(model)]
    unreadable = _unreadable({id(tensor): name for name, tensor, _ in left})
    for _, tensor, _ in left:
        # A subclass may have a layout of its own.
        with suppress(TypeError):
            tensor.__class__ = unreadable
    try:
        yield
    finally:
        for _, tensor, kind in left:
            if type(tensor) is unreadable:
                tensor.__class__ = kind


def _unreadable(names: dict[int, str]) -> type[Tensor]:
    """A class of tensors that raise wherever they are read. `names`: where they were found, by their ids."""

    class Left(Tensor):
        @classmethod
        def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = next(names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls)
            raise RuntimeError(f"it reads the tensor {name}, which the step before has left")

    return Left


def _random_states() -> dict[str, Any]:
    # The legacy generator is the one that numpy.random's functions draw from.
    state: Any = numpy.random.get_state()  # noqa: NPY002
    return {
        "Python's random": random.getstate(),
        "numpy.random": (state[1].tobytes(), state[2]),
        "torch": torch.get_rng_state().tolist(),
    }
