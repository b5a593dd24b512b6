"""All ranks stop after the same step, whichever gets the signal and however far apart they are."""

import random
import threading
import time

import pytest
from torch.distributed import HashStore

from fusedmlp.training.last_step import LastStep

RANKS = 3


def ranks_until_they_stop(signalled: int, after_s: float, steps: int, lead: int) -> list[tuple[int, int | None]]:
    """The last step of each rank and the signal it stopped by; a rank may be `lead` steps ahead of the slowest."""
    store, done, ended = HashStore(), [0] * RANKS, {}
    lasts = [LastStep(store, rank, RANKS) for rank in range(RANKS)]

    def train(rank):
        lasts[rank].begin(1)
        for step in range(1, steps + 1):
            time.sleep(random.random() * 2e-3)
            # What a collective does: nobody ends a step that others have not come near to.
            while step > min(done) + lead:
                time.sleep(1e-4)
            done[rank] = step
            signum = lasts[rank].stop_after(step)
            if signum is not None:
                break
        ended[rank] = (step, signum)
        lasts[rank].leave()

    def watch(rank):
        began = time.monotonic()
        while rank not in ended:
            got = rank == signalled and time.monotonic() - began > after_s
            lasts[rank].look(15 if got else None)
            time.sleep(random.random() * 5e-3)

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(RANKS) for work in (train, watch)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "ranks wait for each other"
    return [ended[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("lead", [1, 5])
@pytest.mark.parametrize("signalled", [0, 2])
def test_all_stop_after_the_same_step(signalled, lead):
    ended = ranks_until_they_stop(signalled, 0.05, steps=100_000, lead=lead)
    assert len(set(ended)) == 1, ended
    assert ended[0][1] == 15


def test_a_signal_at_the_end_holds_nobody_up():
    for after_s in (0.0, 0.01, 0.02, 0.03):
        ended = ranks_until_they_stop(1, after_s, steps=10, lead=1)
        assert len({step for step, _ in ended}) == 1, ended
