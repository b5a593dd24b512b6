"""Networks that train.py trains: mlp, the lecture's stack of Linear+GELU, and gpt, a GPT-2-like transformer."""

from fusedmlp.models.gpt import GPT
from fusedmlp.models.mlp import MLPLanguageModel

__all__ = ["GPT", "MLPLanguageModel"]
