"""Networks that train.py trains: mlp, the lecture's stack of Linear+GELU, gpt, a GPT-2-like transformer, and any other
module (TorchModule)."""

from fusedmlp.models.gpt import GPT
from fusedmlp.models.mlp import MLPLanguageModel
from fusedmlp.models.torch_module import TorchModule

__all__ = ["GPT", "MLPLanguageModel", "TorchModule"]
