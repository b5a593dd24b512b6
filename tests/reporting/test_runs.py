"""What is read from directories, and how runs are put together."""

import json
import os

import pytest
from conftest import raises
from reporting.fakes import COMMIT, H200, failed, result, write_run, write_sweep

from fusedmlp.errors import UserError
from fusedmlp.reporting import machines, report
from fusedmlp.reporting.cells import group, swept_keys, title
from fusedmlp.reporting.html import render
from fusedmlp.reporting.report import build
from fusedmlp.reporting.runs import load


def words(impl: str, *more: str, **changes) -> dict:
    """A result with these overrides besides impl and dim."""
    fields = result(impl, **changes)
    return fields | {"overrides": [*fields["overrides"], *more]}


def test_runs_sweeps_and_what_holds_them_are_found_once_each(tmp_path):
    write_sweep(tmp_path / "day" / "sweep", [result("native"), result("triton")], waiting=1)
    write_run(tmp_path / "day" / "alone", result("cuda"))
    runs = load([tmp_path, tmp_path / "day" / "sweep", tmp_path / "day" / "sweep" / "0-native-dim512"])
    assert sorted((run.impl, run.status) for run in runs) == [
        ("cuda", "completed"), ("cuda", "waiting"), ("native", "completed"), ("triton", "completed"),
    ]  # fmt: skip


def test_an_earlier_attempt_of_a_job_does_not_count(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [result("native")])
    write_run(sweep / "0-native-dim512-2", failed("native"))
    assert [run.status for run in load([sweep])] == ["completed"]


def test_a_job_that_wrote_nothing_has_what_the_sweep_knows(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [result("native"), failed("triton", reason="killed by signal 9 (SIGKILL)")])
    for file in (sweep / "1-triton-dim512").iterdir():
        file.unlink()
    (one,) = group(load([sweep]))
    dead = one.cell("triton")
    assert (dead.status, dead.reasons) == ("failed", ["killed by signal 9 (SIGKILL)"])


def test_a_damaged_result_is_no_reason_to_fail(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [result("native"), result("triton")])
    (sweep / "1-triton-dim512" / "result.json").write_text('{"status": "comp')
    (sweep / "1-triton-dim512" / "config.yaml").write_text("a: [")
    assert len(load([sweep])) == 2


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("result.json", b""),
        ("result.json", b"\xff\xfe"),
        ("result.json", b'{"status": 3, "overrides": [1], "throughput": "x", "environment": [], "trace": 1}'),
        ("result.json", b'{"throughput": {"step_ms_median": "fast"}, "environment": {"gpu": []}}'),
        ("result.json", b'{"status": "completed", "environment": {"gpu": 3}, "git": {"commit": 7}}'),
        ("result.json", b'{"status": "completed", "cuda_graph": {"captured": []}, "environment": {"gpu": "H200"}}'),
        ("result.json", b'{"status": "completed", "cuda_graph": {"graphs": 1}}'),
        ("result.json", b'{"status": "completed", "throughput": {"step_ms_median": ' + b"9" * 400 + b"}}"),
        ("result.json", b"[" * 100_000),
        ("config.yaml", b"\xff\xfe"),
        ("config.yaml", b"model: 3\ntrainer: x\ndata: []"),
    ],
)
def test_a_report_over_a_run_that_is_damaged(tmp_path, name, content):
    write_run(tmp_path / "good", result("native"))
    write_run(tmp_path / "bad", result("triton"))
    (tmp_path / "bad" / name).write_bytes(content)
    report = build([tmp_path])
    assert report.state.startswith("2 runs: ")
    render(report)
    if not content:
        (bad,) = [run for run in load([tmp_path]) if run.folder.name == "bad"]
        assert (bad.status, bad.fields["reason"]) == ("unknown", "its result.json is empty or damaged")


def test_names_that_no_file_and_no_font_takes_are_written_otherwise(tmp_path):
    """A directory's name in another encoding, and control characters, in every field that a report shows."""
    name = os.fsdecode(b"caf\xe9\x1b[31m")
    fields = failed(name, reason=name) | {"overrides": [f"impl={name}", f"data.files={name}"], "command": name}
    write_run(tmp_path / "runs" / os.fsdecode(b"caf\xe9"), fields, impl=name)
    write_run(tmp_path / "runs" / "other", result("native", overrides=["impl=native"]))
    report.write([tmp_path / "runs"], tmp_path / "out")
    for file in ("report.html", "report.md", "results.csv"):
        assert r"caf\xdce9\x1b[31m" in (tmp_path / "out" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "changes",
    [
        {"throughput": {"step_ms_median": 0, "step_ms_p10": 0, "step_ms_p90": 0, "tokens_per_s": 1.0}},
        {"throughput": {"step_ms_median": 2.0, "step_ms_p10": 1.0}},
        {"trace": {"sentence": 3, "kinds": True, "time_by_kind_ms": [1]}},
        {"trace": {"kinds": {"GEMM": {"share": 1}, "GELU": 3, "softmax": {"ms": "1"}, "other": {"ms": 2.0}}}},
    ],
)
def test_a_report_over_a_run_of_another_version(tmp_path, changes):
    """What this version does not know is left out."""
    write_run(tmp_path / "runs" / "one", result("native", **changes))
    assert "completed" in render(build([tmp_path / "runs"]))


@pytest.mark.parametrize(("name", "said"), [("none", "is no directory"), (".", "holds no run: neither result.json")])
def test_a_directory_without_runs_is_refused(tmp_path, name, said):
    with raises(UserError, str(tmp_path / name), said):
        load([tmp_path / name])


