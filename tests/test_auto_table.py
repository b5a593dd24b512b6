"""The table of choices on disk: shared by processes, shown, cleared, exported and imported."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import raises

from fusedmlp import auto, functional
from fusedmlp.auto import __main__ as command
from fusedmlp.auto import candidates, measure, policy, table
from fusedmlp.errors import UserError

x = torch.randn(4, 8)

# What a process of a job does: its first call finds the table empty, or another process measuring.
WORKER = """
import sys, time
import torch
from fusedmlp import auto, functional
from fusedmlp.auto import policy
from fusedmlp.auto.table import Entry

def measure(call, names):
    with open(sys.argv[1], "a") as file:
        file.write(call.key() + "\\n")
    time.sleep(0.5)
    return Entry({"native": 2.0, "manual": 1.0}), None

policy.measurable = lambda device: True
policy.measure = measure
for rows in (4, 64):
    functional.gelu(torch.randn(rows, 8))
print(sorted(set(auto.used().values())))
"""


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty table, and times that make manual the winner."""
    monkeypatch.setenv("FUSEDMLP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FUSEDMLP_AUTO_IMPLS", "native,manual")
    monkeypatch.delenv("FUSEDMLP_AUTO", raising=False)
    monkeypatch.setattr(policy, "measurable", lambda device: True)
    measured = []

    def times(functions, clock):
        measured.append(tuple(functions))
        return {name: {"native": 2.0, "manual": 1.0, "compiled": 3.0}[name] for name in functions}

    monkeypatch.setattr(measure, "in_turns", times)
    auto.forget()
    yield measured
    auto.forget()


def test_processes_that_start_together_measure_once(tmp_path):
    environment = os.environ | {"FUSEDMLP_CACHE": str(tmp_path), "FUSEDMLP_AUTO_IMPLS": "native,manual"}
    environment.pop("FUSEDMLP_AUTO", None)
    start = [sys.executable, "-c", WORKER, str(tmp_path / "measured")]
    processes = [subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert outputs == ["['manual']\n"] * 2
    assert len((tmp_path / "measured").read_text().splitlines()) == 2, "once for each of the two calls"


def test_the_file_is_read_by_people_and_by_other_users(here):
    functional.gelu(x)
    content = json.loads(auto.path().read_text())
    ((environment, entries),) = content["choices"].items()
    assert torch.__version__ in environment
    assert list(entries) == ["gelu float32 none elements<=32 gradients=none"]
    assert auto.path().stat().st_mode & 0o444 == 0o444
    text = auto.show()
    assert "*manual 1 ms" in text
    assert "native 2 ms" in text


def test_other_versions_are_measured_anew(here, monkeypatch):
    functional.gelu(x)
    monkeypatch.setattr(policy, "environment", lambda device: "cpu, torch 99")
    auto.forget()
    functional.gelu(x)
    assert len(here) == 2
    assert len(auto.choices()) == 2


def test_export_clear_import(here, tmp_path):
    functional.gelu(x)
    functional.softmax(x)
    assert auto.export_table(tmp_path / "plan.json") == 2
    auto.clear()
    auto.clear()
    assert auto.choices() == {}
    assert "no choices" in auto.show()
    with auto.using("known"):
        functional.gelu(x)
        assert set(auto.used().values()) == {"native"}
    assert auto.import_table(tmp_path / "plan.json") == 2
    functional.gelu(x)
    assert set(auto.used().values()) == {"manual"}
    assert len(here) == 2, "an imported choice is not measured again"


def test_an_imported_choice_stands_when_there_are_other_candidates(here, tmp_path, monkeypatch):
    functional.gelu(x)
    auto.export_table(tmp_path / "plan.json")
    monkeypatch.setenv("FUSEDMLP_AUTO_IMPLS", "native,manual,compiled")
    monkeypatch.setattr(candidates, "ready", lambda name: True)
    monkeypatch.setattr(measure.sample.Oracle, "disagreement", lambda self, impl: None)
    auto.forget()
    functional.gelu(x)
    assert here[-1] == ("native", "manual", "compiled"), "one of its own is measured again"
    auto.import_table(tmp_path / "plan.json")
    functional.gelu(x)
    assert len(here) == 2
    assert set(auto.used().values()) == {"manual"}


def test_a_winner_that_cannot_run_here_gives_way(here, monkeypatch):
    functional.gelu(x)
    (environment,) = auto.choices()
    (key,) = auto.choices()[environment]
    table.update({environment: {key: table.Entry({"cuda": 0.1, "gone": 0.2, "manual": 1.0, "native": 2.0})}})
    auto.forget()
    functional.gelu(x)
    assert set(auto.used().values()) == {"manual"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 99, "choices": {}}', '{"format": 1}', '{"format": 1, "choices": {"a": {"b": 3}}}'],
)
def test_a_damaged_file_counts_as_empty(here, text):
    auto.path().parent.mkdir(parents=True)
    auto.path().write_text(text)
    assert auto.choices() == {}
    functional.gelu(x)
    assert len(auto.choices()) == 1


def test_a_directory_that_cannot_be_written_costs_the_sharing_only(here, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    functional.gelu(x)
    functional.gelu(x)
    assert set(auto.used().values()) == {"manual"}
    assert len(here) == 1
    assert auto.choices() == {}


def test_a_full_disk_is_said_once(here, monkeypatch, caplog):
    def full(changes, overwrite=True):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "merge", full)
    functional.gelu(x)
    functional.softmax(x)
    assert caplog.text.count("No space left") == 1
    assert set(auto.used().values()) == {"manual"}


def test_the_command_line(here, tmp_path, capsys):
    functional.gelu(x)
    plan = str(tmp_path / "plan.json")
    assert command.main(["show"]) == 0
    assert "*manual 1 ms" in capsys.readouterr().out
    assert command.main(["export", plan]) == 0
    assert command.main(["clear"]) == 0
    assert command.main(["import", plan]) == 0
    assert capsys.readouterr().out.startswith("1 choices written")
    for arguments, words in (
        (["import", str(tmp_path / "none")], "cannot be read: No such file"),
        (["import", __file__], "not a table of choices"),
        (["export", f"{__file__}/plan.json"], "error: "),
    ):
        assert command.main(arguments) == 1
        assert words in capsys.readouterr().err


def test_a_file_that_is_no_table_is_refused(here, tmp_path):
    file = tmp_path / "other.json"
    file.write_text('{"format": 1, "choices": {"a": {"b": {"ms": {}}}}}')
    with raises(UserError, "other.json", "an entry without times", "export FILE"):
        auto.import_table(file)
