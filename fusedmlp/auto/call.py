"""What a choice depends on: one call of an op, the bucket that its shapes fall into, and the machine.

`M` rows, `K` in_features, `N` out_features or hidden features, `N2` the MLP's out_features.
"""

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedmlp

PACKAGE = Path(__file__).parents[1]
REPLAYED = " replayed"  # how the keys of calls end that a CUDA graph replays


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        op: "gelu", "softmax", "linear_gelu" or "mlp".
        option: `approximate`, or `dim` (not negative) of the softmax.
        tensors: in the order of the op's signature; a bias may be None.
        needs: for each tensor, whether its gradient is wanted.
        replayed: whether what is launched will be replayed from a CUDA graph, so that host time does not count.
    """

    op: str
    option: str | int
    tensors: tuple[Tensor | None, ...]
    needs: tuple[bool, ...]
    replayed: bool = False

    @property
    def x(self) -> Tensor:
        x = self.tensors[0]
        assert x is not None
        return x

    @property
    def dim(self) -> int:
        """The dimension along which a row of x runs."""
        return self.option if isinstance(self.option, int) else -1

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self.tensors, self.option)

    def key(self) -> str:
        """The bucket of this call; calls of one bucket share their choice."""
        x = self.x
        parts = [self.op, _name(x.dtype)]
        if isinstance(self.option, str):
            parts.append(self.option)
        parts += _sizes(self)
        if not all(t is None or t.is_contiguous() for t in self.tensors):
            parts.append("strided")
        parts.append(self._gradients())
        if len(self.tensors) > 1 and x.dtype == torch.float32:
            parts.append("tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee")
        if self.op == "mlp" and (keep := os.environ.get("FUSEDMLP_MLP_KEEP")):
            parts.append(f"keep={keep}")
        return " ".join(parts) + (REPLAYED if self.replayed else "")

    def _gradients(self) -> str:
        x, *parameters = self.needs
        wanted = ["x"] * x + ["weights"] * any(parameters)
        return f"gradients={'+'.join(wanted) or 'none'}"


def _sizes(call: Call) -> list[str]:
    x = call.x
    if call.op == "gelu":
        return [f"elements<={bucket(x.numel())}"]
    if call.op == "softmax":
        columns = x.shape[call.dim] if x.ndim else 1
        # Rows that begin between two 16-byte vectors are read in smaller pieces.
        aligned = "aligned" if columns * x.element_size() % 16 == 0 else "unaligned"
        last = "" if call.dim % max(x.ndim, 1) == max(x.ndim - 1, 0) else "not the last dim"
        sizes = [f"rows<={bucket(x.numel() // max(columns, 1))}", f"columns<={bucket(columns)}", aligned, last]
        return [size for size in sizes if size]
    weight, bias = call.tensors[1:3]
    assert weight is not None
    N, K = weight.shape
    sizes = [f"M<={bucket(x.numel() // max(K, 1))}", f"K={K}", f"N={N}"]
    if call.op == "mlp" and (second := call.tensors[3]) is not None:
        sizes.append(f"N2={second.shape[0]}")
    return sizes if bias is not None else [*sizes, "no bias"]


def bucket(size: int) -> int:
    """`size` rounded up to a power of two or to three quarters of one, so that sizes of a bucket differ by 3/2 at most.

    1025 to 1536 share a bucket, and so do 1537 to 2048.
    """
    power = 1 << max(size - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


@functools.cache
def environment(device: torch.device) -> str:
    """The GPU and the versions that a measurement holds for."""
    try:
        import triton

        compiler = f"triton {triton.__version__}"
    except ImportError:
        compiler = "no triton"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{gpu}, torch {torch.__version__}, {compiler}, fusedmlp {fusedmlp.__version__} ({_code_digest()})"


@functools.cache
def _code_digest() -> str:
    """Of the implementations and their kernels: other code is to be measured again."""
    digest = hashlib.sha256()
    for folder in ("impls", "kernels"):
        for path in sorted((PACKAGE / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".cpp", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
