"""Starts the ranks of a run on this host and waits for them: when one dies, the others are told and ended.

It keeps what torchrun promises: the environment of a rank, and a store at an address where nobody else listens.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import DistError, TCPStore

from fusedmlp.signals import stop_signals
from fusedmlp.training.failures import Ending
from fusedmlp.training.messages import FOLDER, left, post_failure, prefixed
from fusedmlp.training.place import Start
from fusedmlp.training.result import FILE, Result

# Ranks that are told of a failure end by themselves; then they are asked to, and then killed.
GRACE_S = 30.0
LAST_GRACE_S = 5.0
_POLL_S = 0.1
# Exit codes of a run that Ctrl-C, SIGTERM or SIGHUP has ended.
STOPPED = (130, 143, 129)


def start_ranks(start: Start, command: Sequence[str], environment: Mapping[str, str], grace_s: float = GRACE_S) -> int:
    """Runs `command` once per rank and returns the exit code of the run.

    What asks this process to stop is handed to all of them. No rank outlives this call.

    Args:
        environment: set for the ranks besides that of this process.
    """
    store = TCPStore(
        start.address, start.port, is_master=start.first == 0, wait_for_workers=False, timeout=timedelta(seconds=300)
    )
    handed: list[int] = []
    group = Group(start, store, grace_s)

    def hand_on(signum: int, frame: FrameType | None) -> None:
        handed.append(signum)

    previous = {number: signal.signal(number, hand_on) for number in stop_signals()}
    try:
        group.start(command, dict(os.environ) | dict(environment))
        while group.running():
            while handed:
                group.signal(handed.pop(0))
            group.look()
            time.sleep(_POLL_S)
    finally:
        group.end()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return group.exit_code()


class Group:
    """The ranks on this host."""

    def __init__(self, start: Start, store: TCPStore, grace_s: float):
        self.ranks, self.store, self.grace_s = start, store, grace_s
        self.processes: list[subprocess.Popen] = []
        self.failed_at: float | None = None
        self.reason: Ending | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        for own in self.environments(environment):
            self.processes.append(subprocess.Popen(command, env=own))

    def environments(self, environment: Mapping[str, str]) -> list[dict[str, str]]:
        """That of each rank, as torchrun would make it out of `environment`."""
        threads = max((os.cpu_count() or 1) // self.ranks.count, 1)
        shared = {
            "WORLD_SIZE": self.ranks.world_size,
            "LOCAL_WORLD_SIZE": self.ranks.count,
            "MASTER_ADDR": self.ranks.address,
            "MASTER_PORT": self.store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            # The cores are shared, and each process would take all of them.
            "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", threads),
        }
        found = []
        for local in range(self.ranks.count):
            own = shared | {"RANK": self.ranks.first + local, "LOCAL_RANK": local}
            found.append({**environment, **{name: str(value) for name, value in own.items()}})
        return found

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def signal(self, signum: int) -> None:
        for process in self.processes:
            process.send_signal(signum)

    def look(self) -> None:
        """Tells the ranks of one that has died, and ends those that are still there when they had the time."""
        codes = [process.poll() for process in self.processes]
        if self.failed_at is None and any(codes):
            self.failed_at = time.monotonic()
            index = next(i for i, code in enumerate(codes) if code)
            self.reason = _ending_of(self.ranks.first + index, codes[index] or 0)
            # What the rank itself has said is there already, and stays; one that was stopped has nothing to say.
            if codes[index] not in STOPPED:
                with suppress(DistError):  # the first host has gone already
                    post_failure(prefixed(self.store), self.ranks.first + index, self.reason)
        if self.failed_at is not None:
            late = time.monotonic() - self.failed_at - self.grace_s
            if late >= 0:
                self.signal(signal.SIGTERM if late < LAST_GRACE_S else signal.SIGKILL)
                time.sleep(1.0)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        if self.ranks.first == 0:
            self._wait_for_other_hosts()
            if self.reason is not None:
                _record(self.store, self.reason)

    def _wait_for_other_hosts(self) -> None:
        """Keeps the store until their ranks have left, which takes no longer than their last step."""
        others = [left(rank) for rank in range(self.ranks.count, self.ranks.world_size)]
        until = time.monotonic() + LAST_GRACE_S
        while others and not prefixed(self.store).check(others) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def exit_code(self) -> int:
        codes = [process.returncode for process in self.processes]
        # Rank 0's tells how the run ended, unless it was killed.
        first = next((code for code in codes if code > 0), 1 if any(codes) else 0)
        return codes[0] if codes[0] > 0 else first


def _ending_of(rank: int, code: int) -> Ending:
    if code > 0:
        return Ending("failed", f"rank {rank} ended with exit code {code}", None, 1)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = "the machine may have run out of memory" if -code == signal.SIGKILL else None
    return Ending("failed", f"rank {rank} was killed by signal {-code} ({name})", hint, 1)


def _record(store: TCPStore, ending: Ending) -> None:
    """Writes the ending where rank 0 could not, because it was the one that died."""
    ours = prefixed(store)
    if not ours.check([FOLDER]):
        return
    folder = Path(ours.get(FOLDER).decode())
    try:
        fields: dict[str, Any] = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return
    if fields.get("status") == "running":
        Result(folder, **fields).write(status=ending.status, reason=ending.reason, hint=ending.hint)
        hint = f"\nhint: {ending.hint}" if ending.hint else ""
        print(f"\n{ending.status}: {ending.reason}{hint}", file=sys.stderr, flush=True)
