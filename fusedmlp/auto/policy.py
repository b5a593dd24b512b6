"""Which implementation a call gets: from the table, by measuring now, or the baseline where neither is possible."""

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from fusedmlp import impls
from fusedmlp.auto import table
from fusedmlp.auto.call import Call, environment
from fusedmlp.auto.measure import measure
from fusedmlp.auto.table import Entry

log = logging.getLogger("fusedmlp.auto")

BASELINE = "native"
# What is not measured unless FUSEDMLP_AUTO_IMPLS says so. `manual` is the oracle, an operation for every line;
# `compiled` would put tens of seconds of compiler before the first call of every shape.
NOT_BY_DEFAULT = ("auto", "compiled", "manual")
# An implementation replaces the baseline when it is faster by more than what repeated measurements differ by.
NOISE = 0.01

_measuring = threading.Lock()
_known: table.Choices | None = None
_failed: set[tuple[str, str]] = set()  # environment and key of what did not fit into memory
_forced_mode: str | None = None
_used: dict[str, str] = {}
_told: set[str] = set()


class Choice(NamedTuple):
    """An implementation, and whether the choice stands: not where it is to be measured at a better moment."""

    impl: str
    final: bool


def mode() -> str:
    """ "measure", "known" (the table or the baseline, never a measurement) or the name of an implementation.

    Raises: ValueError for anything else in FUSEDMLP_AUTO.
    """
    chosen = _forced_mode or os.environ.get("FUSEDMLP_AUTO") or "measure"
    accepted = ["measure", "known", *(name for name in impls.names() if name != "auto")]
    if chosen not in accepted:
        raise ValueError(f"FUSEDMLP_AUTO={chosen!r} is unknown; accepted: {', '.join(accepted)}")
    # A program that asks for the same results every time does not want them to depend on a stopwatch.
    return "known" if chosen == "measure" and torch.are_deterministic_algorithms_enabled() else chosen


def choose(call: Call) -> Choice:
    """The implementation for a call, which is measured now if it has to be and can be."""
    choice = _choose(call)
    _used[call.key()] = choice.impl
    return choice


def _choose(call: Call) -> Choice:
    asked = mode()
    if asked not in ("measure", "known"):
        return Choice(asked, True)
    if not measurable(call.x.device):
        return Choice(BASELINE, True)
    if any(type(t) not in (Tensor, Parameter) for t in call.tensors if t is not None):
        # DTensor, FakeTensor: kernels of ours do not know them.
        return Choice(BASELINE, True)
    if call.x.numel() == 0 or call.x.dtype not in impls.DEFAULT_DTYPES:
        return Choice(BASELINE, True)
    where, key = environment(call.x.device), call.key()
    names = candidates(call)
    entry = _lookup(where, key)
    if entry is not None and (asked == "known" or entry.covers(names)):
        return Choice(best(entry, call), True)
    if asked == "known" or names == [BASELINE] or (where, key) in _failed:
        return Choice(BASELINE, True)
    if (reason := obstacle()) is not None:
        fallback = BASELINE if entry is None else best(entry, call)
        _say_once(f"impl=auto measures nothing {reason}: {fallback} runs until a call outside of it has been measured")
        return Choice(fallback, False)
    entry = _measure(call, names, where, key)
    return Choice(BASELINE if entry is None else best(entry, call), True)


def measurable(device: torch.device) -> bool:
    """Whether there is anything to choose between on this device: on a GPU."""
    return device.type == "cuda"


def candidates(call: Call) -> list[str]:
    """What can be timed for a call here without a long build or compilation, the baseline first."""
    asked = os.environ.get("FUSEDMLP_AUTO_IMPLS")
    names = _asked_for(asked) if asked else [name for name in impls.names() if name not in NOT_BY_DEFAULT]
    usable = [name for name in names if name != BASELINE and _ready(name) and _accepts(name, call)]
    return [BASELINE, *usable]


def _asked_for(names: str) -> list[str]:
    asked = [name.strip() for name in names.split(",")]
    accepted = [name for name in impls.names() if name != "auto"]
    for name in asked:
        if name not in accepted:
            raise ValueError(f"FUSEDMLP_AUTO_IMPLS={names}: {name!r} is unknown; accepted: {', '.join(accepted)}")
    return asked


@functools.cache
def _ready(name: str) -> bool:
    """Whether an implementation runs here at once: what has to be built first (impl=cuda) is left until it is."""
    if impls.unavailable(name) is not None:
        return False
    built = getattr(impls.load(name), "built", None)
    return built is None or built()


def _accepts(name: str, call: Call) -> bool:
    devices = getattr(impls.load(name), "DEVICES", None)
    return call.x.dtype in impls.dtypes(name) and (devices is None or call.x.device.type in devices)


