"""Kernel tests run on the GPU if there is one, else in Triton's interpreter, which needs a process of its own."""

import pytest
from conftest import INTERPRETER, ON_GPU


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("interpreter") and not (INTERPRETER or ON_GPU):
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1: see test_interpreter.py"))
