"""Reads runs from their directories: result.json, config.yaml, and what sweep.json says of jobs that wrote neither."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fusedmlp.errors import UserError
from fusedmlp.sweep import ledger
from fusedmlp.training import result

# Overrides that say where a run is kept and how the sweep goes on, not what is run.
_BOOKKEEPING = ("hydra.", "hydra/", "sweep.", "resume", "impl")


_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


@dataclass
class Run:
    """One run, or a job of a sweep that waits for its turn (status "waiting", no folder).

    Args:
        fields: result.json.
        config: config.yaml, everything resolved; empty if the run did not come so far.
        root: the directory that it was found in: its sweep's, or its own.
        repeat: counts from 0.
    """

    root: Path
    folder: Path | None
    fields: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    repeat: int = 0

    @property
    def status(self) -> str:
        return self.fields.get("status", "unknown")

    @property
    def impl(self) -> str:
        return str(self.fields.get("impl") or self.overrides.get("impl") or "unknown")

    @property
    def overrides(self) -> dict[str, str]:
        """Key -> value of the command line, as text."""
        pairs = (str(word).partition("=") for word in self.fields.get("overrides") or [])
        return {key.lstrip("+~"): value.strip("'\"") for key, _, value in pairs}

    @property
    def speed(self) -> dict[str, Any]:
        measured = self.fields.get("throughput") or {}
        numbers = {name: value for name, value in measured.items() if value is None or isinstance(value, int | float)}
        # No step takes no time.
        return {name: value for name, value in numbers.items() if "step_ms" not in name or (value or 0) > 0}

    @property
    def final_loss(self) -> tuple[str, float] | None:
        """What was measured ("validation" or "training") and the value, in nats per token."""
        for kind, name in (("validation", "final_val_loss"), ("training", "final_train_loss")):
            if self.fields.get(name) is not None:
                return kind, float(self.fields[name])
        return None

    @property
    def early_loss(self) -> tuple[int, float] | None:
        """How many first steps, and their mean training loss in nats per token."""
        early = self.fields.get("early_train_loss") or {}
        steps, loss = early.get("steps"), early.get("loss")
        return (steps, float(loss)) if isinstance(steps, int) and isinstance(loss, int | float) else None

    def keys(self) -> list[str]:
        """The keys of its overrides that say what is run."""
        return [key for key in self.overrides if key != "dim" and not key.startswith(_BOOKKEEPING)]

    def value(self, key: str) -> str:
        """The value of a key of the config, or the choice in a config group, as text; "default" if it is not known."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        known = node is not None and not isinstance(node, dict)
        return _text(node if known else self.overrides.get(key, "default"))


