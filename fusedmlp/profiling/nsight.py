"""profile=nsys and profile=ncu: the window marked for Nsight, and the command that runs this program under it."""

import glob
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fusedmlp.profiling.ranges import Marker

# Set in the environment of what nsys runs; by hand too.
SESSION = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")

_FOLDERS = (
    "/usr/local/cuda*/bin",
    "/opt/nvidia/nsight-systems*/*/bin",
    "/opt/nvidia/nsight-systems*/*/target-linux-*",
    "/opt/nvidia/nsight-compute*/*",
    "/opt/nvidia/nsight-compute*/*/host/target-linux-*",
    "/usr/local/cuda*/nsight-systems*/bin",
    "/usr/local/cuda*/nsight-systems*/target-linux-*",
    "/usr/local/cuda*/nsight-compute*",
    "/usr/local/cuda*/nsight-compute*/host/target-linux-*",
    "/usr/lib/nsight-systems/bin",
)


class NsightTool:
    """Marks the window for a profiler outside the process, which records between cudaProfilerStart and -Stop."""

    def __init__(self) -> None:
        self.marker: Marker | None = torch.cuda.nvtx.range
        self._recording = False

    def warm_up(self) -> None:
        """The ranges are installed; nothing is recorded yet."""

    def record(self) -> None:
        # What was launched before belongs to no step of the window.
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        self._recording = True

    def step(self) -> None:
        pass

    def stop(self) -> None:
        if self._recording:
            self._recording = False
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def find(tool: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The path of `nsys` or `ncu`: on PATH, in CUDA's folder, or in those of Nsight Systems and Nsight Compute."""
    on_path = shutil.which(tool, path=environment.get("PATH"))
    if on_path is not None:
        return on_path
    return next(
        (path for path in _candidates(tool, environment) if os.access(path, os.X_OK) and Path(path).is_file()), None
    )


def _candidates(tool: str, environment: Mapping[str, str]) -> Iterator[str]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(variable):
            yield os.path.join(environment[variable], "bin", tool)
    for pattern in _FOLDERS:
        # The newest version last in the alphabet, so first here.
        yield from sorted(glob.glob(os.path.join(pattern, tool)), reverse=True)


def nsys_command(nsys: str, report: Path, program: Sequence[str]) -> list[str]:
    """Records CUDA and NVTX in the window; `report` is named without its ending.

    CPU sampling needs rights that containers do not give; the kernels of a CUDA graph show one by one.
    """
    return [
        nsys, "profile", "-c", "cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx", "--sample=none",
        "--cpuctxsw=none", "--cuda-graph-trace=node", "-o", str(report), *program,
    ]  # fmt: skip


def ncu_command(ncu: str, report: Path, kernel: str, launches: int, program: Sequence[str]) -> list[str]:
    """Measures the first launches in the window of the kernels whose name the regular expression `kernel` finds."""
    return [
        ncu, "--profile-from-start", "off", "--target-processes", "application-only", "--graph-profiling", "node",
        "--kernel-name", f"regex:{kernel}", "--launch-count", str(launches), "--set", "full", "--export", str(report),
        *program,
    ]  # fmt: skip


def inside_session(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process runs under Nsight, or something else that wants to trace CUDA."""
    return any(environment.get(name) for name in SESSION)
