"""The step after which all ranks of a run stop, once one of them has got a signal to.

Each says which step it is in, which it will finish, and begins no other before all have said so; the largest of these
steps is the last one, on every rank. A step costs a lock: who looks at the store is another thread.
"""

import threading

from torch.distributed import Store

from fusedmlp.training.messages import STOP


class LastStep:
    """The agreement, seen from `rank`."""

    def __init__(self, store: Store, rank: int, world_size: int):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._changed = threading.Condition()
        self._step, self._frozen, self._posted = 0, False, False
        self.limit: int | None = None

    def begin(self, step: int) -> None:
        """The loop is about to begin with optimizer step `step` (from 1)."""
        with self._changed:
            self._step = step

    def stop_after(self, step: int) -> int | None:
        """Called when `step` has ended: the signal if the run stops here, else None and the next step begins."""
        with self._changed:
            while self._frozen and self.limit is None:
                self._changed.wait(0.1)
            if self.limit is not None and step >= self.limit:
                return int(self._store.get(STOP))
            self._step = step + 1
        return None

    def look(self, received: int | None) -> None:
        """Called again and again from another thread, with the signal that this rank has got, if it has."""
        if self.limit is not None:
            return
        if received is not None and not self._store.check([STOP]):
            self._store.compare_set(STOP, "", str(received))
        if not self._store.check([STOP]):
            return
        with self._changed:
            self._frozen = True
        self.leave()
        keys = [f"step/{rank}" for rank in range(self._world_size)]
        if self._store.check(keys):
            limit = max(int(self._store.get(key)) for key in keys)
            with self._changed:
                self.limit = limit
                self._changed.notify_all()

    def leave(self) -> None:
        """Says the step, so that nobody waits for it any more."""
        if not self._posted:
            self._posted = True
            self._store.set(f"step/{self._rank}", str(self._step))