def best(entry: Entry, call: Call) -> str:
    """The fastest of those that can run here; the baseline unless it is beaten by more than the noise."""
    runnable = {name: ms for name, ms in entry.ms.items() if name in impls.names() and impls.unavailable(name) is None}
    runnable = {name: ms for name, ms in runnable.items() if _accepts(name, call)}
    if not runnable:
        return BASELINE
    fastest = min(runnable, key=lambda name: runnable[name])
    baseline = runnable.get(BASELINE)
    return BASELINE if baseline is not None and baseline <= (1 + NOISE) * runnable[fastest] else fastest


def obstacle() -> str | None:
    """What forbids a measurement at this moment, in words; None if nothing does."""
    if torch.compiler.is_compiling():
        return "under torch.compile"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "while a CUDA graph is captured"
    if transformed():
        return "under a functorch transform or forward-mode differentiation"
    if torch._C._current_graph_task_id() != -1:
        # The thread that would run the measurement's backward pass is the one that waits for it.
        return "during a backward pass"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "under a dispatch mode"
    return None


def transformed() -> bool:
    """Whether vmap, torch.func.grad or dual numbers are at work, which need ops that PyTorch knows the rules of."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _measure(call: Call, names: list[str], where: str, key: str) -> Entry | None:
    """Measures, unless another process has meanwhile, and shares the result."""

    def found() -> bool:
        """Whether the file has it by now; reads the file anew."""
        global _known
        _known = table.read()
        entry = _lookup(where, key)
        return entry is not None and entry.covers(names)

    # What is under way may be a collective that waits for another process, which must not wait for the lock meanwhile.
    if call.x.is_cuda:
        torch.cuda.synchronize(call.x.device)
    with _measuring, table.locked(found) as alone:
        if found():
            return _lookup(where, key)
        try:
            entry = measure(call, names)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _failed.add((where, key))
            _say_once("impl=auto: a sample of a call does not fit into the memory that is left, so native runs for it")
            return None
        _remember(where, key, entry, alone)
        return entry


def _remember(where: str, key: str, entry: Entry, alone: bool) -> None:
    global _known
    _known = _known or {}
    _known.setdefault(where, {})[key] = entry
    if not alone:
        return
    try:
        table.merge({where: {key: entry}})
    except OSError as error:
        _say_once(f"impl=auto: choices cannot be kept in {table.path()} ({error.strerror}); every process measures")


def _lookup(where: str, key: str) -> Entry | None:
    global _known
    if _known is None:
        _known = table.read()
    return _known.get(where, {}).get(key)


def while_traced(op: str, option: str | int, dtype: torch.dtype, device_type: str, gradients: bool) -> str:
    """The implementation for a call that TorchDynamo traces, whose sizes may not be known: that of the largest call of
    its kind that was measured, or the baseline."""
    asked = mode()
    if asked not in ("measure", "known"):
        return asked
    name = None
    if device_type == "cuda" and dtype in impls.DEFAULT_DTYPES:
        device = torch.device("cuda", torch.cuda.current_device())
        _lookup(environment(device), "")
        prefix = f"{op} {str(dtype).removeprefix('torch.')}" + (f" {option}" if isinstance(option, str) else "")
        entries = {
            key: entry
            for key, entry in (_known or {}).get(environment(device), {}).items()
            if key.startswith(prefix + " ") and ("gradients=none" not in key) == gradients
        }
        if entries:
            entry = entries[max(entries, key=lambda key: (max(entries[key].ms.values()), key))]
            runnable = [name for name in entry.ms if name in impls.names() and impls.unavailable(name) is None]
            name = min(runnable, key=lambda name: entry.ms[name] * (1 - NOISE * (name == BASELINE)), default=None)
    if name is None and device_type == "cuda":
        _say_once(f"impl=auto measures nothing under torch.compile, and no {op} is known: native is compiled")
    _used[f"{op} under torch.compile"] = name or BASELINE
    return name or BASELINE


def _say_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        log.warning(message)


@contextmanager
def using(chosen: str) -> Iterator[None]:
    """Within this context FUSEDMLP_AUTO counts as `chosen`."""
    global _forced_mode
    before, _forced_mode = _forced_mode, chosen
    forget()
    try:
        mode()
        yield
    finally:
        _forced_mode = before
        forget()


def used() -> dict[str, str]:
    """What ran in this process: bucket of calls -> implementation."""
    return dict(sorted(_used.items()))


def forget() -> None:
    """Forgets what this process has read and chosen; the file stays. The next call of each kind is looked up again."""
    global _known
    from fusedmlp.impls import auto

    _known = None
    _failed.clear()
    _used.clear()
    _told.clear()
    _ready.cache_clear()
    auto.forget()
