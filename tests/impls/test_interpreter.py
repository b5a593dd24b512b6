"""The whole contract for impl=triton on the CPU: Triton's interpreter, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import INTERPRETER, interpreter_environment

ROOT = Path(__file__).parents[2]
SUITES = [
    "tests/impls",
    "tests/models",
    "tests/test_functional.py",
    "tests/test_modules.py",
    "tests/training/distributed/test_ops.py",
]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETER, reason="this is the process that the test starts")
def test_contract_of_triton_in_the_interpreter():
    environment = interpreter_environment()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton", *SUITES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2_000:]
    assert int(passed[1]) >= 60, f"only {passed[1]} tests ran: {done.stdout[-2_000:]}"
