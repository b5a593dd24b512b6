"""Which implementations are timed for a call, and which of those that were timed it gets."""

import functools
import os

from fusedmlp import impls
from fusedmlp.auto.call import Call
from fusedmlp.auto.table import Entry

BASELINE = "native"
# What is not measured unless FUSEDMLP_AUTO_IMPLS says so. `manual` is the oracle, an operation for every line;
# `compiled` would put tens of seconds of compiler before the first call of every shape.
NOT_BY_DEFAULT = ("auto", "compiled", "manual")
# An implementation replaces the baseline when it is faster by more than what repeated measurements differ by.
NOISE = 0.01


def candidates(call: Call) -> list[str]:
    """What can be timed for a call here without a long build or compilation, the baseline first."""
    asked = os.environ.get("FUSEDMLP_AUTO_IMPLS")
    names = _asked_for(asked) if asked else [name for name in impls.names() if name not in NOT_BY_DEFAULT]
    usable = [name for name in names if name != BASELINE and ready(name) and _accepts(name, call)]
    return [BASELINE, *usable]


def _asked_for(names: str) -> list[str]:
    asked = [name.strip() for name in names.split(",")]
    accepted = [name for name in impls.names() if name != "auto"]
    for name in asked:
        if name not in accepted:
            raise ValueError(f"FUSEDMLP_AUTO_IMPLS={names}: {name!r} is unknown; accepted: {', '.join(accepted)}")
    return asked


@functools.cache
def ready(name: str) -> bool:
    """Whether an implementation runs here at once: what has to be built first (impl=cuda) is left until it is."""
    if impls.unavailable(name) is not None:
        return False
    built = getattr(impls.load(name), "built", None)
    return built is None or built()


def _accepts(name: str, call: Call) -> bool:
    devices = getattr(impls.load(name), "DEVICES", None)
    return call.x.dtype in impls.dtypes(name) and (devices is None or call.x.device.type in devices)


def best(entry: Entry, call: Call) -> str:
    """The fastest of those that can run here, for this call; the baseline where none can."""
    return fastest({name: ms for name, ms in entry.ms.items() if _runs(name) and _accepts(name, call)})


def fastest(ms: dict[str, float]) -> str:
    """The implementation with the least time; the baseline unless it is beaten by more than the noise."""
    least = min(ms.values(), default=0.0)
    if not ms or ms.get(BASELINE, float("inf")) <= (1 + NOISE) * least:
        return BASELINE
    return min(ms, key=lambda name: ms[name])


def _runs(name: str) -> bool:
    return name in impls.names() and impls.unavailable(name) is None


def known_here(ms: dict[str, float]) -> dict[str, float]:
    """Times of what can run on this machine."""
    return {name: value for name, value in ms.items() if _runs(name)}
