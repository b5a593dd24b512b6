"""Which configuration a GEMM gets.

By default the rule's: nothing is measured, the first call waits for one compilation, and all ranks agree.
FUSEDMLP_TUNE=1 measures the candidates on a problem's first call (about a second) and keeps the winner in a file for
later processes; FUSEDMLP_TUNE=0 ignores that file. A process of a distributed job only reads it, and nothing is
measured while a CUDA graph is being captured.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from fusedmlp.cache import cache_dir
from fusedmlp.kernels import configs
from fusedmlp.kernels.configs import GemmConfig, Problem

# What `using` asks for.
forced: GemmConfig | None = None


def choose(problem: Problem, run: Callable[[GemmConfig], Callable[[], None]]) -> GemmConfig:
    """The configuration for a problem.

    Args:
        run: gives a function that launches the kernel with a configuration; called only where something is measured.
    """
    if forced is not None:
        return forced
    tune = os.environ.get("FUSEDMLP_TUNE")
    if problem.device < 0 or tune == "0":
        return configs.by_rule(problem)
    key = _key(problem)
    known = _measured().get(key)
    if known is not None and known in configs.candidates(problem):
        return known
    if tune != "1" or torch.cuda.is_current_stream_capturing() or _is_distributed():
        return configs.by_rule(problem)
    fastest = min(configs.candidates(problem), key=lambda config: _time(run(config)))
    _remember(key, fastest)
    return fastest


@contextmanager
def using(config: GemmConfig) -> Iterator[None]:
    """Within this context every GEMM runs with `config`: for measurements and tests."""
    global forced
    before, forced = forced, config
    try:
        yield
    finally:
        forced = before


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _key(problem: Problem) -> str:
    bucket = 1 << max(problem.M - 1, 0).bit_length()
    parts = ("dgelu" if problem.backward else "fwd", f"M{bucket}", f"N{problem.N}", f"K{problem.K}")
    rest = (str(problem.dtype), problem.precision, "tma" if problem.use_tma else "pointers", problem.flags)
    return " ".join((*parts, *rest, f"triton{configs.TRITON}", configs.card(problem.device)[3]))


def _time(function: Callable[[], None]) -> float:
    """Median time of a call in ms, after the first, which compiles."""
    for _ in range(3):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in zip(events[::2], events[1::2], strict=True))


def cache_file() -> Path:
    """Where measured choices are kept."""
    return cache_dir() / "gemm-configs.json"


_measured_cache: dict[str, GemmConfig] | None = None


def _measured() -> dict[str, GemmConfig]:
    """The choices in the file, read once a process; an unreadable file counts as empty."""
    global _measured_cache
    if _measured_cache is None:
        _measured_cache = _read()
    return _measured_cache


def _read() -> dict[str, GemmConfig]:
    try:
        entries = json.loads(cache_file().read_text())
        return {key: GemmConfig(**entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, config: GemmConfig) -> None:
    _measured()[key] = config
    # Where the file cannot be written, later processes measure again.
    with suppress(OSError):
        _write(key, config)


def _write(key: str, config: GemmConfig) -> None:
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another process may have added to the file; replacing it whole leaves no half-written one behind.
    entries = {name: asdict(known) for name, known in {**_read(), key: config}.items()}
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
        json.dump(entries, temporary, indent=1)
    os.replace(temporary.name, file)
