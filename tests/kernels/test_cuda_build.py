"""Building the CUDA kernels: what is said when something is missing, the cache, several processes, the command line.

The builds here are of two tiny sources; `test_cuda_sources.py` builds the real ones.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import raises

from fusedmlp import build
from fusedmlp.impls import cuda
from fusedmlp.kernels import toolchain

CXX_SOURCE = 'extern "C" int answer() { return 42; }\n'
CUDA_SOURCE = "__global__ void kernel(float* x) { x[threadIdx.x] = 1.0f; }\n"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuda"


@pytest.fixture
def tiny(tmp_path, monkeypatch, cache):
    """Sources that compile in seconds."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(CXX_SOURCE)
    (folder / "kernel.cu").write_text(CUDA_SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def toolchain_here():
    if (reason := toolchain.missing()) is not None:
        pytest.skip(reason)


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """A machine that has everything, whatever this one has: CUDA 13 and stand-ins for the tools."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    home, tools = tmp_path / "toolkit", tmp_path / "tools"
    for folder in (home / "bin", home / "include", home / "lib64", tools):
        folder.mkdir(parents=True)
    script(home / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    for tool in ("c++", "g++", "ninja"):
        script(tools / tool, "true")
    for name in toolchain._HEADERS:
        (home / "include" / name).touch()
    for name in toolchain._LIBRARIES:
        (home / "lib64" / f"lib{name}.so").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(toolchain, "_pip_folders", lambda: ())
    for variable in ("CXX", "CC", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_nothing_is_missing_where_everything_is_there(complete):
    assert toolchain.missing() is None


def test_a_pytorch_without_cuda(complete, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a build without CUDA; install one with CUDA from https://pytorch.org" in toolchain.missing()
    assert "is a build without CUDA" in cuda.unavailable()


def test_no_nvcc(complete, monkeypatch):
    (complete / "toolkit" / "bin" / "nvcc").unlink()
    message = toolchain.missing()
    assert "nvcc" in message
    assert "install the CUDA 13 toolkit" in message
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(toolchain, "_USUAL_HOME", complete / "nowhere")
    assert toolchain.missing() == message
    with raises(RuntimeError, "nvcc", "CUDA_HOME"):
        toolchain.cuda_home()


def test_nvcc_of_another_cuda(complete):
    script(complete / "toolkit" / "bin" / "nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    message = toolchain.missing()
    assert "is CUDA 12.4 and PyTorch was built with CUDA 13.0; install the CUDA 13 toolkit" in message


def test_an_nvcc_that_does_not_run(complete):
    script(complete / "toolkit" / "bin" / "nvcc", "exit 3")
    assert "nvcc does not run" in toolchain.missing()
    script(complete / "toolkit" / "bin" / "nvcc", "echo hello")
    assert "is CUDA an unknown version" in toolchain.missing()


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("c++", "the C++ compiler 'c++' was not found; install g++"),
        ("g++", "host compiler 'g++' was not found; install g++"),
        ("ninja", "ninja was not found; pip install ninja"),
    ],
)
def test_a_missing_tool(complete, tool, words):
    (complete / "tools" / tool).unlink()
    assert words in toolchain.missing()


def test_a_missing_compiler_that_was_asked_for(complete, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler'" in toolchain.missing()


def test_ninja_beside_python_is_found(complete):
    (complete / "tools" / "ninja").rename(complete / "ninja")
    assert toolchain.missing() is None


def test_no_setuptools(complete, monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert "pip install setuptools" in toolchain.missing()


def test_missing_cublas(complete):
    (complete / "toolkit" / "lib64" / "libcublasLt.so").unlink()
    assert "libcublasLt.so" in toolchain.missing()
    (complete / "toolkit" / "include" / "cublasLt.h").unlink()
    assert "the header cublasLt.h" in toolchain.missing()


def test_pip_packages_complete_the_toolkit(complete, monkeypatch):
    """Headers and libraries of pip's packages, whose libraries have a version at their end, and a link without one."""
    package = complete / "nvidia" / "cu13"
    for kind, name, pip_name in (
        ("include", "cublasLt.h", "cublasLt.h"),
        ("lib", "libcublasLt.so", "libcublasLt.so.13"),
    ):
        (package / kind).mkdir(parents=True)
        (package / kind / pip_name).touch()
        (complete / "toolkit" / {"lib": "lib64"}.get(kind, kind) / name).unlink()
    assert "cublasLt" in toolchain.missing()
    monkeypatch.setattr(toolchain, "_pip_folders", lambda: (package,))
    assert toolchain.missing() is None
    assert toolchain.include_folders() == [package / "include"]
    links = toolchain.link_folder(complete)
    assert (links / "libcublasLt.so").resolve() == package / "lib" / "libcublasLt.so.13"
    assert (links / "libcudart.so").resolve() == complete / "toolkit" / "lib64" / "libcudart.so"


def test_the_toolkit_behind_a_script_is_found(toolchain_here, tmp_path, monkeypatch):
    """An nvcc in PATH can be a script that calls the toolkit's."""
    home = toolchain.cuda_home()
    script(tmp_path / "nvcc", f'exec {home}/bin/nvcc "$@"')
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert toolchain.find_nvcc() == tmp_path / "nvcc"
    assert toolchain.cuda_home() == home


def test_a_gpu_that_nvcc_does_not_know(complete, tiny, monkeypatch):
    script(complete / "toolkit" / "bin" / "nvcc", "echo 'release 13.0, sm_80 sm_90 sm_100'")
    assert toolchain.missing_archs([80, 100]) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "visible_archs", lambda: [90, 130])
    words = ("nvcc", "compute capability 13.0", "8.0, 9.0, 10.0", "install a newer CUDA toolkit")
    with raises(RuntimeError, "cannot be built", *words):
        build.build([90, 130])
    assert all(word in cuda.unavailable() for word in words)
    assert "an older" in toolchain.missing_archs([50])
    script(complete / "toolkit" / "bin" / "nvcc", "exit 1")
    assert toolchain.missing_archs([90]) is None


