"""What the measuring scripts refuse before they measure."""

import sys

import pytest
import torch
from scripts_by_path import script

NUMBERS = [
    ("bench_auto", "--rounds 0"),
    ("bench_auto", "--rep x"),
    ("bench_gemm", "--rounds -1"),
    ("bench_loop", "--turns 0"),
    ("bench_loop", "--dims 0"),
    ("bench_replace", "--steps 0"),
    ("gpu_trace_check", "--turns 0"),
    ("gpu_train_check", "--steps 0"),
]


@pytest.fixture
def said(monkeypatch, capsys):
    """The last line of a script that refuses its command line."""

    def last_line(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as ended:
            script(name).main()
        told = capsys.readouterr().err if ended.value.code == 2 else str(ended.value.code)
        return told.strip().splitlines()[-1]

    return last_line


@pytest.mark.parametrize(("name", "words"), NUMBERS)
def test_numbers_that_measure_nothing(said, name, words):
    option, value = words.split()
    assert f"{option}: {value}: accepted: whole numbers, " in said(name, option, value)


@pytest.mark.parametrize("name", ["bench_auto", "bench_gemm", "bench_loop", "bench_replace", "gate_gemm"])
def test_no_gpu_is_one_line(said, monkeypatch, tmp_path, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    needed = ("--out", str(tmp_path)) if name == "bench_loop" else ()
    assert "PyTorch finds none here" in said(name, *needed)
