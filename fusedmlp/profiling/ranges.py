"""Named ranges around the parts of a step, for as long as a window is open; outside it nothing of them is installed.

`step` runs from the first batch asked for to the end of the optimizer step, `data` while a batch is waited for;
`forward`, `backward` and `optimizer` are where the training step marks them. Every member of the model's outermost
module lists is a block: "block layers.0" in the forward pass, "block layers.0 backward" in the backward pass.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from fusedmlp.profiling.steps import BLOCK, DATA, STEP

Marker = Callable[[str], AbstractContextManager[Any]]


class Ranges:
    """Opens and closes ranges on a training task.

    Args:
        marker: makes a range of a name: `torch.profiler.record_function`, `torch.cuda.nvtx.range`.
    """

    def __init__(self, marker: Marker):
        self._marker = marker
        self._open: dict[str, AbstractContextManager[Any]] = {}
        self._undo: list[Callable[[], None]] = []

    def install(self, task: Any) -> None:
        """Marks what `task` (its `range` and `model`) does, and its waits for batches: `on_fetch` to `on_batch`."""
        outside, asked, received = task.range, task.on_fetch, task.on_batch
        task.range = self._marker
        self._undo.append(lambda: setattr(task, "range", outside))

        def ask() -> None:
            self.begin(STEP)
            self.begin(DATA)
            asked()

        def receive() -> None:
            self.begin(STEP)
            self.end(DATA)
            received()

        task.on_fetch, task.on_batch = ask, receive
        self._undo.append(lambda: setattr(task, "on_fetch", asked))
        self._undo.append(lambda: setattr(task, "on_batch", received))
        for name, block in blocks(task.model):
            self._mark(f"{BLOCK}{name}", block)

    def remove(self) -> None:
        """Closes what is open and takes everything off again."""
        for name in reversed(list(self._open)):
            self.end(name)
        while self._undo:
            self._undo.pop()()

    def begin(self, name: str) -> None:
        """Opens a range unless it is open."""
        if name not in self._open:
            self._open[name] = self._marker(name)
            self._open[name].__enter__()

    def end(self, name: str) -> None:
        """Closes a range if it is open, and first what was opened in it."""
        if name in self._open:
            for inner in reversed(list(self._open)):
                self._open.pop(inner).__exit__(None, None, None)
                if inner == name:
                    break

    def _mark(self, name: str, block: nn.Module) -> None:
        """Ranges of both passes. The backward pass of a block begins where the gradient of its output is at hand and
        ends where that of its input is, in autograd's thread."""
        backward = f"{name} backward"

        def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.begin(name)
            for node in _nodes((inputs, *named.values())):
                node.register_prehook(lambda _: self.end(backward))

        def after(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            self.end(name)
            # A block whose input needs no gradient would have no end.
            for node in _nodes((output,)) if _nodes((inputs, *named.values())) else ():
                node.register_prehook(lambda _: self._begin_backward(backward))

        self._undo.append(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._undo.append(block.register_forward_hook(after, with_kwargs=True, always_call=True).remove)

    def _begin_backward(self, name: str) -> None:
        # The output of one block is the input of the next, whose backward pass ends here.
        for other in [other for other in self._open if other.endswith(" backward")]:
            self.end(other)
        self.begin(name)


def _nodes(values: Iterable[Any]) -> list[Any]:
    """The autograd nodes that the tensors among these values, or in tuples and lists of them, came out of."""
    nodes = []
    for value in values:
        if isinstance(value, tuple | list):
            nodes += _nodes(value)
        elif isinstance(value, Tensor) and value.grad_fn is not None:
            nodes.append(value.grad_fn)
    return nodes


def blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every member of the model's outermost module lists."""
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList):
            yield from ((f"{name}.{i}", block) for i, block in enumerate(module))
        else:
            yield from ((f"{name}.{inner}", block) for inner, block in blocks(module))


def no_range(name: str) -> AbstractContextManager[None]:
    """The marker outside a window."""
    return _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()