def _text(value: Any) -> str:
    """As on the command line, and the same for all ways to write a number."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def load(folders: Sequence[Path]) -> list[Run]:
    """All runs in or below `folders`: runs, sweeps, or whatever holds them. Raises: UserError if one holds none."""
    # The first to name a run is its sweep, which knows its repeats. Jobs that wait have no directory yet.
    runs: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no directory; give directories of runs or sweeps")
        found = [*_sweeps(folder), *_single(folder)]
        if not found:
            raise UserError(f"{folder} holds no run: neither {result.FILE} nor {ledger.FILE} in it or below it")
        for run in found:
            runs.setdefault((run.folder or run.root).resolve() / str(run.fields.get("job", "")), run)
    everything = list(runs.values())
    for run in everything:
        _complete(run, everything)
    return everything


def _complete(run: Run, others: Sequence[Run]) -> None:
    """Gives a run that has no config that of a run of its sweep with the same overrides, but for impl."""
    if run.config and run.fields.get("model"):
        return
    own = {key: value for key, value in run.overrides.items() if key != "impl"}
    for peer in others:
        same = peer.root == run.root and {key: value for key, value in peer.overrides.items() if key != "impl"} == own
        if same and peer.config and peer.fields.get("model"):
            run.config = run.config or peer.config
            run.fields = {name: peer.fields[name] for name in ("model", "dim")} | run.fields
            return


def _sweeps(folder: Path) -> Iterable[Run]:
    for file in sorted(folder.rglob(ledger.FILE)):
        sweep = ledger.Ledger.read(file.parent)
        for job in sweep.jobs:
            start = _printable({"overrides": job.overrides, "status": job.status, "reason": job.reason})
            place = None if job.folder is None else sweep.folder / job.folder
            if place is None or not place.is_dir():
                yield Run(sweep.folder, None, start | {"job": job.index}, {}, job.repeat)
            else:
                run = _read(place, sweep.folder)
                # What the sweep knows of the ending comes after what the process could write.
                known = start if job.ended or not run.fields else {}
                yield Run(sweep.folder, place, run.fields | known, run.config, job.repeat)


def _single(folder: Path) -> Iterable[Run]:
    """Runs outside of sweeps; in one, sweep.json says which attempt of a job counts."""
    sweeps = {file.parent for file in folder.rglob(ledger.FILE)}
    for file in sorted(folder.rglob(result.FILE)):
        if not any(sweep in file.parents for sweep in sweeps):
            run = _read(file.parent, file.parent)
            if not run.fields:
                known = {name: run.config[name] for name in ("impl", "dim", "seed") if name in run.config}
                run.fields = known | {"status": "unknown", "reason": f"its {result.FILE} is empty or damaged"}
            yield run


def _read(folder: Path, root: Path) -> Run:
    try:
        # What is no number in a result.json (NaN, or an integer without end) is as good as nothing.
        text = (folder / result.FILE).read_text(encoding="utf-8")
        fields = json.loads(text, parse_int=_integer, parse_float=_number, parse_constant=lambda word: None)
    except (OSError, ValueError, RecursionError):
        fields = {}
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        config = {}
    fields, config = _printable(fields), _printable(config)
    fields = _sound(fields, _FIELDS)
    for section, types in _WITHIN.items():
        if section in fields:
            fields[section] = _sound(fields[section], types)
    return Run(root, folder, fields, _sound(config, _SECTIONS))


def _printable(content: Any) -> Any:
    """Without what no file and no font takes: bytes of a file's name that are no UTF-8, and control characters."""
    if isinstance(content, dict):
        return {_printable(key): _printable(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_printable(value) for value in content]
    return _UNPRINTABLE.sub(lambda sign: f"\\x{ord(sign[0]):02x}", content) if isinstance(content, str) else content


def _integer(text: str) -> int | None:
    return int(text) if len(text) < 20 else None


def _number(text: str) -> float | None:
    return number if math.isfinite(number := float(text)) else None


# What is looked into, and the types that it has if nobody has edited the file.
_FIELDS: dict[str, tuple[type, ...]] = {
    "status": (str,), "overrides": (list,), "steps": (int,), "final_train_loss": (int, float),
    "final_val_loss": (int, float), "peak_memory_gib": (int, float),
    **dict.fromkeys(("environment", "git", "throughput", "cuda_graph", "trace", "seconds", "data"), (dict,)),
    "early_train_loss": (dict,),
}  # fmt: skip
_WITHIN: dict[str, dict[str, tuple[type, ...]]] = {
    "environment": {"gpu": (str,)}, "git": {"commit": (str,)}, "cuda_graph": {"captured": (bool,)},
    "trace": {"sentence": (str,), **dict.fromkeys(("kinds", "time_by_kind_ms"), (dict,))},
}  # fmt: skip
_SECTIONS: dict[str, tuple[type, ...]] = dict.fromkeys(("model", "data", "trainer"), (dict,))


def _sound(content: Any, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """What a file holds, without what has another type than it should."""
    if not isinstance(content, dict):
        return {}
    return {name: value for name, value in content.items() if isinstance(value, types.get(name, object))}
