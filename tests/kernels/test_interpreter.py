"""Starts the process in which the kernel tests run on the CPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import INTERPRETER, ON_GPU, interpreter_environment


@pytest.mark.skipif(INTERPRETER or ON_GPU, reason="the tests run in this process")
@pytest.mark.slow
def test_kernels_in_the_interpreter():
    environment = interpreter_environment()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "interpreter", "tests/kernels"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2_000:]
    assert int(passed[1]) >= 100, f"only {passed[1]} tests ran: {done.stdout[-2_000:]}"
