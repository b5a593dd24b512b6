"""What building the CUDA C++ kernels needs on this machine, where it is, and what to install where it is not."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

# Besides nvcc's own, PyTorch's headers include these; a toolkit without them and pip's packages complete each other.
_HEADERS = ("cuda_runtime.h", "cublasLt.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h")
_LIBRARIES = ("cudart", "cublasLt")
_USUAL_HOME = Path("/usr/local/cuda")


def missing() -> str | None:
    """Why the kernels cannot be built here and what to do, or None. Costs a few file look-ups and `nvcc --version`."""
    return _missing_pytorch() or _missing_nvcc() or _missing_tools() or _missing_files()


def missing_archs(archs: Iterable[int]) -> str | None:
    """Why nvcc cannot compile for GPUs of these compute capabilities (90 for 9.0) and what to do, or None."""
    nvcc = find_nvcc()
    if nvcc is None:
        return _missing_nvcc()
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout
    known = sorted(map(int, re.findall(r"\bsm_(\d+)\b", listed)))
    unknown = sorted(set(archs) - set(known))
    if not known or not unknown:
        return None
    wanted = ", ".join(str(arch / 10) for arch in unknown)
    remedy = f"install {'a newer' if unknown[-1] > known[0] else 'an older'} CUDA toolkit or set CUDA_HOME to it"
    accepted = ", ".join(str(arch / 10) for arch in known)
    return f"{nvcc} cannot compile for compute capability {wanted}, but for {accepted}; {remedy}"


def _missing_pytorch() -> str | None:
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build without CUDA; install one with CUDA from https://pytorch.org"
    return None


def _missing_nvcc() -> str | None:
    major = torch.version.cuda.partition(".")[0]
    remedy = f"install the CUDA {major} toolkit (https://developer.nvidia.com/cuda-downloads) or set CUDA_HOME to it"
    nvcc = find_nvcc()
    if nvcc is None:
        return f"nvcc, CUDA's compiler, was not found in CUDA_HOME, PATH or /usr/local/cuda; {remedy}"
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{nvcc} does not run ({error}); {remedy}"
    found = re.search(r"release (\d+)\.(\d+)", output)
    if found is None or found.group(1) != major:
        version = ".".join(found.groups()) if found else "an unknown version"
        return f"{nvcc} is CUDA {version} and PyTorch was built with CUDA {torch.version.cuda}; {remedy}"
    return None


def _missing_tools() -> str | None:
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        return f"the C++ compiler {cxx!r} was not found; install g++ (apt-get install g++) or set CXX"
    # nvcc looks for a host compiler of its own, unless PyTorch hands it $CC.
    cc = os.environ.get("CC", "g++")
    if shutil.which(cc) is None:
        return f"nvcc's host compiler {cc!r} was not found; install g++ (apt-get install g++) or set CC"
    if shutil.which("ninja", path=search_path()) is None:
        return "ninja was not found; pip install ninja (or apt-get install ninja-build)"
    if importlib.util.find_spec("setuptools") is None:
        return "torch.utils.cpp_extension needs setuptools; pip install setuptools"
    return None


def _missing_files() -> str | None:
    major = torch.version.cuda.partition(".")[0]
    remedy = f"install the CUDA {major} toolkit with its libraries, or pip's nvidia-* packages that PyTorch asks for"
    for header in _HEADERS:
        if not any((folder / header).exists() for folder in [cuda_home() / "include", *include_folders()]):
            return f"the header {header} was found neither in {cuda_home()} nor in pip's nvidia packages; {remedy}"
    for library in _LIBRARIES:
        if find_library(library) is None:
            return f"the library lib{library}.so was found neither in {cuda_home()} nor in pip's packages; {remedy}"
    return None


def find_nvcc() -> Path | None:
    """nvcc of $CUDA_HOME or $CUDA_PATH if one is set; else of PATH, /usr/local/cuda or pip's package."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates = [Path(os.environ[variable], "bin", "nvcc")]
            break
    else:
        on_path = shutil.which("nvcc")
        candidates = [Path(on_path)] if on_path else []
        candidates.append(_USUAL_HOME / "bin" / "nvcc")
        candidates += [folder / "bin" / "nvcc" for folder in _pip_folders()]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def cuda_home() -> Path:
    """The toolkit that nvcc belongs to. Raises: RuntimeError without nvcc."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(_missing_nvcc())
    return _toolkit_of(nvcc)


@functools.cache
def _toolkit_of(nvcc: Path) -> Path:
    # The nvcc in PATH can be a link or a script that calls the toolkit's: it is asked where it is.
    command = [str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    top = re.search(r"^#\$ TOP=(.+)$", subprocess.run(command, capture_output=True, text=True).stderr, re.M)
    return Path(top.group(1)).resolve() if top else nvcc.parent.parent


def include_folders() -> list[Path]:
    """Folders of headers in pip's nvidia packages."""
    return [folder / "include" for folder in _pip_folders() if (folder / "include").is_dir()]


def find_library(name: str) -> Path | None:
    """The shared library to link against: the toolkit's, else that of pip's packages, whose names end in a version."""
    for folder in (cuda_home() / "lib64", cuda_home() / "lib"):
        if (folder / f"lib{name}.so").exists():
            return folder / f"lib{name}.so"
    found = [path for folder in _pip_folders() for path in sorted((folder / "lib").glob(f"lib{name}.so*"))]
    return found[0] if found else None


def link_folder(parent: Path) -> Path:
    """A folder in which the linker finds every library by its plain name, which pip's packages do not have."""
    folder = parent / "lib"
    folder.mkdir(exist_ok=True)
    for name in _LIBRARIES:
        link, library = folder / f"lib{name}.so", find_library(name)
        link.unlink(missing_ok=True)
        if library is not None:
            link.symlink_to(library)
    return folder


def search_path() -> str:
    """PATH with the running Python's folder first: pip puts ninja there, also in a venv that is not activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


@functools.cache
def _pip_folders() -> tuple[Path, ...]:
    """Folders of pip's nvidia packages: nvidia/cu13 since CUDA 13, nvidia/cublas, nvidia/cuda_runtime, ... before."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None or spec.submodule_search_locations is None:
        return ()
    return tuple(path for root in spec.submodule_search_locations for path in sorted(Path(root).glob("*")))
