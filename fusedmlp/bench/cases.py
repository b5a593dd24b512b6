"""What is measured: an op with its sizes and dtype, its tensors, and the least work that it can be.

`M` rows, `K` in_features, `N` out_features or hidden features (columns for gelu and softmax), `N2` the MLP's
out_features.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedmlp.errors import UserError
from fusedmlp.functional import APPROXIMATE
from fusedmlp.impls import manual

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"gelu": "MxN", "softmax": "MxN", "linear_gelu": "MxKxN", "mlp": "MxK, MxKxN or MxKxNxN2"}
# forward: without gradients. backward: alone, on a kept graph. step: training forward and backward.
DIRECTIONS = ("forward", "backward", "step")
USUAL_DIRECTIONS = {
    "gelu": ("forward", "backward"),
    "softmax": ("forward", "backward"),
    "linear_gelu": ("forward", "backward"),
    "mlp": ("forward", "step"),
}
# Elementary operations of manual for each element; exp, erf and tanh count as one.
_OPERATIONS = {("gelu", "none"): 5, ("gelu", "tanh"): 9, ("softmax", "none"): 5}


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        shape: (M, N) for gelu and softmax (over the last dimension), (M, K, N) for linear_gelu, (M, K, N, N2) for mlp.
        dtype: "fp32", "bf16" or "fp16".  approximate: of the GELU.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    approximate: str = "none"

    def __str__(self) -> str:
        kind = "" if self.op == "softmax" else f" ({'erf' if self.approximate == 'none' else 'tanh'})"
        return f"{self.op}{kind} {'x'.join(map(str, self.shape))} {self.dtype}"

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def has_gemm(self) -> bool:
        return self.op in ("linear_gelu", "mlp")

    def sizes(self) -> tuple[int, int, int, int]:
        """M, K, N, N2; 0 for what the op does not have."""
        if not self.has_gemm:
            return self.shape[0], 0, self.shape[1], 0
        M, K, N, *rest = self.shape
        return M, K, N, rest[0] if rest else 0

    def gemms(self, direction: str) -> list[tuple[int, int, int]]:
        """(rows, summed over, columns) of every matrix product."""
        if not self.has_gemm:
            return []
        M, K, N, N2 = self.sizes()
        layers = [(M, K, N)] + ([(M, N, N2)] if self.op == "mlp" else [])
        back = [product for m, k, n in layers for product in ((m, n, k), (n, m, k))]
        return {"forward": layers, "backward": back, "step": layers + back}[direction]

    def flops(self, direction: str) -> int:
        """FLOPs of the matrix products; for gelu and softmax the elementary operations of `manual`, twice backward."""
        if self.has_gemm:
            return sum(2 * m * k * n for m, k, n in self.gemms(direction))
        M, _, N, _ = self.sizes()
        each = _OPERATIONS[self.op, self.approximate if self.op == "gelu" else "none"] * M * N
        return each * {"forward": 1, "backward": 2, "step": 3}[direction]

    def least_bytes(self, direction: str) -> int:
        """Bytes with every input read once and every result written once.

        Backward reads what the forward pass of training kept: x for gelu, y for softmax, preact for the others, which
        that forward pass therefore writes beside its result.
        """
        M, K, N, N2 = self.sizes()
        forward = sum(manual.ledger(self.op, M, N, K, N2, fused=True))
        hidden = M * N if self.has_gemm else 0
        if not self.has_gemm:
            backward = 3 * M * N
        else:
            out = M * (N2 or N)
            parameters = K * N + N + N * N2 + N2
            weights = K * N + N * N2
            backward = out + hidden + M * K + weights + M * K + parameters
        elements = {"forward": forward, "backward": backward, "step": forward + hidden + backward}[direction]
        return elements * self.itemsize


def parse_case(op: str, shape: str, dtype: str, approximate: str = "none") -> Case:
    """A case from the command line's words, "16384x768x3072" for the shape. Raises: UserError."""
    if op not in SIZES:
        raise UserError(f"op {op!r} is unknown; accepted: {', '.join(SIZES)}")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; accepted: {', '.join(DTYPES)}")
    if approximate not in APPROXIMATE:
        raise UserError(f"approximate {approximate!r} is unknown; accepted: {', '.join(APPROXIMATE)}")
    sizes = parse_shape(shape)
    if op == "mlp" and 2 <= len(sizes) <= 4:
        M, K, *rest = sizes
        N = rest[0] if rest else 4 * K
        sizes = (M, K, N, rest[1] if len(rest) > 1 else K)
    elif len(sizes) != (3 if op == "linear_gelu" else 2) or op == "mlp":
        raise UserError(f"shape {shape!r} does not fit {op}, which takes {SIZES[op]}, for example {_EXAMPLES[op]}")
    return Case(op, sizes, dtype, "none" if op == "softmax" else approximate)


_EXAMPLES = {"gelu": "4096x4096", "softmax": "4096x50257", "linear_gelu": "16384x768x3072", "mlp": "16384x768"}


def parse_shape(text: str) -> tuple[int, ...]:
    """ "16384x768" -> (16384, 768). Raises: UserError."""
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"shape {text!r} is not sizes joined by x; accepted: for example 16384x768")
    sizes = tuple(map(int, parts))
    # A tensor has two of the sizes; the product of all may be large where no tensor is.
    if any(a * b > 2**40 for a, b in itertools.combinations(sizes, 2)):
        raise UserError(f"shape {text!r} is larger than any memory")
    return sizes


def make_tensors(case: Case, device: torch.device) -> dict[str, Tensor | None]:
    """The op's tensor arguments by name, in its order: standard normal, weights scaled to keep the variance."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, dtype=torch.float32) * scale).to(DTYPES[case.dtype])

    M, K, N, N2 = case.sizes()
    if not case.has_gemm:
        return {"x": normal(M, N)}
    tensors: dict[str, Tensor | None] = {"x": normal(M, K)}
    if case.op == "linear_gelu":
        return tensors | {"weight": normal(N, K, scale=K**-0.5), "bias": normal(N)}
    first = {"weight1": normal(N, K, scale=K**-0.5), "bias1": normal(N)}
    return tensors | first | {"weight2": normal(N2, N, scale=N**-0.5), "bias2": normal(N2)}


def option(case: Case) -> object:
    """What an implementation's function takes after the tensors: `approximate`, or softmax's dimension."""
    return 1 if case.op == "softmax" else case.approximate
