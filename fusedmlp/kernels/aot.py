"""Compile a Triton kernel for a GPU that need not be there, and read what the compiler made of it.

    report = compile_kernel(_gelu_fwd_kernel, {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i64"},
                            {"APPROXIMATE": "none", "BLOCK": 2048}, sm=90)
    report.registers, report.stack_bytes, report.shared_bytes, report.loads, report.tensor_core, report.sass()

Not usable under TRITON_INTERPRET=1, where kernels are plain Python.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Shared memory one thread block can have, in bytes (CUDA C++ Programming Guide, "Technical Specifications").
SHARED_BYTES_PER_BLOCK = {
    80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: 99 * 1024,
}  # fmt: skip

_PTX_ACCESS = re.compile(r"\b(ld|st)(?:\.volatile|\.relaxed|\.acquire|\.release|\.gpu)*\.global((?:\.[\w:]+)*)")
_TENSOR_CORE = {
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "mma": re.compile(r"(?<!\w)mma\.sync"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
}


@dataclass(frozen=True)
class KernelReport:
    """What the compiler made of one kernel.

    Attributes:
        name: the kernel's name.  sm: compute capability, 90 for 9.0.
        registers: per thread.  stack_bytes: local memory per thread (spilled registers and indexed arrays), in bytes.
        shared_bytes: static and dynamic shared memory per thread block, in bytes.
        loads, stores: global accesses in the PTX, counted by their width in bytes.
        tensor_core: matrix instructions in the PTX, counted by family ("wgmma", "mma", "tcgen05").
    """

    name: str
    sm: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    loads: Counter[int]
    stores: Counter[int]
    tensor_core: Counter[str]
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    def sass(self) -> str:
        """The machine code, disassembled."""
        return _on_cubin("nvdisasm", ["-c"], self.cubin)

    def waits_for_each_product(self) -> bool:
        """Whether the machine code (sm_90) lets no wgmma instruction run beside another: ptxas gives up so where other
        instructions touch the accumulator in between, and says it in a remark (C7510 to C7519) that nobody sees."""
        return waits_for_each_product(self.sass())


def waits_for_each_product(sass: str) -> bool:
    """Whether a wait until none is under way follows one wgmma instruction after another."""
    found = re.findall(r"\b(HGMMA)\b|WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", sass)
    return "HwHw" in "".join("H" if product else "w" if under_way == "0" else "-" for product, under_way in found)


def compile_kernel(
    kernel,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    sm: int,
    *,
    multiples_of_16: Iterable[str] | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    **options,
) -> KernelReport:
    """Compile `kernel` for `sm` and report on the result.

    Args:
        kernel: a `@triton.jit` (or Gluon) function.
        types: run-time arguments, name -> "*bf16", "i32", "fp32", "tensordesc<bf16[128,64]>", ...
        constants: constexpr arguments, name -> value; those with a default may be left out.
        sm: compute capability times ten: 80, 90, 100.
        multiples_of_16: arguments known to be divisible by 16; default: every pointer.
        num_warps, num_stages, options: as in a launch.
    Raises: ValueError when an argument of the kernel is in neither or both of `types` and `constants`.
    """
    names = kernel.arg_names
    defaults = {p.name: p.default for p in kernel.params if p.is_constexpr and p.has_default}
    constants = {name: value for name, value in defaults.items() if name not in types} | dict(constants)
    if sorted([*types, *constants]) != sorted(names):
        raise ValueError(f"{kernel.__name__} takes {names}; got types {list(types)} and constants {list(constants)}")
    if multiples_of_16 is None:
        multiples_of_16 = [name for name, kind in types.items() if kind.startswith("*")]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples_of_16}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = _source_class(kernel)(kernel, signature, constexprs=dict(constants), attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return _report(kernel.__name__, sm, compiled)


def _source_class(kernel):
    """Gluon kernels are parsed by a class of their own."""
    if type(kernel).__module__.startswith("triton.experimental.gluon"):
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def _report(name: str, sm: int, compiled) -> KernelReport:
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    usage = _on_cubin("cuobjdump", ["--dump-resource-usage"], cubin)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    accesses = Counter((kind, _width(suffixes)) for kind, suffixes in _PTX_ACCESS.findall(ptx))
    return KernelReport(
        name=name,
        sm=sm,
        registers=int(registers),
        stack_bytes=int(stack),
        shared_bytes=compiled.metadata.shared,
        loads=Counter({width: n for (kind, width), n in accesses.items() if kind == "ld"}),
        stores=Counter({width: n for (kind, width), n in accesses.items() if kind == "st"}),
        tensor_core=Counter(
            {family: n for family, pattern in _TENSOR_CORE.items() if (n := len(pattern.findall(ptx)))}
        ),
        ptx=ptx,
        cubin=cubin,
    )


def _width(suffixes: str) -> int:
    """Bytes of one access, from its suffixes: ".L2::evict_first.v4.b32" -> 16."""
    vector = re.search(r"\.v(\d)\b", suffixes)
    bits = re.search(r"\.[bsuf](\d+)$", suffixes)
    return int(bits.group(1)) // 8 * (int(vector.group(1)) if vector else 1)


def _on_cubin(tool: str, arguments: list[str], cubin: bytes) -> str:
    """Run one of the CUDA binary tools that come with Triton."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "kernel.cubin")
        Path(file).write_bytes(cubin)
        return subprocess.run([path, *arguments, file], check=True, capture_output=True, text=True).stdout
