"""Time the implementations of one call in turns, behind a check against the oracle."""

import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from fusedmlp.auto import sample
from fusedmlp.auto.call import Call
from fusedmlp.auto.table import Entry

BUDGET_S = 0.4
ROUNDS = 4
RIVALS = 0.1  # after each round those stay that are slower by less than this share
LONG_MS = 1.0
CALLS = (3, 40)  # per implementation and round, at least and at most

Result = TypeVar("Result")


class Clock(Protocol):
    """Times `count` calls of a function one by one, in ms."""

    def __call__(self, function: Callable[[], Any], count: int) -> list[float]: ...


class CudaClock:
    """Times by CUDA events, with a cold L2 cache before each call, as between the layers of a network."""

    def __init__(self, device: torch.device):
        self.device = device
        size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, 1 << 28)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def __call__(self, function: Callable[[], Any], count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events]


class HostClock:
    """Times by the host's clock."""

    def __init__(self, device: torch.device):
        pass

    def __call__(self, function: Callable[[], Any], count: int) -> list[float]:
        marks = [time.perf_counter()]
        for _ in range(count):
            function()
            marks.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in itertools.pairwise(marks)]


def measure(call: Call, names: list[str]) -> tuple[Entry, Entry | None]:
    """Times of the implementations that agree with the oracle, and why the others were left.

    Returns: as launched call by call, and as replayed from a CUDA graph, where the host's time does not count; None if
        that makes no difference.
    Raises: torch.OutOfMemoryError where the sample does not fit beside what is there already.
    """
    return _in_a_thread_of_its_own(lambda: _measure(call, names), call.x.device)


def _measure(call: Call, names: list[str]) -> tuple[Entry, Entry | None]:
    device = call.x.device
    with torch.set_grad_enabled(any(call.needs)):
        case = sample.like(call)
        oracle = sample.Oracle(case)
        left: dict[str, str] = {}
        functions: dict[str, Callable[[], Any]] = {}
        for name in names:
            reason = None if name == "native" else _tried(oracle.disagreement, name)
            if reason is None:
                functions[name] = functools.partial(case.run, name, case.dy)
            else:
                left[name] = reason
        del oracle
        clock = CudaClock(device) if call.x.is_cuda else HostClock(device)
        launched = Entry(in_turns(functions, clock), left)
        # Where the GPU takes longer than any launch, replaying changes nothing.
        if not call.x.is_cuda or min(launched.ms.values()) > LONG_MS:
            return launched, None
        return launched, _replayed(functions, left, clock, device)


def _replayed(
    functions: dict[str, Callable[[], Any]], left: dict[str, str], clock: Clock, device: torch.device
) -> Entry:
    graphs: dict[str, Callable[[], Any]] = {}
    left = dict(left)
    for name, function in functions.items():
        try:
            graphs[name] = _replay(function, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            left[name] = _in_words(error)
    return Entry(in_turns(graphs, clock), left) if graphs else Entry({"native": 0.0}, left)


def _tried(check: Callable[[str], str | None], name: str) -> str | None:
    """What the check says of an implementation: whatever a kernel or a compiler raises costs that one only."""
    try:
        return check(name)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return _in_words(error)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all measurements: cuBLAS keeps a workspace for every stream that it has seen.
    return torch.cuda.Stream(device)


def _replay(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Replays what `function` launches, from a CUDA graph."""
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Libraries allocate their workspaces, and kernels are compiled, at the first calls on a stream.
        for _ in range(2):
            function()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            function()
        finally:
            graph.capture_end()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay


def in_turns(functions: dict[str, Callable[[], Any]], clock: Clock) -> dict[str, float]:
    """Median ms of each function. They take turns, so that a clock that drifts favours none.

    In each turn a function runs alone for a while, and the first half of it does not count: a GPU at its power limit
    needs tens of ms to settle on the clock that goes with it. The order turns round after every round, so that none
    always follows the same other. One that is far behind has its time after one round, and the rivals share what is
    left: those are the ones that have to be told apart, by a few percent.
    """
    first = {name: clock(function, 1)[0] for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    rivals = list(functions)
    for _ in range(ROUNDS):
        slice_ms = 1e3 * BUDGET_S / ROUNDS / max(len(rivals), 1)
        for name in rivals:
            count = min(max(int(slice_ms / max(first[name], 1e-3)), CALLS[0]), CALLS[1])
            times[name] += clock(functions[name], count)[count // 2 :]
        found = {name: statistics.median(times[name]) for name in rivals}
        limit = (1 + RIVALS) * min(found.values(), default=0.0)
        rivals = [name for name in reversed(rivals) if found[name] <= limit]
        if len(rivals) < 2:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def _in_a_thread_of_its_own(function: Callable[[], Result], device: torch.device) -> Result:
    """Runs `function` where no mode of the caller reaches.

    Autocast, no_grad, dispatch and function modes, hooks on saved tensors (activation checkpointing), the current
    stream and device all belong to the thread. What belongs to the process, the sync debug mode and the statistics of
    memory, is put back.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.cuda.synchronize(device)
            outcome.append(function())
        except BaseException as error:
            # Its frames hold the sample's memory.
            failure.append(error.with_traceback(None))

    before = _global_state(device)
    thread = threading.Thread(target=work, name="fusedmlp.auto")
    thread.start()
    thread.join()
    _restore(before, device)
    if failure:
        raise failure[0]
    return outcome[0]


def _global_state(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    state = torch.cuda.get_sync_debug_mode(), torch.cuda.max_memory_allocated(device)
    _set_sync_debug_mode(0)
    return state


def _restore(state: tuple[int, int], device: torch.device) -> None:
    if device.type != "cuda":
        return
    sync_debug_mode, peak = state
    torch.cuda.synchronize(device)
    if torch.cuda.max_memory_allocated(device) > peak:
        torch.cuda.reset_peak_memory_stats(device)
        missing = peak - torch.cuda.memory_allocated(device)
        with suppress(torch.OutOfMemoryError):
            # The peak is a mark of the allocator's: reach it again, with memory that is cached by now.
            torch.empty(max(missing, 0), dtype=torch.int8, device=device)
    _set_sync_debug_mode(sync_debug_mode)


def _set_sync_debug_mode(mode: int) -> None:
    # Setting it warns, whatever the mode.
    if mode != torch.cuda.get_sync_debug_mode():
        torch.cuda.set_sync_debug_mode(mode)
