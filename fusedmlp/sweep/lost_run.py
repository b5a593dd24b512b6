"""The W&B run of a job that was killed, written after it: W&B's own offline file is empty until the run is finished."""

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fusedmlp.training.options import LoggerOptions, build
from fusedmlp.training.wandb_sink import WandbSink

# A .wandb file with its header and no record.
_EMPTY_BYTES = 7


def record(folder: Path, fields: Mapping[str, Any], logger: Mapping[str, Any]) -> Path | None:
    """Writes the offline run, marked failed, from config.yaml and metrics.csv, unless the job has finished its own.

    Args:
        folder: the job's directory.
        fields: its result.json.
        logger: section `logger` of its config. An online run is on the server, which knows that it crashed.
    Returns: the run's directory, None if nothing was written.
    """
    options: LoggerOptions = build("logger", logger, LoggerOptions)
    if "wandb" in fields or options.mode != "offline":
        return None
    for run in folder.glob("wandb/offline-run-*"):
        if all(file.stat().st_size <= _EMPTY_BYTES for file in run.glob("*.wandb")):
            shutil.rmtree(run)
    impl = str(fields.get("impl"))
    name = f"{impl}-dim{fields.get('dim')}"
    config = (
        yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        if (folder / "config.yaml").exists()
        else {}
    )
    sink = WandbSink(options, folder, name, impl, fields.get("group"), config, print, "the sweep goes on")
    for row in _rows(folder / "metrics.csv"):
        sink.write(row)
    sink.finish({key: fields.get(key) for key in ("status", "reason")}, 1)
    return sink.folder


def _rows(file: Path) -> list[dict[str, float]]:
    """metrics.csv; the last line may have been cut off."""
    if not file.exists():
        return []
    with open(file, newline="") as text:
        lines = [row for row in csv.DictReader(text) if None not in row.values()]
    rows = [{name: _number(value) for name, value in row.items() if value} for row in lines]
    return [row for row in rows if "step" in row]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
