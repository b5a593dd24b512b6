"""Times of functions side by side: kernel time in turns, and the host's time for a call.

On a GPU the candidates of a comparison take turns in random order, and each runs for a while before it is measured: a
card at its power limit takes tens of ms to settle on a clock, and would measure a candidate at the clock of the one
before. A call whose launches cost the host more than its kernels take would be timed at the host's pace, so the GPU
spins until the call has been enqueued; all candidates of a comparison get the same spin, so that none runs on a cooler
card. That gives the time a call takes inside a CUDA graph, and works where capturing does not.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusedmlp.profiling.timing import Timing

Function = Callable[[], Any]

# Cycles of a spin for each microsecond: no GPU's clock is much above 2 GHz, and a slower one spins longer.
_CYCLES_PER_US = 2000
# Calls to be in flight at once; CUDA queues about a thousand launches before it makes the host wait.
_HOST_CALLS = 5


@dataclass(frozen=True)
class Measured:
    """One function's time in ms, and the host's time for a call in us (None on a CPU, which has no other)."""

    timing: Timing
    host_us: float | None


@dataclass(frozen=True)
class Pace:
    """How to time functions.

    Attributes:
        rounds: turns of every function.
        settle_ms, rep_ms: time of each function in each turn, before and while it is measured.
        cold: caches hold nothing of the inputs before each call.
        seed: of the order.
    """

    rounds: int = 3
    settle_ms: float = 50.0
    rep_ms: float = 10.0
    cold: bool = True
    seed: int = 0


def in_turns(functions: Mapping[str, Function], device: torch.device, pace: Pace) -> dict[str, Measured]:
    """Time every function `pace.rounds` times, all of them in every round, in random order.

    Args:
        functions: name -> function without arguments that runs on `device`.
    """
    clock: _Gpu | _Cpu = _Gpu(pace, device) if device.type == "cuda" else _Cpu(pace)
    order = random.Random(pace.seed)
    clock.prepare(functions)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(pace.rounds):
        for name in order.sample(list(functions), len(functions)):
            times[name] += clock.turn(name, functions[name])
    return {name: Measured(Timing.of(values), clock.host_us.get(name)) for name, values in times.items()}


class _Cpu:
    """Wall time of single calls."""

    def __init__(self, pace: Pace):
        self.pace, self.host_us = pace, dict[str, float]()
        # Larger than the caches of most processors.
        self._flush = torch.zeros(1 << 23, dtype=torch.float32) if pace.cold else None

    def prepare(self, functions: Mapping[str, Function]) -> None:
        for function in functions.values():
            function()

    def turn(self, name: str, function: Function) -> list[float]:
        times: list[float] = []
        while not times or (sum(times) < self.pace.rep_ms and len(times) < 100):
            if self._flush is not None:
                self._flush.add_(1.0)
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) * 1e3)
        return times


class _Gpu:
    """Time between events around a call, enqueued while the GPU is still busy."""

    def __init__(self, pace: Pace, device: torch.device):
        self.pace, self.host_us = pace, dict[str, float]()
        self._ms: dict[str, float] = {}
        self._spin_us = 0.0
        size = 4 * getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 1 << 26)
        self._flush = torch.empty(size, dtype=torch.int8, device=device) if pace.cold else None

    def prepare(self, functions: Mapping[str, Function]) -> None:
        for name, function in functions.items():
            function()
            function()
            self.host_us[name] = host_us(function)
            self._ms[name] = self._between_events([function] * 3) / 3
        if functions and max(self.host_us.values()) > 500 * min(self._ms.values()):
            # The longest launch must fit into the spin; clocks of hosts vary from call to call.
            self._spin_us = 1.5 * max(self.host_us.values()) + 20

    def turn(self, name: str, function: Function) -> list[float]:
        repetitions = min(max(math.ceil(self.pace.rep_ms / self._ms[name]), 3), 200)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repetitions)]
        # Idling as it will while it is measured: one that waits for its launches would settle on a cooler card.
        for _ in range(min(math.ceil(self.pace.settle_ms / (self._ms[name] + self._spin_us / 1e3)), 5000)):
            self._spin()
            function()
        # No synchronisation here: while the last calls run, the first measured one is enqueued.
        for start, end in zip(events[::2], events[1::2], strict=True):
            if self._flush is not None:
                self._flush.zero_()
            self._spin()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(events[::2], events[1::2], strict=True)]

    def _spin(self) -> None:
        if self._spin_us:
            torch.cuda._sleep(int(self._spin_us * _CYCLES_PER_US))

    def _between_events(self, functions: list[Function]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for function in functions:
            function()
        end.record()
        torch.cuda.synchronize()
        return max(start.elapsed_time(end), 1e-3)


def host_us(function: Function, repeats: int = 5) -> float:
    """Median over repeats of the host's time for one call, in us, the GPU idle at the start of each repeat."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_HOST_CALLS):
            function()
        times.append((time.perf_counter() - begin) / _HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)
