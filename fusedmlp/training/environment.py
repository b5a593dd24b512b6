"""Where a run happened: versions, hardware, commit, and how long the process had been up."""

import functools
import os
import platform
import re
import subprocess
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and hardware as plain values; what does not apply is None."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "lightning": _version("lightning"),
        "cuda": torch.version.cuda,
        "driver": _nvidia_driver() if cuda else None,
        "device": device.type,
        "gpu": properties.name if properties else None,
        "gpu_multiprocessors": properties.multi_processor_count if properties else None,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1) if properties else None,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Commit of the checkout that `folder` is in and whether tracked files differ from it; None outside a checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else None
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def process_age_s() -> float | None:
    """Seconds since this process was started, so interpreter and imports included; None where the system hides it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, ValueError, IndexError):
        return None


# Seconds that this process was held back after its imports, in a sweep.
held_s = 0.0


@functools.cache
def import_s() -> float | None:
    """Seconds from the start of the process to its first run: interpreter, imports, command line."""
    age = process_age_s()
    return None if age is None else age - held_s


def peak_memory_gib(device: torch.device) -> float | None:
    """Peak of the memory allocated on the GPU; on a CPU the peak resident size of the process."""
    if device.type == "cuda":
        # What max_memory_allocated reads, without the other hundred numbers that it sorts for it.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return stats["allocated_bytes"]["all"]["peak"] / 2**30 if stats else 0.0
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def reset_peak_memory(device: torch.device) -> None:
    """Begins `peak_memory_gib` anew, where the system lets a process do that: a run before had its own peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # proc(5): 5 resets the peak resident size.
        Path("/proc/self/clear_refs").write_text("5")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> str | None:
    try:
        return driver_version(Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None


def driver_version(text: str) -> str | None:
    """The driver's version in what the kernel module says of itself: "580.159.04", after the architecture x86_64."""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match.group(1) if match else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
