"""A model that kills or fails one of the ranks that train it, at its third step; the other may wait for ever then, or
is asked to stop when its run has ended, as by torchrun."""

import ctypes
import os
import signal
from types import SimpleNamespace

from torch import Tensor

from fusedmlp.models.mlp import MLPLanguageModel
from fusedmlp.training import run


class Dying(MLPLanguageModel):
    def __init__(self, how: str = "killed", rank: int = 1, **sizes):
        super().__init__(**sizes)
        self.how, self.mine, self.steps = how, os.environ["RANK"] == str(rank), 0
        if how == "stopped" and not self.mine:
            run.gc = SimpleNamespace(collect=lambda: os.kill(os.getpid(), signal.SIGTERM))  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        if self.mine and self.steps == 3:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a bug of the user's")
        if self.how == "stuck" and self.steps == 3:
            wait_for_ever()
        return super().forward(tokens)


def wait_for_ever() -> None:
    """Where neither a signal nor an exception ends it, as in a call that waits for a GPU."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)
