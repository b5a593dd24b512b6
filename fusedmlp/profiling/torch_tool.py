"""profile=torch: torch.profiler over the window, as a gzipped Chrome trace."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fusedmlp.profiling.ranges import Marker
from fusedmlp.profiling.trace import FILE


class TorchTool:
    """Records CPU and GPU.

    Args:
        folder: receives trace.json.gz.
        warmup, active: steps that the profiler runs without keeping anything, and that it keeps.
    """

    def __init__(self, folder: Path, warmup: int, active: int, device: torch.device):
        self.marker: Marker | None = record_function
        self.file = folder / FILE
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._schedule = schedule(wait=0, warmup=warmup, active=active, repeat=1)
        self._profile: profile | None = None

    def warm_up(self) -> None:
        # Made here and dropped in `stop`, so that outside the window nothing of it is left. Without acc_events some
        # versions warn that a second cycle would forget the first; there is one.
        made = profile(
            activities=self._activities, schedule=self._schedule, on_trace_ready=self._write, acc_events=True
        )
        made.start()
        # Kept only once it has started: one that has not takes the process down when it is stopped.
        self._profile = made

    def record(self) -> None:
        """The schedule counts the steps itself."""

    def step(self) -> None:
        assert self._profile is not None
        try:
            self._profile.step()
        except BaseException:
            # In which state it is now is not known.
            self._profile = None
            raise

    def stop(self) -> None:
        """Ends the profile; a window that was cut short is written as far as it came."""
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()

    def _write(self, recorded: Any) -> None:
        partial = self.file.with_name(f"partial-{self.file.name}")
        try:
            recorded.export_chrome_trace(str(partial))
            os.replace(partial, self.file)
        finally:
            partial.unlink(missing_ok=True)
