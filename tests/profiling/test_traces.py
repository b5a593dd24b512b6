"""Every trace in traces/ says what the file of expectations beside it wants: NAME.json.gz and NAME.expected.json.

Those whose expectation says `recorded` were cut from traces of that GPU (profiles/records/2026-11-29-h200-traces and
2026-11-30-h200-traces), one for every bound: an analysis that reads them otherwise than before fails. simulated.py
writes the others, of which every microsecond is known.

An expectation names the bound, words of the sentence and of the notes, and numbers of result.json's `trace` (a path of
keys with dots) with the lowest and the highest value accepted.
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusedmlp.profiling import kinds
from fusedmlp.profiling.report import analyse_file, lines, values

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))
BOUNDS = {"launch", "sync", "data", "size", "memory", "optimizer", "GEMM"}


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
    assert sum(found["idle_causes_ms"].values()) == pytest.approx(found["idle_ms"], abs=1e-6)
    assert found["gpu_busy_ms"] + found["idle_ms"] == pytest.approx(found["step_ms"])
    assert sum(kind["ms"] for kind in found["kinds"].values()) == pytest.approx(found["kernel_ms"])
    assert sum(kind["percent"] for kind in found["kinds"].values()) == pytest.approx(100)
    assert set(found["kinds"]) <= set(kinds.KINDS)
    assert found["sentence"] in lines(analysis)[0]


RECORDED = [file for file in TRACES if "recorded" in expectation(file)]


def test_there_is_a_recorded_trace_for_every_bound():
    assert {expectation(file)["bound"] for file in RECORDED} == BOUNDS
    assert [analyse_file(file).device for file in RECORDED] == [expectation(file)["recorded"] for file in RECORDED]


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.name.partition(".")[0])
def test_numbers_of_a_recorded_trace_counted_by_hand(file):
    """Without the reader: from the events themselves."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    on_gpu = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    steps = sum(event["name"] == "step" for event in events)
    found = values(analyse_file(file))
    assert steps == found["steps"]
    assert sum(event["dur"] for event in on_gpu) / steps / 1e3 == pytest.approx(found["kernel_ms"])
    assert sum(event["cat"] == "kernel" for event in on_gpu) / steps == found["kernels_per_step"]


def counts_by_kind(name: str) -> dict[str, float]:
    counts = dict.fromkeys(kinds.KINDS, 0.0)
    for row in analyse_file(TRACES[0].with_name(f"{name}.json.gz")).rows:
        counts[row.kind] += row.count
    return counts


@pytest.mark.parametrize("name", ["lecture-triton", "lecture-triton-graph"])
def test_kernels_of_the_lecture_s_stack(name):
    """64 layers: products forward, of the input's and of the weight's gradient; the head and its two gradients."""
    counts = counts_by_kind(name)
    assert (counts[kinds.FUSED_GEMM], counts[kinds.GELU], counts[kinds.GEMM]) == (64, 64, 2 * 64 + 3)
    analysis = analyse_file(TRACES[0].with_name(f"{name}.json.gz"))
    assert analysis.steps == 3
    assert analysis.share(kinds.OTHER) < 1, "the embedding, its gradient and the clipping of gradients are known"


def test_kernels_of_gpt():
    """12 blocks with triton: softmax and its gradient; fc1 with GELU, and fc2's dx with GELU's gradient."""
    counts = counts_by_kind("gpt-triton")
    assert (counts[kinds.SOFTMAX], counts[kinds.FUSED_GEMM], counts[kinds.GELU]) == (2 * 12, 2 * 12, 0)


def test_eager_and_captured_run_the_same_kernels():
    eager, captured = (analyse_file(TRACES[0].with_name(f"lecture-triton{end}.json.gz")) for end in ("", "-graph"))
    assert captured.launches == 2
    assert captured.kernel_ms == pytest.approx(eager.kernel_ms, rel=0.02)
    for kind in (kinds.GEMM, kinds.FUSED_GEMM, kinds.GELU, kinds.INDEXING, kinds.OPTIMIZER):
        assert captured.kinds[kind] == pytest.approx(eager.kinds[kind], rel=0.1), kind


def test_blocks_of_a_recorded_trace_launched_their_kernels():
    analysis = analyse_file(TRACES[0].with_name("lecture-triton.json.gz"))
    blocks = {name: gpu for name, (_, gpu) in analysis.ranges.items() if name.startswith("block ")}
    assert len(blocks) == 2 * 64
    forward = sum(gpu for name, gpu in blocks.items() if not name.endswith(" backward"))
    assert forward == pytest.approx(analysis.kinds[kinds.FUSED_GEMM]), "a layer's forward is one kernel of ours"
    phases = sum(analysis.ranges[name][1] for name in ("data", "forward", "backward", "optimizer"))
    assert phases == pytest.approx(analysis.kernel_ms)
