"""The CUDA C++ kernels of impl=cuda, built by nvcc for a GPU that need not be there.

Each template is built for every dtype and variant; those of the case's op, direction and dtype are read. Which variant
of a softmax runs depends on the width of its rows (`csrc/softmax_plan.h`). Matrix products are cuBLASLt's, which ships
no source: of linear_gelu and mlp there is what stands beside them.
"""

import re
import subprocess
import tempfile
from pathlib import Path

from fusedmlp import build
from fusedmlp.bench.cards import Card
from fusedmlp.bench.cases import Case
from fusedmlp.bench.inspection.reading import Kernel, from_code
from fusedmlp.errors import UserError
from fusedmlp.kernels import toolchain

_SOURCES = {
    "gelu": ("gelu.cu",),
    "softmax": ("softmax_fwd.cu", "softmax_bwd.cu"),
    "linear_gelu": ("gelu.cu", "column_sums.cu"),
    "mlp": ("gelu.cu", "column_sums.cu"),
}
_MANGLED = re.compile(r".*\d([a-z_]+_kernel)I(13__nv_bfloat16|6__half|f)(\w*)")
_DTYPES = {"bf16": "13__nv_bfloat16", "fp16": "6__half", "fp32": "f"}
_USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def cuda_kernels(case: Case, direction: str, card: Card) -> list[Kernel]:
    """The kernels of a case, by name. Raises: UserError if they cannot be built here, or there are none."""
    found = [
        kernel
        for source in _SOURCES[case.op]
        if _file_matters(source, direction)
        for kernel in _build(source, case, direction, card)
    ]
    if not found:
        raise UserError(f"impl=cuda runs {case} {direction} in cuBLASLt's kernels, which come without source")
    return found


def _file_matters(source: str, direction: str) -> bool:
    return not (("_fwd" in source and direction == "backward") or ("_bwd" in source and direction == "forward"))


def _wanted(name: str, variant: str, case: Case, direction: str) -> bool:
    """Whether a kernel belongs to the case: its direction, and of GELU's its kind."""
    if ("_fwd" in name and direction == "backward") or ("_fwd" not in name and direction == "forward"):
        return False
    if case.has_gemm and case.approximate == "tanh" and name.startswith("gelu"):
        # cuBLASLt's epilogues have tanh.
        return False
    kind = re.search(r"Lb([01])E", variant) if name.startswith("gelu") else None
    return kind is None or kind[1] == str(int(case.approximate == "tanh"))


def _build(source: str, case: Case, direction: str, card: Card) -> list[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        command = [_nvcc(), "-cubin", *build.NVCC_FLAGS, f"-arch=sm_{card.sm}", "--keep", "--keep-dir", folder]
        _run([*command, str(build.SOURCES / source), "-o", str(cubin)], f"nvcc cannot build {source} for sm_{card.sm}")
        ptx = next(Path(folder).glob("*.ptx")).read_text()
        usage = _run([_tool("cuobjdump"), "--dump-resource-usage", str(cubin)], "cuobjdump failed")
        sass = _by_function(_run([_tool("cuobjdump"), "-sass", str(cubin)], "cuobjdump failed"))
    kernels = []
    for symbol, registers, stack, shared in _USAGE.findall(usage):
        parts = _MANGLED.fullmatch(symbol)
        if parts is None or parts[2] != _DTYPES[case.dtype] or not _wanted(parts[1], parts[3], case, direction):
            continue
        text = _entry(ptx, symbol)
        # __launch_bounds__ is the most that a block has; these kernels are launched with it, or with part of it.
        threads = int(found[1]) if (found := re.search(r"\.(?:maxntid|reqntid) (\d+)", text)) else 256
        name = f"{parts[1]}<{', '.join([case.dtype, *_arguments(parts[3])])}>"
        numbers = (threads, None, int(registers), int(stack), int(shared))
        kernels.append(from_code(name, card, *numbers, text, sass.get(symbol, ""), None, case.itemsize))
    return kernels


def _arguments(variant: str) -> list[str]:
    """Template arguments after the first: "Li4ELb1E" -> ["4", "true"]."""
    values = re.findall(r"L(?:N\w+?|[bijlm])(\d+)E", variant.split("EEEv")[0] + "E")
    kinds = re.findall(r"L(N\w+?|[bijlm])\d+E", variant.split("EEEv")[0] + "E")
    return [("false", "true")[int(v)] if kind == "b" else v for kind, v in zip(kinds, values, strict=True)]


def _by_function(listing: str) -> dict[str, str]:
    """The disassembly of each function."""
    _, *parts = re.split(r"^\s*Function : ", listing, flags=re.MULTILINE)
    return {part.split("\n", 1)[0].strip(): part for part in parts}


def _entry(ptx: str, symbol: str) -> str:
    """The part of a PTX module that is one kernel."""
    start = ptx.find(f".entry {symbol}(")
    end = ptx.find("\n}", start)
    return ptx[start : end + 2] if start >= 0 else ""


def _nvcc() -> str:
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        raise UserError("impl=cuda needs nvcc, which was not found in CUDA_HOME, PATH or /usr/local/cuda; install CUDA")
    return str(nvcc)


def _tool(name: str) -> str:
    """One of CUDA's binary tools: the toolkit's, or the one that comes with Triton."""
    candidates = [toolchain.cuda_home() / "bin" / name]
    try:
        import triton

        candidates.append(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
    except ImportError:
        pass
    for path in candidates:
        if path.exists():
            return str(path)
    raise UserError(f"{name} is neither in the CUDA toolkit nor does it come with Triton; install either")


def _run(command: list[str], failure: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise UserError(f"{failure}: {lines[0]}")
    return done.stdout
