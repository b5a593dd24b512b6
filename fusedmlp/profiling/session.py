"""The profile of one run: the tool that its options name, in its window, and what came of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback

from fusedmlp.errors import UserError
from fusedmlp.profiling import memory, nsight, relaunch, report
from fusedmlp.profiling.memory import MemoryTool
from fusedmlp.profiling.nsight import NsightTool
from fusedmlp.profiling.torch_tool import TorchTool
from fusedmlp.profiling.window import Clock, Tool, Window, check_window

log = logging.getLogger(__name__)

Say = Callable[[str], None]


class Options(Protocol):
    """What the section `profile` of the config gives."""

    @property
    def tool(self) -> str | None: ...
    @property
    def wait(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def active(self) -> int: ...
    @property
    def kernel(self) -> str | None: ...
    @property
    def relaunch(self) -> bool: ...


class Session:
    """Records while it is the active context, if there is something to record with.

    Args:
        folder: the run's directory, which receives the traces.
        steps: optimizer steps that the run will take.
        clock: gives the clock of the run's throughput once the loop runs.
        out_of_memory: tells whether an exception says that memory ran out.
    Attributes:
        callbacks: what the Trainer must call, after the clock and before checkpoints.
        artifacts: files that the run left, for W&B.
    Raises: UserError for a window that does not fit the run, or a tool that cannot record here.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        device: torch.device,
        steps: int,
        clock: Callable[[], Clock],
        out_of_memory: Callable[[BaseException], bool],
    ):
        self.options, self.folder, self._out_of_memory = options, folder, out_of_memory
        self.callbacks: list[Callback] = []
        self.artifacts: list[Path] = []
        self._window: Window | None = None
        self._tool: Tool | None = None
        self._oom_file: Path | None = None
        if options.tool is None:
            return
        check_window(options.wait, options.warmup, options.active, steps)
        self._tool = _make_tool(options, folder, device)
        self._window = Window(self._tool, options.wait, options.warmup, options.active, clock)
        self.callbacks = [self._window]

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._window is None:
            return
        if isinstance(self._tool, MemoryTool) and error is not None and self._out_of_memory(error):
            try:
                self._oom_file = self._tool.died_of_out_of_memory()
            except Exception as failure:
                log.warning("the memory snapshot cannot be written", exc_info=failure)
        self._window.close()
        if isinstance(self._tool, MemoryTool):
            self._tool.close()

    def finish(self, unprofiled_step_ms: float | None, say: Say) -> dict[str, Any] | None:
        """What came of it, for result.json, and in lines for the user; None without a tool.

        Args:
            unprofiled_step_ms: median step of the run, nearly all of whose steps lie outside the window.
        """
        if self._window is None:
            return None
        found: dict[str, Any] = {"tool": self.options.tool, "recorded_steps": self._window.recorded}
        try:
            found |= self._outcome(unprofiled_step_ms, say)
        except Exception as error:
            log.warning("the trace cannot be analysed", exc_info=error)
            found["reason"] = str(error) or type(error).__name__
        if self._window.failure is not None:
            failure = self._window.failure
            found["reason"] = f"the profiler failed: {type(failure).__name__}: {failure}"
        elif not self._window.recorded:
            found["reason"] = "the run ended before the window's first step did"
        if found.get("reason"):
            say(f"profile={self.options.tool}: {found['reason']}")
        return found

    def _outcome(self, unprofiled_step_ms: float | None, say: Say) -> dict[str, Any]:
        if isinstance(self._tool, MemoryTool):
            return self._memory(self._tool, say)
        if not isinstance(self._tool, TorchTool):
            return {"file": relaunch.report_file(self.options.tool, self.folder)}
        if not self._tool.file.exists():
            return {"file": None}
        assert self._window is not None
        if not self._window.recorded:
            # It holds no whole step, and what the end of the run did would pass for one.
            return {"file": self._tool.file}
        analysis = report.analyse_file(self._tool.file, unprofiled_step_ms)
        report.write_kernels(analysis, self.folder / report.KERNELS_FILE)
        self.artifacts = [self._tool.file, self.folder / report.KERNELS_FILE]
        for line in ("", *report.lines(analysis)):
            say(line)
        return {"file": self._tool.file, "kernels_file": self.folder / report.KERNELS_FILE, **report.values(analysis)}

    def _memory(self, tool: MemoryTool, say: Say) -> dict[str, Any]:
        files = [file for file in (self.folder / memory.FILE, self._oom_file) if file is not None and file.exists()]
        self.artifacts = files
        if tool.peaks:
            say("peak memory by phase, GiB: " + ", ".join(f"{name} {gib:.2f}" for name, gib in tool.peaks.items()))
        return {"file": files[-1] if files else None, "peak_gib": tool.peaks}


def _make_tool(options: Options, folder: Path, device: torch.device) -> Tool:
    if options.tool == "ncu" and not options.kernel:
        raise UserError(
            "profile=ncu: profile.kernel is not set; expected a regular expression for the names of the kernels to "
            "measure, which profile=torch lists"
        )
    if options.tool != "torch" and device.type != "cuda":
        raise UserError(f"profile={options.tool} records a GPU, and this run has none; profile=torch records a CPU too")
    if options.tool == "torch":
        if nsight.inside_session():
            raise UserError(
                "profile=torch under Nsight: only one of them can trace CUDA; give profile=nsys "
                "profile.relaunch=false, or start the run without Nsight"
            )
        return TorchTool(folder, options.warmup, options.active, device)
    if options.tool == "memory":
        return MemoryTool(folder)
    if options.relaunch:
        raise UserError(relaunch.why_not(options, folder))
    return NsightTool()
