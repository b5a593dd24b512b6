"""Fixtures for all tests."""

import os
import re
import subprocess
import sys

import pytest
import torch
from interpreter_speed import look_once

from fusedmlp import impls

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETER


def pytest_configure(config):
    if INTERPRETER:
        look_once()
        # numpy warns where the interpreter computes inf - inf or overflows, as a GPU does without a word.
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
        # Triton up to 3.6 makes integers of arrays of one element, which NumPy before 2.4 still allows.
        config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:triton")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device() -> str:
    """Where the tests of the contract run: the GPU, if there is one."""
    return "cuda" if ON_GPU else "cpu"


def skip_unless_available(impl: str) -> str:
    reason = impls.unavailable(impl)
    if reason:
        pytest.skip(f"impl={impl}: {reason}")
    return impl


def interpreter_environment() -> dict[str, str]:
    """Environment for a process in which Triton's kernels are interpreted; skips where they cannot be.

    Triton decides on import whether they are.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    probe = [sys.executable, "-c", "import fusedmlp; print(fusedmlp.unavailable('triton') or '')"]
    reason = subprocess.run(probe, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    if reason:
        pytest.skip(reason)
    return environment


def pytest_generate_tests(metafunc):
    """A test that takes `impl` runs once for every implementation there is."""
    if "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", impls.names(), indirect=True)


@pytest.fixture
def impl(request) -> str:
    return skip_unless_available(request.param)


@pytest.fixture
def poisoned(monkeypatch):
    """`torch.empty` and its relatives hand out NaN, so that an element nobody wrote shows."""

    def poison(allocate):
        def allocated(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and tensor.device.type != "meta":
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return allocated

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def raises(error: type[Exception], *words: str):
    """`pytest.raises` for a message that has all these words, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words)))
