"""auto: the implementation to use when the caller names none.

It is native today: the baseline runs everywhere, and choosing anything else without a measurement would be a guess.
`fusedmlp.impls.resolved("auto")` and every run's result.json say which implementation ran.
"""

from fusedmlp.impls import native

DTYPES = native.DTYPES

unavailable = native.unavailable
gelu = native.gelu
softmax = native.softmax
linear_gelu = native.linear_gelu
mlp = native.mlp


def resolved() -> str:
    return "native"
