"""Our training loop and bare ones in turns of a few steps, within one run of ours.

Host times of two runs, one after the other, differ by tens of percent on a shared machine, equal loops or not. Within a
second a machine is more like itself: so our loop stops after every block of steps, the bare loops run a block each, and
only blocks of the same turn are compared. What logging costs is measured likewise, within one run. The CPU time of the
process, all its threads, is taken beside: where the host bounds a step it is most of it, and other programs of the
machine are not in it.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from bare_loop import BareLoop

from fusedmlp.training import monitor, run
from fusedmlp.training.metrics import BATCH
from fusedmlp.training.monitor import Monitor
from fusedmlp.training.throughput import Durations, Step, StepClock

BLOCK = 20
NEVER = 10**9  # trainer.log_every
UNCOUNTED = 3  # steps at the beginning of a block, while nothing is enqueued ahead
LOG_BLOCK = 2 * BATCH + UNCOUNTED


class Taken(NamedTuple):
    """What a step of a block took on average: milliseconds, and milliseconds of CPU time."""

    ms: float
    cpu_ms: float


class BlockClock(StepClock):
    """A clock that calls `between` with the steps of each block and their CPU time in ms, which it then leaves out."""

    def __init__(self, device: torch.device, between: Callable[[list[Step], float], None], length: int = BLOCK):
        super().__init__(device)
        self._between, self._block, self._length = between, list[Step](), length
        self._began = time.process_time()

    def tick(self) -> None:
        super().tick()
        self._block.append(self._steps[-1])
        if len(self._block) == self._length:
            block, self._block = self._block, []
            self._between(block, 1e3 * (time.process_time() - self._began))
            self.restart()
            self._began = time.process_time()


def in_turns(train: Callable[[], object], others: Sequence[BareLoop], device: torch.device) -> list[list[Taken]]:
    """What a step took in each turn: ours, then each of the others.

    Args:
        train: runs our loop for BLOCK times as many steps as there shall be turns, and one more, the first of which
            does not count: kernels are compiled and steps recorded in it.
    """
    turns: list[list[Taken]] = []

    def between(block: list[Step], cpu_ms: float) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        mine = Taken(_mean(Durations.of(block).step_ms), cpu_ms / BLOCK)
        # In turn the first and the last after ours.
        places = range(len(others)) if len(turns) % 2 else reversed(range(len(others)))
        taken = {place: Taken(_mean(others[place].run(BLOCK)), others[place].cpu_ms / BLOCK) for place in places}
        turns.append([mine, *(taken[place] for place in range(len(others)))])

    with mock.patch.object(monitor, "StepClock", partial(BlockClock, between=between)):
        train()
    return turns[1:]


class LogsInTurns(Monitor):
    """Logs every step of a block and none of the next, in the order that slow drifts cancel in: every, never, never,
    every.

    Attributes:
        calls: of each step the call here, in seconds by the host's clock: when it began and when it ended.
    """

    def __init__(self, options: Any, *arguments: Any):
        super().__init__(options, *arguments)
        self._choices = [replace(options, log_every=every) for every in (1, NEVER, NEVER, 1)]
        self.calls: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, task: Any, *rest: Any) -> None:
        self.options = self._choices[(task.steps - 1) // LOG_BLOCK % 4]
        began = time.perf_counter()
        super().on_train_batch_end(trainer, task, *rest)
        self.calls.append((began, time.perf_counter()))

    def host_ms(self) -> tuple[float, float]:
        """What a step of a block took the host: here on average, with the writing of the rows that are left, and
        elsewhere, the median."""
        began = time.perf_counter()
        self.flush()
        left = time.perf_counter() - began
        # The first is the last of the block before, in whose midst this was asked.
        calls, self.calls = self.calls, []
        here = [end - begin for begin, end in calls[UNCOUNTED:]]
        elsewhere = [begin - before for (_, before), (begin, _) in itertools.pairwise(calls[UNCOUNTED - 1 :])]
        return 1e3 * (sum(here) + left) / len(here), 1e3 * statistics.median(elsewhere)


class Logged(NamedTuple):
    """What a step of a block took on average, how much of it the monitor took the host, both in ms, and the median of
    what the rest of the loop did."""

    ms: float
    host_ms: float
    rest_ms: float


def logged_in_turns(train: Callable[[], object], device: torch.device) -> list[list[Logged]]:
    """What a step took in each turn: logged, then not.

    Args:
        train: runs our loop for twice LOG_BLOCK times as many steps as there shall be turns, and two blocks more, which
            do not count.
    """
    blocks: list[Logged] = []
    made: list[LogsInTurns] = []

    def between(block: list[Step], cpu_ms: float) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        blocks.append(Logged(_mean(Durations.of(block).step_ms), *made[-1].host_ms()))

    def make(*arguments: Any) -> LogsInTurns:
        made.append(LogsInTurns(*arguments))
        return made[-1]

    with (
        mock.patch.object(monitor, "StepClock", partial(BlockClock, between=between, length=LOG_BLOCK)),
        mock.patch.object(run, "Monitor", make),
    ):
        train()
    turns = [blocks[i : i + 2] for i in range(2, len(blocks), 2)]
    return [turn[::-1] if i % 2 == 0 else turn for i, turn in enumerate(turns)]


def cost_of_logging(turns: Sequence[Sequence[Logged]], host_bound: bool) -> dict[str, float | str | None]:
    """Steps that are logged over steps that are not; medians over the turns, with their 95 % intervals.

    Where the host bounds a step, twice: the time of the steps, with whatever else the machine did meanwhile, and "host
    %", which is far less disturbed: what the monitor took on average and, by its median, the rest of the loop, which
    logging may slow too. Both in a step that is logged over both in one that is not; "of it the monitor %" is the first
    part alone.
    """
    ratios = [every.ms / never.ms for every, never in turns]
    found: dict[str, float | str | None] = {
        "never ms": statistics.median(never.ms for _, never in turns),
        "every step ms": statistics.median(every.ms for every, _ in turns),
        "cost %": 100 * (statistics.median(ratios) - 1), "95 % interval": percent(*interval(ratios)),
        "smallest, largest %": percent(min(ratios), max(ratios)),
        "monitor us a row": 1e3 * statistics.median(every.host_ms - never.host_ms for every, never in turns),
        "host %": None, "its 95 % interval": None, "of it the monitor %": None, "95 % interval of that": None,
    }  # fmt: skip
    if host_bound:
        of_never = [never.host_ms + never.rest_ms for _, never in turns]
        host = [(every.host_ms + every.rest_ms) / took for (every, _), took in zip(turns, of_never, strict=True)]
        monitor = [
            1 + (every.host_ms - never.host_ms) / took for (every, never), took in zip(turns, of_never, strict=True)
        ]
        found |= {
            "host %": 100 * (statistics.median(host) - 1), "its 95 % interval": percent(*interval(host)),
            "of it the monitor %": 100 * (statistics.median(monitor) - 1),
            "95 % interval of that": percent(*interval(monitor)),
        }  # fmt: skip
    return found


def compared(turns: Sequence[Sequence[Taken]]) -> dict[str, float | str]:
    """Ours over the mean of two bare loops, in time and in CPU time, and the second of these over the first as control:
    medians over the turns, with their 95 % intervals."""
    wall, cpu = ([[getattr(taken, name) for taken in turn] for turn in turns] for name in Taken._fields)
    ratios, of_cpu = ([mine / statistics.mean(bare) for mine, *bare in taken] for taken in (wall, cpu))
    control = [second / first for _, first, second in wall]
    return {
        "bare ms": statistics.median(statistics.mean(bare) for _, *bare in wall),
        "ours ms": statistics.median(mine for mine, *_ in wall),
        "overhead %": 100 * (statistics.median(ratios) - 1), "95 % interval": percent(*interval(ratios)),
        "smallest, largest %": percent(min(ratios), max(ratios)),
        "bare over bare %": 100 * (statistics.median(control) - 1), "its interval": percent(*interval(control)),
        "bare CPU ms": statistics.median(statistics.mean(bare) for _, *bare in cpu),
        "CPU time %": 100 * (statistics.median(of_cpu) - 1), "its 95 % interval": percent(*interval(of_cpu)),
    }  # fmt: skip


def percent(low: float, high: float) -> str:
    """Two ratios as what they are above 1."""
    return f"{100 * (low - 1):.1f}, {100 * (high - 1):.1f}"


def _mean(step_ms: list[float]) -> float:
    return statistics.mean(step_ms[UNCOUNTED:])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with at least 95 % confidence, from the order of the values alone; all of it for few."""
    ordered, n = sorted(values), len(values)
    below = [sum(math.comb(n, j) for j in range(k + 1)) / 2**n for k in range(n)]
    cut = max(sum(share <= 0.025 for share in below) - 1, 0)
    return ordered[cut], ordered[-1 - cut]
