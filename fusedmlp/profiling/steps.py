"""Which step, and which range of it, a GPU activity belongs to: that of the call that launched it."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusedmlp.profiling.intervals import Intervals, holder
from fusedmlp.profiling.trace import Events, Trace

STEP, DATA, FORWARD, BACKWARD, OPTIMIZER = "step", "data", "forward", "backward", "optimizer"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER)
BLOCK = "block "  # in front of the name of a module

LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch|hip\w*LaunchKernel")
GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")
# Calls in which the CPU waits for the GPU. A copy to pageable memory waits inside cudaMemcpyAsync, where it cannot be
# told from one that does not.
BLOCKING = re.compile(r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize|(cuda|hip)Memcpy$")


@dataclass(frozen=True)
class Steps:
    """The steps of a trace.

    Attributes:
        cpu: when each began and ended on the CPU.
        launch: (n,) the call that launched each GPU activity, -1 where the trace does not have it.
        of: (n,) the step that each GPU activity was launched in, -1 for none.
        named: whether the trace marks its steps; if not, all of it counts as one.
    """

    cpu: Intervals
    launch: NDArray[np.int64]
    of: NDArray[np.int64]
    named: bool

    @property
    def count(self) -> int:
        return len(self.cpu[0])


def find_steps(trace: Trace) -> Steps:
    """Takes ranges named "step", else the ProfilerStep# of torch.profiler, else the whole trace."""
    names = np.array(trace.ranges.names, dtype=object)
    marked = np.array([name == STEP for name in names], bool)
    if not marked.any():
        marked = np.array([name.startswith("ProfilerStep") for name in names], bool)
    launch = launches_of(trace.gpu, trace.calls)
    if marked.any():
        cpu = (trace.ranges.start[marked], trace.ranges.end[marked])
        return Steps(cpu, launch, holder(cpu, launch_times(trace, launch)), True)
    ends = [events.end.max() for events in (trace.gpu, trace.calls, trace.ranges, trace.ops) if len(events)]
    everything = (np.array([0.0]), np.array([max(ends, default=0.0)]))
    return Steps(everything, launch, np.zeros(len(trace.gpu), np.int64), False)


def launches_of(gpu: Events, calls: Events) -> NDArray[np.int64]:
    """For each GPU activity the position of the call with its correlation, -1 for none."""
    known = np.flatnonzero(calls.correlation >= 0)
    if not len(known):
        return np.full(len(gpu), -1)
    known = known[np.argsort(calls.correlation[known], kind="stable")]
    ids = calls.correlation[known]
    i = np.minimum(np.searchsorted(ids, gpu.correlation), len(ids) - 1)
    return np.where((ids[i] == gpu.correlation) & (gpu.correlation >= 0), known[i], -1)


def launch_times(trace: Trace, launch: NDArray[np.int64]) -> NDArray[np.float64]:
    """When each GPU activity was launched; -1 us where that is not known."""
    if not len(trace.calls):
        return np.full(len(launch), -1.0)
    return np.where(launch >= 0, trace.calls.start[np.maximum(launch, 0)], -1.0)


def ranges_named(trace: Trace, name: str) -> Intervals:
    """The ranges with this name."""
    chosen = np.array([found == name for found in trace.ranges.names], bool)
    return trace.ranges.start[chosen], trace.ranges.end[chosen]


def calls_named(calls: Events, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Mask of the calls whose name matches."""
    matching = {name for name in set(calls.names) if pattern.match(name)}
    return np.array([name in matching for name in calls.names], bool)
