"""Whether Triton's interpreter (TRITON_INTERPRET=1) works with the NumPy that is installed."""

import functools

import numpy
import torch
import triton
import triton.language as tl


@triton.jit
def _sum_below_kernel(out_ptr, n):
    """One program writes 0 + 1 + ... + (n - 1)."""
    total = 0
    for i in range(n):
        total += i
    tl.store(out_ptr, total)


@functools.cache
def fault() -> str | None:
    """Why a loop with a bound known at run time fails in the interpreter, None where it works.

    NumPy 2.4 no longer turns an array of one element into an integer, which Triton up to 3.6 relies on.

    Found out once: later it may be asked while torch.export traces, when kernels cannot run.
    """
    out = torch.zeros(1, dtype=torch.int32)
    try:
        _sum_below_kernel[(1,)](out, 4)
    except Exception as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        return (
            f"the interpreter of Triton {triton.__version__} does not work with NumPy {numpy.__version__} ({cause}); "
            "pip install 'numpy<2.4', or a newer Triton"
        )
    return None
