"""What is shown while a run goes on: one live line in a terminal, a plain line per log point elsewhere."""

import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

REFRESH_S = 0.5


class Progress(Protocol):
    """A sink that shows the rows; `say` prints a line of its own."""

    def begin(self, first_step: int, max_steps: int) -> None: ...

    def write(self, row: dict[str, float]) -> None: ...

    def tick(self, step: int, pause: bool = False) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


def make_progress() -> Progress:
    console = Console()
    # A dumb terminal cannot redraw a line: rich would show nothing but the last one.
    return LiveProgress(console) if sys.stdout.isatty() and not console.is_dumb_terminal else PlainProgress()


class NoProgress:
    """For the ranks whose run another one shows."""

    def begin(self, first_step: int, max_steps: int) -> None: ...

    def write(self, row: dict[str, float]) -> None: ...

    def tick(self, step: int, pause: bool = False) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class _Status:
    """Numbers for one line, all from the host: nothing here asks the device for anything."""

    def __init__(self) -> None:
        self.first_step = self.step = self.max_steps = 0
        self.started = time.monotonic()
        self.row: dict[str, float] = {}

    def begin(self, first_step: int, max_steps: int) -> None:
        self.first_step = self.step = first_step
        self.max_steps = max_steps
        self.started = time.monotonic()

    def line(self, elapsed_s: float | None = None) -> str:
        """What to show after `elapsed_s` seconds; None: now."""
        row = self.row
        parts = [f"step {self.step:>{len(str(self.max_steps))}}/{self.max_steps}"]
        if "train/loss" in row:
            parts.append(f"loss {row['train/loss']:.3f}")
        if "throughput/tokens_per_s" in row:
            parts.append(f"{row['throughput/tokens_per_s']:,.0f} tokens/s")
        if self.step > self.first_step:
            elapsed_s = time.monotonic() - self.started if elapsed_s is None else elapsed_s
            per_step = elapsed_s / (self.step - self.first_step)
            parts.append(f"{_clock(per_step * (self.max_steps - self.step))} left")
        # What a narrow terminal may cut off comes last.
        if "time/step_ms" in row:
            parts.append(f"{row['time/step_ms']:.1f} ms/step")
        if "throughput/tflops_per_s" in row:
            parts.append(utilization(row["throughput/tflops_per_s"], row.get("throughput/mfu_percent")))
        return "   ".join(parts)


class PlainProgress:
    """A line per row, for pipes and log files; what is ready goes out twice a second, because sending it takes time."""

    def __init__(self) -> None:
        self._status = _Status()
        self._sent = 0.0
        self._waiting = False

    def begin(self, first_step: int, max_steps: int) -> None:
        self._status.begin(first_step, max_steps)

    def write(self, row: dict[str, float]) -> None:
        if "val/loss" in row:
            self.say(_validation(row))
        else:
            self._status.row, self._status.step = row, int(row["step"])
            # Many rows may be written at the same moment, each long after its own.
            print(self._status.line(row.get("time/elapsed_s")))
            self._waiting = True

    def tick(self, step: int, pause: bool = False) -> None:
        if self._waiting and (pause or time.monotonic() - self._sent >= REFRESH_S):
            self.close()

    def say(self, line: str) -> None:
        print(line, flush=True)

    def close(self) -> None:
        self._sent, self._waiting = time.monotonic(), False
        sys.stdout.flush()


class LiveProgress:
    """One line that is redrawn at most twice a second, and only when a step has ended."""

    def __init__(self, console: Console):
        self._status, self._console = _Status(), console
        self._live: Live | None = None
        self._drawn = 0.0

    def begin(self, first_step: int, max_steps: int) -> None:
        self._status.begin(first_step, max_steps)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def write(self, row: dict[str, float]) -> None:
        if "val/loss" in row:
            self.say(_validation(row))
        else:
            self._status.row = row

    def tick(self, step: int, pause: bool = False) -> None:
        self._status.step = step
        now = time.monotonic()
        if pause or now - self._drawn >= REFRESH_S or step == self._status.max_steps:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        if self._live is not None:
            # An ellipsis that has to be written as \u2026 would be wider than the terminal.
            overflow: Any = "crop" if self._console.options.ascii_only else "ellipsis"
            self._live.update(Text(self._status.line(), no_wrap=True, overflow=overflow), refresh=True)

    def say(self, line: str) -> None:
        # The console repeats the live line as it was drawn last below.
        self._draw()
        self._console.print(Text(line), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None


def utilization(tflops_per_s: float, mfu_percent: float | None) -> str:
    """The rate, with three digits however small, and the MFU where it is known."""
    rate = f"{tflops_per_s:,.0f}" if tflops_per_s >= 100 else f"{tflops_per_s:.3g}"
    return f"{rate} TFLOP/s" + ("" if mfu_percent is None else f" ({mfu_percent:.1f} % MFU)")


def _validation(row: dict[str, float]) -> str:
    return f"step {row['step']:.0f}: validation loss {row['val/loss']:.3f} nats/token"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
