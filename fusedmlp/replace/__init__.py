"""Put FusedMLP, FusedLinearGeLU and the softmax op into a model that somebody else wrote."""

from fusedmlp.replace.adopted import OURS
from fusedmlp.replace.report import Left, Replaced, Replacement
from fusedmlp.replace.walk import replace_modules

__all__ = ["OURS", "Left", "Replaced", "Replacement", "replace_modules"]
