"""A small trace out of a large one: some steps with what the analysis reads, which a repository can hold."""

import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import Any

from fusedmlp.errors import UserError
from fusedmlp.profiling import trace
from fusedmlp.profiling.steps import BLOCKING, LAUNCH, STEP

_ARGUMENTS = ("correlation", "stream", "device", "graph node id", "bytes")


def cut(source: Path, target: Path, steps: int) -> int:
    """Writes the first `steps` steps of a trace: kernels, copies, launches, calls that wait, ranges.

    Without GPU activity the operations on the CPU are kept as well. Returns: the number of events written.
    Raises: UserError for a trace that has no steps, or fewer.
    """
    content = trace.load_json(source)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise UserError(f"{source}: JSON, but no Chrome trace: it has no list of traceEvents")
    if target.exists() and target.samefile(source):
        raise UserError(f"{target}: this is the trace that is cut, and would be lost; give another file")
    events = list(trace.complete(events))
    low, high = _span(source, events, steps)
    on_gpu = any(event.get("cat") in trace.ON_GPU for event in events)
    wanted = (trace.RANGE, *trace.CALLS) if on_gpu else (trace.RANGE, trace.OP)
    host = [event for event in events if event["cat"] in wanted and low <= _time(event) < high]
    launched = {_correlation(event) for event in host if event["cat"] in trace.CALLS} - {None}
    device = [event for event in events if event.get("cat") in trace.ON_GPU and _correlation(event) in launched]
    reached = {_correlation(event) for event in device}
    # Of the calls only those that started something, or that wait.
    host = [
        event
        for event in host
        if event["cat"] not in trace.CALLS or _correlation(event) in reached or BLOCKING.match(_name(event))
        or LAUNCH.match(_name(event))
    ]  # fmt: skip
    kept = sorted((_small(event) for event in host + device), key=lambda event: event["ts"])
    if not kept:
        raise UserError(f"{source}: its steps take no time, so nothing can be cut out of it")
    origin = kept[0]["ts"]
    for event in kept:
        event["ts"] = round(event["ts"] - origin, 3)
    gpu = trace.device_of(content)
    _write(target, {"schemaVersion": 1, "deviceProperties": [gpu] if gpu else [], "traceEvents": kept})
    return len(kept)


def _span(source: Path, events: list[Any], steps: int) -> tuple[float, float]:
    """Begin of the first step and end of the last one that is kept, on the CPU."""
    ranges = [event for event in events if event["cat"] == trace.RANGE]
    marked = [event for event in ranges if _name(event) == STEP]
    marked = marked or [event for event in ranges if _name(event).startswith("ProfilerStep")]
    if not 1 <= steps <= len(marked):
        raise UserError(f"{source}: it has {len(marked)} steps, so {steps} cannot be cut out of it")
    marked.sort(key=_time)
    return _time(marked[0]), _time(marked[steps - 1]) + marked[steps - 1]["dur"]


def _time(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _name(event: dict[str, Any]) -> str:
    return str(event.get("name", ""))


def _correlation(event: dict[str, Any]) -> Any:
    return (event.get("args") or {}).get("correlation")


def _small(event: dict[str, Any]) -> dict[str, Any]:
    small = {name: event[name] for name in ("ph", "cat", "name", "pid", "tid", "ts", "dur") if name in event}
    arguments = {name: event["args"][name] for name in _ARGUMENTS if name in (event.get("args") or {})}
    return small | {"args": arguments}


def _write(target: Path, content: dict[str, Any]) -> None:
    partial = target.with_name(f"{target.name}.partial")
    data = json.dumps(content, separators=(",", ":")).encode()
    # No time stamp in the header: the same cut is the same file.
    try:
        partial.write_bytes(gzip.compress(data, 9, mtime=0) if target.name.endswith(".gz") else data)
        os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"{target}: the trace cannot be written: {error.strerror}") from error
