"""Compile every kernel that `calls.py` launches, side by side in processes, into Triton's cache on disk."""

import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

from fusedmlp.kernels import configs
from fusedmlp.kernels.ahead.calls import DTYPES, specialisations
from fusedmlp.kernels.ahead.specialisation import Specialisation, build
from fusedmlp.kernels.ahead.workers import in_processes

PROGRESS_S = 5.0
# Where more than these fail, it is for one reason.
MOST_LINES = 20
# A process holds a context of about half a GB on the GPU, and as much in the host's memory.
MOST_PROCESSES, GPU_BYTES = 32, 2**30


@dataclass
class Report:
    """What was done.

    Attributes:
        folder: Triton's cache.  kernels: how many are wanted.
        found, compiled: how many of them were there already, and how many were compiled just now.
        failures: a line for each that could not be.  seconds: all in all.
    """

    folder: Path
    kernels: int = 0
    found: int = 0
    compiled: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.failures:
            there = self.found + self.compiled
            return f"{there} of {self.kernels} Triton kernels are in {self.folder}, {self.kernels - there} are not"
        if not self.compiled:
            return f"all {self.kernels} Triton kernels are in {self.folder} already"
        return f"compiled {self.compiled} Triton kernels in {self.seconds:.0f} s, {self.kernels} are in {self.folder}"


def compile_ahead(
    say: Callable[[str], None], dtypes: Sequence[str] = tuple(DTYPES), processes: int | None = None
) -> Report:
    """Compile for each kind of GPU here.

    Args:
        say: gets a line of progress every few seconds, and one for each kernel that cannot be compiled.
        dtypes: of DTYPES.  processes: at once; default: as many as there are cores for this process.
    """
    began = time.perf_counter()
    report = Report(Path(triton.knobs.cache.dir))
    devices = {configs.card(device): device for device in reversed(range(torch.cuda.device_count()))}
    for device in sorted(devices.values()):
        _compile_for(device, dtypes, processes, say, report)
    report.seconds = time.perf_counter() - began
    return report


def _compile_for(
    device: int, dtypes: Sequence[str], processes: int | None, say: Callable[[str], None], report: Report
) -> None:
    wanted = specialisations(device, dtypes)
    record = Record(device, report.folder)
    missing = [item for item in wanted if item not in record]
    report.kernels += len(wanted)
    report.found += len(wanted) - len(missing)
    if not missing:
        return
    processes = min(processes or _processes(device), len(missing))
    name, processes_word = configs.card(device)[3], "process" if processes == 1 else "processes"
    say(f"compiling {len(missing)} of {len(wanted)} Triton kernels for {name} in {processes} {processes_word} ...")
    progress = _Progress(len(missing), say)
    try:
        for outcome in in_processes(build, missing, processes, prepare=_on_gpu, arguments=(device,)):
            if outcome.item is None:
                progress.failed(f"a process to compile in could not start: {outcome.failure}")
                continue
            progress.one_more()
            if outcome.failure is None:
                report.compiled += 1
                record.add(outcome.item)
            else:
                report.failures.append(f"could not compile {outcome.item}: {outcome.failure}")
                progress.failed(report.failures[-1])
    finally:
        record.write()
    if left := len(missing) - progress.ended:
        report.failures += [f"{left} Triton kernels were not compiled: no process was left to compile in"]
        say(report.failures[-1])


class _Progress:
    """Tells of items that ended every few seconds, and of the first failures that differ."""

    def __init__(self, total: int, say: Callable[[str], None]):
        self.total, self.say, self.ended = total, say, 0
        self.began = self.told = time.perf_counter()
        self.failures: set[str] = set()

    def one_more(self) -> None:
        self.ended += 1
        now = time.perf_counter()
        if now - self.told >= PROGRESS_S:
            self.told = now
            self.say(f"{self.ended} of {self.total} Triton kernels, {now - self.began:.0f} s")

    def failed(self, line: str) -> None:
        if line not in self.failures and len(self.failures) < MOST_LINES:
            self.say(line)
            self.failures.add(line)


def _on_gpu(device: int) -> None:
    """Make a GPU the process's own, with a context, which Triton expects."""
    torch.cuda.set_device(device)
    torch.empty(1, device="cuda")


def _processes(device: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(cores, MOST_PROCESSES, free // GPU_BYTES))


class Record:
    """Which kernels have been compiled for a GPU into Triton's cache: a file in it, so that both go together."""

    def __init__(self, device: int, folder: Path):
        self.path = folder / f"fusedmlp-ahead-{_digest(_conditions(device))}.json"
        self._known: set[str] = set()
        with suppress(OSError, ValueError, TypeError):
            self._known = set(json.loads(self.path.read_text()))

    def __contains__(self, item: Specialisation) -> bool:
        return _digest(repr(item)) in self._known

    def add(self, item: Specialisation) -> None:
        self._known.add(_digest(repr(item)))

    def write(self) -> None:
        """Where it cannot be written, the next time asks Triton's cache about each kernel."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as temporary:
                json.dump(sorted(self._known), temporary)
            os.replace(temporary.name, self.path)


def _conditions(device: int) -> str:
    """What else a compiled kernel depends on: versions, card, sources, and the settings that compilers read."""
    versions = (triton.__version__, sys.version_info[:3], platform.machine(), configs.card(device)[0])
    elsewhere = ("TRITON_CACHE_DIR", "TRITON_HOME")
    prefixes = ("TRITON_", "LLVM_", "MLIR_", "DISABLE_")
    settings = [f"{k}={v}" for k, v in os.environ.items() if k.startswith(prefixes) and k not in elsewhere]
    sources = [path.read_text() for path in sorted(Path(__file__).parents[1].rglob("*.py"))]
    return "\n".join([str(versions), *sorted(settings), *sources])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
