"""A Chrome trace of torch.profiler as columns: what ran on the GPU, what the CPU asked for, and the ranges around it.

The format is Kineto's (libkineto/src/output_json.cpp): events of phase "X" with a category, times in microseconds, and
a `correlation` that a GPU activity shares with the call that launched it.
"""

import gc
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusedmlp.errors import UserError
from fusedmlp.profiling.kinds import launched_early

FILE = "trace.json.gz"
KERNEL, MEMCPY, MEMSET = "kernel", "gpu_memcpy", "gpu_memset"
ON_GPU = (KERNEL, MEMCPY, MEMSET)
CALLS = ("cuda_runtime", "cuda_driver")
RANGE, OP = "user_annotation", "cpu_op"
# What tells threads, streams and devices apart, and what joins a call with its kernel.
_PLACES, _ARGUMENTS = ("pid", "tid"), ("stream", "device", "correlation")
_LATEST = 1e18  # us

_OTHERS = {
    ".nsys-rep": "a report of Nsight Systems: open it with nsys-ui, or print it with nsys stats",
    ".qdstrm": "a raw recording of Nsight Systems, which its QdstrmImporter makes a .nsys-rep of",
    ".ncu-rep": "a report of Nsight Compute: open it with ncu-ui, or print it with ncu --import",
    ".pickle": "a memory snapshot: open it at https://pytorch.org/memory_viz",
}


@dataclass
class Events:
    """Events of one sort in the order of their start; times in us, -1 for a thread, stream or correlation not given."""

    names: list[str] = field(default_factory=list)
    start: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    duration: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    lane: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # thread or stream
    correlation: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    categories: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def end(self) -> NDArray[np.float64]:
        return self.start + self.duration

    def __getitem__(self, chosen: NDArray[Any]) -> "Events":
        """The events at these positions, or where a mask is true."""
        where = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        return Events(
            [self.names[i] for i in where], self.start[where], self.duration[where], self.lane[where],
            self.correlation[where], [self.categories[i] for i in where],
        )  # fmt: skip


@dataclass
class Trace:
    """One process and one GPU.

    Attributes:
        gpu: kernels, copies and memsets, see `in_turn`.  calls: of the CUDA runtime and driver.
        ranges: record_function.  ops: of ATen on the CPU.
        device: name of the GPU, None if the trace does not tell.
    """

    gpu: Events
    calls: Events
    ranges: Events
    ops: Events
    device: str | None = None


def read(path: Path) -> Trace:
    """Reads a trace, plain or gzipped.

    Raises: UserError for a file that is missing, truncated, of another kind or without events.
    """
    content = _parsed(path)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise UserError(f"{path}: JSON, but no Chrome trace: it has no list of traceEvents")
    trace = from_events(events)
    trace.device = device_of(content).get("name")
    if not len(trace.gpu) + len(trace.ops) + len(trace.ranges) + len(trace.calls):
        raise UserError(f"{path}: this trace is empty: no step was recorded, or it was not written by torch.profiler")
    return trace


