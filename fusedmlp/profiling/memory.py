"""profile=memory: what the CUDA allocator gave out, to whom, and the peak of each phase of a step."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusedmlp.profiling.ranges import Marker
from fusedmlp.profiling.steps import BLOCK

FILE, OUT_OF_MEMORY_FILE = "memory.pickle", "memory-oom.pickle"
# Allocations and frees that are remembered, the oldest are forgotten; each takes a few KB with its Python stack.
MAX_ENTRIES = 200_000

Phase = tuple[str, float, float]  # name, begin and end in us since the epoch


class MemoryTool:
    """Records from its making to the end of the run, so that a run that dies of out of memory can be looked into.

    Args:
        folder: receives memory.pickle at the end of the window.
    Attributes:
        peaks: phase -> largest memory allocated in it, in GiB, over the window's steps.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.peaks: dict[str, float] = {}
        self._phases: list[Phase] = []
        self.marker: Marker | None = self._mark
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")

    def warm_up(self) -> None:
        pass

    def record(self) -> None:
        self._phases.clear()

    def step(self) -> None:
        pass

    def stop(self) -> None:
        snapshot = torch.cuda.memory._snapshot()
        self.peaks = peaks(snapshot, self._phases)
        self._dump(self.folder / FILE)

    def died_of_out_of_memory(self) -> Path:
        """Writes what was allocated when memory ran out, and how it came to that."""
        self._dump(self.folder / OUT_OF_MEMORY_FILE)
        return self.folder / OUT_OF_MEMORY_FILE

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _dump(self, file: Path) -> None:
        partial = file.with_name(f"{file.name}.partial")
        try:
            torch.cuda.memory._dump_snapshot(str(partial))
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)

    @contextmanager
    def _mark(self, name: str) -> Iterator[None]:
        began = time.time_ns() / 1e3
        try:
            yield
        finally:
            if not name.startswith(BLOCK):
                self._phases.append((name, began, time.time_ns() / 1e3))


def peaks(snapshot: dict[str, Any], phases: list[Phase]) -> dict[str, float]:
    """Phase -> largest memory allocated in it, in GiB.

    Args:
        snapshot: of `torch.cuda.memory._snapshot()`. Its history may have lost its beginning, so memory is counted back
            from what is allocated at its end.
    """
    events = [event for device in snapshot["device_traces"] for event in device if event["action"] in _SIGN]
    events.sort(key=lambda event: event["time_us"])
    allocated = sum(
        block.get("requested_size", block["size"])
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    times = np.array([event["time_us"] for event in events], np.float64)
    added = np.array([_SIGN[event["action"]] * event["size"] for event in events], np.float64)
    # levels[i]: allocated before event i, so levels[i + 1] after it
    levels = allocated - np.concatenate((np.cumsum(added[::-1])[::-1], [0.0]))
    found: dict[str, float] = {}
    for name, begin, end in phases:
        first, last = np.searchsorted(times, (begin, end))
        found[name] = max(found.get(name, 0.0), float(levels[first : last + 1].max()) / 2**30)
    return found


_SIGN = {"alloc": 1, "free_requested": -1}
