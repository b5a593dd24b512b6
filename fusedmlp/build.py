"""Builds the CUDA C++ kernels of impl=cuda: by itself on first use, or ahead of it; Triton's kernels ahead of theirs.

    python -m fusedmlp.build                      # both, for the GPUs of this machine
    python -m fusedmlp.build --impl triton --dtypes bf16
    python -m fusedmlp.build --arch 8.0 9.0 10.0  # CUDA C++ for others; needs no GPU

The library is kept in $FUSEDMLP_CACHE/cuda (else fusedmlp/cuda in the user's cache folder), one for each version of
PyTorch, of its CUDA and of the sources. One process builds, others wait for it. Triton's kernels go into Triton's own
cache, ~/.triton/cache or $TRITON_CACHE_DIR; `kernels/ahead/calls.py` says which calls then find theirs there.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from fusedmlp import impls
from fusedmlp.cache import cache_dir
from fusedmlp.kernels import toolchain

SOURCES = Path(__file__).parent / "kernels" / "csrc"
NAME = "fusedmlp_cuda"
CXX_FLAGS = ["-O2"]
NVCC_FLAGS = ["-O3", "-lineinfo"]

_loaded: Path | None = None


def load() -> None:
    """Make the kernels of torch.ops.fusedmlp_cuda.* known to this process, building them first if need be.

    Raises: RuntimeError if they cannot be built.
    """
    global _loaded
    if _loaded is None:
        path = build(visible_archs())
        torch.ops.load_library(str(path))
        _loaded = path


def loaded() -> bool:
    """Whether this process has the kernels."""
    return _loaded is not None


def visible_archs() -> list[int]:
    """Compute capabilities of this machine's GPUs, times ten: [90]."""
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return sorted({major * 10 + minor for major, minor in capabilities})


def cache_folder() -> Path:
    """cuda/ in the package's cache directory."""
    return cache_dir() / "cuda"


def find(archs: Iterable[int]) -> Path | None:
    """A library that is built already and holds code for all of `archs`."""
    wanted = set(archs)
    for path in sorted(cache_folder().glob(f"{_digest()}*.so")):
        if wanted <= set(map(int, re.findall(r"-sm(\d+)", path.name))):
            return path
    return None


def missing(archs: Iterable[int]) -> str | None:
    """Why the library cannot be built for `archs` on this machine and what to do, or None."""
    return toolchain.missing() or toolchain.missing_archs(archs)


def build(archs: Iterable[int], verbose: bool = False) -> Path:
    """The library with code for `archs` ([80, 90]): built ahead, or built now.

    Raises: RuntimeError saying what is missing, that the cache cannot be written, or how the compiler failed.
    """
    archs = sorted(set(archs))
    if (path := find(archs)) is not None:
        return path
    if (reason := missing(archs)) is not None:
        raise RuntimeError(f"the CUDA kernels cannot be built: {reason}")
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{_digest()}.lock"):
            return find(archs) or _build_now(archs, folder, verbose)
    except OSError as error:
        raise RuntimeError(
            f"the CUDA kernels cannot be built: {folder} cannot be written ({error}); "
            "set FUSEDMLP_CACHE to a folder that can"
        ) from error


def _build_now(archs: list[int], folder: Path, verbose: bool) -> Path:
    stem = _digest() + "".join(f"-sm{arch}" for arch in archs)
    work = folder / f"{stem}.build"
    work.mkdir(exist_ok=True)
    # Older versions of PyTorch wait for ever on the lock of a build that was killed; nobody else builds here.
    (work / "lock").unlink(missing_ok=True)
    names = ", ".join(f"sm_{arch}" for arch in archs)
    _say(f"building the CUDA kernels for {names}, once; this takes about a minute ...")
    begin = time.perf_counter()
    built = _compile(archs, work, verbose)
    path = folder / f"{stem}.so"
    os.replace(built, path)
    shutil.rmtree(work, ignore_errors=True)
    _say(f"built in {time.perf_counter() - begin:.0f} s: {path}")
    return path


def _compile(archs: list[int], work: Path, verbose: bool) -> Path:
    # Imported here because it takes half a second and setuptools.
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(toolchain.cuda_home())
    path_before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = toolchain.search_path()
    try:
        # A "standalone" program that is linked as a shared library: so `load` builds it without loading it.
        return Path(
            cpp_extension.load(
                name=NAME,
                sources=[str(path) for path in sorted(SOURCES.glob("*.c*")) if path.suffix in (".cpp", ".cu")],
                extra_cflags=[*CXX_FLAGS, *_system_includes()],
                extra_cuda_cflags=[*NVCC_FLAGS, *gencode_flags(archs)],
                extra_ldflags=["-shared", f"-L{toolchain.link_folder(work)}", "-lcublasLt"],
                build_directory=str(work),
                verbose=verbose,
                with_cuda=True,
                is_python_module=False,
                is_standalone=True,
            )
        )
    except (RuntimeError, ImportError) as error:
        raise RuntimeError(f"the CUDA kernels cannot be built: {_summary(str(error))}") from error
    finally:
        os.environ["PATH"] = path_before


