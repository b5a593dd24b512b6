"""What asks a program to stop, and how it is held back."""

import signal
from types import FrameType
from typing import Any


def stop_signals() -> tuple[int, ...]:
    """What asks a program to stop: Ctrl-C, SIGTERM, and a terminal that closes unless nohup has that ignored."""
    closing = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *closing)


class Signals:
    """Collects these signals in `received` while it is the active context, instead of ending the process.

    torchrun and srun send them to all ranks as soon as one has failed, and the first one is still to tell of it.

    Args:
        held: False: it does nothing.
    """

    def __init__(self, held: bool = True) -> None:
        self.held = held
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in stop_signals() if self.held else ():
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
