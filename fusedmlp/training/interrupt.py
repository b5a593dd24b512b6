"""Ctrl-C, SIGTERM, SIGHUP: the first one stops the run at the end of its optimizer step, the second one at once."""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from fusedmlp.signals import stop_signals


class Interrupted(BaseException):
    """The user or the system asked the run to stop. No `Exception`, so that nothing on the way swallows it."""

    def __init__(self, signum: int):
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that ended by this signal."""
        return 128 + self.signum


class StopRequests:
    """Holds these signals back while it is the active context, in the main thread; elsewhere it does nothing.

    Attributes:
        deferred: whether the first signal may wait for the end of a step; before the loop runs it stops at once.
        received: the signal that waits, or None.
        notice: what the user is told when a signal waits, if anything.
        at_once_s: signals that come within so many seconds of another are one, where a terminal sends Ctrl-C to every
            process of the run and the one that started them hands it on besides.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.received: int | None = None
        self.notice = "stopping after this step; once more to stop at once"
        self.at_once_s = 0.0
        self._last = -float("inf")
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.getsignal(number) for number in stop_signals()}
            self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Takes the signals (again: Lightning puts its own SIGTERM handler in place, which ends at any micro-batch)."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before < self.at_once_s:
            return
        if not self.deferred or self.received is not None:
            # While that one ends the run, the next is held back again.
            self.received, self.deferred = None, True
            raise Interrupted(signum)
        self.received = signum
        if not self.notice:
            return
        # Not print: a handler may run in the middle of another print.
        with suppress(OSError):  # closed, or gone with the terminal
            os.write(2, f"\n{self.notice}\n".encode())