def gencode_flags(archs: Iterable[int]) -> list[str]:
    """nvcc's flags for machine code of these compute capabilities."""
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]


def _system_includes() -> list[str]:
    # After the toolkit's own, so that nothing there is replaced.
    return [flag for folder in toolchain.include_folders() for flag in ("-idirafter", str(folder))]


def _digest() -> str:
    """Changes with everything that a library depends on."""
    parts = [torch.__version__, str(torch.version.cuda), platform.machine(), *CXX_FLAGS, *NVCC_FLAGS]
    content = hashlib.sha256("\n".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()[:16]


def _lock(path: Path):
    """A file lock, which a process that dies gives back; says so where another process holds it."""
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say("another process is building the CUDA kernels; waiting for it")
        lock.acquire()
    return lock


def _say(line: str) -> None:
    print(f"fusedmlp: {line}", file=sys.stderr, flush=True)


def _summary(log: str, count: int = 40) -> str:
    """The first `count` lines of a build's log that are not the commands it ran."""
    # nvcc's own complaints begin with its name too: "nvcc fatal   : ...", "nvcc error   : 'cicc' died ...".
    command = re.compile(
        r"(Error building extension '\w+': )?(\[\d+/\d+\] )?\S*(c\+\+|g\+\+|nvcc(?! (fatal|error|warning))) "
    )
    lines = [line for line in log.strip().splitlines() if not command.match(line)]
    return "\n".join(lines if len(lines) <= count else [*lines[:count], "..."])


def _arch(text: str) -> int:
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability such as 9.0")
    return int(text.replace(".", ""))


IMPLS = ("cuda", "triton")
DTYPES = ("bf16", "fp16", "fp32", "tf32")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns: 0 if all that was asked for is built, else 1; 2 for wrong arguments."""
    options = _parse(arguments)
    results = []
    if "cuda" in options.impl:
        results.append(_build_cuda(options.arch or visible_archs(), options.verbose))
    if "triton" in options.impl:
        results.append(_build_triton(options.dtypes, options.jobs))
    return 0 if all(results) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fusedmlp.build",
        description="Build the kernels of impl=cuda and impl=triton ahead of their use.",
    )
    parser.add_argument("--impl", nargs="+", choices=IMPLS, help="which; default: both, cuda alone with --arch")
    parser.add_argument(
        "--arch", nargs="+", type=_arch, help="cuda: compute capabilities; default: this machine's GPUs"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=DTYPES,
        help="triton: of tensors, tf32 for fp32 with TF32 products",
    )
    parser.add_argument("--jobs", type=_count, help="triton: processes at once; default: the cores of this machine")
    parser.add_argument("--verbose", action="store_true", help="cuda: show the compilers' commands and output")
    options = parser.parse_args(arguments)
    options.impl = options.impl or (["cuda"] if options.arch else list(IMPLS))
    if "cuda" in options.impl and not (options.arch or visible_archs()):
        parser.error(
            "there is no CUDA GPU here; name the compute capabilities to build the CUDA C++ kernels for: --arch 9.0 "
            "(Triton's are compiled where their GPU is)"
        )
    return options


def _build_cuda(archs: list[int], verbose: bool) -> bool:
    try:
        print(build(archs, verbose))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return False
    return True


def _build_triton(dtypes: list[str], jobs: int | None) -> bool:
    reason = impls.unavailable("triton")
    if reason is None and os.environ.get("TRITON_INTERPRET") == "1":
        reason = "TRITON_INTERPRET=1 is set, and the interpreter compiles nothing"
    if reason is not None:
        print(f"the Triton kernels cannot be compiled: {reason}", file=sys.stderr)
        return False
    # Imported here because it needs Triton.
    from fusedmlp.kernels.ahead.run import compile_ahead

    try:
        report = compile_ahead(_say, dtypes, jobs)
    except KeyboardInterrupt:
        print("interrupted; Triton kernels that are compiled are kept, and the same command goes on", file=sys.stderr)
        return False
    print(report)
    return not report.failures


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
