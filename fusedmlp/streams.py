"""stdout and stderr whose other end may go: what is shown must not cost what is computed."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Stream:
    """A text stream that swallows what can no longer be written.

    A reader that has gone (`| head`) stops the run as a terminal that closes would, after its step and with its
    checkpoint; anything else, such as a full disk, leaves the run alone.

    Attributes:
        error: the first that writing raised, else None; from then on nothing is shown.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._break(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        first, self.error = self.error is None, self.error or error
        # What is buffered would be refused again, and so would Python's own flush when it exits.
        with suppress(OSError, ValueError):  # in a test there is no file behind it
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if first and isinstance(error, BrokenPipeError):
            _hang_up(error)


def _hang_up(error: BrokenPipeError) -> None:
    handler = signal.getsignal(signal.SIGHUP)
    if callable(handler):
        signal.raise_signal(signal.SIGHUP)
    elif handler is signal.SIG_DFL:
        raise error  # nothing is under way that could be lost
    # Ignored, as nohup has it: the run goes on, unseen.


def exit_code(work: Callable[[], int]) -> int:
    """Calls what a command line asks for, with both streams guarded; the exit code, where nobody listens too.

    Returns: that of `work`; 1 where its output could not be written (said on stderr, unless the reader just left), 130
        for Ctrl-C.
    """
    before = guard()
    try:
        code = work()
        sys.stdout.flush()
        refused: OSError | None = getattr(sys.stdout, "error", None)
        if refused is not None and not isinstance(refused, BrokenPipeError) and code == 0:
            print(f"error: what is printed cannot be written: {refused.strerror}", file=sys.stderr)
            code = 1
    except BrokenPipeError:
        code = 1
    except KeyboardInterrupt:
        code = 130
    finally:
        sys.stdout, sys.stderr = before
    return code


def guard() -> tuple[Any, Any]:
    """Puts a `Stream` in the place of stdout and of stderr; returns what it writes to."""
    streams = []
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the whole process
        stream = getattr(sys, name)
        if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal's encoding does not
        setattr(sys, name, Stream(stream))
        streams.append(stream)
    return streams[0], streams[1]
