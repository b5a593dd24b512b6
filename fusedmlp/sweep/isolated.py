"""Hydra launcher `isolated`: every job of a sweep in a fresh process, one after another, whatever becomes of each."""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fusedmlp.signals import Signals
from fusedmlp.sweep.job import Started, environment_of, run_process
from fusedmlp.sweep.launcher import CANNOT_BEGIN, CONSOLE, SweepLauncher
from fusedmlp.sweep.ledger import Job


class _Next(NamedTuple):
    """A job's process, and the directory that it will have, by its path and as the list of jobs names it."""

    process: Started
    folder: Path
    name: str


class IsolatedLauncher(SweepLauncher):
    """Runs the jobs on this machine."""

    # Where Hydra finds it; see fusedmlp/sweep/plugin.py.
    __module__ = "hydra_plugins.fusedmlp"

    def run_all(self, jobs: Sequence[Job], signals: Signals) -> None:
        waiting: deque[_Next] = deque()
        try:
            for number, job in enumerate(jobs):
                if signals.received:
                    break
                try:
                    now = waiting.popleft() if waiting else self._start(job, held=False)
                except CANNOT_BEGIN as error:
                    self.refuse(job, error)
                    continue
                job.folder = now.name
                self.set_running(job)
                with suppress(Exception):  # which is raised again when it is that job's turn
                    for after in jobs[number + 1 + len(waiting) : number + 1 + self.options.preload]:
                        waiting.append(self._start(after, held=True))
                prefix = self.prefix(job)
                ended = run_process(
                    now.process, now.folder / CONSOLE, lambda line: print(prefix, line, flush=True),  # noqa: B023
                    signals.received, self.options.timeout,
                )  # fmt: skip
                self.end(job, ended, signals)
        finally:
            for held in waiting:
                held.process.withdraw()
                held.folder.rmdir()

    def _start(self, job: Job, held: bool) -> _Next:
        before = job.folder
        command, folder = self.begin(job)
        # What is written down of a job is its last attempt until this one begins.
        name, job.folder = str(job.folder), before
        return _Next(Started(command, environment_of(self.group), held), folder, name)
