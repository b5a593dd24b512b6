"""Keeps the report of a sweep up to date while it runs, beside the jobs and never in their way."""

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ERRORS = "report-error.log"


def guarded(what: str, folder: Path, work: Callable[[], object]) -> None:
    """Does what must not end a sweep when it fails: then there is one line, and the traceback in a file in `folder`."""
    try:
        work()
    except Exception as error:
        print(f"warning: no {what}: {error} ({ERRORS})", flush=True)
        try:
            with open(folder / ERRORS, "a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        except OSError:
            pass  # the disk is full, as the warning says


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
        self._thread = threading.Thread(target=guarded, args=("report", self.folder, self._write), daemon=True)
        self._thread.start()

    def close(self) -> list[str]:
        """Writes the report for the last time; returns what to say."""
        self._join()
        guarded("report", self.folder, self._write)
        if self._result is None:
            return []
        from fusedmlp.reporting.report import HTML

        return [*self._result.verdicts, f"report     {self.folder / HTML}"]

    def _write(self) -> None:
        # Imported here, because matplotlib takes a second that no single run should pay.
        from fusedmlp.reporting import report

        self._result = report.write([self.folder], self.folder)

    def summarize(self) -> None:
        """Makes the summary in W&B, unless no job began or there is no report."""
        if self.logger is not None and self._result is not None:
            guarded("Weights & Biases summary", self.folder, self._send)

    def _send(self) -> None:
        from fusedmlp.reporting import wandb_summary

        wandb_summary.send(self._result, self.folder, self.group, self.logger)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
