"""What a run reports: at every log point a row of metrics is requested, and written once it has arrived.

Rows go to the sinks (metrics.csv, Weights & Biases, the progress display) in the order of the log points. A row arrives
a few steps late, because nobody waits for it; at the end, before a checkpoint and on a failure the rest is waited for.
Rows of a GPU that follow one another closely are written several at a time: alone, between two steps, one costs the
host several times as much as another of a batch, because nothing that it needs is in a cache.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from operator import sub
from typing import Any, NamedTuple, Protocol

from lightning.pytorch import Callback, Trainer

from fusedmlp.training import environment
from fusedmlp.training.failures import Diverged
from fusedmlp.training.metrics import BATCH, BATCH_S
from fusedmlp.training.optim import learning_rate
from fusedmlp.training.options import TrainerOptions
from fusedmlp.training.readings import Reading
from fusedmlp.training.task import LanguageModelTask
from fusedmlp.training.throughput import Cost, Durations, Step, StepClock, Throughput, summarize

Row = dict[str, float]

# The loss of the first steps is kept: before rounding has carried far, equal computations have equal losses.
EARLY_STEPS = 5


class Sink(Protocol):
    """Takes rows as they arrive. `write` gets at least "step".

    `tick` is called after every optimizer step and, with `pause`, where validation or a checkpoint begins: what was
    written is to be seen then.
    """

    def write(self, row: Row) -> None: ...

    def tick(self, step: int, pause: bool = False) -> None: ...


# Of this process so far: samples and tokens trained on, and steps replayed from a CUDA graph.
Counts = tuple[int, int, int]
_NONE: Counts = (0, 0, 0)


class Pending(NamedTuple):
    """A row on its way. What it says is worked out when it is written."""

    step: int
    reading: Reading
    requested: float  # by `time.perf_counter`
    steps: list[Step] | None = None  # None for validation
    before: Counts = _NONE  # where the interval began
    counts: Counts = _NONE
    peak_memory_gib: float | None = None


class Monitor(Callback):
    """Requests, completes and writes the rows; stops the run when a value is not finite.

    Args:
        sinks: what the rows are written to.
        cost: of a sample, and the peak rate that MFU is taken against.
    Attributes:
        last: the most recent value of every metric.
        early_loss: mean training loss of the first `early_steps` steps; None if the run began later, ended earlier, or
            had something to write before.
        started: when the loop began, by `time.perf_counter`; None before.
    """

    state_key = "Monitor"  # Lightning's property, asked for before every hook
    on_train_batch_start = None  # type: ignore[assignment]  # Lightning calls what is there

    def __init__(self, options: TrainerOptions, sinks: Sequence[Sink], cost: Cost):
        self.options, self.sinks, self.cost = options, sinks, cost
        self.last: Row = {}
        self.early_steps = min(EARLY_STEPS, options.log_every)
        self.early_loss: float | None = None
        self._early: Reading | None = None
        self._began = self._marked = 0
        self.started: float | None = None
        self._pending: deque[Pending] = deque()
        self._batch_rows = 1
        self._polled = -math.inf
        self._peak_memory: float | None = None
        self._durations, self._profiled = Durations(), list[bool]()
        self._counts = _NONE
        self._per_step = (0, 0)

    def on_train_start(self, trainer: Trainer, task: LanguageModelTask) -> None:  # type: ignore[override]
        self.clock, self._capture = StepClock(task.device), task.capture
        self._began = self._marked = trainer.global_step
        # Ranks are to see a loss that is not finite in the same step, as far as can be.
        if task.device.type == "cuda" and self.cost.devices == 1:
            self._batch_rows = BATCH
        environment.reset_peak_memory(task.device)
        # A wait begins when the step asks for a batch, and ends when it has it on the device.
        task.on_fetch, task.on_batch = self.clock.ask, self.clock.receive
        task.capture.on_captured = self.clock.restart
        self.started = time.perf_counter()
        self.clock.resume()

    def on_train_batch_end(self, trainer: Trainer, task: LanguageModelTask, *_: Any) -> None:  # type: ignore[override]
        if not task.step_done:
            return
        step = task.steps
        self.clock.tick()
        self._marked = step
        if step == self.early_steps and self._began == self._counts[0] == 0:
            self._early = task.train_metrics.read(go_on=True)
        if step % self.options.log_every == 0 or step == self.options.max_steps:
            self._request(step, task)
        if self._due():
            task.train_metrics.send_late()
            self._write_arrived()
        self._tick(step)

    def _tick(self, step: int, pause: bool = False) -> None:
        for sink in self.sinks:
            sink.tick(step, pause)

    def on_validation_start(self, trainer: Trainer, task: LanguageModelTask) -> None:  # type: ignore[override]
        self.clock.pause()
        # Rows are not to wait until it has ended, on the device or in a sink.
        task.train_metrics.send()
        self._write_arrived()
        self._tick(task.steps, pause=True)

    def on_validation_batch_end(self, trainer: Trainer, task: LanguageModelTask, *_: Any) -> None:  # type: ignore[override]
        if self._pending:
            self._write_arrived()
            self._tick(task.steps, pause=True)

    def on_validation_end(self, trainer: Trainer, task: LanguageModelTask) -> None:  # type: ignore[override]
        self._pending.append(Pending(trainer.global_step, task.val_metrics.read(), time.perf_counter()))
        self.clock.resume()

    def _request(self, step: int, task: LanguageModelTask) -> None:
        now = time.perf_counter()
        if now - self._polled >= BATCH_S or step == self.options.max_steps:
            # Some 50 us each time.
            self._polled, self._peak_memory = now, environment.peak_memory_gib(task.device)
        before, self._counts = self._counts, (task.samples, task.tokens, self._capture.replayed)
        reading, steps = task.train_metrics.read(), self.clock.take()
        self._pending.append(Pending(step, reading, now, steps, before, self._counts, self._peak_memory))

    def _due(self) -> bool:
        waiting = self._pending
        if len(waiting) >= self._batch_rows:
            return True
        return bool(waiting) and time.perf_counter() - waiting[0].requested >= BATCH_S

    def _write_arrived(self) -> None:
        if self._early is not None and self._early.ready():
            self._take_early(self._early)
        while self._pending and self._pending[0].reading.ready():
            self._write_next()

    def flush(self) -> None:
        """Waits for all rows that were requested and writes them. Raises: Diverged."""
        if self._early is not None:
            self._take_early(self._early)
        while self._pending:
            self._write_next()

    def _take_early(self, reading: Reading) -> None:
        self._early, self.early_loss = None, reading.means().get("train/loss")

    def give_up(self) -> None:
        """Writes the rows that have arrived, and forgets the others: what they wait for may never come.

        Raises: Diverged, with those that follow still to be written.
        """
        self._write_arrived()
        self._pending.clear()

    def settle(self, step: int, task: LanguageModelTask) -> None:
        """Requests and writes what there is up to `step`, so that its state is known to be finite. Raises: Diverged."""
        if task.samples > self._counts[0]:
            self._request(step, task)
        self.flush()
        self._tick(step, pause=True)

    def request_rest(self, task: LanguageModelTask) -> None:
        """Requests what there is since the last row, of a run that broke off: its finished steps.

        The mean loss is also over what there is of the step that it broke off in.
        """
        if task.steps > self._marked:
            # Between the step and its mark.
            self.clock.tick()
        whole = (task.steps - self._began) * self.options.accumulate
        if whole > 0:
            batches = whole + task._micro
            task.samples, task.tokens = task.samples * whole // batches, task.tokens * whole // batches
            if task.samples > self._counts[0]:
                self._request(task.steps, task)

    def _write_next(self) -> None:
        pending = self._pending[0]
        means = pending.reading.means()
        steps = pending.steps or ()
        durations = self.clock.durations(steps)
        row: Row = {"step": pending.step} | means
        if pending.steps is not None:
            self._tell(row, pending, durations)
        # Only now: a signal may end the run at any line, and this row is then written with the rest.
        self._pending.popleft()
        failures = []
        for sink in self.sinks:
            try:
                sink.write(row)
            except Exception as error:
                # One that cannot take the row, as on a full disk, does not keep it from the others.
                failures.append(error)
        self.last |= row
        self._durations.extend(durations)
        self._profiled += [step.profiled for step in steps]
        if failures:
            raise failures[0]
        bad = [f"{name} is {value}" for name, value in means.items() if not math.isfinite(value)]
        if bad:
            raise Diverged(f"{' and '.join(bad)} at step {row['step']:.0f}")

    def _tell(self, row: Row, pending: Pending, durations: Durations) -> None:
        """Adds what the host knows of an interval, and the speed in it: rates from all its steps."""
        assert self.started is not None
        # Not the task's, which is that of the next step already when that one has broken off.
        row["lr"] = learning_rate(pending.step - 1, self.options)
        row["time/elapsed_s"] = pending.requested - self.started
        if pending.peak_memory_gib is not None:
            row["memory/peak_gib"] = pending.peak_memory_gib
        steps = len(durations.step_ms)
        if not steps:
            return
        samples, tokens, replayed = map(sub, pending.counts, pending.before)
        self._per_step = samples * self.cost.devices // steps, tokens * self.cost.devices // steps
        seconds = sum(durations.step_ms) / 1e3
        samples_per_s = samples * self.cost.devices / seconds
        row["time/step_ms"] = statistics.median(durations.step_ms)
        row["time/data_wait_percent"] = durations.data_wait_percent
        row["time/replayed_percent"] = 100 * replayed / steps
        row["throughput/samples_per_s"] = samples_per_s
        row["throughput/tokens_per_s"] = tokens * self.cost.devices / seconds
        # Left out where it is not known.
        if (tflops := self.cost.tflops_per_s(samples_per_s)) is not None:
            row["throughput/tflops_per_s"] = tflops
        if (mfu := self.cost.mfu_percent(samples_per_s)) is not None:
            row["throughput/mfu_percent"] = mfu

    def throughput(self) -> Throughput | None:
        """Speed over the steps whose rows were written; None below two steps."""
        unprofiled = self._durations.where([not profiled for profiled in self._profiled])
        # A window that leaves next to nothing is better than no number.
        durations = unprofiled if len(unprofiled.step_ms) > 1 else self._durations
        first_steps = self._capture.first_steps if self._durations.step_ms else 0
        return summarize(durations, *self._per_step, self.cost, first_steps)
