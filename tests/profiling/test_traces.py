"""Every trace in traces/ says what the file of expectations beside it wants: NAME.json.gz and NAME.expected.json.

An expectation names the bound, words of the sentence and of the notes, and numbers of result.json's `trace` (a path of
keys with dots) with the lowest and the highest value accepted.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusedmlp.profiling import kinds
from fusedmlp.profiling.report import analyse_file, lines, values

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))
BOUNDS = {"launch", "sync", "data", "memory", "GEMM"}


def expectation(file: Path) -> dict[str, Any]:
    return json.loads(file.with_name(file.name.replace(".json.gz", ".expected.json")).read_text())


def number(found: Any, path: str) -> float:
    for key in path.split("."):
        found = found[key]
    return found


@pytest.mark.parametrize("file", TRACES, ids=lambda file: file.name.partition(".")[0])
def test_a_trace_says_what_is_expected_of_it(file):
    expected = expectation(file)
    analysis = analyse_file(file, expected.get("unprofiled_step_ms"))
    found = values(analysis)
    assert found["bound"] == expected["bound"]
    assert re.search(expected["sentence"], found["sentence"]), found["sentence"]
    for words in expected.get("notes", []):
        assert any(re.search(words, note) for note in found["notes"]), found["notes"]
    for path, (low, high) in expected["numbers"].items():
        assert low <= number(found, path) <= high, (path, number(found, path))
    assert sum(kind["percent"] for kind in found["kinds"].values()) == pytest.approx(100)
    assert set(found["kinds"]) <= set(kinds.KINDS)
    assert found["sentence"] in lines(analysis)[0]


def test_there_is_a_trace_for_every_bound():
    assert {expectation(file)["bound"] for file in TRACES} >= BOUNDS
