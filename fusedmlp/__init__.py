"""fusedmlp: swap GELU, softmax, Linear+GELU and MLP implementations in a real training loop, and keep the winner."""

__version__ = "0.1.0"

from fusedmlp import auto, functional
from fusedmlp.impls import names as impl_names
from fusedmlp.impls import unavailable
from fusedmlp.modules import FusedLinearGeLU, FusedMLP, TritonSoftmax
from fusedmlp.replace import replace_modules

__all__ = [
    "FusedLinearGeLU", "FusedMLP", "TritonSoftmax", "auto", "functional", "impl_names", "replace_modules",
    "unavailable",
]  # fmt: skip
