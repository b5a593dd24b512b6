"""Scalars that stay on the device: accumulated there, copied without waiting, read once the copy has arrived.

Reading a value from a GPU (`.item()`, `float(loss)`, a print) makes the CPU wait until the GPU has caught up, and after
that the GPU waits for the CPU. So nothing is read between two log points; at a log point the sums start on their way to
pinned memory, and the loop goes on. A `Reading` is asked later whether it has arrived.

Readings that follow closely are sent together: a copy with its event and the zeroing takes the host 20 us right after
another, and 100 between two training steps, when nothing that it needs is in a cache.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fusedmlp.training.readings import Reading, Slot, Transfer

# Readings that are sent together at most, and how long the first of them waits for the others: the progress is
# not shown more often either.
BATCH = 32
BATCH_S = 0.5


class DeviceMetrics:
    """Weighted means of 0-dim tensors over a log interval, without a synchronisation.

    Args:
        names: what may be added.
        device: where the tensors are.
        world_size: ranks that add the same names with the same weights; the mean is that over all of them.
        batch: readings that may be sent together; 1 where there are several ranks, which must send alike.
    """

    def __init__(self, names: Sequence[str], device: torch.device, world_size: int = 1, batch: int = 1):
        self._world_size, self._batch = world_size, batch
        # Each interval has a row of its own, until it is sent. One more for where all intervals begin in the same row.
        self._sums = torch.zeros(batch + 1, len(names), dtype=torch.float32, device=device)
        self._all_cells = [{name: row[i] for i, name in enumerate(names)} for row in self._sums]
        self._none = dict.fromkeys(names, 0.0)
        self._weights = self._none.copy()
        self._held: dict[str, tuple[Tensor, float]] = {}
        self._unsent: list[Reading] = []
        self._stays = False
        self._last_read = self._waits_since = -math.inf
        # To pin memory and to make an event takes the host longer than the copy.
        self._slots: list[Slot] = []
        self._begin(0)

    def _begin(self, row: int) -> None:
        """From here on `_end`, the row behind those that are not sent yet, is `row`."""
        self._end = row
        self._cells = self._all_cells[0 if self._stays else row]

    def stay(self) -> None:
        """From now on all is added in the same place, which a graph may be recorded with."""
        if self._stays or self._batch == 1:
            return
        self._add_held()
        self.send()
        if self._end > 0:
            self._sums[0].copy_(self._sums[self._end])
        self._stays = True
        self._begin(1)

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
        """Requests the means and begins a new interval, or goes on with this one.

        It is sent at once if none came shortly before, else when there are `batch` readings, when `send_late` finds
        that the first of them has waited for long, and at the latest when one is asked for its means.
        """
        if self._held:
            self._add_held()
        if go_on:
            weights, row = self._weights.copy(), 0 if self._stays else self._end
            reading = Reading(weights, self._world_size, row, self.send)
            self._start([reading])
            return reading
        reading = Reading(self._weights, self._world_size, self._end, self.send)
        self._weights = self._none.copy()
        if self._stays:
            self._sums[self._end].copy_(self._sums[0])
            self._sums[0].zero_()
        self._unsent.append(reading)
        self._begin(self._end + 1)
        before, self._last_read = self._last_read, time.perf_counter()
        if len(self._unsent) == 1:
            self._waits_since = self._last_read
        if self._end == self._batch + self._stays or self._last_read - before > BATCH_S:
            self.send()
        return reading

    def send_late(self) -> None:
        """Sends what was requested if the first of it has waited for longer than BATCH_S."""
        if self._unsent and time.perf_counter() - self._waits_since > BATCH_S:
            self.send()

    def send(self) -> None:
        """Starts the copy of what was requested and not sent yet."""
        if not self._unsent:
            return
        sent = self._start(self._unsent)
        self._unsent = []
        if self._stays:
            return self._begin(1)
        sent.zero_()
        if not self._held and not any(self._weights.values()):
            self._begin(0)
        return None

    def _start(self, readings: list[Reading]) -> Tensor:
        """Starts the copy of the rows of these readings, one after another; returns the rows."""
        rows = self._sums[readings[0].row : readings[-1].row + 1]
        sums, work, slot = rows, None, None
        if self._world_size > 1:
            sums = sums.clone()
            work = dist.all_reduce(sums, async_op=True)
        if self._sums.is_cuda:
            if work is not None:
                work.wait()  # the stream does, not the host
                work = None
            slot = self._slots.pop() if self._slots else self._new_slot()
            host = slot.host[: len(rows)].copy_(sums, non_blocking=True)
            slot.event.record()
        else:
            host = sums if work is not None else sums.clone()
        transfer = Transfer(host, readings[0].row, slot, self._slots.append, work)
        for reading in readings:
            reading.transfer = transfer
        return rows

    def _new_slot(self) -> Slot:
        host = torch.empty(self._batch, self._sums.shape[1], dtype=torch.float32, pin_memory=True)
        return Slot(host, torch.Event(self._sums.device))
