"""A run's directory is its own, and its result.json is always whole and valid."""

import json
import math
from pathlib import Path

import pytest
from conftest import raises

from fusedmlp.errors import UserError
from fusedmlp.training import environment
from fusedmlp.training.result import Result, claim_folder


def test_runs_that_want_one_directory_get_one_each(tmp_path):
    folders = [claim_folder(tmp_path / "runs" / "12-00-00-native-dim32") for _ in range(3)]
    assert [folder.name for folder in folders] == [f"12-00-00-native-dim32{tail}" for tail in ("", "-2", "-3")]
    assert all(folder.is_dir() for folder in folders)


def test_a_directory_without_a_run_in_it_is_taken(tmp_path):
    assert claim_folder(tmp_path) == tmp_path


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    with raises(UserError, str(tmp_path / "file"), "hydra.run.dir"):
        claim_folder(tmp_path / "file" / "run")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where nobody, not even root, can write")
def test_an_unwritable_directory():
    with raises(UserError, "/proc/fusedmlp", "cannot be written", "hydra.run.dir"):
        claim_folder(Path("/proc/fusedmlp/run"))


def test_result_is_valid_json_whatever_the_numbers(tmp_path):
    result = Result(tmp_path, numbers=[1.5, math.nan, -math.inf], where=Path("/x"), inner={"loss": math.nan})
    result.write()
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["status"] == "running"
    assert content["numbers"] == [1.5, None, None]
    assert content["inner"] == {"loss": None}
    assert content["where"] == "/x"
    result.write(status="completed")
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "completed"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("something else\n", None),
    ],
)
def test_driver_version(text, version):
    assert environment.driver_version(text) == version


def test_on_a_full_disk_the_file_that_is_there_is_written_over(tmp_path, monkeypatch):
    result = Result(tmp_path, impl="native")
    result.write()
    write_text = Path.write_text

    def full(path, text, *arguments, **keywords):
        if path.suffix == ".partial":
            raise OSError(28, "No space left on device")
        return write_text(path, text, *arguments, **keywords)

    monkeypatch.setattr(Path, "write_text", full)
    result.write(status="failed", reason="no space")
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"
    with pytest.raises(OSError, match="No space") as caught:
        result.write(more="x" * 100_000)
    assert caught.value.filename == str(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["reason"] == "no space"
