"""Keeps the report of a sweep up to date while it runs, beside the jobs and never in their way."""

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ERRORS = "report-error.log"


class Reporter:
    """Writes the report into the sweep's directory, in a thread: while the next job imports what it needs.

    Args:
        folder: the sweep's directory.
        group: its name in W&B.
    Attributes:
        logger: section `logger` of a job's config, which holds for the summary too; None until a job began.
    """

    def __init__(self, folder: Path, group: str):
        self.folder, self.group = folder, group
        self.logger: Any = None
        self._thread: threading.Thread | None = None
        self._result: Any = None

    def update(self) -> None:
        """A job has ended: writes the report anew."""
        self._join()
        self._thread = threading.Thread(target=self._guarded, args=("report", self._write), daemon=True)
        self._thread.start()

    def close(self) -> list[str]:
        """Writes the report for the last time, and the summary in W&B; returns what to say."""
        self._join()
        self._guarded("report", self._write)
        if self._result is None:
            return []
        if self.logger is not None:
            self._guarded("Weights & Biases summary", self._summarize)
        from fusedmlp.reporting.report import HTML

        return [*self._result.verdicts, f"report     {self.folder / HTML}"]

    def _write(self) -> None:
        # Imported here, because matplotlib takes a second that no single run should pay.
        from fusedmlp.reporting import report

        self._result = report.write([self.folder], self.folder)

    def _summarize(self) -> None:
        from fusedmlp.reporting import wandb_summary

        wandb_summary.send(self._result, self.folder, self.group, self.logger)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _guarded(self, what: str, work: Callable[[], None]) -> None:
        """A report that cannot be written must not end a sweep."""
        try:
            work()
        except Exception as error:
            print(f"warning: no {what}: {error} ({ERRORS})", flush=True)
            try:
                with open(self.folder / ERRORS, "a") as file:
                    traceback.print_exc(file=file)
            except OSError:
                pass  # the disk is full, as the warning says
