"""Models for a sweep whose jobs go wrong, unless the environment has WELL."""

import os
import signal
import time

from fusedmlp.models.mlp import MLPLanguageModel


def raises(**sizes):
    if "WELL" not in os.environ:
        raise RuntimeError("a bug of the user's")
    return MLPLanguageModel(**sizes)


def killed(**sizes):
    if "WELL" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return MLPLanguageModel(**sizes)


class Slow(MLPLanguageModel):
    """Takes its time, but not that of a core."""

    def forward(self, tokens):
        time.sleep(0.1)
        return super().forward(tokens)
