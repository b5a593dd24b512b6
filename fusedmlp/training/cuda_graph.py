"""CUDA's part in step capture: streams, events, graphs, and a look-out for operations that wait for the GPU."""

import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

_WAITS = "called a synchronizing CUDA operation"


class Replayable(Protocol):
    def replay(self) -> None: ...


class CudaGraphs:
    """Records functions into CUDA graphs that share one pool of memory, and what has to happen around that.

    Graphs of one pool must be replayed in the order in which they were recorded, never two at once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._recording, self._copying = _streams(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Runs what is inside on the stream that will be recorded, between what precedes it and what follows it.

        So libraries have what they set up for a stream, and autograd no ties to another one.
        """
        main = torch.cuda.current_stream(self.device)
        self._recording.wait_stream(main)
        with torch.cuda.stream(self._recording):
            yield
        main.wait_stream(self._recording)

    def copying(self) -> AbstractContextManager[Any]:
        """Runs what is inside on a stream of its own, beside the others."""
        return torch.cuda.stream(self._copying)

    def event(self) -> Any:
        """With `record`, and `wait`, which lets the current stream wait and not the host."""
        return torch.cuda.Event()

    def mark(self) -> Any:
        """A point in the current stream; after `drain`, `elapsed_time` from one mark to another is in ms."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def drain(self) -> None:
        """Waits until the GPU has nothing left to do."""
        torch.cuda.synchronize(self.device)

    @contextmanager
    def watch(self, found: list[str]) -> Iterator[None]:
        """Appends to `found` where something inside made the host wait for the GPU: that cannot be recorded.

        A recording would fail at such an operation and leave PyTorch's allocator in disorder; this changes nothing.
        Threads that Python has started, to fetch batches for example, may wait; autograd's may not.
        """
        before, trains, caught = torch.cuda.get_sync_debug_mode(), threading.current_thread(), []

        def note(message: Any, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
            thread = threading.current_thread()
            ours = thread is trains or isinstance(thread, threading._DummyThread)
            caught.append((ours, message, category, filename, lineno))

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for ours, message, category, filename, lineno in caught:
            if _WAITS in str(message):
                found += [f"{filename}:{lineno}"] * ours
            elif "Synchronization debug mode" not in str(message):
                warnings.warn_explicit(message, category, filename, lineno)

    def record(self, function: Callable[[], Any]) -> Replayable:
        """The GPU's work in `function`, recorded without being done. Raises: RuntimeError for what cannot be."""
        graph = torch.cuda.CUDAGraph()
        failure: BaseException | None = None
        # A cast that autocast remembers from outside would be missing in the graph.
        torch.clear_autocast_cache()
        try:
            # torch.cuda.graph leaves its stream current when it fails. Other threads (pinning, W&B) may go on.
            with torch.cuda.stream(self._recording), own_workspaces(), nothing_collected():
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._recording, capture_error_mode="thread_local"
                ):
                    try:
                        function()
                    except BaseException as error:
                        failure = error
                        raise
        except BaseException:
            self.give_up()
            release_generator(torch.cuda.default_generators[self.device.index])
            # Ending a failed recording raises another error.
            if failure is not None:
                raise failure from None
            raise
        finally:
            # This frame and the error would keep each other alive, and with them what was being recorded.
            failure = None
            torch.clear_autocast_cache()
        return graph

    def give_up(self) -> None:
        """Frees what warm-up or a failed recording has left."""
        # After a failed recording the allocator takes it to be still going on and refuses to free its cache.
        with suppress(AttributeError, RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            torch._C._cuda_releasePool(self.device.index, self._pool)
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
        # A model that keeps its last output keeps autograd's nodes of the warm-up. They add gradients on the stream of
        # that, for which autograd waits: no harm, but PyTorch 2.10 and newer warn.
        with suppress(AttributeError):
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)


@contextmanager
def own_workspaces() -> Iterator[None]:
    """What is recorded inside has cuBLAS's workspaces in the memory of its graph.

    It would use those that PyTorch keeps for each stream. Lightning frees them all whenever it sets up a Trainer, and
    PyTorch a stream's with any graph that was recorded on it (its issue 193402): a replay after that writes to freed
    memory, or ends the process. Source: torch._inductor.cudagraph_trees, which clears them before and after as well.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        # What is not replayed must not use it.
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Inside, Python's garbage collector does not run.

    It would end a recording by what it destroys there: the graph of an earlier run, which a cycle has kept alive, or a
    Triton kernel that autotuning has discarded.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def release_generator(generator: torch.Generator) -> None:
    """Lets a generator draw numbers again after a recording that CUDA has ended.

    PyTorch before 2.14 would take it to be recorded still, and every dropout from then on would raise "Offset increment
    outside graph capture". A copy of its state knows nothing of that, and goes on where it was.
    """
    generator.graphsafe_set_state(generator.clone_state())


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One to record on and one to copy on, for all runs of a process: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Staging:
    """A batch at a fixed address, which a graph reads, and two places where the next ones arrive meanwhile.

    `stage` and `load` are called in turn. The copy from the host runs on a stream of its own while earlier steps run.

    Args:
        example: a batch on the device; all others must have its shapes and dtypes.
    """

    def __init__(self, graphs: Any, example: tuple[Tensor, ...]):
        self._graphs = graphs
        self.batch: tuple[Tensor, ...] = tuple(torch.empty_like(tensor) for tensor in example)
        self._slots = [tuple(torch.empty_like(tensor) for tensor in example) for _ in range(2)]
        self._arrived = [graphs.event() for _ in self._slots]
        self._free = [graphs.event() for _ in self._slots]
        for event in self._free:
            event.record()
        self._next, self._staged = 0, False

    def stage(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Starts copying a batch to the device; the current stream waits for it, the host does not."""
        slot, arrived = self._slots[self._next], self._arrived[self._next]
        with self._graphs.copying():
            self._free[self._next].wait()
            for target, source in zip(slot, batch, strict=True):
                target.copy_(source, non_blocking=True)
            arrived.record()
        arrived.wait()
        self._staged = True
        return slot

    def load(self, batch: tuple[Tensor, ...]) -> None:
        """Copies a batch that is on the device, staged or not, to the fixed address."""
        for target, source in zip(self.batch, batch, strict=True):
            target.copy_(source)
        if self._staged:
            self._free[self._next].record()
            self._next, self._staged = 1 - self._next, False
