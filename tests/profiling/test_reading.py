"""The command line on traces, and what it says of files that are none."""

import csv
import gzip
import json
import re

import pytest
from conftest import raises
from profiling.simulated import GELU, SCENES, Kernel, Step, content, layers, write

from fusedmlp.errors import UserError
from fusedmlp.profiling import trace
from fusedmlp.profiling.__main__ import main
from fusedmlp.profiling.analysis import analyse
from fusedmlp.profiling.report import analyse_file, values, write_kernels


@pytest.fixture
def launch(tmp_path):
    return write(tmp_path, *SCENES["launch"], name="launch.json.gz")


def read(tmp_path, data: bytes, name: str = "trace.json"):
    (tmp_path / name).write_bytes(data)
    return trace.read(tmp_path / name)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ("not a Chrome trace",)),
        (b"<!DOCTYPE html>", ("not a Chrome trace",)),
        (b"SQLite format 3\0\xff\xfe", ("not a Chrome trace",)),
        (b'{"traceEvents": [{"ph": "X", "na', ("truncated or damaged",)),
        (b'{"status": "completed"}', ("no Chrome trace", "traceEvents")),
        (b"3", ("no Chrome trace",)),
        (b'{"traceEvents": []}', ("empty",)),
        (b'{"traceEvents": [{"ph": "X", "cat": [], "ts": 1, "dur": 1}]}', ("empty",)),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1, "args": 5}]}', ("empty",)),
        (b'{"traceEvents": [null, 1, {"ph": "M"}, {"ph": "X", "cat": "kernel", "name": "k"}]}', ("empty",)),
        (gzip.compress(json.dumps(content(*SCENES["launch"])).encode())[:-400], ("truncated or damaged",)),
        (b"\x1f\x8b\x08\0garbage", ("truncated or damaged",)),
    ],
)
def test_a_file_that_is_no_trace(tmp_path, data, words):
    with raises(UserError, "trace.json", *words) as caught:
        read(tmp_path, data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.nsys-rep", "nsys-ui"),
        ("a.qdstrm", "QdstrmImporter"),
        ("a.ncu-rep", "ncu-ui"),
        ("memory.pickle", "memory_viz"),
    ],
)
def test_the_file_of_another_tool(tmp_path, name, words):
    with raises(UserError, name, words, "profile=torch"):
        read(tmp_path, b"x", name)


def test_a_place_without_a_trace(tmp_path):
    with raises(UserError, "no such file"):
        trace.find(tmp_path / "nowhere")
    with raises(UserError, "holds no trace.json.gz", "profile=torch"):
        trace.find(tmp_path)


def test_a_list_of_events_and_a_plain_file_are_traces_too(tmp_path):
    events = content(*SCENES["launch"])["traceEvents"]
    (tmp_path / "list.json").write_text(json.dumps(events))
    assert analyse(trace.read(tmp_path / "list.json")).kernels == 32


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("event", "tid", 2**64 - 1),  # an unsigned hash, as other programs number threads
        ("event", "pid", ["a"]),
        ("args", "correlation", 2**63),
        ("args", "correlation", {}),
        ("args", "device", []),
        ("args", "stream", float("nan")),
        ("event", "dur", -1),
        ("event", "dur", 1e308),
        ("event", "ts", float("nan")),
        ("content", "deviceProperties", True),
        ("content", "deviceProperties", [1]),
    ],
)
def test_a_trace_with_odd_values_is_read_or_refused(tmp_path, capsys, where, name, value):
    whole = content(*SCENES["launch"])
    for event in whole["traceEvents"]:
        target = event if where == "event" else event.get("args") if where == "args" else {}
        if target and name in target:
            target[name] = value
    if where == "content":
        whole[name] = value
    file = tmp_path / "odd.json"
    file.write_text(json.dumps(whole))
    for words in (["show", str(file)], ["cut", str(file), str(tmp_path / "cut.json")]):
        code = main(words)
        said = capsys.readouterr()
        assert (code, said.err.count("\n")) in ((0, 0), (1, 1))
        if where != "event" or name in ("tid", "pid"):
            assert code == 0, "what is known of the times is enough"


