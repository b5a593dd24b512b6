"""profile=nsys and profile=ncu without Nsight: finding it, the command, and a stand-in that runs what it is given."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from python_path import ROOT, python_path

from fusedmlp.profiling import nsight, relaunch
from fusedmlp.profiling.nsight import NsightTool

TINY = (
    "dim=32", "model.num_layers=2", "data=synthetic", "data.num_tokens=20000", "data.batch_size=8",
    "data.val_batches=2", "logger=none", "trainer.accelerator=cpu", "trainer.val_every=0", "trainer.max_steps=6",
    "profile.wait=1",
    "profile.warmup=1", "profile.active=2",
)  # fmt: skip
# Runs the program behind its own options, as nsys and ncu do, and leaves a report; says what it was given.
STAND_IN = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
flag = "-o" if "-o" in words else "--export"
at = words.index(flag)
code = subprocess.call(words[at + 2:])
open(os.environ["GIVEN"], "a").write(json.dumps(sys.argv) + "\\n")
if "BROKEN" not in os.environ:
    open(words[at + 1] + (".nsys-rep" if flag == "-o" else ".ncu-rep"), "w").close()
sys.exit(code)
"""
# Lets a run without a GPU pass for one that Nsight can record.
PRETEND = """
import torch
from fusedmlp.profiling import session
from fusedmlp.profiling.nsight import NsightTool
make = session._make_tool
def pretend(options, folder, device):
    tool = make(options, folder, torch.device("cuda"))
    if isinstance(tool, NsightTool):
        tool.record = tool.stop = lambda: None
        tool.marker = None
    return tool
session._make_tool = pretend
"""


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def start(tmp_path):
    """Starts train.py with stand-ins of nsys and ncu on PATH; `given` lists what they were called with."""
    for tool in ("nsys", "ncu"):
        executable(tmp_path / "bin" / tool, STAND_IN.format(python=sys.executable))
    (tmp_path / "pretend.py").write_text(PRETEND)
    program = (ROOT / "train.py").read_text().replace('config_path="configs"', f"config_path={str(ROOT / 'configs')!r}")
    (tmp_path / "train.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport pretend\n{program}")
    environment = os.environ | {
        "FUSEDMLP_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": "", "GIVEN": str(tmp_path / "given"),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)

    def begin(*arguments: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "train.py", *arguments], cwd=tmp_path, env=environment | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    return begin


def finish(process: subprocess.Popen) -> tuple[int, str]:
    try:
        out = process.communicate(timeout=200)[0]
    finally:
        process.kill()
    return process.returncode, out


def results(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("profiles/runs/**/result.json"))]


def given(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "given").read_text().splitlines()]


def test_a_run_starts_itself_under_nsys(tmp_path, start):
    code, out = finish(start(*TINY, "profile=nsys"))
    assert code == 0, out
    (found,) = results(tmp_path)
    assert (found["status"], found["trace"]["tool"], found["trace"]["recorded_steps"]) == ("completed", "nsys", 2)
    assert Path(found["trace"]["file"]).is_file()
    (words,) = given(tmp_path)
    assert words[1:5] == ["profile", "-c", "cudaProfilerApi", "--capture-range-end=stop"]
    assert {"--sample=none", "--cpuctxsw=none"} <= set(words)
    assert out.count("nsys: ") == 1
    assert "nsys stats" in out
    assert "profile.relaunch" not in out[out.index("next") :]


def test_a_sweep_runs_its_jobs_under_nsys_and_sees_how_they_end(tmp_path, start):
    code, out = finish(start("-m", *TINY, "profile=nsys", "data.batch_size=0"))
    assert code == 1, out
    (found,) = results(tmp_path)
    assert found["status"] == "failed"
    assert "data.batch_size=0" in found["reason"]
    assert found["group"] is not None, "the child belongs to the sweep too"
    assert len(given(tmp_path)) == 1
    assert "1 failed" in out


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """What would be run, in place of running it; a name in `leaves` is left in the run's directory."""
    seen = SimpleNamespace(words=[], environment={}, leaves="", code=0)

    def run(words, environment):
        seen.words, seen.environment = words, environment
        if seen.leaves:
            (tmp_path / "run" / seen.leaves).touch()
        return seen.code

    monkeypatch.setattr(relaunch, "_run", run)
    monkeypatch.setattr(nsight, "find", lambda tool: f"/opt/{tool}")
    monkeypatch.setattr(sys, "argv", ["train.py", "dim=32"])
    return seen


def profile(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"tool": "nsys", "relaunch": True, "kernel": None, "launches": 1, **changes})


