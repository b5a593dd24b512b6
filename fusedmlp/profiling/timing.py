"""Time GPU functions side by side, and write down what was measured on what.

A single time means little: cards differ and their clocks drift. So candidates alternate in one run, next to a copy that
gives the card's bandwidth in the same minute, and what counts is a ratio inside one run.
"""

import functools
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Quantiles of one function's time, in ms."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> "Timing":
        if len(times_ms) == 1:
            return cls(*(times_ms[0],) * 3)
        tenths = statistics.quantiles(times_ms, n=10, method="inclusive")
        return cls(tenths[1], tenths[4], tenths[7])


def time_side_by_side(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 3, warmup_ms: int = 10, rep_ms: int = 30
) -> dict[str, Timing]:
    """Time each function in `rounds` turns, all of them in every turn, with a cold L2 cache before each call.

    Args:
        functions: name -> function without arguments; it runs on the current GPU.
        rounds: turns.  warmup_ms, rep_ms: GPU time of each function in each turn, before and while it is measured.
    Returns: name -> Timing over all turns.
    """
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name] += do_bench(function, warmup=warmup_ms, rep=rep_ms, return_mode="all")
    return {name: Timing.of(values) for name, values in times.items()}


def captured(function: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> Callable[[], Any]:
    """A function that replays one call of `function` from a CUDA graph.

    What it takes is the time of the kernels: the host's time for launching them one by one, which can be longer where
    they are short, is left out. The replay writes the tensors that the captured call has made.

    Args:
        function: allocates through PyTorch, reads nothing back; it is called three times before it is captured.
        stream: that of the capture; one on which a graph of autograd was built that `function` runs backward.
    """
    stream = torch.cuda.Stream() if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = function()
    return functools.partial(_replay, graph, results, function)


def _replay(graph: torch.cuda.CUDAGraph, results: Any, _function: Callable[[], Any]) -> Any:
    """Replay; the results live in the graph's memory, and what the function holds on to is what the graph reads."""
    graph.replay()
    return results


def copy_bytes_per_ms(num_bytes: int = 1 << 30) -> float:
    """Bytes read plus bytes written per ms by a copy of `num_bytes` on the current GPU: the limit of a kernel that only
    moves data."""
    source = torch.randn(num_bytes // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / time_side_by_side({"copy": lambda: target.copy_(source)})["copy"].p50


def peak_bytes(function: Callable[[], Any]) -> int:
    """Largest GPU memory that one call allocates on top of what is allocated before it, in bytes."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def environment() -> dict[str, Any]:
    """What a measurement depends on: GPU, driver, versions, commit."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    commit = _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit,
        "uncommitted changes": None if commit is None else bool(changes),
        "command": " ".join((_relative(sys.argv[0]), *sys.argv[1:])),
    }


def _relative(path: str) -> str:
    """A path below the current directory without the latter."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def _output(*command: str) -> str | None:
    """Standard output of a command, None where it is missing or fails."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a Markdown table; numbers to three digits."""
    if not rows:
        return ""
    keys = list(rows[0])
    lines = [keys, ["---"] * len(keys), *([_cell(row[key]) for key in keys] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_record(
    folder: Path, name: str, tables: Mapping[str, Sequence[Mapping[str, Any]]], details: Mapping[str, Any]
) -> None:
    """Write `name`.json (environment, details, tables) and `name`.md (the same for people) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {**environment(), **details}
    record = {"environment": header, "tables": tables}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    parts = [f"# {name}", *(f"## {title}\n\n{markdown_table(rows)}" for title, rows in tables.items())]
    facts = "\n".join(f"- {key}: {_cell(value)}" for key, value in header.items())
    (folder / f"{name}.md").write_text("\n\n".join([*parts, "## Measured on", facts]) + "\n")
