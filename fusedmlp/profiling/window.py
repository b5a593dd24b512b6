"""The steps of a run that a profiler looks at: after `wait` steps it warms up, then it records, once."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch import Callback, Trainer

from fusedmlp.errors import UserError
from fusedmlp.profiling.ranges import Marker, Ranges
from fusedmlp.profiling.steps import STEP

log = logging.getLogger(__name__)


class Tool(Protocol):
    """What records. The methods are called once each and in this order, `step` after every step in between; when the
    run ends early, `stop` follows at once. `stop` writes what was recorded."""

    marker: Marker | None

    def warm_up(self) -> None: ...

    def record(self) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...


class Clock(Protocol):
    """What must not count the time that starting, stopping and writing take, nor the steps while the tool is on."""

    profiled: bool

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def check_window(wait: int, warmup: int, active: int, steps: int) -> None:
    """Raises: UserError if a run of `steps` steps ends before its window does."""
    if wait + warmup + active > steps:
        raise UserError(
            f"the profiler's window does not fit: profile.wait={wait} + profile.warmup={warmup} + "
            f"profile.active={active} are {wait + warmup + active} steps and the run has {steps}; make them fewer, or "
            "give a larger trainer.max_steps"
        )


class Window(Callback):
    """Drives a tool through its window. Steps are optimizer steps of this process.

    Args:
        wait, warmup, active: steps before the window, before recording, and recorded.
        clock: gives the clock of the run's throughput; the time that the tool takes between two steps is not the run's.
    Attributes:
        recorded: steps that were recorded.
        failure: why nothing was, if the tool broke; training goes on.
    """

    def __init__(self, tool: Tool, wait: int, warmup: int, active: int, clock: Callable[[], Clock]):
        self.tool, self.clock = tool, clock
        self._warmup_at, self._record_at, self._stop_at = wait, wait + warmup, wait + warmup + active
        self.recorded, self._steps = 0, 0
        self.failure: Exception | None = None
        self._ranges = Ranges(tool.marker) if tool.marker is not None else None
        self._started = self._stopped = False

    def on_train_start(self, trainer: Trainer, task: Any) -> None:
        self._advance(trainer, task)

    def on_train_batch_end(self, trainer: Trainer, task: Any, *_: Any) -> None:
        if not task.step_done:
            return
        if self._is_open:
            if self._ranges is not None:
                self._ranges.end(STEP)
            self.recorded += self._steps >= self._record_at
        self._steps += 1
        if self._steps <= self._stop_at:
            self._advance(trainer, task)

    @property
    def _is_open(self) -> bool:
        return self._started and not self._stopped

    def _advance(self, trainer: Trainer, task: Any) -> None:
        """Between two steps: what the tool has to do after so many of them."""
        changes = self._steps in (self._warmup_at, self._record_at, self._stop_at)
        if changes:
            self.clock().pause()
        if self._is_open:
            self._guard(self.tool.step)
        if self._steps == self._warmup_at:
            self._start(trainer, task)
        if self._steps == self._record_at and self._is_open:
            self._guard(self.tool.record)
        if self._steps == self._stop_at:
            self.close()
        if changes:
            self.clock().profiled = self._is_open
            self.clock().resume()

    def _start(self, trainer: Trainer, task: Any) -> None:
        self._started = True
        if self._guard(self.tool.warm_up) and self._ranges is not None:
            self._ranges.install(task)

    def close(self) -> None:
        """Ends the window if it is open, at its end or because the run ends; the tool writes what it has."""
        if self._is_open:
            self._stopped = True
            if self._ranges is not None:
                self._ranges.remove()
            self._guard(self.tool.stop, stopping=True)

    def _guard(self, action: Callable[[], None], stopping: bool = False) -> bool:
        """Calls the tool. A profiler that breaks costs the trace, not the training."""
        if self.failure is not None and not stopping:
            return False
        try:
            action()
        except Exception as error:
            log.warning("the profiler failed", exc_info=error)
            self.failure = self.failure or error
            return False
        return True
