"""Why the GPU was idle: what the launch of the kernel after a gap was waiting for."""

import numpy as np
from numpy.typing import NDArray

from fusedmlp.profiling import steps
from fusedmlp.profiling.intervals import Intervals, holder, overlap, union
from fusedmlp.profiling.steps import Steps
from fusedmlp.profiling.trace import Trace

# A kernel whose launch returned so long before the GPU ran dry was waiting in its queue: the gap is the GPU's own.
QUEUED_US = 5.0


def idle_causes(trace: Trace, found: Steps, idle: Intervals) -> dict[str, float]:
    """ms of the gaps `idle` by cause: "launch", "sync", "data", "queue"; what they mean, `Analysis` says."""
    length = idle[1] - idle[0]
    if not len(length):
        return {}
    following = np.searchsorted(trace.gpu.start, idle[1])
    last = following == len(trace.gpu)
    launch = np.where(last, -1, found.launch[np.where(last, 0, following)])
    returned = trace.calls.end[np.maximum(launch, 0)] if len(trace.calls) else np.zeros(len(length))
    # The later kernels of a graph are queued with its first, even if the call that launched them is still running.
    first = _first_of_launch(found.launch)[np.where(last, 0, following)]
    queued = (launch >= 0) & (~first | (returned + QUEUED_US < idle[0]))
    waits = trace.calls[steps.calls_named(trace.calls, steps.BLOCKING)]
    # The CPU sees the end of what it waited for a little after the GPU has ended it.
    synchronised = ~queued & (holder(union(waits.start, waits.end), idle[0] + 1.0) >= 0)
    for_data = np.where(queued, 0.0, overlap(union(*steps.ranges_named(trace, steps.DATA)), idle))
    rest = np.where(queued, 0.0, length - for_data)
    causes = {
        "launch": rest[~synchronised].sum(), "sync": rest[synchronised].sum(), "data": for_data.sum(),
        "queue": length[queued].sum(),
    }  # fmt: skip
    return {cause: float(us) / 1e3 for cause, us in causes.items()}


def _first_of_launch(launch: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the activities that are the first of their launch; one whose launch is not known counts as first."""
    first = launch < 0
    first[np.unique(launch, return_index=True)[1]] = True
    return first
