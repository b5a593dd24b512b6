"""Work shared out to processes, which may fail, die or fall silent without stopping the others."""

import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# A process imports PyTorch and Triton first, side by side with all the others; a kernel compiles in 0.2 to 5 s.
START_S, SILENT_S = 300.0, 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of an item: `failure` in words, or None; `item` is None where a process could not be started."""

    item: Any
    failure: str | None


def in_processes(
    work: Callable[[Any], None],
    items: Sequence[Any],
    count: int,
    prepare: Callable[..., None] | None = None,
    arguments: tuple = (),
    start_s: float = START_S,
    silent_s: float = SILENT_S,
) -> Iterator[Outcome]:
    """`work(item)` for each item in `count` processes; outcomes in the order in which they come.

    Where no process can be started, items are left without an outcome.

    Args:
        work, prepare: functions of a module; `prepare(*arguments)` runs once in each process.
        silent_s: seconds that an item may take before its process is ended and the item counts as failed.
    """
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    outcomes: queue.SimpleQueue = queue.SimpleQueue()
    stop = threading.Event()
    keepers = [
        threading.Thread(
            target=_keep, args=(waiting, outcomes, stop, (work, prepare, arguments), start_s, silent_s), daemon=True
        )
        for _ in range(min(count, len(items)))
    ]
    for keeper in keepers:
        keeper.start()
    running = len(keepers)
    try:
        while running:
            outcome = outcomes.get()
            if outcome is None:
                running -= 1
            else:
                yield outcome
    finally:
        stop.set()
        for keeper in keepers:
            keeper.join()


def _keep(waiting, outcomes, stop: threading.Event, job: tuple, start_s: float, silent_s: float) -> None:
    """Keep one process at work until nothing waits; another takes its place where it dies or is ended."""
    worker = None
    try:
        while not stop.is_set():
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                worker = worker or _Worker(job, start_s, stop)
            except OSError as error:
                # Another process may still take it.
                waiting.put(item)
                outcomes.put(Outcome(None, str(error)))
                return
            failure = worker.answer(silent_s, stop, item)
            if not worker.usable:
                worker.end()
                worker = None
            outcomes.put(Outcome(item, failure))
    finally:
        if worker is not None:
            worker.end()
        outcomes.put(None)


class _Worker:
    """A process that runs items sent to it, and answers None or the failure in words.

    Raises: OSError if it cannot be started or prepared.
    """

    def __init__(self, job: tuple, start_s: float, stop: threading.Event):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, *job), daemon=True)
        self.process.start()
        other.close()
        self.usable = True
        if (reason := self.answer(start_s, stop)) is not None:
            self.end()
            raise ChildProcessError(reason)

    def answer(self, timeout_s: float, stop: threading.Event, *item: Any) -> str | None:
        """What it answers to an item. Raises nothing: a process that is silent or gone is not `usable` any more."""
        began = time.monotonic()
        try:
            for one in item:
                self.connection.send(one)
            while not self.connection.poll(0.2):
                if stop.is_set():
                    self.usable = False
                    return "stopped"
                if time.monotonic() - began > timeout_s:
                    self.usable = False
                    return f"no answer within {timeout_s:.0f} s"
            return self.connection.recv()
        except (EOFError, OSError):
            self.usable = False
            self.process.join(10)
            return f"the process ended with exit code {self.process.exitcode}"

    def end(self) -> None:
        if self.usable:
            self.connection.close()
            self.process.join(5)
        # A compiler that hangs may not notice SIGTERM.
        self.process.kill()
        self.process.join()


def _serve(connection, work: Callable, prepare: Callable | None, arguments: tuple) -> None:
    # Ctrl-C reaches every process of a terminal; the one that started this one sees to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.send(_failure(prepare, *arguments) if prepare is not None else None)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        connection.send(_failure(work, item))


def _failure(function: Callable, *arguments: Any) -> str | None:
    try:
        function(*arguments)
    except Exception as error:
        line = next((line for line in str(error).strip().splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {line}"
    return None
