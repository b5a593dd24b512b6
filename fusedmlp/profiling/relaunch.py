"""profile=nsys and profile=ncu run this program a second time, as the child of Nsight, and wait for it."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from fusedmlp.profiling import nsight
from fusedmlp.signals import stop_signals

RESULT = "result.json"
_REPORTS = {"nsys": ("trace", ".nsys-rep"), "ncu": ("kernels", ".ncu-rep")}
_PRODUCTS = {"nsys": "NVIDIA Nsight Systems", "ncu": "NVIDIA Nsight Compute"}
# The run that Nsight's child is.
INSIDE = "profile.relaunch=false"


class Options(Protocol):
    """What is needed of the section `profile`."""

    @property
    def tool(self) -> str | None: ...
    @property
    def relaunch(self) -> bool: ...


def report_file(tool: str | None, folder: Path) -> Path:
    """Where the report of nsys or ncu is written."""
    name, ending = _REPORTS[str(tool)]
    return folder / f"{name}{ending}"


def command(profile: Any, folder: Path, executable: str) -> list[str]:
    """This program's command line again, under nsys or ncu, with its run in `folder`."""
    arguments = [word for word in sys.argv[1:] if not word.startswith(("hydra.run.dir=", "profile.relaunch="))]
    program = [sys.executable, sys.argv[0], *arguments, INSIDE, f"hydra.run.dir={_quoted(folder)}"]
    report = folder / _REPORTS[profile.tool][0]
    if profile.tool == "nsys":
        return nsight.nsys_command(executable, report, program)
    return nsight.ncu_command(executable, report, str(profile.kernel), profile.launches, program)


def _quoted(folder: Path) -> str:
    """A path as the value of an override, in quotes where Hydra's grammar needs them."""
    if re.fullmatch(r"[\w./-]+", str(folder)):
        return str(folder)
    escaped = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def why_not(profile: Any, folder: Path) -> str:
    """Why a run that asks for nsys or ncu is not running under it, and what to do."""
    if nsight.find(profile.tool) is not None:
        return f"profile={profile.tool} starts every run in a process of its own: choose hydra/launcher=isolated"
    line = shlex.join(command(profile, folder, profile.tool))
    return (
        f"profile={profile.tool}: {profile.tool} is not on PATH, in CUDA's folder or in those of Nsight; install "
        f"{_PRODUCTS[profile.tool]}, or run where it is: {line}"
    )


def relaunch(profile: Any, folder: Path, environment: Mapping[str, str]) -> int | None:
    """Runs this program under Nsight and returns the exit code; None if this process itself is to run.

    Args:
        profile: the section of the config; with another tool, or with `relaunch` false, nothing is done.
        folder: the directory that the run would have.
        environment: set for the child besides that of this process.
    """
    if profile.tool not in _REPORTS or not profile.relaunch:
        return None
    if profile.tool == "ncu" and not profile.kernel:
        return None  # the run says what is missing
    executable = nsight.find(profile.tool)
    if executable is None:
        return None
    folder = _free(folder)
    words = command(profile, folder, executable)
    print(f"{profile.tool}: {shlex.join(words)}", flush=True)
    code = _run(words, {**os.environ, **environment})
    report = report_file(profile.tool, folder)
    if report.exists():
        print(f"\n{profile.tool} report  {report}\n  {_how_to_open(profile.tool, executable, report)}", flush=True)
        return code
    raw = report.with_suffix(".qdstrm")
    left = f"only {raw}, which QdstrmImporter of a whole Nsight Systems turns into a report" if raw.exists() else "none"
    print(f"error: {profile.tool} should have written {report} and left {left}", file=sys.stderr, flush=True)
    return code or 1


def _free(folder: Path) -> Path:
    """`folder`, or `folder`-2 and so on after other runs: what the run itself would choose."""
    number, candidate = 1, folder
    while (candidate / RESULT).exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    candidate.mkdir(parents=True, exist_ok=True)
    return candidate


def _how_to_open(tool: str, executable: str, report: Path) -> str:
    if tool == "nsys":
        return f"nsys-ui {report}   or   {shlex.join([executable, 'stats', str(report)])}"
    return f"ncu-ui {report}   or   {shlex.join([executable, '--import', str(report)])}"


def _run(words: list[str], environment: Mapping[str, str]) -> int:
    """Exit code of a command, as a shell has it; signals to this process are handed to it."""
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def hand_on(signum: int, frame: FrameType | None) -> None:
        # A terminal sends Ctrl-C to all of its foreground processes, the child included.
        if signum == signal.SIGINT and _in_terminal():
            return
        if process is None:
            early.append(signum)
        else:
            process.send_signal(signum)

    previous = {number: signal.signal(number, hand_on) for number in stop_signals()}
    try:
        process = subprocess.Popen(words, env=dict(environment))
        for signum in early:
            process.send_signal(signum)
        code = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _in_terminal() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
