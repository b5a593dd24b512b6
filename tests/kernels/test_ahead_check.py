"""scripts/check_ahead.py without a GPU: its calls, and what it makes of their outcome."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import INTERPRETER
from scripts_by_path import script

pytest.importorskip("triton")
if INTERPRETER:
    pytest.skip("nothing is compiled under TRITON_INTERPRET=1", allow_module_level=True)

from fusedmlp import impls

SMALL = ([(4, 10)], [(6, 16, 32)], [(3, 5)])


def test_every_call_is_made_on_native():
    check = script("check_ahead")
    made = [what for what, call in check.calls(impls.load("native"), torch.float32, "cpu", SMALL) if call() is None]
    assert len(made) == 1 + 2 * (1 + 2 * 3 + 1)
    rows, products, elements = check.random_sizes(0)
    assert all(n > 0 for sizes in (*rows, *products, *elements) for n in sizes)
    assert all(K % 16 == N % 16 == 0 for _, K, N in products)


GOOD = {"kernels found": 50, "kernels compiled": 0, "new files": 0, "control noticed": True}


@pytest.fixture
def check(monkeypatch):
    """The script, whose processes answer at once: exit codes of compiling ahead, and a row for each dtype."""
    check = script("check_ahead")
    check.codes, check.row, check.commands = [0, 0], dict(GOOD), []

    def run(command, env, **_):
        assert env["TRITON_CACHE_DIR"]
        check.commands.append(command)
        if name := env.get(check.CHILD):
            return SimpleNamespace(returncode=0, stdout=f"noise\n{json.dumps({'dtype': name} | check.row)}\n")
        return SimpleNamespace(returncode=check.codes.pop(0), stdout="compiled 7 Triton kernels\n")

    monkeypatch.setattr(check.subprocess, "run", run)
    monkeypatch.setattr(check.timing, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return check


def test_nothing_compiled_is_success(check, tmp_path):
    assert check.main(["--out", str(tmp_path), "--dtypes", "bf16", "tf32", "--jobs", "3"]) == 0
    ahead, again, first, second = check.commands
    assert ahead == again == [
        sys.executable, "-m", "fusedmlp.build", "--impl", "triton", "--dtypes", "bf16", "tf32", "--jobs", "3",
    ]  # fmt: skip
    assert first == second
    record = json.loads((tmp_path / "ahead.json").read_text())
    assert [row["dtype"] for row in record["tables"]["ahead"]] == ["bf16", "tf32"]
    assert record["environment"]["first"] == "compiled 7 Triton kernels"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kernels compiled": 1}, "something was compiled: bf16"),
        ({"new files": 2}, "something was compiled: bf16"),
        ({"control noticed": False}, "a compilation was not noticed: bf16"),
        ({"kernels found": 0}, "a compilation was not noticed: bf16"),
    ],
)
def test_what_was_compiled_or_missed_is_failure(check, tmp_path, capsys, wrong, words):
    check.row |= wrong
    assert check.main(["--out", str(tmp_path), "--dtypes", "bf16"]) == 1
    assert words in capsys.readouterr().out


def test_compiling_ahead_that_fails_is_failure(check, tmp_path):
    check.codes = [1, 1]
    assert check.main(["--out", str(tmp_path), "--dtypes", "bf16"]) == 1


def test_no_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script("check_ahead").main([])
    assert "PyTorch finds none here" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """With the fewest kernels: a minute of one core."""
    assert script("check_ahead").main(["--out", str(tmp_path), "--dtypes", "tf32"]) == 0