def test_the_directory_of_a_run_gives_the_step_without_profiler(tmp_path):
    write(tmp_path, *SCENES["launch"])
    assert analyse_file(tmp_path).unprofiled_step_ms is None
    (tmp_path / "result.json").write_text(json.dumps({"throughput": {"step_ms_median": 0.5}}))
    assert analyse_file(tmp_path).unprofiled_step_ms == 0.5
    (tmp_path / "result.json").write_text('{"throughput": null}')
    assert analyse_file(tmp_path).unprofiled_step_ms is None


def test_show(launch, capsys):
    assert main([str(launch), "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("launch-bound: GPU busy 20 %")
    assert "nvjet_tst" in out
    assert "... 3 more" in out
    assert main(["show", str(launch), "--json", "--step-ms", "0.26"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu_busy_percent_unprofiled"] == pytest.approx(97.3, abs=0.1)


def test_a_wrong_trace_on_the_command_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{trace}", "--top", "-1"), "at least 0"),
        (("{trace}", "--step-ms", "nan"), "above 0"),
        (("picture", "{trace}", "out.png", "--steps", "0"), "at least 1"),
        (("shwo", "{trace}"), "shwo: no such command; accepted: show"),
    ],
)
def test_a_wrong_word_on_the_command_line(launch, words, said, capsys):
    try:
        code = main([word.format(trace=launch) for word in words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_nothing_is_written_to_the_wrong_place(launch, capsys):
    before, folder = launch.read_bytes(), launch.parent / "folder"
    folder.mkdir()
    for words in (["cut", launch, launch], ["cut", launch, folder], ["cut", launch, folder / "no" / "a.json"],
                  ["picture", launch, folder]):  # fmt: skip
        assert main([*map(str, words)]) == 1
        assert capsys.readouterr().err.startswith(f"error: {words[-1]}: ")
    assert launch.read_bytes() == before
    assert sorted(path.name for path in launch.parent.rglob("*")) == ["folder", "launch.json.gz"]


def test_compare_tells_what_came_and_went(tmp_path, capsys):
    fused = Kernel("_linear_gelu_fwd_kernel", 12.0, 40.0)
    a = write(tmp_path, *SCENES["launch"], name="a.json.gz")
    step = layers(10.0, 4.0, 40.0)
    b = write(tmp_path, *[Step((fused,) * 6, step.backward, step.optimizer)] * 4, name="b.json.gz")
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    # 6 GEMMs and 6 GELUs of 10 and 4 us became 6 of 12 us.
    assert "B saves 0.012 ms of kernels a step (-4.7 %)" in out
    came, went = ([line for line in out.splitlines() if line.startswith(word)] for word in ("came", "went"))
    assert len(came) == 1
    assert "_linear_gelu_fwd_kernel" in came[0]
    assert "+0.072" in came[0]
    assert len(went) == 1
    assert "GeluCUDAKernelImpl" in went[0]
    assert "-0.024" in went[0]
    changed = [line for line in out.splitlines() if line.startswith("changed")]
    assert len(changed) == 1
    assert "18.0     12.0" in changed[0]
    assert "GEMM+GELU" in out


def test_compare_a_trace_with_itself(launch, capsys):
    assert main(["compare", str(launch), str(launch)]) == 0
    out = capsys.readouterr().out
    assert "0.000 ms of kernels a step (+0.0 %)" in out
    assert not any(line.startswith(("came", "went", "changed")) for line in out.splitlines())


@pytest.mark.parametrize("scene", ["sync", "graph"])
def test_picture(tmp_path, scene, capsys):
    file, target = write(tmp_path, *SCENES[scene]), tmp_path / "out.png"
    assert main(["picture", str(file), str(target), "--steps", "3"]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert target.stat().st_size > 10_000
    assert main(["picture", str(file), str(tmp_path / "out.xyz")]) == 1
    assert main(["picture", str(file), str(tmp_path / "nowhere" / "out.png")]) == 1


def test_a_picture_says_what_the_run_says(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda axes, text, **options: titles.append(text))
    file, target = write(tmp_path, *SCENES["launch"]), tmp_path / "out.png"
    assert main(["picture", str(file), str(target)]) == 0
    assert main(["picture", str(file), str(target), "--step-ms", "0.5", "--title", "mine"]) == 0
    (tmp_path / "result.json").write_text(json.dumps({"throughput": {"step_ms_median": 1.0}}))
    assert main(["picture", str(file), str(target)]) == 0
    assert [re.search(r"GPU busy (\d+) %", title).group(1) for title in titles] == ["20", "51", "25"]
    assert titles[1].startswith("mine\n")


def test_a_picture_of_a_part(tmp_path, monkeypatch, capsys):
    from fusedmlp.profiling import picture

    drawn, bars = [], picture._bars
    monkeypatch.setattr(picture, "_bars", lambda axes, *args: drawn.append(args[1:3]) or bars(axes, *args))
    file, target = write(tmp_path, *SCENES["launch"]), tmp_path / "out.png"
    begin = float(trace.read(file).ranges.start[1])
    assert main(["picture", str(file), str(target), "--steps", "1", "--between", "0.25", "0.5"]) == 0
    assert set(drawn) == {(begin + 250, begin + 500)}
    for part in (("0.5", "0.25"), ("-1", "0.5"), ("2", "3"), ("nan", "1")):
        assert main(["picture", str(file), str(target), "--steps", "1", "--between", *part]) == 1
        assert "is none of the steps shown, which last 1.29 ms" in capsys.readouterr().err


def test_what_a_picture_shows(tmp_path):
    from fusedmlp.profiling import picture

    found = trace.read(write(tmp_path, *SCENES["sync"]))
    lanes = dict(picture._cpu_lanes(found)) | dict(picture._gpu_lanes(found))
    assert list(lanes) == ["CPU: ranges", "CPU: calls", "GPU: stream 7"]
    bars = {label: len(start) for label, _, (start, _) in lanes["CPU: calls"]}
    assert bars == {"launch": 4 * 18, "waits for the GPU": 4}
    kinds = {label: len(start) for label, _, (start, _) in lanes["GPU: stream 7"] if len(start)}
    assert kinds == {"GEMM": 24, "GELU": 48, "copy": 4}


def test_a_cut_is_small_and_says_the_same(tmp_path, capsys):
    whole, small = write(tmp_path, *[SCENES["memory"][0]] * 9), tmp_path / "small.json.gz"
    assert main(["cut", str(whole), str(small), "--steps", "3"]) == 0
    assert small.stat().st_size < whole.stat().st_size / 3
    a, b = values(analyse_file(whole)), values(analyse_file(small))
    assert b["steps"] == 3
    for name in ("sentence", "kernels_per_step", "launches_per_step", "kinds", "device", "ranges"):
        assert b[name] == pytest.approx(a[name]) if isinstance(a[name], float) else b[name] == a[name]
    assert b["step_ms"] == pytest.approx(a["step_ms"])
    assert len(trace.read(small).gpu) == 3 * 32, "what later steps launched is not in it"
    again = tmp_path / "again.json.gz"
    assert main(["cut", str(small), str(again), "--steps", "3"]) == 0
    assert again.read_bytes() == small.read_bytes()


def test_a_cut_of_more_steps_than_there_are(launch, capsys):
    assert main(["cut", str(launch), str(launch.with_name("out.json.gz")), "--steps", "9"]) == 1
    assert "it has 4 steps, so 9 cannot" in capsys.readouterr().err
    assert not launch.with_name("out.json.gz").exists()


def test_kernels_file(launch, tmp_path):
    write_kernels(analyse_file(launch), tmp_path / "kernels.csv")
    with open(tmp_path / "kernels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kind"] for row in rows] == ["GEMM", "GELU", "GELU", "optimizer", "optimizer"]
    assert sum(float(row["percent"]) for row in rows) == pytest.approx(100, abs=0.01)
    assert (float(rows[0]["count_per_step"]), float(rows[0]["us_each"])) == (18, 10)
    assert rows[1]["full_name"].startswith(GELU[:60])