def load_json(path: Path) -> Any:
    """The content of a JSON file, plain or gzipped. Raises: UserError if it cannot be read or is damaged."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: truncated or damaged: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    # Millions of objects that stay: the collector would look at all of them again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        begins = data.lstrip()[:1] in (b"{", b"[")
        what = "truncated or damaged" if begins else "not a Chrome trace"
        raise UserError(f"{path}: {what}: {str(error) if begins else 'no JSON'}") from error
    finally:
        if collecting:
            gc.enable()


def _parsed(path: Path) -> Any:
    for suffix, what in _OTHERS.items():
        if path.name.endswith(suffix):
            raise UserError(f"{path}: {what}; what is read here is the {FILE} of profile=torch")
    return load_json(path)


def from_events(events: Iterable[Any]) -> Trace:
    """The columns of trace events; what is not complete (phase X, with a time) is left out."""
    rows: dict[str, list[tuple[Any, ...]]] = {"gpu": [], "calls": [], "ranges": [], "ops": []}
    place: dict[Any, list[tuple[Any, ...]]] = dict.fromkeys(ON_GPU, rows["gpu"]) | dict.fromkeys(CALLS, rows["calls"])
    place |= {RANGE: rows["ranges"], OP: rows["ops"]}
    devices: dict[Any, int] = {}
    for event in complete(events):
        category, start, duration = event["cat"], event["ts"], event["dur"]
        target = place.get(category)
        if target is None:
            continue
        arguments = event.get("args") or {}
        correlation, lane, device = arguments.get("correlation", -1), event.get("tid"), event.get("pid")
        if target is rows["gpu"]:
            lane, device = arguments.get("stream", lane), arguments.get("device", device)
            devices[device] = devices.get(device, 0) + 1
        target.append((float(start), float(duration), event.get("name", ""), lane, correlation, category, device))
    # A process that drives several GPUs is looked at on the one that does most.
    busiest = max(devices, key=lambda device: devices[device], default=None)
    rows["gpu"] = [row for row in rows["gpu"] if row[6] == busiest]
    origin = min((row[0] for group in rows.values() for row in group), default=0.0)
    gpu, calls, ranges, ops = (_columns(rows[name], origin) for name in ("gpu", "calls", "ranges", "ops"))
    return Trace(in_turn(gpu), calls, ranges, ops)


def in_turn(gpu: Events) -> Events:
    """The same with the kernels that are launched early (`kinds.launched_early`) from where the activity before them on
    their stream has ended: until then they are on the GPU and wait."""
    activities = zip(gpu.names, gpu.categories, strict=True)
    early = np.array([category == KERNEL and launched_early(name) for name, category in activities], bool)
    if not early.any():
        return gpu
    start = gpu.start.copy()
    for lane in np.unique(gpu.lane[early]):
        places = np.flatnonzero(gpu.lane == lane)
        ended = np.maximum.accumulate(gpu.end[places])
        start[places[1:]] = np.where(early[places[1:]], np.maximum(start[places[1:]], ended[:-1]), start[places[1:]])
    order = np.argsort(start, kind="stable")
    turns = gpu[order]
    turns.start, turns.duration = start[order], np.maximum(gpu.end - start, 0.0)[order]
    return turns


def complete(events: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The events of phase X that have a category, a begin and a duration. Other tools write what they like."""
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("cat"), str):
            continue
        arguments = event.get("args") or {}
        if _is_time(event.get("ts")) and _is_time(event.get("dur")) and isinstance(arguments, dict):
            sound = all(_is_number_or_name(event.get(name)) for name in _PLACES)
            sound = sound and all(_is_number_or_name(arguments.get(name)) for name in _ARGUMENTS)
            yield event if sound else _without_odd(event, arguments)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _LATEST


def _is_number_or_name(value: Any) -> bool:
    """Whether it can be a key, and an integer column can hold it. Others number threads with what they like."""
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 2**63)


def _without_odd(event: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in event.items() if name not in _PLACES or _is_number_or_name(value)}
    known = {name: value for name, value in arguments.items() if name not in _ARGUMENTS or _is_number_or_name(value)}
    return kept | {"args": known}


def _columns(rows: list[tuple[Any, ...]], origin: float) -> Events:
    # Of events that start together the longer one first, because it holds the other.
    rows.sort(key=lambda row: (row[0], -row[1]))
    return Events(
        [str(row[2]) for row in rows],
        np.array([row[0] - origin for row in rows], np.float64),
        np.array([max(row[1], 0.0) for row in rows], np.float64),
        np.array([row[3] if isinstance(row[3], int) else -1 for row in rows], np.int64),
        np.array([row[4] if isinstance(row[4], int) else -1 for row in rows], np.int64),
        [row[5] for row in rows],
    )


def device_of(content: Any) -> dict[str, Any]:
    """What the content of a trace says of the GPU: `id` and `name`, as far as they are there."""
    devices = content.get("deviceProperties") if isinstance(content, dict) else None
    first = devices[0] if isinstance(devices, list) and devices else None
    known = first if isinstance(first, dict) else {}
    return {name: known[name] for name, kind in (("id", int), ("name", str)) if isinstance(known.get(name), kind)}


def find(path: Path) -> Path:
    """The trace that `path` means: a file, or a run's directory. Raises: UserError if there is none."""
    if path.is_dir():
        if (path / FILE).is_file():
            return path / FILE
        found = sorted(path.glob("*.json.gz"))
        if len(found) == 1:
            return found[0]
        raise UserError(f"{path}: this directory holds no {FILE}; profile=torch writes one into the run's directory")
    if not path.is_file():
        raise UserError(f"{path}: no such file or directory; give a trace or a run's directory")
    return path
