"""Which cases a run measures when the command line does not say: large ones on a GPU, small ones on a CPU."""

from collections.abc import Sequence

from fusedmlp.bench.cases import Case, parse_case

OPS = ("gelu", "softmax", "linear_gelu", "mlp")
TABLES = ("copy", "matmul", *OPS, "mlp_scaling", "kernels", "padding", "waves")

_GPU = [
    ("gelu", "16384x16384", "fp32", "none"),
    ("gelu", "16384x16384", "bf16", "none"),
    ("gelu", "16384x16384", "bf16", "tanh"),
    ("softmax", "32768x1024", "bf16", "none"),
    ("softmax", "16384x8192", "bf16", "none"),
    ("softmax", "16384x16384", "fp32", "none"),
    ("softmax", "8192x32768", "bf16", "none"),
    ("softmax", "4096x131072", "bf16", "none"),
    ("softmax", "2048x262144", "bf16", "none"),
    ("linear_gelu", "16384x768x3072", "bf16", "tanh"),
    ("linear_gelu", "16384x1024x4096", "bf16", "tanh"),
    ("linear_gelu", "16384x2048x8192", "bf16", "tanh"),
    ("mlp", "16384x768", "bf16", "tanh"),
    ("mlp", "16384x1024", "bf16", "tanh"),
    ("mlp", "16384x2048", "bf16", "tanh"),
]
# What --full adds: the rest of the tables, and widths that are no multiple of a tile.
_MORE = [
    ("gelu", "16384x16384", "fp32", "tanh"),
    ("softmax", "65536x1000", "bf16", "none"),
    ("softmax", "4096x50304", "bf16", "none"),
    ("softmax", "4096x50257", "bf16", "none"),
    ("linear_gelu", "1024x2048x2048", "bf16", "tanh"),
    ("linear_gelu", "16384x768x3072", "bf16", "none"),
    ("linear_gelu", "16384x4096x16384", "bf16", "tanh"),
    ("mlp", "16384x768", "bf16", "none"),
    ("mlp", "16384x4096", "bf16", "tanh"),
]
_CPU = [
    ("gelu", "512x512", "fp32", "none"),
    ("gelu", "512x512", "bf16", "tanh"),
    ("softmax", "512x256", "fp32", "none"),
    ("softmax", "64x2053", "bf16", "none"),
    ("linear_gelu", "128x64x256", "fp32", "tanh"),
    ("mlp", "128x64", "fp32", "tanh"),
]


def usual_cases(op: str, on_gpu: bool, full: bool = False) -> list[Case]:
    """The cases of one op's table."""
    chosen = (_GPU + (_MORE if full else [])) if on_gpu else _CPU
    return [parse_case(*words) for words in chosen if words[0] == op]


def cases(
    op: str, shapes: Sequence[str], dtypes: Sequence[str], kinds: Sequence[str], on_gpu: bool, full: bool
) -> list[Case]:
    """The cases of one op: the usual ones, or those that the command line names; what it leaves open is as usual.

    Args:
        shapes, dtypes, kinds: from the command line, or empty; kinds are of the GELU, "none" or "tanh".
    Raises: UserError for words that do not fit the op.
    """
    usual = usual_cases(op, on_gpu, full)
    if shapes:
        dtypes = dtypes or ["bf16" if on_gpu else "fp32"]
        named = [parse_case(op, s, d, k) for s in shapes for d in dtypes for k in kinds or ["none"]]
    else:
        named = [
            parse_case(op, "x".join(map(str, case.shape)), dtype, kind)
            for case in usual
            for dtype in dtypes or [case.dtype]
            for kind in kinds or [case.approximate]
        ]
    # Softmax has no kinds, and a dtype for every usual case may repeat one.
    return list(dict.fromkeys(named))
