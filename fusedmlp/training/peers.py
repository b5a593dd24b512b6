"""The other ranks of a run: meeting them, the first failure of any, and the step after which all of them stop.

All of it goes through a store on the host, which a thread looks at four times a second: no device ever waits. Without
other ranks nothing is done.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fusedmlp.training.failures import Ending
from fusedmlp.training.interrupt import Interrupted, StopRequests
from fusedmlp.training.last_step import LastStep
from fusedmlp.training.messages import FOLDER, ending_for, failure, left, post_failure, prefixed
from fusedmlp.training.place import Place

_POLL_S = 0.25
# How long a rank that lost touch waits for the reason; one that was told to end may take to begin with it, and in all.
_REASON_S, _ENDING_S, _FINISHING_S = 3.0, 15.0, 60.0
# How long a rank that was told to end may wait in a collective, before that is ended under it.
_COLLECTIVE_S = 2.0
_WAKE = signal.SIGUSR1

# Whether this process has had a process group that was bound to its GPU.
_bound_before = False


class PeerFailed(BaseException):
    """Another rank has ended the run. No `Exception`, so that nothing on the way swallows it."""


class Peers:
    """The ranks of a run, seen from this one; an active context from before the first collective to the last.

    Args:
        stop: holds the signals that this rank got.
    """

    def __init__(self, place: Place, stop: StopRequests):
        self.place, self.stop = place, stop
        self.timeout_s = 300.0
        stop.at_once_s = 1.0 if self.several else 0.0
        if not self.is_first:
            stop.notice = ""
        # Rank 0, when it is told to end and cannot: writes what there is, before the process is ended.
        self.on_stuck: Callable[[Ending], None] = lambda ending: None
        self._store: Any = None
        self._said: dict[str, Any] | None = None
        self._last: LastStep | None = None
        self._closing = self._heeding = self._ending = False
        self._exit_code = 1
        self._meeting: Any = None
        self._thread: threading.Thread | None = None

    @property
    def several(self) -> bool:
        return self.place.world_size > 1

    @property
    def is_first(self) -> bool:
        return self.place.rank == 0

    def __enter__(self) -> "Peers":
        if self.several:
            place = self.place
            if place.rank == 0 and not place.hosted:
                self._meeting = dist.TCPStore(place.address, place.port, is_master=True, wait_for_workers=False)
            self._store = prefixed(self._connection())
            self._last = LastStep(self._store, place.rank, place.world_size)
            self._previous = signal.signal(_WAKE, self._woken)
            self._thread = threading.Thread(target=self._watch, name="fusedmlp.peers", daemon=True)
            self._thread.start()
        return self

    def _connection(self) -> Any:
        return dist.TCPStore(
            self.place.address, self.place.port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout_s),
        )  # fmt: skip

    def meet(self, device: torch.device, timeout_s: float) -> None:
        """Makes the process group of all ranks; from now on a rank waits `timeout_s` for another."""
        global _bound_before
        self.timeout_s = timeout_s
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        # PyTorch splits a bound group for a device mesh, and splitting any but a process's first one is a segmentation
        # fault: https://github.com/pytorch/pytorch/pull/192109
        bound = device if cuda and not _bound_before else None
        _bound_before = _bound_before or cuda
        # A connection of its own: it blocks while the group waits.
        store = dist.PrefixStore("group", self._connection()) if self.several else dist.HashStore()
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=self.place.rank, world_size=self.place.world_size,
            timeout=timedelta(seconds=timeout_s), device_id=bound,
        )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._farewell()
            signal.signal(_WAKE, self._previous)
        if not dist.is_initialized():
            return
        if not self.lost:
            dist.destroy_process_group()
        elif dist.get_backend() == "nccl":
            # With a rank missing, ending the group could wait for it, and so could Python's end.
            atexit.register(_leave_at_once, self._exit_code)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """While it is active, PeerFailed is raised when another rank fails; at other times nobody could take it."""
        self._heeding = True
        try:
            if self._said is not None:
                raise PeerFailed
            yield
        finally:
            self._heeding = False

    def agree(self, name: str, value: str) -> str:
        """Rank 0's `value`, on every rank. Raises: PeerFailed if another rank fails before it is said."""
        if self._store is None:
            return value
        if self.is_first:
            self._store.set(name, value)
            return value
        self._wait_for(name)
        return self._store.get(name).decode()

    def first_here(self, name: str, work: Callable[[], None]) -> None:
        """Does `work` on one rank of this host, and then on the others."""
        if self._store is None:
            return work()
        key = f"{name}/{self.place.node}"
        if self.place.local_rank > 0:
            self._wait_for(key)
        work()
        if self.place.local_rank == 0:
            self._store.set(key, "done")
        return None

    def same(self, name: str, value: str) -> bool:
        """Whether all ranks say the same, as far as rank 0 hears it soon; on the others True."""
        if self._store is None:
            return True
        self._store.set(f"{name}/{self.place.rank}", value)
        if not self.is_first:
            return True
        keys = [f"{name}/{rank}" for rank in range(self.place.world_size)]
        until = time.monotonic() + _REASON_S
        while not self._store.check(keys):
            if time.monotonic() > until:
                return True
            time.sleep(0.05)
        return all(self._store.get(key).decode() == value for key in keys)

    def _wait_for(self, key: str) -> None:
        # Not the store's own wait, which a failure of another rank could not end.
        until = time.monotonic() + self.timeout_s
        while not self._store.check([key]):
            if self._said is not None:
                raise PeerFailed
            if time.monotonic() > until:
                raise RuntimeError(f"rank {self.place.rank} has waited {self.timeout_s:g} s for another rank: {key}")
            time.sleep(0.05)

    def begin(self, step: int) -> None:
        """The loop is about to begin with optimizer step `step` (from 1)."""
        if self._last is not None:
            self._last.begin(step)

    def stop_after(self, step: int) -> int | None:
        """Called when `step` has ended: the signal if the run stops here, on every rank, else None."""
        return self.stop.received if self._last is None else self._last.stop_after(step)

    def ended_by(self, error: BaseException, ending: Ending, traceback: str) -> Ending:
        """Tells the others of a failure of this rank; returns how the run ends, which another may have decided."""
        self._heeding, self._ending, self._exit_code = False, True, ending.exit_code
        if self._store is None or (isinstance(error, Interrupted) and self._last and self._last.limit):
            return ending  # that is what all do
        if _lost_touch(error) or isinstance(error, PeerFailed):
            until = time.monotonic() + _REASON_S
            while self._said is None and time.monotonic() < until:
                time.sleep(0.05)
        if self._said is None:
            try:
                self._said = post_failure(self._store, self.place.rank, ending, traceback)
            except dist.DistError:
                return ending
        if self._said["ending"]["reason"] != ending.reason:
            ending = ending_for(self._said, self.place.rank)
        self._exit_code = ending.exit_code
        return ending

    @property
    def lost(self) -> bool:
        """Whether a rank may be missing, so that what the device was given may never end."""
        return self._said is not None

    @property
    def foreign_traceback(self) -> str | None:
        """Of the failure that ended the run, if another rank had it."""
        said = self._said
        return said["traceback"] or None if said is not None and said["rank"] != self.place.rank else None

    def _woken(self, signum: int, frame: FrameType | None) -> None:
        if self._heeding and self._said is not None:
            self._heeding = False
            raise PeerFailed

    def _watch(self) -> None:
        try:
            while not self._closing and not self._look():
                time.sleep(_POLL_S)
        except Exception as error:
            if self._closing:
                return
            # Whoever listens at the ranks' address has ended.
            who = "the process that started the ranks" if self.place.hosted else "rank 0"
            lost = Ending("failed", f"{who} is gone: {error}".splitlines()[0], None, 1)
            self._said = {"rank": self.place.rank, "ending": vars(lost), "traceback": ""}
        if self._said is not None and not self._closing:
            self._end_main_thread(ending_for(self._said, self.place.rank))

    def _look(self) -> bool:
        """Whether the run has to end, because a rank has failed."""
        said = failure(self._store)
        if said is not None:
            self._said = said
            return True
        if self._last is not None:
            self._last.look(self.stop.received)
        return False

    def _end_main_thread(self, ending: Ending) -> None:
        if self._heeding:
            signal.pthread_kill(threading.main_thread().ident, _WAKE)  # type: ignore[arg-type]
        began, aborting = time.monotonic(), None
        while time.monotonic() < began + (_FINISHING_S if self._ending else _ENDING_S):
            if self._closing:
                return
            if aborting is None and time.monotonic() > began + _COLLECTIVE_S:
                aborting = threading.Thread(target=_abort_collectives, daemon=True)
                aborting.start()
            time.sleep(_POLL_S)
        # It waits for a rank that is no more, in a call that nothing can end.
        self.on_stuck(ending)
        _leave_at_once(ending.exit_code or 1)

    def _farewell(self) -> None:
        """Leaves, in a way that nobody waits for this rank."""
        assert self._thread is not None
        self._closing = True
        self._thread.join()
        try:
            if self._last is not None:
                self._last.leave()
            self._store.set(left(self.place.rank), "")
            if self._meeting is not None:
                # Whoever has the store is the last to leave.
                until = time.monotonic() + _REASON_S
                everybody = [left(rank) for rank in range(self.place.world_size)]
                while not self._store.check(everybody) and time.monotonic() < until:
                    time.sleep(0.05)
        except dist.DistError:
            pass  # nobody is there any more


def _abort_collectives() -> None:
    """Ends what waits on the GPU for other ranks, and with it the main thread's wait for the GPU.

    Gloo ends by itself when a rank is gone; NCCL's kernels would wait as long as `trainer.rank_timeout`.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        with suppress(Exception):
            dist.distributed_c10d._abort_process_group()


def _leave_at_once(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def agreed_folder(peers: Peers, claim: Callable[[], Path]) -> Path:
    """The run's directory, which rank 0 claims."""
    if peers.is_first:
        return Path(peers.agree(FOLDER, str(claim().absolute())) if peers.several else claim())
    return Path(peers.agree(FOLDER, ""))


def _lost_touch(error: BaseException) -> bool:
    """Whether an error only says that another rank does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
