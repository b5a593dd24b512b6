"""The kernels that an implementation runs for an op, compiled for a GPU that need not be there, and what they say."""

from fusedmlp.bench.inspection.inspect import inspect_op
from fusedmlp.bench.inspection.reading import Kernel, read

__all__ = ["Kernel", "inspect_op", "read"]