def test_a_failed_build_shows_what_nvcc_says_and_no_commands():
    log = """Error building extension 'fusedmlp_cuda': [1/11] /usr/local/cuda/bin/nvcc -MD -c gelu.cu
[2/11] c++ -c bindings.cpp
nvcc error   : 'cicc' died due to signal 9 (Kill signal)
/usr/local/cuda/bin/nvcc -MD -c softmax_fwd.cu
nvcc fatal   : Unsupported gpu architecture 'compute_130'
"""
    assert build._summary(log).splitlines() == [log.splitlines()[2], log.splitlines()[4]]


def test_what_is_missing_ends_a_build(complete, tiny):
    (complete / "toolkit" / "bin" / "nvcc").unlink()
    with raises(RuntimeError, "the CUDA kernels cannot be built", "nvcc", "install the CUDA 13 toolkit"):
        build.build([90])


def test_availability_by_gpu(complete, monkeypatch, cache):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no CUDA GPU; use impl=native" in cuda.unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "visible_archs", lambda: [75, 90])
    assert "compute capability 7.5" in cuda.unavailable()
    assert "hide it with CUDA_VISIBLE_DEVICES" in cuda.unavailable()
    monkeypatch.setattr(build, "visible_archs", lambda: [90])
    assert cuda.unavailable() is None
    (complete / "tools" / "ninja").unlink()
    assert "pip install ninja" in cuda.unavailable()
    # Whoever has a library already needs no tools.
    cache.mkdir(parents=True)
    (cache / f"{build._digest()}-sm80-sm90.so").touch()
    assert cuda.unavailable() is None


def test_visible_archs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", [(9, 0), (8, 0), (9, 0)].__getitem__)
    assert build.visible_archs() == [80, 90]


def test_a_cache_that_cannot_be_written(complete, tiny, monkeypatch):
    (complete / "file").touch()
    monkeypatch.setenv("FUSEDMLP_CACHE", str(complete / "file"))
    with raises(RuntimeError, str(complete / "file"), "cannot be written", "set FUSEDMLP_CACHE"):
        build.build([90])


def test_cache_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path))
    assert build.cache_folder() == tmp_path / "cuda"
    monkeypatch.delenv("FUSEDMLP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "fusedmlp" / "cuda"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "fusedmlp" / "cuda"


def test_a_second_build_is_found(toolchain_here, tiny, capfd):
    first = build.build([90, 80])
    assert first.name.endswith("-sm80-sm90.so")
    progress = capfd.readouterr().err
    assert "fusedmlp: building the CUDA kernels for sm_80, sm_90" in progress
    assert "fusedmlp: built in" in progress
    # Also for one of its architectures, and without any tool.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "missing", lambda: "everything")
        assert build.build([90]) == build.build([80, 90]) == first
        with raises(RuntimeError, "everything"):
            build.build([100])
        (tiny / "answer.cpp").write_text(CXX_SOURCE.replace("42", "43"))
        assert build.find([90]) is None
    assert "building" not in capfd.readouterr().err
    # Nothing but the library and its lock is left.
    assert {path.suffix for path in first.parent.iterdir()} == {".so", ".lock"}


def test_a_compile_error_is_shown(toolchain_here, tiny, capfd):
    (tiny / "kernel.cu").write_text("__global__ void kernel() { undeclared = 1; }\n")
    with raises(RuntimeError, "the CUDA kernels cannot be built", "kernel.cu", "undeclared"):
        build.build([90])
    # The next try starts anew, also after a build that was killed.
    (tiny / "kernel.cu").write_text(CUDA_SOURCE)
    work = build.cache_folder() / f"{build._digest()}-sm90.build"
    work.mkdir()
    (work / "lock").touch()
    assert build.build([90]).exists()


TWO = """
import sys
from pathlib import Path
from fusedmlp import build
build.SOURCES = Path(sys.argv[1])
print(build.build([90]))
"""


def test_two_processes_build_once(toolchain_here, tiny):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(tiny)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0] != ""
    progress = results[0][1] + results[1][1]
    assert progress.count("building the CUDA kernels for sm_90") == 1
    assert progress.count("waiting for it") <= 1


