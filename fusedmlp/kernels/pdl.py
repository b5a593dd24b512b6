"""Programmatic dependent launch (Hopper and newer): a kernel is launched while the one before it still runs.

Between two kernels a GPU is idle for about a microsecond, and in part while the last programs of one finish. A kernel
that is launched so is on its multiprocessors by then, and its first statement, `follow`, waits until the kernel before
has ended and its results can be read. So the order is what it always was; a kernel without `follow` is not launched so.

FUSEDMLP_PDL=0 launches all kernels the usual way.
"""

import ctypes
import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# CUDA graphs keep such launches from CUDA 12.3 on.
_DRIVER = 12040


def driver_version() -> int:
    """The newest CUDA that the driver knows, 12040 for 12.4; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


@functools.lru_cache
def available(device: torch.device) -> bool:
    """Whether kernels can be launched so on `device`, and the user lets them."""
    if device.type != "cuda" or os.environ.get("FUSEDMLP_PDL") == "0":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0) and driver_version() >= _DRIVER


@triton.jit
def follow(PDL: tl.constexpr):
    """Waits for the kernel before, and lets the one behind be launched, once all programs are here."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
