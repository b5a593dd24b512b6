"""Models for a sweep whose jobs go wrong, unless the environment has WELL."""

import os
import signal

from fusedmlp.models.mlp import MLPLanguageModel


def raises(**sizes):
    if "WELL" not in os.environ:
        raise RuntimeError("a bug of the user's")
    return MLPLanguageModel(**sizes)


def killed(**sizes):
    if "WELL" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return MLPLanguageModel(**sizes)
