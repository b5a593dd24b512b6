"""Values on their way from the device to the host: requested at one moment, asked for later, waited for only then."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Slot(NamedTuple):
    """Where sums arrive from a GPU: pinned memory, (batch, n) fp32, and the event that follows the copy."""

    host: Tensor
    event: Any


class Transfer:
    """Sums of some readings on their way to the host.

    Args:
        host: (m, n) fp32 on the host, a row for each reading, valid once the rest is done.
        first: the row that the first of these has on the device.
        slot: where it lies, and `give_back` receives it once it has been read; None if it does not come from a GPU.
        work: the sum over ranks on its way (CPU), or None.
    """

    def __init__(
        self,
        host: Tensor,
        first: int = 0,
        slot: Slot | None = None,
        give_back: Callable[[Slot], None] | None = None,
        work: Any = None,
    ):
        self._host, self._first, self._slot, self._give_back, self._work = host, first, slot, give_back, work
        self._sums: list[list[float]] | None = None

    def arrived(self) -> bool:
        if self._sums is not None:
            return True
        return (self._slot is None or self._slot.event.query()) and (self._work is None or self._work.is_completed())

    def sums(self, row: int) -> list[float]:
        """What was in `row` on the device; waits for it if it has to."""
        if self._sums is None:
            if self._slot is not None:
                self._slot.event.synchronize()
            if self._work is not None:
                self._work.wait()
            self._sums = self._host.tolist()
            if self._slot is not None and self._give_back is not None:
                self._give_back(self._slot)
        return self._sums[row - self._first]


class Reading:
    """Means that were requested at one log point and may still be on their way.

    Args:
        weights: of what each rank added; a name of weight 0 has no mean.
        ranks: that the sums are over.
        row: of the sums on the device.
        send: sends what has not been sent, this among it.
    Attributes:
        transfer: that brings the sums; None until they are sent.
    """

    __slots__ = ("_ranks", "_send", "_weights", "row", "transfer")

    def __init__(self, weights: dict[str, float], ranks: int, row: int, send: Callable[[], None]):
        self._weights, self._ranks, self.row, self._send = weights, ranks, row, send
        self.transfer: Transfer | None = None

    def ready(self) -> bool:
        """Whether `means` would return without waiting."""
        return self.transfer is not None and self.transfer.arrived()

    def means(self) -> dict[str, float]:
        """Mean of every name that was added to since the reading before; waits for the copy if it has to."""
        if self.transfer is None:
            self._send()
        assert self.transfer is not None
        sums = self.transfer.sums(self.row)
        weights = self._weights.items()
        return {
            name: value / (weight * self._ranks) for value, (name, weight) in zip(sums, weights, strict=True) if weight
        }
