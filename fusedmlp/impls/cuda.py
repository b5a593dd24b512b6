"""cuda: C++/CUDA kernels and cuBLASLt's fused epilogues. Not part of this version; asking for it says so."""

from fusedmlp import __version__


def unavailable() -> str | None:
    return f"fusedmlp {__version__} has no CUDA C++ kernels yet; use impl=native, impl=compiled or impl=triton"
