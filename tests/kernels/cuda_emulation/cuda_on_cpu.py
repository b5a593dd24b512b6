"""impl=cuda on CPU tensors: its operators and kernels as they are, over an emulated CUDA runtime and cuBLASLt.

As a pytest plugin (`-p cuda_on_cpu`, with the library in CUDA_ON_CPU) it makes the tests of the contract run it.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fusedmlp.build import SOURCES

COMPILED = ("gelu.cu", "column_sums.cu", "softmax_fwd.cu", "softmax_bwd.cu", "library.cpp", "bindings.cpp", "gemm.cpp")
COMPILED += ("linear.cpp", "measure.cpp", "pointwise.cpp", "products.cpp")


def build_library(folder: Path) -> Path:
    """Compile the sources into a shared library, with what only a GPU can do replaced.

    Raises: RuntimeError with the compiler's output.
    """
    emulation = Path(__file__).parent
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    shutil.copytree(emulation, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    bindings = folder / "bindings.cpp"
    bindings.write_text(bindings.read_text().replace("fusedmlp_cuda, CUDA,", "fusedmlp_cuda, CPU,"))
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    flags = ["-std=c++20", "-fPIC", "-I.", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    # A distribution's checks of longjmp know nothing of fibers.
    flags += ["-U_FORTIFY_SOURCE"]
    flags += [flag for path in includes for flag in ("-isystem", str(path))]

    def run(*arguments: str) -> None:
        built = subprocess.run(["g++", *arguments], cwd=folder, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(built.stderr)

    def compile_one(name: str) -> str:
        # What fibers run a thousand times is worth optimising.
        run(*flags, "-O1" if name.endswith(".cu") else "-O0", "-x", "c++", "-c", name, "-o", f"{name}.o")
        return f"{name}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, COMPILED))
    run("-shared", *objects, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-o", "emulated.so")
    return folder / "emulated.so"


def pytest_configure() -> None:
    from fusedmlp import build
    from fusedmlp.impls import cuda

    build.load = lambda: torch.ops.load_library(os.environ["CUDA_ON_CPU"])
    cuda.DEVICES = ("cpu",)
    cuda.unavailable = lambda: None