def test_repeats_are_one_cell_and_impls_one_group(tmp_path):
    steps = (10.0, 12.0, 11.0)
    runs = [result(impl, step_ms=ms) for ms in steps for impl in ("triton", "native")]
    (one,) = group(load([write_sweep(tmp_path / "sweep", runs)]))
    assert [cell.impl for cell in one.cells] == ["native", "triton"]
    spread = one.cells[0].step_ms
    assert (spread.median, spread.low, spread.high, spread.runs) == (11.0, 10.0, 12.0, 3)
    assert one.speed_up(one.cells[1]) == 1.0
    assert one.cells[0].within() is None


def test_a_run_that_failed_gives_no_number_to_those_that_did_not(tmp_path):
    runs = [result("native"), result("native", step_ms=99.0, status="timed out", reason="time limit")]
    (one,) = group(load([write_sweep(tmp_path / "sweep", runs)]))
    assert one.cells[0].step_ms.runs == 1
    assert one.cells[0].status == "1 completed, 1 timed out"
    assert one.cells[0].reasons == ["time limit"]


def test_any_swept_key_groups_by_its_value_in_the_config(tmp_path):
    # The same number written in two ways, and a key that only one of two sweeps gives.
    first = words("native", "trainer.cuda_graph=true", "trainer.learning_rate=1e-3")
    second = words("native", "trainer.learning_rate=0.001", "+tag='x y'")
    write_run(tmp_path / "a", first, trainer={"cuda_graph": True, "learning_rate": 0.001})
    write_run(tmp_path / "b", second, trainer={"cuda_graph": False, "learning_rate": 0.001})
    runs = load([tmp_path])
    assert swept_keys(runs) == ["trainer.cuda_graph"]
    assert [title(one.setting) for one in group(runs)] == [
        "mlp, cuda_graph=false, dim 512", "mlp, cuda_graph=true, dim 512",
    ]  # fmt: skip


def test_numbers_sort_by_value_and_bookkeeping_is_no_configuration(tmp_path):
    for number, size in enumerate((1024, 64, 512)):
        more = (f"data.batch_size={size}", f"hydra.run.dir=x{number}", f"sweep.timeout={number}", "logger=none")
        write_run(tmp_path / str(size), words("native", *more), data={"batch_size": size})
    write_run(tmp_path / "dims", result("native", 64), data={"batch_size": 64})
    titles = [title(one.setting) for one in group(load([tmp_path]))]
    assert titles == [
        f"mlp, batch_size={size}, dim {dim}" for size, dim in ((64, 64), (64, 512), (512, 512), (1024, 512))
    ]


def test_keys_that_change_together_are_one(tmp_path):
    for name, model in (("lecture", "MLPLanguageModel"), ("gpt", "GPT")):
        write_run(tmp_path / name, words("native", f"experiment={name}", model=model))
    assert [title(one.setting) for one in group(load([tmp_path]))] == ["gpt, dim 512", "mlp, dim 512"]


def test_jobs_to_come_are_where_they_will_be(tmp_path):
    sweep = write_sweep(tmp_path / "sweep", [result("native")], waiting=1)
    (one,) = group(load([sweep]))
    assert (one.cell("cuda").status, one.cell("cuda").pending) == ("waiting", True)
    (sweep / "0-native-dim512" / "config.yaml").unlink()
    (one,) = group(load([sweep]))
    assert one.cell("cuda") is None, "nothing is known of its configuration"


def test_two_machines_are_told_apart_by_what_differs(tmp_path):
    other = H200 | {"gpu": "NVIDIA A100"}
    write_sweep(tmp_path / "a", [result("native"), failed("triton", environment=None)])
    write_sweep(tmp_path / "b", [result("native", environment=other)])
    write_sweep(tmp_path / "c", [result("native", environment=H200 | {"torch": "2.12.0"})])
    groups = group(load([tmp_path / "a", tmp_path / "b", tmp_path / "c"]))
    assert list(machines.labels([one.machine for one in groups]).values()) == [
        "NVIDIA H200, 012345678, torch 2.11.0", "NVIDIA A100, 012345678", "NVIDIA H200, 012345678, torch 2.12.0",
    ]  # fmt: skip
    assert [len(one.cells) for one in groups] == [2, 1, 1], "the failed run is where its sweep was"


def test_the_runs_of_a_sweep_stay_together_when_the_commit_changes_on_the_way(tmp_path):
    dirty = {"commit": COMMIT, "dirty": True}
    runs = load([write_sweep(tmp_path / "sweep", [result("native"), result("triton", git=dirty), result("cuda")])])
    (one,) = group(runs)
    assert len(one.cells) == 3
    assert machines.mixtures(runs) == ["Within sweep, dirty was not the same for all: False (2 runs), True (1 runs)."]


def test_a_sweep_over_two_kinds_of_gpu_is_two(tmp_path):
    runs = [result("native"), result("triton", environment=H200 | {"gpu": "NVIDIA L4"}), result("cuda")]
    groups = group(load([write_sweep(tmp_path / "sweep", runs)]))
    assert [[cell.impl for cell in one.cells] for one in groups] == [["native", "cuda"], ["triton"]]


def test_runs_without_environment_have_a_place_too(tmp_path):
    write_run(tmp_path / "a", {"status": "running", "impl": "native", "dim": 512, "overrides": []})
    (one,) = group(load([tmp_path]))
    assert machines.labels([one.machine]) == {one.machine: "an unknown machine, no commit known"}
    assert json.dumps(one.setting) == '[["model", "unknown model"], ["dim", "512"]]'
