"""Scalars that stay on the device: accumulated there, copied without waiting, read once the copy has arrived.

Reading a value from a GPU (`.item()`, `float(loss)`, a print) makes the CPU wait until the GPU has caught up, and after
that the GPU waits for the CPU. So nothing is read between two log points; at a log point the sums start on their way to
pinned memory, and the loop goes on. A `Reading` is asked later whether it has arrived.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Slot(NamedTuple):
    """Where the sums of one reading arrive on the host: pinned memory, and the event that follows the copy."""

    host: Tensor
    event: Any


class Reading:
    """Means that were requested at one log point and may still be on their way.

    Args:
        sums: (n,) fp32 on the host, valid once `slot.event` has completed.
        weights: what each sum is divided by; a name of weight 0 has no mean.
        slot: what is given to `give_back` once it has been read; None if the sums are there already (CPU).
        work: the sum over ranks on its way (CPU), or None.
    """

    def __init__(
        self,
        sums: Tensor,
        weights: dict[str, float],
        slot: Slot | None = None,
        give_back: Callable[[Slot], None] | None = None,
        work: Any = None,
    ):
        self._sums, self._weights, self._slot, self._give_back, self._work = sums, weights, slot, give_back, work
        self._means: dict[str, float] | None = None

    def ready(self) -> bool:
        """Whether `means` would return without waiting."""
        if self._means is not None:
            return True
        return (self._slot is None or self._slot.event.query()) and (self._work is None or self._work.is_completed())

    def means(self) -> dict[str, float]:
        """Mean of every name that was added to since the reading before; waits for the copy if it has to."""
        if self._means is None:
            if self._slot is not None:
                self._slot.event.synchronize()
            if self._work is not None:
                self._work.wait()
            sums = self._sums.tolist()
            if self._slot is not None and self._give_back is not None:
                self._give_back(self._slot)
            self._means = {
                name: value / weight
                for value, (name, weight) in zip(sums, self._weights.items(), strict=True)
                if weight
            }
        return dict(self._means)


class DeviceMetrics:
    """Weighted means of 0-dim tensors over a log interval, without a synchronisation.

    Args:
        names: what may be added.
        device: where the tensors are.
        world_size: ranks that add the same names with the same weights; the mean is that over all of them.
    """

    def __init__(self, names: Sequence[str], device: torch.device, world_size: int = 1):
        self._world_size = world_size
        self._sums = torch.zeros(len(names), dtype=torch.float32, device=device)
        self._cells = {name: self._sums[i] for i, name in enumerate(names)}
        self._weights = dict.fromkeys(names, 0.0)
        self._held: dict[str, tuple[Tensor, float]] = {}
        # To pin memory and to make an event takes the host longer than the copy.
        self._slots: list[Slot] = []

    def add(self, name: str, value: Tensor, weight: float = 1.0) -> None:
        """Adds `weight * value` to the sum of `name`, on the device.

        It waits for the other names, because each operation costs the host time, and at most for the next reading.
        """
        if name in self._held:
            self._add_held()
        self._held[name] = value.detach() if value.requires_grad else value, weight
        self._weights[name] += weight
        if len(self._held) == len(self._cells):
            self._add_held()

    def _add_held(self) -> None:
        held, self._held = self._held, {}
        if len(held) > 1 and {(value.dtype, weight) for value, weight in held.values()} == {(torch.float32, 1.0)}:
            torch._foreach_add_([self._cells[name] for name in held], [value for value, _ in held.values()])
            return
        for name, (value, weight) in held.items():
            self._cells[name].add_(value, alpha=weight)

    def count(self, name: str, weight: float = 1.0) -> None:
        """Notes on the host that `weight * value` was added on the device, by a graph that was replayed."""
        self._weights[name] += weight

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """While a graph is recorded: what is added inside is not added yet, and counts when the graph is replayed."""
        weights, held, self._held = dict(self._weights), self._held, {}
        try:
            yield
            # As part of the graph.
            self._add_held()
        finally:
            self._weights, self._held = weights, held

    def read(self, go_on: bool = False) -> Reading:
        """Starts the copy of all sums to the host and begins a new interval, or goes on with this one."""
        self._add_held()
        weights = dict(self._weights)
        sums, work, slot = self._sums, None, None
        if self._world_size > 1:
            weights = {name: weight * self._world_size for name, weight in weights.items()}
            sums = self._sums.clone()
            work = dist.all_reduce(sums, async_op=True)
        if self._sums.is_cuda:
            if work is not None:
                work.wait()  # the stream does, not the host
                work = None
            slot = self._slots.pop() if self._slots else self._new_slot()
            host = slot.host.copy_(sums, non_blocking=True)
            slot.event.record()
        else:
            host = sums if work is not None else sums.clone()
        if not go_on:
            self._sums.zero_()
            self._weights = dict.fromkeys(weights, 0.0)
        return Reading(host, weights, slot, self._slots.append, work)

    def _new_slot(self) -> Slot:
        return Slot(torch.empty_like(self._sums, device="cpu", pin_memory=True), torch.Event(self._sums.device))
