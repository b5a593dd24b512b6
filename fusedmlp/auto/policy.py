"""Which implementation a call gets: from the table, by measuring now, or the baseline where neither is possible."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedmlp import impls
from fusedmlp.auto import table
from fusedmlp.auto.call import REPLAYED, Call, environment
from fusedmlp.auto.candidates import BASELINE, best, candidates, fastest, known_here, ready
from fusedmlp.auto.measure import measure
from fusedmlp.auto.moment import obstacle
from fusedmlp.auto.table import Entry

log = logging.getLogger("fusedmlp.auto")

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


def _measure(call: Call, names: list[str], where: str, key: str) -> Entry | None:
    """Measures, unless another process has meanwhile, and shares the result."""

    def found() -> bool:
        """Whether somebody has measured it by now; reads the file anew, beside what could not be written to it."""
        global _known
        _known = _known or {}
        for place, entries in table.read().items():
            _known.setdefault(place, {}).update(entries)
        entry = _lookup(where, key)
        return entry is not None and entry.covers(names)

    # What is under way may be a collective that waits for another process, which must not wait for the lock meanwhile.
    if call.x.is_cuda:
        torch.cuda.synchronize(call.x.device)
    with _measuring, table.locked(found) as alone:
        if found():
            return _lookup(where, key)
        try:
            launched, replayed = measure(call, names)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            _failed.add((where, key))
            _say_once("impl=auto: a sample of a call does not fit into the memory that is left, so native runs for it")
            return None
        found_now = {replace(call, replayed=False).key(): launched}
        if replayed is not None:
            found_now[replace(call, replayed=True).key()] = replayed
        _remember(where, found_now, alone)
        return _lookup(where, key)


def _remember(where: str, entries: dict[str, Entry], alone: bool) -> None:
    global _known
    _known = _known or {}
    _known.setdefault(where, {}).update(entries)
    if not alone:
        return
    try:
        table.merge({where: entries})
    except OSError as error:
        _say_once(f"impl=auto: choices cannot be kept in {table.path()} ({error.strerror}); every process measures")


def _lookup(where: str, key: str) -> Entry | None:
    global _known
    if _known is None:
        _known = table.read()
    entries = _known.get(where, {})
    # Where replaying makes no difference there is one entry for both.
    return entries.get(key) or entries.get(key.removesuffix(REPLAYED))


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
            name = fastest(known_here(entry.ms))
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


def forget_replayed() -> None:
    """Forgets what ran for replays that there will not be."""
    for key in [key for key in _used if key.endswith(REPLAYED)]:
        del _used[key]


def forget() -> None:
    """Forgets what this process has read and chosen; the file stays. The next call of each kind is looked up again."""
    global _known
    from fusedmlp.impls import auto

    _known = None
    _failed.clear()
    _used.clear()
    _told.clear()
    ready.cache_clear()
    auto.forget()
