"""What came of a job: its result.json and how its process ended, brought into one status and reason."""

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from fusedmlp.sweep.job import Ended
from fusedmlp.training.result import FILE, Result


def read(folder: Path) -> dict[str, Any]:
    """result.json of a run, or nothing if it wrote none."""
    try:
        fields = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def settle(folder: Path, start: dict[str, Any], ended: Ended, limit: str | None, stopped: bool) -> dict[str, Any]:
    """The fields of a job that has ended; where its result.json does not tell the ending, it is written there.

    Args:
        start: what is known of the job without its result.json.
        limit: its time limit, as the user set it.
        stopped: whether the user stopped the sweep.
    """
    fields = read(folder)
    status, reason, hint = _ending(fields, ended, limit, stopped)
    if (status, reason) != (fields.get("status"), fields.get("reason")):
        # Its reasons were those of the process, which knew nothing of a time limit.
        result = Result(folder, **(start | fields))
        with suppress(OSError):  # on a full disk sweep.json may still tell
            result.write(status=status, reason=reason, hint=hint)
        fields = result.fields
    return fields


def _ending(
    fields: dict[str, Any], ended: Ended, limit: str | None, stopped: bool
) -> tuple[str, str | None, str | None]:
    """Status, reason and hint."""
    status, reason, hint = fields.get("status"), fields.get("reason"), fields.get("hint")
    ours = stopped or ended.timed_out or ended.lost is not None
    if status in ("failed", "diverged") or (status == "completed" and (ours or ended.exit_code == 0)):
        return status, reason, hint
    if stopped:
        return "interrupted", reason or "stopped with the sweep", hint
    if ended.timed_out:
        return "timed out", f"time limit: {limit}", None
    if status == "interrupted":
        return status, reason, hint
    if ended.lost is not None:
        return "failed", ended.lost, hint
    after = " after training" if status == "completed" else ""
    if ended.exit_code < 0:
        number = -ended.exit_code
        hint = "the machine may have run out of memory" if number == signal.SIGKILL else None
        return "failed", f"killed by signal {number} ({_name(number)}){after}", hint
    said = f": {ended.last_line}" if ended.last_line and not after else ""
    return "failed", f"exit code {ended.exit_code}{after}{said}", None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
