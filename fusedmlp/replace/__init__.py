"""Put FusedMLP, FusedLinearGeLU and the softmax op into a model that somebody else wrote."""

from fusedmlp.replace.report import Left, Replaced, Replacement
from fusedmlp.replace.walk import replace_modules

__all__ = ["Left", "Replaced", "Replacement", "replace_modules"]
