"""Processes that share work: failures, deaths and silence cost the item at hand and no other."""

import importlib
import os
import sys
import time
from pathlib import Path

import pytest

from fusedmlp.kernels.ahead import workers
from fusedmlp.kernels.ahead.workers import Outcome, in_processes


@pytest.fixture
def work(monkeypatch):
    """A module that the processes find as this one does."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    return importlib.import_module("work_to_share")


def test_what_fails_dies_or_hangs_costs_nothing_else(work, tmp_path):
    notes = tmp_path / "notes"
    good = [f"notes {notes}"] * 4
    items = [good[0], "fails badly", good[1], "dies", "hangs", *good[2:]]
    began = time.monotonic()
    outcomes = list(in_processes(work.do, items, 2, work.prepare, ("yes",), silent_s=2))
    assert time.monotonic() - began < 60
    assert sorted(outcome.item for outcome in outcomes) == sorted(items)
    failures = {outcome.item: outcome.failure for outcome in outcomes if outcome.failure}
    assert failures == {
        "fails badly": "ValueError: badly",
        "dies": "the process ended with exit code 7",
        "hangs": "no answer within 2 s",
    }
    lines = notes.read_text().splitlines()
    assert len(lines) == 4
    assert {line.split()[1] for line in lines} == {"yes"}, "each process is prepared"
    assert str(os.getpid()) not in notes.read_text()


def test_processes_that_cannot_start_are_told_and_nothing_waits(work):
    outcomes = list(in_processes(work.do, ["a", "b"], 1, work.prepare, ("fails",)))
    assert outcomes == [Outcome(None, "RuntimeError: no GPU in this process")]


def test_a_machine_that_starts_no_more_processes(work, monkeypatch):
    def fork(process):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(workers.multiprocessing.get_context("spawn").Process, "start", fork)
    (outcome,) = in_processes(work.do, ["a"], 1)
    assert outcome == Outcome(None, "[Errno 11] Resource temporarily unavailable")


def test_who_stops_listening_ends_the_processes(work):
    outcomes = in_processes(work.do, ["fails at once", "hangs"], 1)
    assert next(outcomes).item == "fails at once"
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < 20


def test_no_items_no_processes(work):
    assert list(in_processes(work.do, [], 4)) == []
