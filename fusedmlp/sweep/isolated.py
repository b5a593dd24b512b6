"""Hydra launcher `isolated`: every job of a sweep in a fresh process, one after another, whatever becomes of each."""

from collections.abc import Sequence

from fusedmlp.sweep.job import Signals, environment_of, run_process
from fusedmlp.sweep.launcher import CONSOLE, SweepLauncher
from fusedmlp.sweep.ledger import Job


class IsolatedLauncher(SweepLauncher):
    """Runs the jobs on this machine."""

    # Where Hydra finds it; see fusedmlp/sweep/plugin.py.
    __module__ = "hydra_plugins.fusedmlp"

    def run_all(self, jobs: Sequence[Job], signals: Signals) -> None:
        for job in jobs:
            if signals.received:
                break
            command, folder = self.begin(job)
            prefix = self.prefix(job)
            ended = run_process(
                command, environment_of(self.group), folder / CONSOLE, lambda line: print(prefix, line, flush=True),  # noqa: B023
                signals, self.options.timeout,
            )  # fmt: skip
            self.end(job, ended, signals)
