"""results.csv: the report's numbers for other programs, one row per run."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedmlp.reporting.agreement import agrees
from fusedmlp.reporting.cells import Cell, Group
from fusedmlp.reporting.machines import commit_of, name_of
from fusedmlp.reporting.runs import Run

_SPEED = (
    "step_ms_median", "step_ms_p10", "step_ms_p90", "samples_per_s", "tokens_per_s", "tflops_per_s", "mfu_percent",
    "first_steps_s",
)  # fmt: skip
_FIELDS = ("peak_memory_gib", "steps", "final_train_loss", "final_val_loss")
_TRACE = ("gpu_busy_percent", "launches_per_step", "sentence")


def write(file: Path, groups: Sequence[Group]) -> None:
    """One row per run, repeats apart, with the speed-up and the agreement of its impl in its group."""
    keys = [key for key, _ in groups[0].setting] if groups else []
    rows = [_row(group, cell, run) for group in groups for cell in group.cells for run in cell.runs]
    head = [*keys, "impl", "impl_resolved", "captured", "repeat", "status", "reason", *_SPEED, *_FIELDS, *_TRACE,
            "times_native", "loss_agrees", "machine", "commit", "run"]  # fmt: skip
    with open(file, "w", newline="", encoding="utf-8", errors="backslashreplace") as out:
        csv.writer(out).writerows([head, *rows])


def _row(group: Group, cell: Cell, run: Run) -> list[Any]:
    fields, trace = run.fields, run.fields.get("trace") or {}
    return [
        *(value for _, value in group.setting),
        *(cell.impl, fields.get("impl_resolved"), (fields.get("cuda_graph") or {}).get("captured")),
        *(run.repeat + 1, run.status, fields.get("reason")),
        *(run.speed.get(name) for name in _SPEED),
        *(fields.get(name) for name in _FIELDS),
        *(trace.get(name) for name in _TRACE),
        *(group.speed_up(cell), agrees(group, cell), name_of(group.machine), commit_of(group.machine)),
        run.folder.name if run.folder else None,
    ]
