"""The CUDA sources, built with warnings as errors for sm_80, sm_90 and sm_100, and what the compiler made of them.

One build serves all tests here. It needs nvcc and a PyTorch with CUDA, no GPU.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from fusedmlp import build
from fusedmlp.kernels import toolchain

ARCHS = (80, 90, 100)
STRICT_CXX = ["-Wall", "-Wextra", "-Werror"]
STRICT_NVCC = ["-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror", "-Xptxas=-warn-spills"]
# Sums over rows that are not a multiple of 16 bytes, and over fp32 partial sums of any number of columns.
NARROW = re.compile(r"strip_sums_kernelI\w+?Li1E|add_strips_kernel")
FAMILIES = (
    "gelu_fwd",
    "gelu_bwd",
    "strip_sums",
    "add_strips",
    *(f"softmax_{d}_{k}" for d in ("fwd", "bwd") for k in ("lanes", "row", "twice")),
    "softmax_fwd_cluster",
    "softmax_bwd_cluster",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if (reason := toolchain.missing()) is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDMLP_CACHE", str(tmp_path_factory.mktemp("cuda")))
        patch.setattr(build, "CXX_FLAGS", build.CXX_FLAGS + STRICT_CXX)
        patch.setattr(build, "NVCC_FLAGS", build.NVCC_FLAGS + STRICT_NVCC)
        return build.build(ARCHS)


def binary_tool(name: str) -> Path:
    """cuobjdump or nvdisasm: the toolkit's, or those that come with Triton."""
    on_path = shutil.which(name, path=f"{toolchain.cuda_home() / 'bin'}:{os.environ['PATH']}")
    if on_path:
        return Path(on_path)
    triton = pytest.importorskip("triton", reason=f"{name} is neither in the CUDA toolkit nor comes with Triton")
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def dump(library: Path, *arguments: str) -> str:
    return subprocess.run(
        [binary_tool("cuobjdump"), *arguments, library], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def sass(library):
    """Machine code by (arch, mangled name of the kernel)."""
    code, arch, name = defaultdict(list), None, None
    for line in dump(library, "--dump-sass").splitlines():
        if found := re.match(r"\s*arch = sm_(\d+)", line):
            arch = int(found.group(1))
        elif found := re.match(r"\s*Function : (\S+)", line):
            name = found.group(1)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code[arch, name].append(found.group(1))
    return code


def test_every_kernel_is_there_for_every_architecture(sass):
    names = {arch: {name for a, name in sass if a == arch} for arch in ARCHS}
    assert names[80] == names[90] == names[100]
    for family in FAMILIES:
        assert sum(f"{family}_kernel" in name for name in names[90]) >= 3, family


def test_nothing_is_spilled(library):
    """Neither registers nor indexed arrays go to local memory, and the largest block of each kernel fits."""
    usage = re.findall(r"Function (\S+):\s*REG:(\d+) STACK:(\d+)", dump(library, "--dump-resource-usage"))
    assert len(usage) >= 3 * len(FAMILIES) * len(ARCHS)
    for name, registers, stack in usage:
        assert int(stack) == 0, f"{name} has {stack} bytes of stack"
        if "_row_kernel" in name or "_twice_kernel" in name:
            # 512 threads a block for 16-bit rows forward, which are held in more registers; else 1024.
            most = 128 if re.search(r"softmax_fwd_row_kernelI(13__nv_bfloat16|6__half)", name) else 64
            assert int(registers) <= most, f"{name}: {registers} registers"
        if "_cluster_kernel" in name:
            # Six blocks of 256 threads: kSliceBlocks in softmax_plan.h.
            assert int(registers) <= 40, f"{name}: {registers} registers"


def test_memory_is_accessed_16_bytes_at_a_time(sass):
    for (arch, name), code in sass.items():
        # LDGSTS goes past the registers to shared memory.
        loads = [line for line in code if re.search(r"\b(LDG\.E|LDGSTS\.E\.BYPASS)\.128\b", line)]
        stores = [line for line in code if re.search(r"\bSTG\.E\.128\b", line)]
        if NARROW.search(name):
            continue
        assert loads, f"sm_{arch} {name} has no load of 16 bytes"
        # Sums alone write nothing but fp32 partial sums.
        assert stores or "strip_sums_kernel" in name, f"sm_{arch} {name} has no store of 16 bytes"


def test_arithmetic_is_single_precision(sass):
    for (arch, name), code in sass.items():
        double = [
            line for line in code if re.search(r"\b(D(ADD|MUL|FMA|SETP|MNMX)|F2F\.F64|MUFU\.R(CP|SQ)64H)\b", line)
        ]
        assert not double, f"sm_{arch} {name}: {double[:3]}"


def test_literals_are_single_precision():
    for path in build.SOURCES.glob("*.cu*"):
        code = re.sub(r"//.*|\"[^\"]*\"", "", path.read_text())
        doubles = re.findall(r"\b\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])", code)
        assert not doubles, f"{path.name}: {doubles}"


def test_clusters_are_used_where_the_hardware_has_them(sass):
    for (arch, name), code in sass.items():
        if "_cluster_kernel" in name:
            assert any("UCGABAR" in line for line in code) == (arch >= 90), f"sm_{arch} {name}"
            # Not the only way to load: vectors that are cut where the tensor ends.
            assert any("LDGSTS" in line for line in code), f"sm_{arch} {name}"
            assert any("CCTL.E.PF2" in line for line in code), f"sm_{arch} {name} prefetches nothing"
            assert any(re.search(r"\bST(AS|\.ASYNC)", line) for line in code) == (arch >= 90), f"sm_{arch} {name}"
            # Nothing may wait for the copies that are under way, as a release to the whole GPU would.
            assert not any("MEMBAR.ALL.GPU" in line or "MEMBAR.SC" in line for line in code), f"sm_{arch} {name}"


LOAD = """
import sys
import torch
from fusedmlp.kernels import cuda_ops
torch.ops.load_library(sys.argv[1])
ops = ("gelu", "softmax", "linear_gelu", "mlp")
for name in [f"{op}_{direction}" for op in ops for direction in ("fwd", "bwd")]:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedmlp_cuda::{name}", "CUDA"), name
try:
    cuda_ops.gelu_fwd(torch.ones(3), "none")
except NotImplementedError as error:
    assert "fusedmlp_cuda::gelu_fwd" in str(error) and "'CPU' backend" in str(error), error
else:
    raise AssertionError("a CPU tensor was accepted")
print("loaded")
"""


def test_the_library_loads_and_its_operators_fit_their_schemas(library):
    """In a process of its own: a kernel whose signature is not its schema's is an error at loading."""
    done = subprocess.run([sys.executable, "-c", LOAD, str(library)], capture_output=True, text=True)
    assert done.stdout == "loaded\n", done.stderr


def test_a_kernel_that_does_not_fit_its_schema_is_refused(library):
    script = "import sys, torch\nlibrary = torch.library.Library('fusedmlp_cuda', 'FRAGMENT')\n"
    script += "library.define('gelu_fwd(Tensor x, int approximate) -> Tensor')\ntorch.ops.load_library(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, str(library)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "gelu_fwd" in done.stderr
