"""Our training loop and bare ones in turns of a few steps, within one run of ours.

Host times of two runs, one after the other, differ by tens of percent on a shared machine, equal loops or not. Within a
second a machine is more like itself: so our loop stops after every block of steps, the bare loops run a block each, and
only blocks of the same turn are compared. The CPU time of the process, all its threads, is taken beside: where the host
bounds a step it is most of it, and other programs of the machine are not in it.

What logging costs is less than a machine changes within a second. So there every other step is logged, and the
monitor's own time is taken by itself: steps that follow one another are more alike (correlation 0.8) than those ten
steps apart (0.5 to 0.6).
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
SPELL = 1  # steps that are logged, or not, before others are not, or are
TURN = 8 * BATCH


class Taken(NamedTuple):
    """What a step of a block took on average: milliseconds, and milliseconds of CPU time."""

    ms: float
    cpu_ms: float


class BlockClock(StepClock):
    """A clock that calls `between` after each block, which it leaves out: with what reads the block's durations, once
    the device has passed it, and with its CPU time in ms."""

    def __init__(self, device: torch.device, between: Callable[[Callable[[], Durations], float], None]):
        super().__init__(device)
        self._between, self._block = between, list[Step]()
        self._began = time.process_time()

    def tick(self) -> None:
        super().tick()
        self._block.append(self._steps[-1])
        if len(self._block) == BLOCK:
            block, self._block = self._block, []
            self._between(partial(self.durations, block), 1e3 * (time.process_time() - self._began))
            self.restart()
            self._began = time.process_time()


def in_turns(train: Callable[[], object], others: Sequence[BareLoop], device: torch.device) -> list[list[Taken]]:
    """What a step took in each turn: ours, then each of the others.

    Args:
        train: runs our loop for BLOCK times as many steps as there shall be turns, and one more, the first of which
            does not count: kernels are compiled and steps recorded in it.
    """
    turns: list[list[Taken]] = []

    def between(durations: Callable[[], Durations], cpu_ms: float) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        mine = Taken(_mean(durations().step_ms), cpu_ms / BLOCK)
        # In turn the first and the last after ours.
        places = range(len(others)) if len(turns) % 2 else reversed(range(len(others)))
        taken = {place: Taken(_mean(others[place].run(BLOCK)), others[place].cpu_ms / BLOCK) for place in places}
        turns.append([mine, *(taken[place] for place in range(len(others)))])

    with mock.patch.object(monitor, "StepClock", partial(BlockClock, between=between)):
        train()
    return turns[1:]


class LogsInTurns(Monitor):
    """Logs every step of some, none of the next, in the order that drifts cancel in: every, never, never, every.

    Attributes:
        calls: of each step the call here, in seconds by the host's clock: when it began and when it ended.
    """

    def __init__(self, options: Any, *arguments: Any):
        super().__init__(options, *arguments)
        self._choices = {True: replace(options, log_every=1), False: replace(options, log_every=NEVER)}
        self.calls: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, task: Any, *rest: Any) -> None:
        self.options = self._choices[is_logged(len(self.calls))]
        began = time.perf_counter()
        super().on_train_batch_end(trainer, task, *rest)
        self.calls.append((began, time.perf_counter()))

    def steps(self) -> list["Followed"]:
        """Of each step but the last: the call at its end, and what followed that."""
        followed = zip(itertools.pairwise(self.calls), self._durations.step_ms[1:], strict=True)
        return [
            Followed(1e3 * (end - begin), 1e3 * (next_one - end), step_ms)
            for ((begin, end), (next_one, _)), step_ms in followed
        ]


class Followed(NamedTuple):
    """What the monitor took the host at the end of a step, what the host did from then to the end of the next, and how
    long that was: all in ms, the last by the clock of the device."""

    monitor_ms: float
    rest_ms: float
    step_ms: float


def is_logged(step: int) -> bool:
    """Whether a step is, counted from 0."""
    return step // SPELL % 4 in (0, 3)


def logged_in_turns(train: Callable[[], object]) -> list[list[Followed]]:
    """The steps of each turn.

    Args:
        train: runs our loop for TURN times as many steps as there shall be turns, and TURN + 1 more, which do not
            count.
    """
    made: list[LogsInTurns] = []

    def make(*arguments: Any) -> LogsInTurns:
        made.append(LogsInTurns(*arguments))
        return made[-1]

    with mock.patch.object(run, "Monitor", make):
        train()
    steps = made[-1].steps()
    return [steps[i : i + TURN] for i in range(TURN, len(steps), TURN)]


def cost_of_logging(turns: Sequence[Sequence[Followed]], host_bound: bool) -> dict[str, float | str | None]:
    """What a step that is logged takes longer than one that is not, with 95 % intervals.

    Where the device bounds a step, from the time of its steps. Where the host does, the sum of two parts, because rows
    are written some steps after those that they are of: what the monitor takes the host, beyond what it does in any
    step, and how much longer the rest of the loop takes after a step that is logged.
    """
    usual_ms = statistics.median(step.monitor_ms for turn in turns for step in _chosen(turn, False))
    rows_ms = [sum(step.monitor_ms - usual_ms for step in turn) / len(_chosen(turn, True)) for turn in turns]
    found: dict[str, float | str | None] = {"monitor us a row": 1e3 * statistics.median(rows_ms)}
    parts: dict[str, list[float]] = {"the monitor": [], "the rest": []}
    if not host_bound:
        never_ms, every_ms = (
            [statistics.mean(step.step_ms for step in _chosen(turn, logged)) for turn in turns]
            for logged in (False, True)
        )
        cost = _median([every / never for never, every in zip(never_ms, every_ms, strict=True)])
    else:
        # Few steps at a time: what slows the machine for longer slows all of them.
        rounds = [turn[i : i + 4 * SPELL] for turn in turns for i in range(0, len(turn), 4 * SPELL)]
        never_ms, every_ms = (
            [usual_ms + statistics.median(step.rest_ms for step in _chosen(steps, logged)) for steps in rounds]
            for logged in (False, True)
        )
        parts["the monitor"] = _median([1 + row_ms / statistics.median(never_ms) for row_ms in rows_ms])
        parts["the rest"] = _median([every / never for never, every in zip(never_ms, every_ms, strict=True)])
        cost = [sum(part) - 1 for part in zip(*parts.values(), strict=True)]
    for name, part in parts.items():
        found[f"{name} %"] = 100 * (part[0] - 1) if part else None
        found[f"interval of {name}"] = percent(*part[1:]) if part else None
    return {
        "never ms": statistics.median(never_ms), "cost %": 100 * (cost[0] - 1), "95 % interval": percent(*cost[1:]),
    } | found  # fmt: skip


def _chosen(steps: Sequence[Followed], logged: bool) -> list[Followed]:
    """Those that are logged, or those that are not, of steps that begin a turn or a round of spells."""
    return [step for i, step in enumerate(steps) if is_logged(i) == logged]


def _median(values: Sequence[float]) -> list[float]:
    """With the ends of its interval."""
    return [statistics.median(values), *interval(values)]


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
