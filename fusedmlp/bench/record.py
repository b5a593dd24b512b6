"""A run's record: environment, limits and tables as JSON, a CSV for each table, and the same for people in Markdown."""

import csv
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusedmlp.errors import UserError
from fusedmlp.profiling.timing import markdown_table
from fusedmlp.training.environment import describe, git_state

Rows = Sequence[Mapping[str, Any]]


def environment(device: torch.device) -> dict[str, Any]:
    """What a measurement depends on: hardware, versions, commit, command."""
    facts = describe(device)
    if device.type == "cuda":
        facts["sms"] = torch.cuda.get_device_properties(device).multi_processor_count
    return facts | git_state(Path(__file__).parent) | {"command": " ".join(sys.argv)}


def claim(folder: Path) -> None:
    """Makes the directory. Raises: UserError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritten(folder, error) from error


def _unwritten(folder: Path, error: OSError) -> UserError:
    return UserError(f"--out {folder} cannot be written: {error.strerror}; give another folder")


def write(folder: Path, facts: Mapping[str, Any], limits: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
    """Write bench.json, bench.md and a CSV for each table into `folder`.

    Raises: UserError if that fails, and what was written before is still there.
    """
    try:
        _write(folder, facts, limits, tables)
    except OSError as error:
        raise _unwritten(folder, error) from error


def _write(folder: Path, facts: Mapping[str, Any], limits: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"environment": dict(facts), "limits": dict(limits), "tables": {n: list(r) for n, r in tables.items()}}
    partial = folder / "bench.json.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, folder / "bench.json")
    for name, rows in tables.items():
        _write_csv(folder / f"{name}.csv", rows)
    parts = ["# Op by op", *(f"## {name}\n\n{markdown_table(for_people(rows))}" for name, rows in tables.items())]
    header = "\n".join(f"- {key}: {value}" for key, value in {**facts, **limits}.items())
    (folder / "bench.md").write_text("\n\n".join([*parts, "## Measured on", header]) + "\n")


def for_people(rows: Rows) -> list[dict[str, Any]]:
    """Rows with the same columns, without those that are empty throughout or hold lists."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    kept = [k for k in keys if any(row.get(k) is not None and not isinstance(row.get(k), list) for row in rows)]
    return [{key: row.get(key) for key in kept} for row in rows]


def _write_csv(path: Path, rows: Rows) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, keys, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: " ".join(v) if isinstance(v, list) else v for k, v in row.items()})
