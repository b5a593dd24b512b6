"""How implementations are found, and what is said of one that is unknown or cannot run here."""

import importlib
import shutil
import sys

import pytest
import torch
from conftest import INTERPRETER, raises

import fusedmlp
from fusedmlp import impls
from fusedmlp.impls import compiled

OPS = ("gelu", "softmax", "linear_gelu", "mlp")


def test_the_files_are_the_names():
    assert {"auto", "compiled", "cuda", "manual", "native", "triton"} <= set(fusedmlp.impl_names())
    assert fusedmlp.impl_names() == sorted(fusedmlp.impl_names())


def test_every_available_implementation_has_every_op(impl):
    assert all(callable(getattr(impls.load(impl), op)) for op in OPS)


def test_an_unknown_implementation_lists_the_names():
    with raises(ValueError, "'trition'", "compiled", "manual", "native"):
        fusedmlp.functional.gelu(torch.ones(2), impl="trition")
    with raises(ValueError, "'x'", "native"):
        fusedmlp.unavailable("x")


def test_an_unavailable_implementation_says_why_and_never_falls_back(monkeypatch):
    monkeypatch.setattr(impls, "_loaded", {})
    monkeypatch.setattr(compiled, "unavailable", lambda: "no compiler; install one")
    assert fusedmlp.unavailable("compiled") == "no compiler; install one"
    with raises(RuntimeError, "'compiled' cannot run here", "no compiler; install one"):
        fusedmlp.functional.gelu(torch.ones(2), impl="compiled")
    with raises(RuntimeError, "no compiler"):
        fusedmlp.FusedMLP(4, impl="compiled")


def test_a_sixth_implementation_is_one_file(monkeypatch, tmp_path):
    body = "from fusedmlp.impls.native import *\nfrom fusedmlp.impls.native import unavailable\n"
    (tmp_path / "sixth.py").write_text(body)
    (tmp_path / "broken.py").write_text("import a_module_that_is_not_installed\n")
    monkeypatch.setattr(impls, "__path__", [*impls.__path__, str(tmp_path)])
    monkeypatch.setattr(impls, "_loaded", {})
    try:
        assert {"sixth", "broken"} <= set(fusedmlp.impl_names())
        x = torch.randn(3)
        assert torch.equal(fusedmlp.functional.gelu(x, impl="sixth"), torch.nn.functional.gelu(x))
        assert impls.resolved("sixth") == "sixth"
        assert "a_module_that_is_not_installed" in fusedmlp.unavailable("broken")
    finally:
        sys.modules.pop("fusedmlp.impls.sixth", None)


@pytest.mark.skipif(INTERPRETER, reason="asks about the GPU")
def test_gpus_that_triton_s_kernels_do_not_run_on(monkeypatch):
    triton = pytest.importorskip("fusedmlp.impls.triton", exc_type=ImportError)
    remedy = "use impl=native"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "compute capability 7.5" in triton.unavailable()
    assert remedy in triton.unavailable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert triton.unavailable() is None
    # An MI300 says 9.4.
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "not NVIDIA's" in triton.unavailable()
    assert remedy in triton.unavailable()


@pytest.mark.skipif(not INTERPRETER, reason="asks Triton's interpreter: TRITON_INTERPRET=1")
def test_an_interpreter_that_fails_is_named(monkeypatch):
    """As with NumPy 2.4 and Triton 3.6: a loop whose bound is known at run time raises."""
    interpreter = pytest.importorskip("fusedmlp.kernels.interpreter")
    triton = importlib.import_module("fusedmlp.impls.triton")
    assert triton.unavailable() is None or "does not work with NumPy" in triton.unavailable()

    class Fails:
        def __getitem__(self, grid):
            raise TypeError("only 0-dimensional arrays can be converted")

    monkeypatch.setattr(interpreter, "_sum_below_kernel", Fails())
    assert "only 0-dimensional arrays can be converted" in triton.unavailable()
    assert "numpy<2.4" in triton.unavailable()


def test_auto_says_what_runs():
    assert impls.resolved("auto") == "native"
    assert impls.resolved("manual") == "manual"


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda patch: patch.setattr(compiled, "_disabled", lambda: True), "TORCH_COMPILE_DISABLE"),
        (lambda patch: patch.setattr(shutil, "which", lambda name: None), "g++"),
        (lambda patch: patch.setattr(compiled.sysconfig, "get_paths", lambda: {"include": "/nowhere"}), "python3-dev"),
        (lambda patch: patch.setattr(torch._dynamo, "is_dynamo_supported", lambda: False), "does not support Python"),
    ],
)
def test_compiled_names_what_is_missing(monkeypatch, break_it, words):
    break_it(monkeypatch)
    assert words in compiled.unavailable()


def test_compiled_never_runs_eagerly_however_many_shapes():
    """Beyond the recompile limit TorchDynamo would run the plain function; a fresh copy is compiled instead."""
    if compiled.unavailable():
        pytest.skip(compiled.unavailable())
    compiles = []

    def count(graph, inputs):
        compiles.append(graph)
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_inductor", count)
        patch.setattr(compiled, "_copies", {})
        # A constant argument that differs per call is a new version each time, never a dynamic size.
        for size in range(2, 40):
            with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
                x = torch.randn(size)
                torch.testing.assert_close(impls.load("compiled").gelu(x, "none"), torch.nn.functional.gelu(x))
    assert len(compiles) == 38
