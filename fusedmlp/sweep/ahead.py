"""Runs whose order is known, one after another: while one is under way, the processes of the next ones import.

Importing PyTorch and Lightning can take longer than a short run does. A held process imports, touches no device and
waits; a run of several ranks has one process for each, so that all of them import at the same time. Python takes a
second or two to end: the next run begins meanwhile, long before it needs the device.
"""

import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fusedmlp.signals import Signals
from fusedmlp.sweep import outcome
from fusedmlp.sweep.job import GROUP, Ended, Started, environment_of, run_process

if TYPE_CHECKING:
    from fusedmlp.training.supervisor import Group

# After its time limit or a signal a run has so long to end by itself, and so have ranks of which one has died.
GRACE_S = 20.0
_IMPORT_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Run:
    """A command line of train.py.

    Attributes:
        cwd: where it is run.
        log: receives what its processes print.
        folder: its directory, as far as it is known before.
        ranks: processes on this host, with the environment that torchrun would give them; 1: one, without.
        environment: set besides that of this process.
    """

    command: Sequence[str]
    cwd: Path
    log: Path
    folder: Path | None = None
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def is_over(self) -> bool:
        """Whether its result tells the ending."""
        return self.folder is not None and outcome.read(self.folder).get("status", "running") != "running"


class Ahead:
    """The processes of these runs; an active context, which leaves none of them behind.

    Args:
        preload: of so many runs after the one at hand the processes are held already; 0: none are held, and a run
            begins when no process of another is left.
        signals: what ends the run at hand, and whoever calls `follow` from calling it again.
        quiet: a run is let go when the held ones have imported and the one before has left, so that nothing else
            happens while it is measured.
    """

    def __init__(self, runs: Sequence[Run], preload: int, signals: Signals, quiet: bool = False):
        self._left, self._preload, self._signals, self._quiet = deque(runs), preload, signals, quiet
        self._held: deque[_Processes] = deque()
        self._threads = ThreadPoolExecutor()

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        while self._held:
            self._held.popleft().withdraw()
        self._threads.shutdown()

    def hold(self) -> None:
        """Starts the processes of the next run and of those to preload, as far as they have not been."""
        while self._left and len(self._held) <= self._preload:
            self._held.append(_Processes(self._left.popleft(), held=self._preload > 0))

    def follow(self, timeout_s: float | None = None) -> Future[Ended]:
        """Lets the next run go and waits until it is over, at most `timeout_s` seconds and what it takes to stop.

        Returns: how it ended, which is known when its processes have.
        """
        self.hold()
        if self._quiet:
            until = time.monotonic() + _IMPORT_S
            while not all(held.wait(_POLL_S) for held in self._held):
                if self._signals.received or time.monotonic() > until:
                    break
        now = self._held.popleft()
        ending = self._threads.submit(now.follow, timeout_s, self._signals)
        overlap = self._preload > 0 and not self._quiet
        try:
            while not wait([ending], _POLL_S).done and not (overlap and now.run.is_over()):
                pass
        except BaseException:
            self._signals.received.append(signal.SIGTERM)
            raise
        return ending


class _Processes:
    """Those of one run, until `follow` held or under way already."""

    def __init__(self, run: Run, held: bool):
        # These runs are no sweep, of which their results would tell.
        own = {name: value for name, value in environment_of("").items() if name != GROUP} | dict(run.environment)
        self.run = run
        self._group = _group(run.ranks) if run.ranks > 1 else None
        environments = [own] if self._group is None else self._group.environments(own)
        self._started = [Started(run.command, each, held, run.cwd) for each in environments]

    def wait(self, within_s: float) -> bool:
        return all(started.waits(within_s) for started in self._started)

    def withdraw(self) -> None:
        for started in self._started:
            started.withdraw()

    def follow(self, timeout_s: float | None, signals: Signals) -> Ended:
        def follow_one(started: Started) -> Ended:
            return run_process(started, self.run.log, lambda line: None, signals.received, timeout_s, GRACE_S)

        if self._group is None:
            return follow_one(self._started[0])
        group = self._group
        group.processes = [started.process for started in self._started]
        with ThreadPoolExecutor(len(self._started)) as threads:
            ranks = [threads.submit(follow_one, started) for started in self._started]
            try:
                while not all(rank.done() for rank in ranks):
                    group.look()
                    time.sleep(_POLL_S)
            finally:
                group.end()
        ended = [rank.result() for rank in ranks]
        # The one that failed says why; of several the first one is as good as any.
        told = next((one for one in ended if one.exit_code), ended[0])
        seconds = max(one.seconds for one in ended)
        return Ended(group.exit_code(), any(one.timed_out for one in ended), told.last_line, seconds)


def _group(ranks: int) -> "Group":
    """As many ranks on this host, which meet at a port where this process listens already."""
    # Lightning comes with it: imported here, while the processes of a first run import as well.
    from torch.distributed import TCPStore

    from fusedmlp.training.place import Start
    from fusedmlp.training.supervisor import Group

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    return Group(Start(ranks, 0, ranks), store, GRACE_S)
