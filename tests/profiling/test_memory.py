"""profile=memory: the peak of each phase from the allocator's history, and when snapshots are written."""

import itertools

import pytest
import torch
from training.runs import fits, result, train

from fusedmlp.profiling import memory, session
from fusedmlp.profiling.memory import MemoryTool, peaks
from fusedmlp.training.step import TrainStep

GIB = 2**30


def event(action: str, gib: float, when: float) -> dict:
    return {"action": action, "size": gib * GIB, "time_us": when, "addr": 0, "stream": 0, "frames": []}


def snapshot(*events: dict, allocated: float) -> dict:
    block = {"state": "active_allocated", "size": 2 * allocated * GIB, "requested_size": allocated * GIB}
    free = {"state": "inactive", "size": 9 * GIB, "requested_size": 0}
    return {"device_traces": [list(events), []], "segments": [{"blocks": [block, free]}]}


def test_peaks_of_phases():
    history = [
        event("alloc", 3, 10),  # forward: 1 + 3
        event("segment_alloc", 50, 11),
        event("free_requested", 3, 20),
        event("free_completed", 3, 21),
        event("alloc", 1, 30),  # backward: 2
        event("alloc", 0.5, 40),  # optimizer: 2.5
    ]
    phases = [("forward", 5.0, 25.0), ("backward", 25.0, 35.0), ("optimizer", 36.0, 50.0), ("data", 51.0, 52.0)]
    found = peaks(snapshot(*history, allocated=2.5), phases)
    assert found == pytest.approx({"forward": 4, "backward": 2, "optimizer": 2.5, "data": 2.5})


def test_a_phase_begins_with_what_is_there_and_repeats_count_once():
    history = [event("free_requested", 2, 10), event("alloc", 1, 20), event("free_requested", 1, 21)]
    found = peaks(snapshot(*history, allocated=1), [("forward", 5.0, 15.0), ("forward", 16.0, 30.0)])
    assert found == pytest.approx({"forward": 3})
    assert peaks(snapshot(allocated=1), [("forward", 0.0, 1.0)]) == {"forward": 1}


@pytest.fixture
def allocator(monkeypatch):
    """The allocator's functions, without a GPU; `calls` says what was asked of it."""
    calls: list[object] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *_, **how: calls.append(how.get("enabled", "all"))
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot(event("alloc", 1, 10), allocated=1))

    def dump(path: str) -> None:
        calls.append("dump")
        with open(path, "w") as file:
            file.write("snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(session, "_make_tool", lambda options, folder, device: MemoryTool(folder))
    return calls


WINDOW = ("profile=memory", "profile.wait=1", "profile.active=2")


@fits
def test_a_snapshot_of_the_window(tmp_path, allocator):
    assert train(tmp_path / "run", *WINDOW).status == "completed"
    assert allocator == ["all", "dump", None]
    saved = result(tmp_path / "run")["trace"]
    assert saved["file"] == str(tmp_path / "run" / memory.FILE)
    assert saved["peak_gib"] == dict.fromkeys(("data", "forward", "backward", "optimizer", "step"), 1)


@fits
@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_run_that_dies_of_out_of_memory_leaves_a_snapshot(tmp_path, allocator, monkeypatch, step):
    def broken(self):
        if next(updates) == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        update(self)

    update, updates = TrainStep._update, itertools.count()
    monkeypatch.setattr(TrainStep, "_update", broken)
    assert train(tmp_path / "run", *WINDOW).reason.startswith("out of memory")
    assert (tmp_path / "run" / memory.OUT_OF_MEMORY_FILE).read_text() == "snapshot"
    assert (tmp_path / "run" / memory.FILE).exists() == (step > 0)
    assert allocator[-1] is None
    assert result(tmp_path / "run")["trace"]["file"].endswith(memory.OUT_OF_MEMORY_FILE)


@fits
def test_another_failure_leaves_none(tmp_path, allocator, monkeypatch):
    def broken(self):
        raise ValueError("boom")

    monkeypatch.setattr(TrainStep, "_update", broken)
    train(tmp_path / "run", *WINDOW)
    assert not (tmp_path / "run" / memory.OUT_OF_MEMORY_FILE).exists()
    assert allocator == ["all", None]