def test_the_command_line(toolchain_here, tiny, capsys, monkeypatch):
    assert build.main(["--arch", "9.0"]) == 0
    assert Path(capsys.readouterr().out.strip()) == build.find([90])
    monkeypatch.setattr(toolchain, "missing", lambda: "no nvcc here")
    assert build.main(["--arch", "10.0"]) == 1
    assert "no nvcc here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--arch 9.0"), (["--arch", "sm90"], "'sm90'"), (["--impl", "native"], "'native'"),
        (["--impl", "triton", "--jobs", "0"], "'0' is not a number of processes"), (["--dtypes", "int8"], "'int8'"),
    ],
)  # fmt: skip
def test_a_command_line_that_is_wrong(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(build, "visible_archs", list)
    with pytest.raises(SystemExit) as exit_:
        build.main(arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def both(monkeypatch):
    """A machine with a GPU, on which both parts of the command do as they are told, and what was asked of them."""
    asked = SimpleNamespace(cuda=[], triton=[], cuda_error=None, report=SimpleNamespace(failures=[]))

    def build_cuda(archs, verbose):
        asked.cuda.append((archs, verbose))
        if asked.cuda_error:
            raise asked.cuda_error
        return Path("library.so")

    def compile_ahead(say, dtypes, jobs):
        asked.triton.append((list(dtypes), jobs))
        if isinstance(asked.report, BaseException):
            raise asked.report
        return asked.report

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(build, "visible_archs", lambda: [90])
    monkeypatch.setattr(build, "build", build_cuda)
    monkeypatch.setattr(build.impls, "unavailable", lambda name: None)
    monkeypatch.setitem(sys.modules, "fusedmlp.kernels.ahead.run", SimpleNamespace(compile_ahead=compile_ahead))
    return asked


@pytest.mark.parametrize(
    ("arguments", "cuda", "triton"),
    [
        ([], [([90], False)], [(["bf16", "fp16", "fp32", "tf32"], None)]),
        (["--impl", "cuda", "--verbose"], [([90], True)], []),
        (["--impl", "triton", "--dtypes", "bf16", "--jobs", "3"], [], [(["bf16"], 3)]),
        # For other machines only what can be built for them.
        (["--arch", "8.0", "9.0"], [([80, 90], False)], []),
        (["--arch", "8.0", "--impl", "triton", "cuda"], [([80], False)], [(["bf16", "fp16", "fp32", "tf32"], None)]),
    ],
)
def test_what_is_built(both, arguments, cuda, triton, capsys):
    assert build.main(arguments) == 0
    assert (both.cuda, both.triton) == (cuda, triton)
    printed = capsys.readouterr().out
    assert ("library.so" in printed, "namespace" in printed) == (bool(cuda), bool(triton))


def test_one_that_fails_does_not_stop_the_other(both, capsys):
    both.cuda_error = RuntimeError("the CUDA kernels cannot be built: no nvcc")
    assert build.main([]) == 1
    assert len(both.triton) == 1
    printed = capsys.readouterr()
    assert "no nvcc" in printed.err
    assert "namespace" in printed.out
    both.cuda_error, both.report = None, SimpleNamespace(failures=["could not compile x"])
    assert build.main([]) == 1
    assert "library.so" in capsys.readouterr().out


def test_an_interruption_is_one_line(both, capsys):
    both.report = KeyboardInterrupt()
    assert build.main(["--impl", "triton"]) == 1
    assert "are kept, and the same command goes on" in capsys.readouterr().err


def test_triton_where_it_cannot_run(both, monkeypatch, capsys):
    monkeypatch.setattr(build.impls, "unavailable", lambda name: "there is no CUDA GPU; use impl=native")
    assert build.main(["--impl", "triton"]) == 1
    assert "the Triton kernels cannot be compiled: there is no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(build.impls, "unavailable", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert build.main([]) == 1
    assert both.cuda
    assert "TRITON_INTERPRET=1 is set" in capsys.readouterr().err
    assert both.triton == []


def test_dtypes_are_those_that_are_planned():
    pytest.importorskip("triton")
    from fusedmlp.kernels.ahead import calls

    assert tuple(calls.DTYPES) == build.DTYPES


IMPORT = """
import sys
import fusedmlp
assert "fusedmlp.impls.cuda" not in sys.modules
assert isinstance(fusedmlp.unavailable("cuda"), str)
assert "torch.utils.cpp_extension" not in sys.modules
"""


def test_importing_needs_no_tool_and_builds_nothing(tmp_path):
    environment = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "FUSEDMLP_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists()
