"""One job of a sweep as a process of its own: start it, pass its output on, end it in time, leave nothing behind.

Nothing of the package is imported here: `slurm.py` sends these functions to machines that need not have it.
"""

import ctypes
import importlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# In the environment of a job: the W&B group of its sweep, the process that must not end before it, and two pipes, of
# which one says when it may begin and the other, by its end, that it could.
GROUP, PARENT, GATE = "FUSEDMLP_SWEEP_GROUP", "FUSEDMLP_SWEEP_PARENT", "FUSEDMLP_SWEEP_GATE"
GRACE_S = 60.0
_LEFTOVERS_S = 2.0
_POLL_S = 0.1
_CHUNK, _LONGEST_LINE = 1 << 16, 1 << 20
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended:
    """How a job's process ended: its exit code (minus the signal that killed it), and the last line it printed.

    `lost` says why nobody knows, because the cluster lost the job; else it is None.
    """

    exit_code: int
    timed_out: bool
    last_line: str
    seconds: float
    lost: str | None = None


class _Output:
    """A job's stdout and stderr: bytes into its log, whole lines to `show`."""

    def __init__(self, pipe: IO[bytes], log: IO[bytes], show: Callable[[str], None]):
        self._pipe, self._log, self._show = pipe, log, show
        self._rest = b""
        self.last_line = ""

    def pump(self, wait_s: float) -> bool:
        """Passes on what arrives within `wait_s` seconds; False if nothing did."""
        if not select.select([self._pipe], [], [], wait_s)[0]:
            return False
        chunk = os.read(self._pipe.fileno(), _CHUNK)
        with suppress(OSError):  # a full disk, of which the job itself tells
            self._log.write(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._pass_on(line)
        return bool(chunk)

    def finish(self) -> None:
        # What has left the process group may hold the pipe and write for ever.
        until = time.monotonic() + _LEFTOVERS_S
        while self.pump(0) and time.monotonic() < until:
            pass
        if self._rest:
            self._pass_on(self._rest)

    def _pass_on(self, line: bytes) -> None:
        # Of a progress bar, what a terminal would show in the end.
        text = line.decode(errors="replace").rstrip().rpartition("\r")[2]
        if text:
            self.last_line = text
            self._show(text)


class _Limits:
    """What ends a job early: signals to this process, and its time limit."""

    def __init__(self, received: Sequence[int], timeout_s: float | None, grace_s: float):
        self._received, self._handed, self._grace_s = received, 0, grace_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._kill_at: float | None = None
        self.timed_out = False

    def apply(self, process: subprocess.Popen) -> None:
        now = time.monotonic()
        for number in self._received[self._handed :]:
            self._handed += 1
            process.send_signal(number if self._handed <= 2 else signal.SIGKILL)
            self._kill_at = self._kill_at or now + self._grace_s
        if self._deadline is not None and now >= self._deadline and not self.timed_out:
            self.timed_out, self._kill_at = True, self._kill_at or now + self._grace_s
            process.send_signal(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            process.kill()


class Started:
    """A process in a process group of its own; one that is `held` goes as far as `wait_until_let_go`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], held: bool = False, cwd: Path | None = None
    ):
        # Our ends of the pipes: to let it go, and to see that it waits for that.
        self._gate: tuple[int, int] | None = None
        own, kept = dict(environment), []
        if held:
            (theirs, let_go), (waits, ready) = os.pipe(), os.pipe()
            self._gate, kept = (let_go, waits), [theirs, ready]
            own[GATE] = f"{theirs},{ready}"
        try:
            self.process = subprocess.Popen(
                command, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True, pass_fds=kept, cwd=cwd,
            )  # fmt: skip
        finally:
            for descriptor in kept:
                os.close(descriptor)

    def waits(self, within_s: float) -> bool:
        """Whether a held process has come to `wait_until_let_go`, or to its end, `within_s` seconds from now."""
        return self._gate is None or bool(select.select([self._gate[1]], [], [], within_s)[0])

    def let_go(self) -> None:
        if self._gate is not None:
            with suppress(BrokenPipeError):  # it has ended before its time, which is seen later
                os.write(self._gate[0], b"1")
            self._close_gate()

    def _close_gate(self) -> None:
        for descriptor in self._gate or ():
            os.close(descriptor)
        self._gate = None

    def withdraw(self) -> None:
        """Ends a process that has not been let go, and so has done nothing that could be lost."""
        self._close_gate()
        _end_group(self.process.pid, 0.0)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def wait_until_let_go(after_import: str | None = None) -> float:
    """In a job's process: waits for its turn, if it is held, and ends the process if that does not come.

    Args:
        after_import: a module that takes long to import, and that the process will need.
    Returns: seconds waited.
    """
    gate = os.environ.pop(GATE, None)
    if gate is None:
        return 0.0
    if after_import is not None:
        importlib.import_module(after_import)
    began = time.monotonic()
    let_go, ready = map(int, gate.split(","))
    os.close(ready)
    with os.fdopen(let_go, "rb") as pipe:
        if not pipe.read(1):
            sys.exit(128 + signal.SIGTERM)
    return time.monotonic() - began


def run_process(
    job: Started,
    log: Path,
    show: Callable[[str], None],
    received: Sequence[int] = (),
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> Ended:
    """Lets a process go and follows it to its end.

    Of the signals that arrive in `received` meanwhile the first two are handed to it, and the time limit sends SIGTERM;
    it is killed `grace_s` seconds after the first of these, or at the third signal, and so is what it leaves running.
    """
    began = time.monotonic()
    limits = _Limits(received, timeout_s, grace_s)
    process = job.process
    assert process.stdout is not None
    job.let_go()
    with _opened(log) as file:
        output = _Output(process.stdout, file, show)
        try:
            while process.poll() is None:
                if not output.pump(_POLL_S):
                    time.sleep(_POLL_S / 10)  # a job that closed its stdout would make this a busy loop
                limits.apply(process)
            _end_group(process.pid, _LEFTOVERS_S)
            output.finish()
        finally:
            # Also when showing the output fails, because its reader has gone.
            _end_group(process.pid, 0.0)
            process.wait()
            process.stdout.close()
    return Ended(process.returncode, limits.timed_out, output.last_line, time.monotonic() - began)


def _opened(log: Path) -> IO[bytes]:
    try:
        return open(log, "ab", buffering=0)
    except OSError:  # a full disk, or the job's directory is gone: the job goes on
        return open(os.devnull, "ab", buffering=0)


def run_alone(command: Sequence[str], group: str, log: Path, timeout_s: float | None) -> Ended:
    """`run_process` for a process that does nothing else, on another machine: what is printed goes into the log only.

    Signals are not handed on: a cluster sends them to the job itself.
    """
    return run_process(Started(command, environment_of(group)), log, lambda line: None, timeout_s=timeout_s)


def _end_group(group: int, wait_s: float) -> None:
    """Kills what is left of a process group once it had `wait_s` seconds to end by itself."""
    until = time.monotonic() + wait_s
    try:
        os.killpg(group, 0)
        while time.monotonic() < until:
            time.sleep(0.05)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # nobody is left; macOS says the latter of zombies


def environment_of(group: str) -> dict[str, str]:
    """The environment of a job: this process's, the sweep's group, whom not to outlive, and a traceback of a crash."""
    # A W&B service of this process is not for its jobs.
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return own | {GROUP: group, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def join_sweep() -> str | None:
    """In a job's process: its sweep's group, or None outside a sweep. The job ends (SIGTERM) if its sweep is killed."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            os.kill(os.getpid(), signal.SIGTERM)
    return os.environ.pop(GROUP, None)