@pytest.mark.parametrize(
    ("leaves", "code", "exit_code", "words"),
    [
        ("trace.nsys-rep", 0, 0, "nsys stats"),
        ("trace.nsys-rep", 130, 130, "nsys stats"),
        ("trace.qdstrm", 0, 1, "QdstrmImporter"),
        ("", 0, 1, "left none"),
        ("", 7, 7, "left none"),
    ],
)
def test_what_nsys_leaves(tmp_path, ran, capsys, leaves, code, exit_code, words):
    ran.leaves, ran.code = leaves, code
    assert relaunch.relaunch(profile(), tmp_path / "run", {"GROUP": "g"}) == exit_code
    assert ran.environment["GROUP"] == "g"
    captured = capsys.readouterr()
    assert words.replace("nsys stats", "/opt/nsys stats") in captured.out + captured.err
    assert ("error: nsys" in captured.err) == (leaves != "trace.nsys-rep")


def test_ncu_measures_the_kernel_that_is_chosen(tmp_path, ran):
    ran.leaves = "kernels.ncu-rep"
    assert relaunch.relaunch(profile(tool="ncu", kernel="gelu|softmax", launches=3), tmp_path / "run", {}) == 0
    words = ran.words
    assert words[words.index("--kernel-name") + 1] == "regex:gelu|softmax"
    assert words[words.index("--launch-count") + 1] == "3"
    assert words[words.index("--profile-from-start") + 1] == "off"
    assert words[words.index("--export") + 1] == str(tmp_path / "run" / "kernels")
    assert words[-3:] == ["dim=32", "profile.relaunch=false", f"hydra.run.dir={tmp_path / 'run'}"]
    # The run itself says that a kernel must be chosen.
    assert relaunch.relaunch(profile(tool="ncu"), tmp_path / "run", {}) is None


def test_signals_are_handed_on(tmp_path):
    child = executable(
        tmp_path / "child", "#!/bin/sh\ntrap 'echo got; exit 7' TERM\necho ready\nwhile :; do sleep 0.05; done\n"
    )
    script = (
        "import os, sys; from fusedmlp.profiling import relaunch; "
        f"sys.exit(relaunch._run([{str(child)!r}], os.environ))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path()},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert (code, out) == (7, "got\n")


def test_where_there_is_no_nsys_the_message_has_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(nsight, "find", lambda tool: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "impl=native", "profile=nsys"])
    assert relaunch.relaunch(profile(), tmp_path / "run", {}) is None
    message = relaunch.why_not(profile(), tmp_path / "run")
    assert "install NVIDIA Nsight Systems" in message
    words = shlex.split(message[message.index(": nsys profile") + 2 :])
    assert words[:4] == ["nsys", "profile", "-c", "cudaProfilerApi"]
    assert words[-5:] == ["train.py", "impl=native", "profile=nsys", "profile.relaunch=false",
                          f"hydra.run.dir={tmp_path / 'run'}"]  # fmt: skip


def test_other_tools_and_the_child_itself_are_not_started_again(tmp_path):
    for changes in ({"tool": "torch"}, {"tool": None}, {"relaunch": False}):
        assert relaunch.relaunch(profile(**changes), tmp_path / "run", {}) is None
    assert not (tmp_path / "run").exists()


def test_a_directory_with_a_run_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").touch()
    assert relaunch._free(tmp_path / "run") == tmp_path / "run-2"


@pytest.mark.parametrize("folder", ["/a/b-c/d.e", "/a b/c", "/it's/x", "/x=1,2/{y}"])
def test_hydra_reads_the_path_that_was_meant(folder):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    word = f"hydra.run.dir={relaunch._quoted(Path(folder))}"
    assert OverridesParser.create().parse_override(word).value() == folder


def test_nsight_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(nsight, "_FOLDERS", (str(tmp_path / "opt/nsight-compute/*/host/target-linux-*"),))
    nowhere = {"PATH": str(tmp_path / "empty")}
    assert nsight.find("nsys", nowhere) is None
    old = executable(tmp_path / "opt/nsight-compute/2024.1/host/target-linux-x64/nsys")
    new = executable(tmp_path / "opt/nsight-compute/2025.3.1/host/target-linux-x64/nsys")
    (tmp_path / "opt/nsight-compute/2026.1/host/target-linux-x64/nsys").mkdir(parents=True)
    assert nsight.find("nsys", nowhere) == str(new)
    new.chmod(0o644)
    assert nsight.find("nsys", nowhere) == str(old)
    home = executable(tmp_path / "cuda/bin/nsys")
    assert nsight.find("nsys", {**nowhere, "CUDA_HOME": str(tmp_path / "cuda")}) == str(home)
    path = executable(tmp_path / "path/nsys")
    assert nsight.find("nsys", {"PATH": str(path.parent), "CUDA_HOME": str(tmp_path / "cuda")}) == str(path)


def test_ranges_are_nvtx_ranges(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    marker = NsightTool().marker
    assert marker is not None
    with marker("forward"):
        pass
    assert calls == ["forward", "pop"]


def test_the_window_is_marked_once(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    tool = NsightTool()
    tool.warm_up()
    tool.stop()
    assert calls == []
    tool.record()
    tool.step()
    tool.stop()
    tool.stop()
    assert calls == ["synchronize", "start", "synchronize", "stop"]
