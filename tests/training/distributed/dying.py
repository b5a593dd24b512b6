"""A model that kills or fails one of the ranks that train it, at its third step."""

import os
import signal

from torch import Tensor

from fusedmlp.models.mlp import MLPLanguageModel


class Dying(MLPLanguageModel):
    def __init__(self, how: str = "killed", rank: int = 1, **sizes):
        super().__init__(**sizes)
        self.how, self.mine, self.steps = how, os.environ["RANK"] == str(rank), 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        if self.mine and self.steps == 3:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a bug of the user's")
        return super().forward(tokens)
